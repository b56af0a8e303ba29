"""The process between a worker and its owner: it ends the worker, and all that the worker started.

It runs nothing of the user's, so it does so whatever the worker does meanwhile, and however the
owner ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from autofit.probing.fork_server import adopt_orphans, die_with_parent, processes_here


def supervise(owner: Connection, *given: Connection) -> None:
    """Run a worker until it ends, or the owner says anything, or the owner has ended.

    The owner is told the worker's process id, and its exit status once nothing of it is left.

    Args:
        owner: to the process that wants the worker.
        given: to `autofit.probing.worker.main`.
    """
    adopt_orphans()
    worker = processes_here().Process(target=_work, args=(owner, given))
    worker.start()
    for each in given:
        each.close()
    with suppress(OSError):  # it has ended
        owner.send(worker.pid)
    ended, tell = Pipe(duplex=False)
    threading.Thread(target=_tell_end, args=(worker.pid, tell), daemon=True).start()
    wait([owner, ended])
    _end(worker)
    with suppress(OSError):
        owner.send(worker.exitcode)


def _tell_end(pid: int, tell: Connection) -> None:
    """Close a connection once a child has ended, whose process id stays taken.

    Its `sentinel` is also open in what it has forked, which may outlive it.
    """
    with suppress(ChildProcessError), tell:  # it was waited for meanwhile
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _end(worker: BaseProcess) -> None:
    """End it at once, then everything it started, even in sessions of their own."""
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
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    assert supervisor.pid is not None
    die_with_parent(supervisor.pid)
    # A group, so that all can be ended, and what a terminal sends is not for it; and no session of
    # its own: Linux shares processors among sessions (autogroup, man 7 sched). There one thread
    # waits for another that hardly runs beside a busy program: a step took 120 times as long.
    os.setpgid(0, 0)
    from autofit.probing.worker import main  # a supervisor that cannot fork needs no torch

    main(*given)
