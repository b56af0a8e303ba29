"""Looks at a workload: in which order, for how long, and what is lost with a worker."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.devices.base import MemoryReading
from autofit.devices.cpu import CpuDevice
from autofit.errors import WorkerFailed
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.planning.search_spec import SearchSpec
from autofit.probing.agreement import is_fault
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.probing.rank_channel import RankChannel
from autofit.probing.requests import Deadline, DeviceFacts, NoReply, ProbeRequest
from autofit.probing.survey import NO_TIME, SPLIT_GRADIENTS, Recomputation, stage_of
from autofit.registry import load_strategies
from autofit.searching.engine import run_search
from autofit.searching.events import Event, ProbeStarted, StageStarted
from autofit.strategy import Context
from autofit.training.workload import Workload
from autofit.units import MIB
from tests.plugin import Plugin

SIZE = 8
CPU = Target("cpu", "64MiB")


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, 3))


def _rows(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, SIZE), torch.arange(samples) % 3


class Sleepy(Plugin):
    """Looks for so many seconds, and offers one value more."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds

    def dimensions(self, context: Context) -> Any:
        time.sleep(self.seconds)
        return super().dimensions(context)


def _prober(*strategies: Any) -> Prober:
    workload = Workload(_classifier, _rows(), criterion=nn.CrossEntropyLoss(), global_batch=8)
    return open_prober(workload, load_strategies(strategies), CPU)


def _searched(build: Any = _classifier, **given: Any) -> tuple[autofit.Report, list[Event]]:
    """The report of a search, and what was told meanwhile."""
    seen: list[Event] = []
    limits: dict[str, Any] = {"global_batch": 8, "vram_budget": "64MiB"} | given
    report = autofit.search(
        build, _rows(), criterion=nn.CrossEntropyLoss(), device="cpu", progress=seen.append,
        **limits,
    )  # fmt: skip
    return report, seen


def _stages(seen: list[Event]) -> dict[str, int]:
    """When each stage began, as a number of the event."""
    return {each.stage: at for at, each in enumerate(seen) if isinstance(each, StageStarted)}


def test_the_first_survey_looks_at_nothing_that_takes_a_while() -> None:
    with _prober(Sleepy("one", 3600.0)) as prober:
        first = prober.first_survey()
        then = prober.survey(looks_end_at=time.monotonic())
    assert first.parameters == SIZE * 16 + 16 + 16 * 3 + 3
    assert first.sample_batch_size == 4
    assert first.loss is not None
    for survey in (first, then):  # nor does any when the time of the looks is over
        assert not survey.dimensions
        assert not survey.may_change_accumulation
        assert f"one left out: {NO_TIME}" in survey.notes


def test_a_survey_after_the_first_one_is_that_of_a_prober_without() -> None:
    with _prober(Sleepy("one", 0.0), "optimizer") as prober:
        first, then = prober.first_survey(), prober.survey()
    with _prober(Sleepy("one", 0.0), "optimizer") as other:
        alone = other.survey()
    assert then.fingerprint == first.fingerprint == alone.fingerprint
    assert then.dimensions.keys() == alone.dimensions.keys() >= {"one.on", "optimizer.when"}
    assert then.may_change_accumulation
    assert then.split_gradients is not None
    assert then.notes == alone.notes


@pytest.mark.slow
def test_a_look_that_takes_too_long_leaves_time_for_the_others() -> None:
    with _prober(Sleepy("first", 0.0), Sleepy("hangs", 3600.0), Sleepy("last", 0.0)) as prober:
        survey = prober.survey(looks_end_at=time.monotonic() + 60)
    assert {"first.on", "last.on"} <= survey.dimensions.keys()
    assert "hangs.on" not in survey.dimensions
    (note,) = (note for note in survey.notes if note.startswith("hangs left out"))
    assert "share of the timeout" in note


@pytest.mark.slow
def test_a_timeout_amid_a_look_leaves_the_baseline_at_least() -> None:
    report, _ = _searched(strategies=[Sleepy("hangs", 3600.0), "precision"], timeout=40.0)
    assert report.baseline.ok
    assert report.best.ok
    assert any(note.startswith("hangs left out") for note in report.record.notes)


@pytest.mark.slow
def test_where_no_look_came_to_an_end_the_baseline_is_the_answer(tmp_path: Path) -> None:
    def build() -> nn.Module:
        """Take a while, but for the first survey and the baseline: in a new worker."""
        with (tmp_path / "built").open("a+") as file:
            if file.write("built\n") and file.tell() > 2 * len("built\n"):
                time.sleep(3600.0)
        return _classifier()

    report, _ = _searched(build, strategies=[Sleepy("hangs", 3600.0)], timeout=45.0)
    assert report.best.plan == report.baseline.plan
    assert report.baseline.ok
    assert "timeout of 45 s" in report.record.search.stopped_because
    assert any(note.startswith("hangs left out") for note in report.record.notes)


