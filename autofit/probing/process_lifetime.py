"""The end of a process with its parent; and whether a process still runs that was noted."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent_pid: int) -> None:
    """End this process with the thread that started it, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every process whose line of parents up to this one is interrupted."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


# Which process this is, and whether one that was noted so still runs.


def this_process() -> dict[str, Any]:
    """Return host and id of this process, and its start time: the system reuses ids."""
    pid = os.getpid()
    return {"pid": pid, "started": _start_ticks(pid), **_whereabouts()}


def _whereabouts() -> dict[str, Any]:
    """Return where a process id means the same: the host, as booted, and the id's namespace.

    Containers may have one host name, and ids of their own.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        known = {"boot": boot.read_text().strip(), "namespace": namespace.stat().st_ino}
    except OSError:  # systems without /proc
        known = {"boot": None, "namespace": None}
    return {"host": socket.gethostname(), **known}


def runs_here(claim: Mapping[str, Any]) -> bool | None:
    """Return whether the process of `this_process` runs; None: it is elsewhere, so unknown."""
    pid = claim["pid"]
    if any(claim.get(name) != value for name, value in _whereabouts().items()):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs as another user
    is_zombie = _stat_fields(pid)[:1] in (["Z"], ["X"])
    return _start_ticks(pid) == claim["started"] and not is_zombie


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat (proc(5)); None on systems without it."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _stat_fields(pid: int) -> list[str]:
    """Return the fields after the command name, which may itself contain blanks and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
