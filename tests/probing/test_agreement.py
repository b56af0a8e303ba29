"""What the answers of several ranks to one probe come to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autofit.codec import from_json, to_json
from autofit.measurement import Measurement, Outcome, RankUse
from autofit.probing.agreement import Answer, agree
from autofit.probing.fault_table import OTHER_COUNT
from autofit.probing.messages import NoReply, Reply

WAITS = """no answer within 8.00 s; it hung here:
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3199 in all_reduce
  File "/home/me/train.py", line 7 in loss"""
WAITS_IN_BACKWARD = """no answer within 8.00 s; it hung here:
  File "/site-packages/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "/site-packages/torch/_tensor.py", line 630 in backward"""
HANGS = """no answer within 8.00 s; it hung here:
  File "/home/me/train.py", line 12 in forward
  File "/site-packages/torch/nn/parallel/distributed.py", line 1 in forward"""
HANGS_IN_BACKWARD = """no answer within 8.00 s; it hung here:
  File "/home/me/train.py", line 20 in backward
  File "/site-packages/torch/autograd/graph.py", line 865 in _engine_run_backward"""
ABORTED = """the worker was ended by SIGABRT; it printed last:
'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 5000 vs 1000. Received \
data size doesn't match expected size. Is there a distributed collective mismatch in your code?"""
NCCL_GAVE_UP = """the worker was ended by SIGABRT; it printed last:
[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"""


def agreed_on(answers: Sequence[Answer]) -> Measurement:
    return agree(answers, is_probe=True).value


def ended(outcome: Outcome, detail: str | None = None) -> Answer:
    """A worker that said how the plan ended; one that did not answer, or died, is lost."""
    if outcome in (Outcome.CRASHED, Outcome.TIMEOUT):
        return NoReply(outcome, detail or "")
    return Reply(Measurement(outcome, detail))


def lost_peer() -> Answer:
    return Reply(Measurement(Outcome.TIMEOUT, "connection closed"), is_consequence=True)


def ran(held: int = 10, times: Sequence[float] = (1.0, 2.0)) -> Answer:
    use = RankUse(held, held, 0, times[0])
    return Reply(
        Measurement(
            Outcome.OK,
            step_times_s=times,
            peak_allocated_bytes=held - 1,
            peak_reserved_bytes=held,
            non_torch_bytes=0,
            ranks=[use],
        )
    )


SILENT = None
OOM, BUG = ended(Outcome.OOM, "out of memory"), ended(Outcome.USER_ERROR, "ValueError")
KILLED = ended(Outcome.CRASHED, "the worker was ended by SIGKILL")


@pytest.mark.parametrize(
    ("replies", "outcome", "rank"),
    [
        ([ran(), OOM], Outcome.OOM, 1),
        ([OOM, lost_peer()], Outcome.OOM, 0),
        ([lost_peer(), SILENT, OOM], Outcome.OOM, 2),
        ([SILENT, SILENT, KILLED], Outcome.CRASHED, 2),
        ([lost_peer(), KILLED], Outcome.CRASHED, 1),
        ([OOM, OOM], Outcome.OOM, 0),
        ([BUG, OOM], Outcome.OOM, 1),
        ([OOM, ended(Outcome.POISONED)], Outcome.POISONED, 1),
        ([KILLED, OOM], Outcome.OOM, 1),
        ([Reply(Measurement(Outcome.POISONED), is_consequence=True), OOM], Outcome.OOM, 1),
        ([BUG, SILENT], Outcome.USER_ERROR, 0),
        ([ended(Outcome.TIMEOUT, WAITS), BUG], Outcome.USER_ERROR, 1),
        ([ran(), ended(Outcome.LEAK)], Outcome.LEAK, 1),
        ([ran(), ended(Outcome.HOST_OOM), ended(Outcome.LEAK)], Outcome.HOST_OOM, 1),
        # hangs: the one that does not wait for another
        ([ended(Outcome.TIMEOUT, WAITS), ended(Outcome.TIMEOUT, HANGS)], Outcome.TIMEOUT, 1),
        ([ended(Outcome.TIMEOUT, HANGS), SILENT], Outcome.TIMEOUT, 0),
        (
            [ended(Outcome.TIMEOUT, HANGS_IN_BACKWARD), ended(Outcome.TIMEOUT, WAITS_IN_BACKWARD)],
            Outcome.TIMEOUT,
            0,
        ),
        ([ended(Outcome.TIMEOUT, WAITS), SILENT], Outcome.TIMEOUT, 1),
        ([lost_peer(), SILENT], Outcome.TIMEOUT, 1),
        ([lost_peer(), lost_peer()], Outcome.TIMEOUT, None),
        ([ended(Outcome.CRASHED, NCCL_GAVE_UP), OOM], Outcome.OOM, 1),
        ([ended(Outcome.CRASHED, NCCL_GAVE_UP), SILENT], Outcome.TIMEOUT, 1),
        # the ranks, and no single one, ran different numbers of forwards
        ([lost_peer(), ended(Outcome.CRASHED, ABORTED)], Outcome.USER_ERROR, None),
        (
            [ended(Outcome.TIMEOUT, WAITS), ended(Outcome.TIMEOUT, WAITS_IN_BACKWARD)],
            Outcome.TIMEOUT,
            None,
        ),
    ],
)
def test_a_cause_beats_a_consequence_and_the_gravest_cause_decides(
    replies: list[Answer], outcome: Outcome, rank: int | None
) -> None:
    agreed = agreed_on(replies)
    assert (agreed.outcome, agreed.failed_rank) == (outcome, rank)
    if rank is not None:
        assert agreed.detail is not None
        assert f"rank {rank}: " in agreed.detail


