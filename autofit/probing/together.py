"""One call of autofit by every rank that torchrun started: rank 0 leads, all end alike.

A process that is alone does the same call by itself, and loads nothing of what ranks need.
"""

from __future__ import annotations

import atexit
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from autofit.errors import InvalidRequest, WorkerFailed
from autofit.probing.prober import Target
from autofit.strategy import Strategy
from autofit.training.workload import Workload
from autofit.world import world_of_environment

if TYPE_CHECKING:
    from autofit.probing.meeting import Meeting

_Result = TypeVar("_Result")


def on_every_rank(
    workload: Workload,
    strategies: Sequence[Strategy],
    target: Target,
    lead: Callable[[Meeting | None], _Result],
) -> _Result:
    """Return what `lead` does on rank 0, or raise what it raises, on every rank alike.

    Args:
        workload, strategies, target: of the prober that `lead` opens; the other ranks have seats.
        lead: called with the meeting of the ranks, or with None where this process is alone; what
            it returns is plain data.

    Raises:
        InvalidRequest: this process is one of several ranks that torchrun did not start.
    """
    world = world_of_environment()
    if world.size == 1:
        _refuse_a_group_that_torchrun_did_not_start()
        return lead(None)
    from autofit.probing.meeting import meet
    from autofit.probing.pulse import beating
    from autofit.probing.seat import device_of_rank

    device = device_of_rank(target.device, world)
    meeting = meet(world)
    with beating(meeting), _cause_before_interrupt():
        return _done(meeting, device, workload, strategies, target, lead)


def _refuse_a_group_that_torchrun_did_not_start() -> None:
    """Each of its ranks would search alone, on the same devices and at the same time."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if (size := distributed.get_world_size()) > 1:
        raise InvalidRequest(
            f"this process is rank {distributed.get_rank()} of a process group of {size} that "
            "torchrun did not start: start the ranks with torchrun, or call autofit in one process "
            "before init_process_group"
        )


def _done(
    meeting: Meeting,
    device: str | None,
    workload: Workload,
    strategies: Sequence[Strategy],
    target: Target,
    lead: Callable[[Meeting | None], _Result],
) -> _Result:
    from autofit.probing.group import end_meeting
    from autofit.probing.seat import Seat, outcome_of_lead

    if meeting.world.rank > 0:
        atexit.register(_wait_for_lead, meeting)
        seat = Seat(meeting, workload, strategies, device=device, seed=target.seed)
        result: _Result = outcome_of_lead(seat.serve())
        return result
    atexit.register(_leave, meeting)
    try:
        result = lead(meeting)
    except BaseException as error:
        end_meeting(meeting, error)
        raise
    end_meeting(meeting, None, result)
    return result


@contextmanager
def _cause_before_interrupt() -> Iterator[None]:
    """Raise that a rank is lost, where torchrun's SIGTERM comes while workers are ended for it."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        cause = interrupt.__context__
        if isinstance(cause, WorkerFailed):
            raise cause from None
        raise


# torchrun ends all ranks as soon as one has failed. Rank 0 first gets to show why, and each ends
# with its own exit code: by then there is nothing left that a signal would have to end.

_LEAVING_S = 5.0
"""For rank 0 to say that it leaves."""


def _leave(meeting: Meeting) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(RuntimeError):  # the store may have gone
        meeting.store(_LEAVING_S).set("left", "")


def _wait_for_lead(meeting: Meeting) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = time.monotonic() + _LEAVING_S
    with suppress(RuntimeError):
        store = meeting.store(_LEAVING_S)
        while not store.check(["left"]) and time.monotonic() < end:
            time.sleep(0.02)
