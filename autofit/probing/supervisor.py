"""The process between a worker and its owner: it ends the worker, and all that the worker started.

It runs nothing of the user's, so it does so whatever the worker does meanwhile, and however the
owner ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from autofit.probing.fork_server import processes_here
from autofit.probing.process_lifetime import adopt_orphans, die_with_parent


def supervise(owner: Connection, *given: Connection) -> None:
    """Run a worker until it ends, or the owner says anything, or the owner has ended.

    The owner is told the worker's process id, and its exit status once nothing of it is left.

    Args:
        owner: to the process that wants the worker.
        given: to `autofit.probing.worker.main`.
    """
    adopt_orphans()
    children_ended = _ends_of_children()
    worker = processes_here().Process(target=_work, args=(owner, given))
    worker.start()
    for each in given:
        each.close()
    with suppress(OSError):  # it has ended
        owner.send(worker.pid)
    while not _has_ended(worker) and owner not in wait([owner, children_ended]):
        os.read(children_ended, 2**10)
    _end(worker)
    with suppress(OSError):
        owner.send(worker.exitcode)


def _ends_of_children() -> int:
    """Return a descriptor that can be read from once a child has ended."""
    ended, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return ended


def _has_ended(worker: BaseProcess) -> bool:
    """Return whether it has; its process id stays taken."""
    assert worker.pid is not None  # it was started
    return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(worker: BaseProcess) -> None:
    """End it at once, then whatever lives on of what it started, in sessions of their own too."""
    assert worker.pid is not None  # it was started
    with suppress(ProcessLookupError):  # it has no group yet
        os.killpg(worker.pid, signal.SIGKILL)
    worker.kill()
    worker.join()
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(OSError):  # none is left; or the kernel does not list them, or lets none be ended
        while True:
            for orphan in children.read_text().split():
                os.kill(int(orphan), signal.SIGKILL)
            os.waitpid(-1, 0)


# In the process of the worker.


def _work(owner: Connection, given: tuple[Connection, ...]) -> None:
    owner.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    assert supervisor.pid is not None
    die_with_parent(supervisor.pid)
    os.setsid()
    from autofit.probing.worker import main  # a supervisor that cannot fork needs no torch

    main(*given)
