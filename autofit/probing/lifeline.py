"""Ties a worker's life to its parent's; imports next to nothing, so that it holds from the start.

The kernel kills the worker when the thread that started it dies (`prctl`, on Linux), and a pipe
that only the parent can close ends it elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, lifeline_fd: int) -> None:
    """End this process as soon as the parent has ended, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(1)
    threading.Thread(target=_exit_at_end_of, args=(lifeline_fd,), daemon=True).start()
    _offer_to_the_oom_killer()


def _exit_at_end_of(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os._exit(1)


def _offer_to_the_oom_killer() -> None:
    """Where host memory ends, the worker goes before anything of the user's does."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return
