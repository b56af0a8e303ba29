"""What the ranks' answers to one probe come to: one measurement, the same whoever is asked. Pure.

A cause beats a consequence: a rank whose connection to another one closed, or that waited for it,
says nothing of the plan while any rank names a reason of its own. Among reasons the gravest
decides. Where there is none, all were ended for being late, and the one to blame is the one that
was not waiting for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autofit.measurement import Measurement, Outcome, RankUse
from autofit.probing.fault_table import GRAVITY, OTHER_COUNT, row_of_last_words
from autofit.probing.faults import Fault

_SILENT = "no answer"
_NOBODY = "each rank waits for another one"

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
"""The gravity of exceptions, and with it that of what else a rank can answer."""

_WAITING = re.compile(r"/torch/(?:distributed/|nn/parallel/distributed\.py|autograd/graph\.py)")
"""Files whose functions wait for other ranks: collectives, and the backward that starts them."""


@dataclass(frozen=True)
class RankReply:
    """The answer of one rank to a probe.

    Attributes:
        measurement: how it ended there; None: no answer came.
        is_consequence: the rank itself knows that another one is to blame.
    """

    measurement: Measurement | None = None
    is_consequence: bool = False

    @property
    def outcome(self) -> Outcome:
        """How it ended; a rank that is silent counts as hung."""
        return Outcome.TIMEOUT if self.measurement is None else self.measurement.outcome

    @property
    def detail(self) -> str:
        """What the rank says of it."""
        return _SILENT if self.measurement is None else self.measurement.detail or "no detail"


def agree(replies: Sequence[RankReply]) -> Measurement:
    """Return the one measurement that the ranks' answers come to.

    Args:
        replies: by rank.
    """
    read = [_read(reply) for reply in replies]
    failed = {rank: reply for rank, reply in enumerate(read) if not reply.outcome.ran}
    if not failed:
        return _merged([reply.measurement for reply in read if reply.measurement is not None])
    causes = {
        rank: reply
        for rank, reply in failed.items()
        if not reply.is_consequence and reply.outcome is not Outcome.TIMEOUT
    }
    if causes:
        rank = min(causes, key=lambda rank: _ORDER.index(causes[rank].outcome))
        blamed = None if OTHER_COUNT in causes[rank].detail else rank
        return _blaming(blamed, rank, read)
    late = [rank for rank, reply in failed.items() if _was_busy(reply)]
    late += [rank for rank, reply in failed.items() if reply.measurement is None]
    if late:
        return _blaming(late[0], late[0], read)
    rank = next(iter(failed))
    words = f"{_NOBODY}: {OTHER_COUNT}, or they lost their connection; rank {rank}: "
    return Measurement(Outcome.TIMEOUT, words + failed[rank].detail, ranks=_uses(read))


def gravest(faults: Mapping[int, Fault]) -> int:
    """Return the rank whose exception decides, of those that raised some outside a probe."""
    causes = {rank: fault for rank, fault in faults.items() if not fault.is_consequence} or faults
    return min(causes, key=lambda rank: _ORDER.index(causes[rank].outcome))


def _read(reply: RankReply) -> RankReply:
    """Return the reply, with the end of a worker that collectives ended taken for what it is."""
    seen = reply.measurement
    row = row_of_last_words(seen.detail or "") if seen and seen.outcome is Outcome.CRASHED else None
    if row is None or seen is None:
        return reply
    named = replace(seen, outcome=row.outcome, detail=f"{row.name}: {seen.detail}")
    return RankReply(named, is_consequence=row.is_consequence)


def _was_busy(reply: RankReply) -> bool:
    """Return whether a rank that was late was at something else than waiting for another one."""
    if reply.measurement is None or reply.is_consequence:
        return False
    innermost = next((line for line in reply.detail.splitlines() if "File " in line), "")
    return not _WAITING.search(innermost)


def _blaming(blamed: int | None, of: int, read: Sequence[RankReply]) -> Measurement:
    """Return the measurement of rank `of`, with who is to blame for it."""
    reply = read[of]
    seen = reply.measurement or Measurement(reply.outcome, reply.detail)
    contended = any(each.measurement.contended for each in read if each.measurement)
    return replace(
        seen,
        detail=f"rank {of}: {reply.detail}",
        contended=contended,
        failed_rank=blamed,
        ranks=_uses(read),
    )


def _merged(seen: Sequence[Measurement]) -> Measurement:
    """Return the measurement of ranks that all ran: the most that one held, the slowest steps."""
    gravest = min(range(len(seen)), key=lambda rank: _ORDER.index(seen[rank].outcome))
    fullest = max(seen, key=lambda each: each.held_bytes or 0)
    first, worst = seen[0], seen[gravest]
    is_fault = worst.outcome is not Outcome.OK
    return replace(
        first,
        outcome=worst.outcome,
        detail=f"rank {gravest}: {worst.detail}" if is_fault else worst.detail,
        step_times_s=[max(times) for times in zip(*(m.step_times_s for m in seen), strict=False)],
        peak_allocated_bytes=fullest.peak_allocated_bytes,
        peak_reserved_bytes=fullest.peak_reserved_bytes,
        non_torch_bytes=fullest.non_torch_bytes,
        allocator_retries=max((m.allocator_retries or 0 for m in seen), default=None),
        contended=any(each.contended for each in seen),
        start_up_s=max((m.start_up_s for m in seen if m.start_up_s is not None), default=None),
        notes=list(dict.fromkeys(note for each in seen for note in each.notes)),
        failed_rank=gravest if is_fault else None,
        ranks=[use for each in seen for use in each.ranks],
    )


def _uses(read: Sequence[RankReply]) -> list[RankUse]:
    """Return what each rank held, as far as every one of them measured that."""
    uses = [use for reply in read if reply.measurement for use in reply.measurement.ranks]
    return uses if len(uses) == len(read) else []
