"""Looks at a workload: in which order, for how long, and what is lost with a worker."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.errors import WorkerFailed
from autofit.measurement import Outcome
from autofit.probing.agreement import is_fault
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.probing.rank_channel import RankChannel
from autofit.probing.requests import Deadline, DeviceFacts, NoReply
from autofit.probing.survey import NO_TIME, SPLIT_GRADIENTS, Recomputation, stage_of
from autofit.registry import load_strategies
from autofit.searching.events import Event, ProbeStarted, StageStarted
from autofit.strategy import Context, Dimension, TrainingView
from autofit.training.workload import Workload

SIZE = 8


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, 3))


def _rows(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, SIZE), torch.arange(samples) % 3


class Sleepy:
    """Looks for so many seconds, and offers one value more."""

    phase = autofit.Phase.STEP
    numerics = autofit.Numerics.EXACT

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds

    def dimensions(self, context: Context) -> dict[str, Dimension]:
        time.sleep(self.seconds)
        return {f"{self.name}.on": Dimension([False, True])}

    def apply(self, training: TrainingView, settings: Any, payloads: Any) -> Any:
        return nullcontext()

    def describe(self, settings: Any, payloads: Any) -> list[str]:
        return []


def _prober(*strategies: Any, **more: Any) -> Prober:
    workload = Workload(_classifier, _rows(), criterion=nn.CrossEntropyLoss(), global_batch=8)
    return open_prober(workload, load_strategies(strategies), Target("cpu", "64MiB"), **more)


def test_the_first_survey_looks_at_nothing_that_takes_a_while() -> None:
    with _prober(Sleepy("one", 3600.0)) as prober:
        first = prober.first_survey()
    assert first.parameters == SIZE * 16 + 16 + 16 * 3 + 3
    assert first.sample_batch_size == 4
    assert first.loss is not None
    assert not first.dimensions
    assert not first.may_change_accumulation
    assert f"one left out: {NO_TIME}" in first.notes


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


def test_no_look_begins_when_their_time_is_over() -> None:
    with _prober(Sleepy("one", 3600.0)) as prober:
        survey = prober.survey(looks_end_at=time.monotonic())
    assert not survey.dimensions
    assert not survey.may_change_accumulation
    assert any(NO_TIME in note for note in survey.notes)


@pytest.mark.slow
def test_a_look_that_takes_too_long_leaves_time_for_the_others() -> None:
    with _prober(Sleepy("first", 0.0), Sleepy("hangs", 3600.0), Sleepy("last", 0.0)) as prober:
        survey = prober.survey(looks_end_at=time.monotonic() + 60)
    assert {"first.on", "last.on"} <= survey.dimensions.keys()
    assert "hangs.on" not in survey.dimensions
    (note,) = (note for note in survey.notes if note.startswith("hangs left out"))
    assert "share of the timeout" in note


@pytest.mark.parametrize("strategies", [[], ["precision"]], ids=str)
def test_the_baseline_runs_before_any_look(strategies: list[str]) -> None:
    seen = list[Event]()
    autofit.search(
        _classifier,
        _rows(),
        criterion=nn.CrossEntropyLoss(),
        global_batch=8,
        strategies=strategies,
        device="cpu",
        vram_budget="32MiB",
        max_probes=1,
        progress=seen.append,
    )
    looks = {stage_of(name) for name in (*strategies, SPLIT_GRADIENTS)}
    places = [at for at, e in enumerate(seen) if isinstance(e, StageStarted) and e.stage in looks]
    (began,) = [at for at, e in enumerate(seen) if isinstance(e, ProbeStarted)]
    assert places
    assert began < min(places)


@pytest.mark.slow
def test_a_timeout_amid_a_look_leaves_the_baseline_at_least() -> None:
    report = autofit.search(
        _classifier,
        _rows(),
        criterion=nn.CrossEntropyLoss(),
        global_batch=8,
        strategies=[Sleepy("hangs", 3600.0), "precision"],
        device="cpu",
        vram_budget="32MiB",
        timeout=40.0,
    )
    assert report.baseline.ok
    assert report.best.ok
    assert any(note.startswith("hangs left out") for note in report.record.notes)


class Built(nn.Module):
    """Takes a while to be built, but for the first few times."""

    def __init__(self, path: Path, quick: int) -> None:
        super().__init__()
        with path.open("a") as file:
            file.write("built\n")
        if path.read_text().count("built") > quick:
            time.sleep(3600.0)
        self.layers = _classifier()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


@pytest.mark.slow
def test_where_no_look_came_to_an_end_the_baseline_is_the_answer(tmp_path: Path) -> None:
    def build() -> nn.Module:  # for the first survey, the baseline, and then for a new worker
        return Built(tmp_path / "built", 2)

    report = autofit.search(
        build,
        _rows(),
        criterion=nn.CrossEntropyLoss(),
        global_batch=8,
        strategies=[Sleepy("hangs", 3600.0)],
        device="cpu",
        vram_budget="32MiB",
        timeout=45.0,
    )
    assert report.best.plan == report.baseline.plan
    assert report.baseline.ok
    assert "timeout of 45 s" in report.record.search.stopped_because
    assert any(note.startswith("hangs left out") for note in report.record.notes)


# -- workers that die


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


class Ends(nn.Module):
    """Ends its process at any forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _classifier()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(rows)


def test_a_model_that_always_ends_its_worker_ends_the_survey() -> None:
    workload = Workload(Ends(), _rows(), criterion=nn.CrossEntropyLoss())
    with (
        open_prober(workload, (), Target("cpu", "64MiB"), deadlines=Deadlines()) as prober,
        pytest.raises(WorkerFailed, match="SIGKILL"),
    ):
        prober.survey()


def _die(session: Any, host: str, port: int, name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_die_as_they_join_are_a_failed_worker(monkeypatch: Any) -> None:
    monkeypatch.setattr("autofit.probing.rank_channel._join", _die)
    channel = RankChannel(2, Workload(_classifier, _rows()), device="cpu")
    try:
        with pytest.raises(WorkerFailed, match="join"):
            channel.open()
        assert channel.pid is None
    finally:
        channel.close()
    assert is_fault(NoReply(Outcome.CRASHED, ""))


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
    seen: list[Event] = []
    report = autofit.search(
        model, _rows(), criterion=nn.CrossEntropyLoss(), global_batch=global_batch,
        numerics="exact", device="cpu", vram_budget="64MiB", max_probes=1, progress=seen.append,
    )  # fmt: skip
    (probed,) = [at for at, each in enumerate(seen) if isinstance(each, ProbeStarted)]
    names = {at: each.stage for at, each in enumerate(seen) if isinstance(each, StageStarted)}
    looks = {stage: at for at, stage in names.items()}
    assert (stage_of("checkpointing") in looks) is is_looked_at
    assert looks[stage_of("offload")] > probed
    said = [note for note in report.notes if note.startswith("checkpointing left out")]
    assert len(said) == (not is_looked_at)


def test_recomputation_that_is_asked_for_by_name_is_looked_at() -> None:
    seen: list[Event] = []
    autofit.search(
        _classifier(), _rows(), criterion=nn.CrossEntropyLoss(), global_batch=8, device="cpu",
        strategies=["checkpointing"], vram_budget="64MiB", max_probes=1, progress=seen.append,
    )  # fmt: skip
    stages = [each.stage for each in seen if isinstance(each, StageStarted)]
    assert stage_of("checkpointing") in stages
