"""Ranks agree on what came of a probe, and have to be alike."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from autofit.codec import from_json, to_json
from autofit.errors import InvalidArgument, SearchTimedOut, WorkerFailed
from autofit.measurement import Measurement, Outcome, RankUse
from autofit.plan import Dimension, Plan
from autofit.probing import rank_channel
from autofit.probing.agreement import Answer, agree
from autofit.probing.fault_table import OTHER_COUNT
from autofit.probing.looks import check_alike, check_shared
from autofit.probing.probe import probe_if
from autofit.probing.rank_channel import RankChannel, device_of_rank
from autofit.probing.requests import NoReply, Reply
from autofit.registry import load_strategies
from autofit.strategy import World
from autofit.training.workload import Workload

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


def agreed_on(answers: Sequence[Answer]) -> Any:
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


# -- What several ranks are refused for, before anything runs

FACTS = {"gpu": "H100", "weights": 0.5}


def workload() -> Workload:
    return Workload(torch.nn.Linear(4, 4), torch.randn(4, 4))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (FACTS | {"gpu": "L4"}, "rank 1 has gpu L4, rank 0 H100: use 2 GPUs"),
        (FACTS | {"weights": 0.25}, "other weights than rank 0"),
    ],
)
def test_ranks_that_differ_are_refused_by_what_differs(other: dict[str, Any], words: str) -> None:
    check_alike([FACTS, FACTS])
    with pytest.raises(InvalidArgument, match=words):
        check_alike([FACTS, other])


def test_one_named_gpu_is_refused_for_several_ranks() -> None:
    assert device_of_rank("cpu", World(1, 1, 2)) == "cpu"
    assert device_of_rank("cuda", World(1, 1, 2)) == "cuda:1"
    with pytest.raises(InvalidArgument, match="'cuda:1' names one GPU, and there are 2 ranks"):
        device_of_rank("cuda:1", World(0, 0, 2))


def test_ranks_that_would_share_no_gradients_are_refused() -> None:
    """Whether no strategy would, or the one that would was left out, on whatever error."""
    level = {"checkpointing.level": Dimension([0, 1])}
    checkpointing = load_strategies(["checkpointing"])
    with pytest.raises(InvalidArgument, match=r"among the 3 ranks.*strategies= \(parallel\)"):
        check_shared(3, checkpointing, level, [])
    both = load_strategies(["checkpointing", "parallel"])
    notes = ["checkpointing left out: what", "parallel left out: RuntimeError: cannot look"]
    with pytest.raises(
        InvalidArgument, match="alone: parallel left out: RuntimeError: cannot look"
    ):
        check_shared(2, both, level, notes)
    check_shared(2, both, level | {"parallel.mode": Dimension(["ddp"])}, notes)


def test_ranks_share_a_global_batch_or_have_one_each() -> None:
    assert Plan(4, global_batch=16, accumulation_steps=4).on(2).accumulation_steps == 2
    assert Plan(4).on(2).samples_per_step == 8


def test_ranks_of_another_number_are_refused_where_a_report_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from autofit.report.apply import _world_of

    with pytest.raises(InvalidArgument, match="for 2 ranks"):
        _world_of(Plan(4, ranks=2))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="the ranks have no process group"):
        _world_of(Plan(4, ranks=2))
    with pytest.raises(InvalidArgument, match="start the ranks with torchrun"):
        probe_if(lambda survey: None, workload(), device="cpu")


# -- One call by ranks that something else than torchrun started, where rank 0 serves the store.

CALLS_TWICE = """
from autofit.probing.torchrun import owned_by_rank_0
print(owned_by_rank_0(lambda ranks: 10 * ranks), owned_by_rank_0(lambda ranks: "again"))
"""
RAISES = """
from autofit.probing.torchrun import owned_by_rank_0
def lead(ranks):
    raise LookupError("of rank 0")
try:
    owned_by_rank_0(lead)
except LookupError as error:
    print(error)
"""
DIES = """
import os
from autofit.errors import WorkerFailed
from autofit.probing.torchrun import owned_by_rank_0
try:
    owned_by_rank_0(lambda ranks: os._exit(3))
except WorkerFailed:
    print("the store is gone")
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (CALLS_TWICE, ["20 again", "20 again"]),
        (RAISES, ["of rank 0", "of rank 0"]),
        (DIES, ["", "the store is gone"]),
    ],
    ids=["two calls", "an error", "a death"],
)
def test_all_ranks_end_as_rank_0_does(python: Any, program: str, said: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        python(
            "-c",
            program,
            env=os.environ | world | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        assert [rank.communicate(timeout=240)[0].strip() for rank in ranks] == said
    finally:
        for rank in ranks:
            rank.kill()


# -- Ranks that are never started: too many, too late, or where they could not meet.


def few() -> Workload:
    return Workload(
        nn.Linear(4, 2), torch.ones(4, 4), loss_fn=lambda model, batch: model(batch).sum()
    )


def test_more_ranks_than_a_machine_runs_are_refused_before_any_has_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_channel, "WorkerChannel", None)  # would be called
    with pytest.raises(InvalidArgument, match=r"ranks=1000000.* at most"):
        RankChannel(10**6, few(), device="cpu")


def test_ranks_that_cannot_meet_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "_HOST", "192.0.2.1")  # of no machine (RFC 5737)
    with pytest.raises(WorkerFailed, match=r"192\.0\.2\.1"):
        RankChannel(2, few(), device="cpu")


def test_no_files_are_made_for_ranks_after_the_search_has_ended() -> None:
    with pytest.raises(SearchTimedOut):
        RankChannel(2, few(), device="cpu", ends_at=time.monotonic() - 1)
