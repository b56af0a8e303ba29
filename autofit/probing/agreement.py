"""What the answers of several ranks to one request come to: one reply. Pure.

A cause beats a consequence: a rank whose connection to another one closed, or that waited for it,
says nothing of the plan while any rank names a reason of its own. Among reasons the gravest
decides. Where there is none, all were ended for being late, and the one to blame is the one that
was not waiting for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autofit.measurement import Measurement, Outcome
from autofit.probing.fault_table import GRAVITY, OTHER_COUNT, row_of_output
from autofit.probing.faults import fault_of
from autofit.probing.requests import NoReply, Reply

# The reply of a rank, or how its worker was lost; None: nothing was heard of it.
Answer = Reply | NoReply | None

# The gravity of exceptions, and with it that of what else a rank can answer.
_ORDER: tuple[Outcome, ...] = (
    *(outcome for outcome in GRAVITY if outcome not in (Outcome.TIMEOUT, Outcome.USER_ERROR)),
    Outcome.CRASHED,
    Outcome.USER_ERROR,
    Outcome.TIMEOUT,
    Outcome.LEAK,
    Outcome.NONFINITE,
    Outcome.OVER_BUDGET,
    Outcome.RETRIES,
    Outcome.OK,
)

# Files whose functions wait for other ranks: collectives, and the backward that starts them.
_WAITING = re.compile(r"/torch/(?:distributed/|nn/parallel/distributed\.py|autograd/graph\.py)")


@dataclass(frozen=True)
class _End:
    """How a request ended on one rank.

    Attributes:
        outcome, detail: in what, and in words.
        is_consequence: whether the rank itself knows that another one is to blame.
    """

    outcome: Outcome
    detail: str = "no detail"
    is_consequence: bool = False

    @classmethod
    def of(cls, answer: Answer) -> _End:
        """Return how it ended; what a worker printed that a collective ended says why."""
        if answer is None:
            return cls(Outcome.TIMEOUT, "no answer")
        if isinstance(answer, NoReply):
            row = row_of_output(answer.detail) if answer.outcome is Outcome.CRASHED else None
            if row is None:
                return cls(answer.outcome, answer.detail)
            return cls(row.outcome, f"{row.name}: {answer.detail}", row.is_consequence)
        if isinstance(answer.value, Measurement):
            seen = answer.value
            return cls(seen.outcome, seen.detail or cls.detail, answer.is_consequence)
        if answer.exception is None:
            return cls(Outcome.OK)
        fault = fault_of(answer.exception)
        return cls(fault.outcome, fault.detail, fault.is_consequence)


def is_fault(answer: Answer) -> bool:
    """Return whether a rank ended in another way than by doing what was asked."""
    return not _End.of(answer).outcome.ran


def agree(answers: Sequence[Answer], *, is_probe: bool) -> Reply:
    """Return the one reply that the ranks' answers come to.

    Args:
        answers: by rank.
        is_probe: whether a plan was run; else a function was called, whose value is rank 0's.

    Raises:
        NoReply: outside of a probe, the rank that decides was lost.
    """
    ends = [_End.of(answer) for answer in answers]
    failed = {rank: end for rank, end in enumerate(ends) if not end.outcome.ran}
    replies = [answer for answer in answers if isinstance(answer, Reply)]
    if not failed:
        return _of_all(replies) if is_probe else replies[0]
    rank, blamed = _decisive(failed)
    decisive, detail = answers[rank], f"rank {rank}: {ends[rank].detail}"
    if not is_probe:
        if isinstance(decisive, Reply):
            return replace(decisive, spent=True)
        raise NoReply(ends[rank].outcome, detail)
    if blamed is None and ends[rank].outcome is Outcome.TIMEOUT:
        words = f"every rank waits for another: {OTHER_COUNT}, or the connection was lost"
        detail = f"{words}; {detail}"
    seen = [each.value for each in replies if isinstance(each.value, Measurement)]
    reply = decisive if isinstance(decisive, Reply) else Reply()
    uses = [use for each in seen for use in each.ranks]
    measured = replace(
        reply.value or Measurement(ends[rank].outcome),
        detail=detail,
        contended=any(each.contended for each in seen),
        failed_rank=blamed,
        ranks=uses if len(uses) == len(answers) else [],  # as far as every one measured it
    )
    return Reply(
        measured,
        exception=reply.exception,
        spent=len(replies) < len(answers),
        worth_repeating=any(each.worth_repeating for each in replies),
    )


def _decisive(failed: Mapping[int, _End]) -> tuple[int, int | None]:
    """Return the rank whose end stands for all, and the rank to blame, if there is one."""
    causes = {
        rank: end
        for rank, end in failed.items()
        if not end.is_consequence and end.outcome is not Outcome.TIMEOUT
    }
    if causes:
        rank = min(causes, key=lambda rank: _ORDER.index(causes[rank].outcome))
        return rank, None if OTHER_COUNT in causes[rank].detail else rank
    late = {rank: end for rank, end in failed.items() if not end.is_consequence}
    silent = [rank for rank, end in late.items() if end == _End.of(None)]
    busy = [rank for rank, end in late.items() if rank not in silent and not _waits(end)]
    found = [*busy, *silent]
    return (found[0], found[0]) if found else (next(iter(failed)), None)


def _waits(end: _End) -> bool:
    """Return whether a rank that was late was waiting for another one."""
    innermost = next((line for line in end.detail.splitlines() if "File " in line), "")
    return bool(_WAITING.search(innermost))


def _of_all(replies: Sequence[Reply]) -> Reply:
    """Return the reply of ranks that all ran: the most that one held, the slowest steps."""
    seen = [reply.measurement for reply in replies]
    gravest = min(range(len(seen)), key=lambda rank: _ORDER.index(seen[rank].outcome))
    fullest = max(seen, key=lambda each: each.held_bytes or 0)
    worst, is_fault = seen[gravest], seen[gravest].outcome is not Outcome.OK
    measured = replace(
        seen[0],
        outcome=worst.outcome,
        detail=f"rank {gravest}: {worst.detail}" if is_fault else worst.detail,
        step_times_s=[max(times) for times in zip(*(m.step_times_s for m in seen), strict=False)],
        peak_allocated_bytes=fullest.peak_allocated_bytes,
        peak_reserved_bytes=fullest.peak_reserved_bytes,
        non_torch_bytes=fullest.non_torch_bytes,
        resident_bytes=fullest.resident_bytes,
        gradient_bytes=fullest.gradient_bytes,
        evaluation_peak_bytes=max(
            (m.evaluation_peak_bytes for m in seen if m.evaluation_peak_bytes), default=None
        ),
        allocator_retries=max((m.allocator_retries or 0 for m in seen), default=None),
        contended=any(each.contended for each in seen),
        start_up_s=max((m.start_up_s for m in seen if m.start_up_s is not None), default=None),
        start_is_warm=_all_warm([each.start_is_warm for each in seen]),
        notes=list(dict.fromkeys(note for each in seen for note in each.notes)),
        failed_rank=gravest if is_fault else None,
        ranks=[use for each in seen for use in each.ranks],
    )
    return Reply(measured, worth_repeating=any(reply.worth_repeating for reply in replies))


def _all_warm(starts: Sequence[bool | None]) -> bool | None:
    """Return whether every rank that compiled found its code, or None if none compiled."""
    known = [each for each in starts if each is not None]
    return all(known) if known else None
