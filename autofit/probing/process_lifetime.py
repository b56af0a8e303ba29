"""The end of a worker: with its parent, and with every process that it started.

The kernel kills the worker when the thread that started it dies (`prctl`, on Linux); elsewhere the
end of a pipe that the parent holds open does. Imports next to nothing, so that this is in force
before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, lifeline_fd: int) -> None:
    """End this process as soon as the parent has ended, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)
    threading.Thread(target=_exit_at_end_of, args=(lifeline_fd,), daemon=True).start()
    with suppress(OSError):  # so that the kernel kills the worker first when host memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")


def _exit_at_end_of(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os._exit(1)


# Processes that a worker started in sessions of their own, which signals to its group do not reach.
#
# They inherit a mark in the worker's environment, by which they are found on Linux; a process that
# was started with another environment is not.

_NAME = "AUTOFIT_WORKER"
_MOST_ROUNDS = 20  # a process that is being killed may just have started another
_PAUSE_S = 0.005  # a process that just starts another program shows no environment meanwhile


def new_mark() -> dict[str, str]:
    """Return an environment variable that no other worker has."""
    return {_NAME: uuid.uuid4().hex}


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