@pytest.mark.parametrize(
    "replies",
    [
        [lost_peer(), ended(Outcome.CRASHED, ABORTED)],
        [ended(Outcome.TIMEOUT, WAITS), ended(Outcome.TIMEOUT, WAITS_IN_BACKWARD)],
    ],
)
def test_ranks_whose_forwards_differ_in_number_are_told_so(replies: list[Answer]) -> None:
    assert OTHER_COUNT in (agreed_on(replies).detail or "")


def test_the_fullest_rank_and_the_slowest_steps_are_those_of_all() -> None:
    agreed = agreed_on([ran(10, (1.0, 4.0)), ran(30, (2.0, 3.0)), ran(20, (1.5, 3.5))])
    assert agreed.ok
    assert agreed.failed_rank is None
    assert agreed.step_times_s == (2.0, 4.0)
    assert (agreed.peak_reserved_bytes, agreed.peak_allocated_bytes) == (30, 29)
    assert [use.held_bytes for use in agreed.ranks] == [10, 30, 20]
    assert from_json(to_json(agreed), Measurement, "it") == agreed


def test_a_rank_that_went_over_the_budget_is_named() -> None:
    over = Reply(Measurement(Outcome.OVER_BUDGET, "held too much", peak_reserved_bytes=90))
    agreed = agreed_on([ran(), over])
    assert (agreed.outcome, agreed.failed_rank) == (Outcome.OVER_BUDGET, 1)


CLOSED = Reply(
    exception=RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    )
)
RAISED = Reply(exception=ValueError("the user's own"))


@pytest.mark.parametrize(
    ("answers", "decisive"),
    [([CLOSED, RAISED], RAISED), ([RAISED, SILENT], RAISED), ([CLOSED, CLOSED], CLOSED)],
)
def test_outside_of_probes_too_a_cause_beats_a_consequence(
    answers: list[Answer], decisive: Reply
) -> None:
    agreed = agree(answers, is_probe=False)
    assert agreed.exception is decisive.exception
    assert agreed.spent


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([CLOSED, KILLED], "rank 1: the worker was ended by SIGKILL"),
        ([ended(Outcome.TIMEOUT, WAITS), ended(Outcome.TIMEOUT, HANGS)], "rank 1: no answer"),
        ([Reply(3), SILENT], "rank 1: no answer"),
    ],
)
def test_a_call_that_a_rank_did_not_survive_has_no_reply(answers: list[Answer], words: str) -> None:
    with pytest.raises(NoReply) as lost:
        agree(answers, is_probe=False)
    assert lost.value.detail.startswith(words)


def test_the_value_of_a_call_is_that_of_rank_0() -> None:
    assert agree([Reply(3), Reply(4)], is_probe=False).value == 3
