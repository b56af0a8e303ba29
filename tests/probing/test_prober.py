"""A prober: what it asks of its worker, and what it refuses before there is one."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument, WorkerFailed
from autofit.measurement import BOUNDS, Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import MAX_REPEATS, Prober, Target, open_prober
from autofit.probing.profile import StepProfile, look_at_step
from autofit.probing.requests import DeviceFacts, NoReply, ProbeRequest, Reply
from autofit.probing.session import Session
from autofit.probing.worker_channel import WorkerChannel
from autofit.searching.predicted_lines import predicted_lines
from autofit.training.workload import Workload
from autofit.units import MIB

WORKLOAD = Workload(nn.Linear(6, 4), torch.ones(4, 6))


def test_it_surveys_probes_compares_and_takes_another_budget() -> None:
    with open_prober(WORKLOAD, (), Target("cpu", "64MiB")) as prober:
        assert prober.survey().space().baseline == Plan(4)
        assert prober.vram_budget_bytes == 64 * MIB
        assert prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.ok
        assert prober.compare(ResolvedPlan(Plan(4)), ResolvedPlan(Plan.split(4, 2)), 4).equal
        less = ProbeRequest(ResolvedPlan(Plan(4)), MIB)
        assert prober.probe(less).measurement.outcome is Outcome.OOM
        assert prober.vram_budget_bytes == prober.survey().vram_budget_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"device": "tpu"}, "device.*'tpu'"),
        ({"device": ""}, "device.*''"),
        ({"vram_budget": b"3GiB"}, "vram_budget.*24GiB.*b'3GiB'"),
        ({"vram_budget": -1}, "bytes.*-1"),
        ({"seed": -1}, "seed.*4294967295.*-1"),
        ({"seed": None}, "seed.*None"),
        ({"seed": 1.5}, "seed.*1.5"),
        ({"seed": 2**70}, "seed.*1180591620717411303424"),
    ],
)
def test_what_means_nothing_is_refused_before_a_worker_is_started(
    said: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerChannel, "__init__", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(InvalidArgument, match=words):
        open_prober(WORKLOAD, (), Target(**{"device": "cpu"} | said))


def says_it_is_a_gpu(device: Any) -> Any:
    environment = replace(device.environment, gpu="NVIDIA H100 80GB HBM3", capability="9.0")
    type(device).environment = property(lambda self: environment)
    return device


@pytest.mark.slow
def test_a_search_predicts_memory_where_it_probes(open_probing: Any, tmp_path: Path) -> None:
    """A dry run has the user's code see a GPU; of that, this process must see nothing."""
    path = tmp_path / "processes"

    class Signs(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with path.open("a") as file:
                print(os.getpid(), torch.cuda.is_available(), file=file)
            return super().forward(inputs)

    prober = open_probing(Signs(16, 4), tamper=says_it_is_a_gpu).prober
    survey = prober.survey()
    path.unlink()
    before, worker = dict(vars(torch.cuda)), prober.worker_pid
    lines, times, notes = predicted_lines(prober, survey, survey.space())
    assert notes == ()
    assert list(lines) == list(times) == [()]
    assert set(path.read_text().splitlines()) == {f"{worker} True"}
    assert vars(torch.cuda) == before
    assert prober.probe(ProbeRequest(ResolvedPlan(Plan(2)))).measurement.ok


@pytest.mark.slow
def test_a_search_goes_on_where_memory_cannot_be_predicted(open_probing: Any) -> None:
    class Ends(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return os._exit(7) if inputs.is_meta else super().forward(inputs)

    prober = open_probing(Ends(16, 4), tamper=says_it_is_a_gpu).prober
    survey = prober.survey()
    lines, times, (note,) = predicted_lines(prober, survey, survey.space())
    assert lines == times == {}
    assert "exited with 7" in note
    assert prober.probe(ProbeRequest(ResolvedPlan(Plan(2)))).measurement.ok


def test_what_a_function_raises_where_it_is_run_is_raised_here(open_probing: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        open_probing(nn.Linear(16, 4)).prober.run(divides)
    assert "in divides" in str(caught.value.__cause__)


def divides(session: Session) -> float:
    return 1 / session.builder.seed


class Replying:
    """A channel whose worker gives these replies, one after the other, or is lost instead."""

    pid = 1

    def __init__(self, *replies: Reply | NoReply) -> None:
        self.left, self.dropped = list(replies), 0

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        return DeviceFacts(2**30, 2**30, None)

    def call(self, request: Any, deadline: Any, on_stage: Any) -> Reply:
        reply = self.left.pop(0)
        if isinstance(reply, NoReply):
            raise reply
        return reply

    def drop(self) -> None:
        self.dropped += 1

    def close(self) -> None: ...


FITS = Reply(Measurement(Outcome.OK))
CONTENDED = Reply(Measurement(Outcome.OK, contended=True))
FULL = Reply(Measurement(Outcome.OOM))
UNEXPLAINED = replace(FULL, worth_repeating=True)
DEAD = Reply(Measurement(Outcome.POISONED, contended=True), spent=True)
LOST = NoReply(Outcome.CRASHED, "killed by SIGSEGV")


@pytest.mark.parametrize(
    ("replies", "outcome", "is_contended"),
    [
        ([FITS], Outcome.OK, False),
        ([CONTENDED, FITS], Outcome.OK, True),
        ([CONTENDED] * (1 + MAX_REPEATS), Outcome.OK, True),
        ([UNEXPLAINED, FITS], Outcome.OK, False),
        ([UNEXPLAINED, UNEXPLAINED], Outcome.OOM, False),
        ([CONTENDED, UNEXPLAINED, FULL], Outcome.OOM, True),
        ([UNEXPLAINED, CONTENDED, UNEXPLAINED], Outcome.OOM, True),
        ([DEAD], Outcome.POISONED, True),
        ([LOST], Outcome.CRASHED, False),
        ([CONTENDED, LOST], Outcome.CRASHED, True),
    ],
)
def test_a_plan_runs_again_where_others_moved_or_its_size_explains_nothing(
    replies: list[Reply | NoReply], outcome: Outcome, is_contended: bool
) -> None:
    channel = Replying(*replies)
    found = Prober(channel, WORKLOAD, vram_budget="1GiB").probe(ProbeRequest(ResolvedPlan(Plan(4))))
    assert channel.left == []
    assert found.measurement.outcome is outcome
    assert found.measurement.contended is is_contended
    assert found.measurement.seconds is not None
    assert channel.dropped == (replies == [DEAD])


def test_what_kept_a_probe_from_running_is_raised() -> None:
    prober = Prober(Replying(Reply(exception=WorkerFailed("no room"))), WORKLOAD)
    with pytest.raises(WorkerFailed, match="no room"):
        prober.probe(ProbeRequest(ResolvedPlan(Plan(4))))


BROKEN = Reply(exception=RuntimeError("assert"), spent=True, device_fault="device-side assert")


@pytest.mark.parametrize("first", [LOST, BROKEN], ids=["lost", "broken"])
def test_a_function_is_called_once_more_where_its_worker_or_the_device_died(
    first: Reply | NoReply,
) -> None:
    assert Prober(Replying(first, Reply(7)), WORKLOAD).run(divides) == 7
    with pytest.raises(WorkerFailed, match=r"SIGSEGV|device-side assert") as caught:
        Prober(Replying(first, first), WORKLOAD).run(divides)
    assert caught.value.__cause__ is (None if isinstance(first, NoReply) else first.exception)
    late = NoReply(Outcome.TIMEOUT, "still in forward")
    with pytest.raises(WorkerFailed, match="still in forward"):
        Prober(Replying(late, Reply(7)), WORKLOAD).run(divides)


# -- Where the time of a step goes: plans whose bound is known by how they are made


def products(net: Any, rows: torch.Tensor) -> torch.Tensor:
    """Large products, and as good as no parameters."""
    left = rows[:1].expand(512, 512) * net.weight
    for _ in range(4):
        left = left @ left / 512
    return left.mean()


def passes(net: Any, rows: torch.Tensor) -> torch.Tensor:
    """Many passes over a few MiB."""
    wide = rows[:1].expand(512, 2048) * net.weight
    for _ in range(6):
        wide = torch.sin(wide)
    return wide.mean()


def sleeps(net: Any, rows: torch.Tensor) -> torch.Tensor:
    """Between its operators Python does something else."""
    time.sleep(0.5)
    return (rows[:1].sum() * net.weight).mean()


def updates(net: Any, rows: torch.Tensor) -> torch.Tensor:
    """One row of a large table is trained on: the update is the work."""
    return (net.weight[:1] * rows[:1].sum()).mean()


def profiled(loss_fn: Any, plan: Plan = Plan(2), weights: int = 1, **given: Any) -> Any:  # noqa: B008 - frozen
    workload = Workload(nn.Linear(1, weights, bias=False), torch.ones(2, 1), loss_fn=loss_fn)
    with open_prober(workload, (), Target("cpu", "1GiB")) as prober:
        return prober.run(partial(look_at_step, plan=ResolvedPlan(plan), **given))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "weights", "bound"),
    [
        (products, 1, "arithmetic"),
        (passes, 1, "memory traffic"),
        (sleeps, 1, "launches"),
        (updates, 2_000_000, "optimizer"),
    ],
)
def test_what_bounds_a_step_is_seen(loss_fn: Any, weights: int, bound: str) -> None:
    shares = profiled(loss_fn, weights=weights).shares(1.0)
    assert sum(shares.values()) == pytest.approx(1)
    assert max(BOUNDS, key=shares.__getitem__) == bound
    assert shares[bound] > 0.5


def test_a_trace_is_written_in_torchs_own_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profiled(products, trace=str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {event.get("name") for event in events}


@pytest.mark.slow
def test_what_is_accumulated_counts_whole_and_the_update_once() -> None:
    one, many = (profiled(products, Plan(1, accumulation_steps=steps)) for steps in (2, 64))
    assert many.operators == one.operators  # two micro-batches were run of either
    assert many.seconds["arithmetic"] > 8 * one.seconds["arithmetic"]
    assert many.seconds["optimizer"] < 8 * one.seconds["optimizer"]


def test_what_kernels_do_not_fill_of_a_step_is_launches() -> None:
    seconds = {"arithmetic": 0.2, "memory traffic": 0.1, "optimizer": 0.1, "launches": 0.0}
    shares = StepProfile(seconds, 10, on_gpu=True).shares(0.8)
    assert shares == pytest.approx(
        {"arithmetic": 0.25, "memory traffic": 0.125, "optimizer": 0.125, "launches": 0.5}
    )
    crowded = StepProfile(seconds, 10, on_gpu=True).shares(0.3)  # kernels ran beside each other
    assert crowded["launches"] == 0.0
    assert sum(crowded.values()) == pytest.approx(1)
