"""The end of a worker: with its parent, and with every process that it started.

And whether a process still runs that was noted (`this_process`).

On Linux a fork server kills the worker when the process that asked for it has ended, and the kernel
does when the server has (`prctl`). Elsewhere the end of a pipe that the parent holds open ends it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, lifeline_fd: int) -> None:
    """End this process as soon as the parent has ended, however that happens."""
    die_with_thread(parent_pid)
    threading.Thread(target=_exit_at_end_of, args=(lifeline_fd,), daemon=True).start()
    with suppress(OSError):  # so that the kernel kills the worker first when host memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with_thread(parent_pid: int) -> None:
    """End this process with the thread that started it, if the system is Linux."""
    _set_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)


def outlive_thread() -> None:
    """Undo `die_with_thread`."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _exit_at_end_of(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os._exit(1)


# Processes that a worker started in sessions of their own, which signals to its group do not reach.
#
# They inherit a mark in the worker's environment, by which they are found on Linux; a process that
# was started with another environment is not.

MARK = "AUTOFIT_WORKER"
NO_MARK = "0" * 32  # of a process that is to become a worker, in whose place its mark is put
_MOST_ROUNDS = 20  # a process that is being killed may just have started another
_PAUSE_S = 0.005  # a process that just starts another program shows no environment meanwhile


def new_mark() -> dict[str, str]:
    """Return an environment variable that no other worker has."""
    return {MARK: uuid.uuid4().hex}


def kill_marked(mark: dict[str, str]) -> None:
    """End every process that has the mark in its environment."""
    entry = "=".join(*mark.items()).encode()
    empty_rounds = 0
    for _ in range(_MOST_ROUNDS):
        found = sum(_killed(pid, entry) for pid in _processes())
        empty_rounds = 0 if found else empty_rounds + 1
        if empty_rounds == 2:
            return
        time.sleep(_PAUSE_S)


def _processes() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _killed(pid: int, entry: bytes) -> bool:
    """Kill a process that has the mark; return whether it had. The handle guards against reuse."""
    with suppress(OSError), os.fdopen(os.pidfd_open(pid), "rb", 0) as handle:
        if entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            signal.pidfd_send_signal(handle.fileno(), signal.SIGKILL)
            return True
    return False


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