@pytest.mark.parametrize("strategies", [[], ["checkpointing"]], ids=str)
def test_the_baseline_runs_before_any_look_and_what_is_asked_for_is_looked_at(
    strategies: list[str],
) -> None:
    _, seen = _searched(strategies=strategies, max_probes=1)
    stages = _stages(seen)
    (began,) = [at for at, each in enumerate(seen) if isinstance(each, ProbeStarted)]
    assert all(began < stages[stage_of(name)] for name in (*strategies, SPLIT_GRADIENTS))


@pytest.mark.parametrize(
    ("model", "global_batch", "is_looked_at"),
    [
        (_classifier(), 8, False),
        (_classifier(), None, True),  # as many samples as the budget takes
        (_classifier(), 2**12, True),
        # What normalizes over the batch keeps the micro-batch that has run
        (nn.Sequential(nn.BatchNorm1d(SIZE), nn.Linear(SIZE, 3)), 2**12, False),
    ],
)
def test_a_search_looks_at_recomputation_after_its_first_probe_and_where_memory_binds(
    model: nn.Module, global_batch: int | None, is_looked_at: bool
) -> None:
    report, seen = _searched(model, global_batch=global_batch, numerics="exact", max_probes=1)
    (probed,) = [at for at, each in enumerate(seen) if isinstance(each, ProbeStarted)]
    assert (stage_of("checkpointing") in _stages(seen)) is is_looked_at
    assert _stages(seen)[stage_of("offload")] > probed
    said = [note for note in report.notes if note.startswith("checkpointing left out")]
    assert len(said) == (not is_looked_at)


@pytest.mark.parametrize(
    ("fits", "keeps_accumulation", "left_out"),
    [(64, False, True), (63, False, False), (8, True, True), (7, True, False)],
)
def test_no_recomputation_is_looked_at_where_the_largest_micro_batch_fits_without(
    fits: int, keeps_accumulation: bool, left_out: bool
) -> None:
    needed = Recomputation(["one"], fits_without=fits, largest=64, largest_if_kept=8)
    why = needed.why_left_out(keeps_accumulation=keeps_accumulation)
    assert why.keys() == ({"one"} if left_out else set())


# -- Workers that die


class _Dying:
    """A channel whose worker always dies after it named a stage."""

    pid = 1

    def __init__(self, stage: str) -> None:
        self.stage, self.calls = stage, 0

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        return DeviceFacts(2**30, 2**30, None)

    def call(self, request: Any, deadline: Deadline, on_stage: Any) -> Any:
        self.calls += 1
        assert self.calls < 50, "a worker is replaced for ever"
        on_stage(self.stage)
        raise NoReply(Outcome.CRASHED, "the worker was killed by SIGSEGV")

    def drop(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("stage", [SPLIT_GRADIENTS, "own", "elsewhere"])
def test_a_worker_that_always_dies_is_replaced_a_few_times(stage: str) -> None:
    channel = _Dying(stage_of(stage))
    workload = Workload(_classifier, _rows())
    prober = Prober(channel, workload, [Sleepy("own", 0.0)], vram_budget="1GiB")
    with pytest.raises(WorkerFailed, match="SIGSEGV"):
        prober.survey()
    assert channel.calls <= 3


def test_ranks_that_die_as_they_join_are_a_failed_worker(monkeypatch: Any) -> None:
    monkeypatch.setattr("autofit.probing.rank_channel._join", lambda *_, **__: _is_killed())
    channel = RankChannel(2, Workload(_classifier, _rows()), device="cpu")
    try:
        with pytest.raises(WorkerFailed, match="join"):
            channel.open()
        assert channel.pid is None
    finally:
        channel.close()
    assert is_fault(NoReply(Outcome.CRASHED, ""))


class Ends(nn.Module):
    """Does something to its process from a micro-batch on."""

    def __init__(self, end: Callable[[], object], least: int) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
        self.body, self.end, self.least = nn.Sequential(*layers), end, least

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) >= self.least:
            self.end()
        return self.body(inputs)


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _refused() -> None:
    raise ValueError("too many samples")


IMPATIENT = Deadlines(shortest_s=8.0, patience=1.0)


def _ending(
    end: Callable[[], object], least: int, *names: str, deadlines: Deadlines, **more: Any
) -> Prober:
    workload = Workload(Ends(end, least), torch.randn(4, 64), **more)
    return open_prober(workload, load_strategies(names), CPU, deadlines=deadlines)


def test_a_model_that_always_ends_its_worker_ends_the_survey() -> None:
    with (
        _ending(_is_killed, 0, deadlines=Deadlines()) as prober,
        pytest.raises(WorkerFailed, match="SIGKILL"),
    ):
        prober.survey()


def test_a_model_that_refuses_more_samples_is_looked_at_with_few() -> None:
    with _ending(_refused, 5, "checkpointing", deadlines=Deadlines()) as prober:
        survey = prober.survey()
    assert len(survey.dimensions["checkpointing.level"].values) > 1


@pytest.mark.slow
@pytest.mark.parametrize("end", [_is_killed, partial(time.sleep, 3600.0)], ids=["killed", "hangs"])
def test_a_look_that_ends_its_worker_leaves_its_strategy_out(end: Callable[[], object]) -> None:
    with _ending(end, 16, "checkpointing", "optimizer", deadlines=IMPATIENT) as prober:
        survey = prober.survey()
    assert set(survey.dimensions) >= {"optimizer.when"}
    assert "checkpointing.level" not in survey.dimensions
    (note,) = (note for note in survey.notes if note.startswith("checkpointing"))
    assert "left out" in note


@pytest.mark.slow
def test_such_a_model_is_searched_below_the_size_that_ends_its_worker() -> None:
    with _ending(_is_killed, 16, "checkpointing", deadlines=IMPATIENT, global_batch=32) as prober:
        spec = SearchSpec(prober.survey().space(), 64 * MIB, seed=0, identity={"test": "ends"})
        result = run_search(prober, spec, max_probes=8)
    assert result.best.ok
    assert result.best.plan.micro_batch < 16
    assert result.baseline.plan.samples_per_step == 32


# -- The first probe of a process loads libraries, for which the cap that was set left no room

LIBRARIES = 16 * MIB


class LoadsLibraries(CpuDevice):
    """Beside its allocator, it holds libraries from its first training on."""

    loaded_bytes = 0

    def read(self) -> MemoryReading:
        return replace(super().read(), non_torch_bytes=self.loaded_bytes)

    def limit(self, vram_budget_bytes: int) -> None:
        super().limit(vram_budget_bytes - self.loaded_bytes)

    @contextmanager
    def accounting(self) -> Iterator[None]:
        self.loaded_bytes = LIBRARIES
        with super().accounting():
            yield


def loads_libraries(device: CpuDevice) -> CpuDevice:
    return LoadsLibraries()


class Greedy(nn.Linear):
    """Once holds some MiB, frees them, and asks for more than the cache then has in one piece."""

    sizes: tuple[int, ...] = ()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for size in self.sizes:
            held = inputs.new_zeros(size * MIB // 4)
            del held
        self.sizes = ()
        return super().forward(inputs)


@pytest.mark.parametrize(("sizes", "outcome"), [((22, 30), Outcome.OK), ((54,), Outcome.OOM)])
def test_a_probe_that_loads_libraries_is_held_to_the_budget_beside_them(
    sizes: tuple[int, ...], outcome: Outcome, open_probing: Any
) -> None:
    model = Greedy(4, 4)
    model.sizes = sizes
    prober: Any = open_probing(
        model, sample_batch=torch.ones(2, 4), vram_budget="64MiB", tamper=loads_libraries
    ).prober
    measured = prober.probe(ProbeRequest(ResolvedPlan(Plan(2)))).measurement
    assert measured.outcome is outcome, measured
    assert not measured.ok or LIBRARIES < measured.held_bytes <= 64 * MIB


# -- Models that their users compiled: said early, and not compiled once more


def wrapped() -> Any:
    return torch.compile(_classifier(), backend="eager")


def in_place() -> nn.Module:
    model = _classifier()
    model.compile(backend="eager")
    return model


def _surveyed(build: Any, stages: list[str]) -> Any:
    workload = Workload(build, torch.randn(4, SIZE))
    strategies = load_strategies(["compile", "checkpointing"])
    with open_prober(workload, strategies, Target("cpu"), on_stage=stages.append) as prober:
        return prober.survey()


@pytest.mark.slow
@pytest.mark.parametrize("build", [wrapped, in_place])
def test_a_compiled_model_is_said_and_not_compiled_again(build: object) -> None:
    stages: list[str] = []
    survey = _surveyed(build, stages)
    assert any("already compiled" in stage for stage in stages[:4]), stages
    assert sum("already compiled" in note for note in survey.notes) == 1
    mode = survey.dimensions.get("compile.mode")
    assert mode is None or len(mode.values) == 1
    assert all(len(note.splitlines()) == 1 for note in survey.notes), survey.notes


@pytest.mark.slow
def test_a_live_model_compiled_in_place_is_said_to_be_measured_plain() -> None:
    survey = _surveyed(in_place(), [])
    assert any("model.compile() had no effect" in note for note in survey.notes)
    assert not any("already compiled" in note for note in survey.notes)
