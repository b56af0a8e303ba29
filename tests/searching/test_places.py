"""Searches whose plans run on several devices, or in the processes of an executor."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from autofit.devices.request import device_names
from autofit.errors import InvalidArgument, SearchTimedOut, WorkerFailed
from autofit.measurement import ACT, NEVER_UPDATED, Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.probing.requests import Reply
from autofit.probing.wire import message_of_reply
from autofit.report.record import INTERRUPTED
from autofit.searching import events
from autofit.searching.engine import run_search
from autofit.searching.faithful import difference_of
from autofit.searching.findings import memory_of
from autofit.searching.options import (
    COMPARISON_PROBES,
    MAX_COMPARISON_SHARE,
    Allowance,
    SearchArguments,
)
from tests.searching.conftest import fails_from, of_kind
from tests.simulated import SimulatedDevice

LIMITS: dict[str, Any] = {"vram_budget": "64MiB", "strategies": ["checkpointing"], "seed": 0}


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Fall short of the processor, so that devices do not slow one another down."""
    time.sleep(0.02)
    output: torch.Tensor = model(batch)
    return output.square().mean()


def searched(**given: Any) -> autofit.Report:
    return autofit.search(build, torch.randn(4, 32), loss_fn=loss, **(LIMITS | given))


def numbers(report: autofit.Report) -> list[int]:
    return [trial.number for trial in report.trials]


@pytest.mark.slow
def test_two_devices_run_plans_of_one_search(tmp_path: Path) -> None:
    """Both run some, the plans of a moment differ, and every number is used once."""
    study = tmp_path / "study.log"
    report = searched(device=["cpu", "cpu"], max_probes=8, study=study)
    assert report.best.ok
    assert report.best in report.trials
    assert numbers(report) == sorted(set(numbers(report)))
    searched_plans = [t.plan for t in report.trials if t.kind is autofit.TrialKind.SEARCH]
    assert len(report.trials) <= 8
    assert len(set(searched_plans)) >= len(searched_plans) - 2  # repeats tell noise
    again = searched(device="cpu", max_probes=8, study=study)
    assert [t.plan for t in again.trials] == [t.plan for t in report.trials]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": ["cuda:0", "cuda:0"]}, "cuda:0 twice"),
        ({"device": ["cuda", "cuda:1"]}, "numbered"),
        ({"device": "cpu,cuda:0"}, "numbered"),
        ({"device": []}, "device is empty"),
        ({"device": ["cpu", "tpu"]}, "tpu"),
        (
            {
                "device": ["cuda:0", "cuda:1"],
                "options": autofit.SearchOptions(executor=ThreadPoolExecutor()),
            },
            "names 2 devices",
        ),
    ],
)
def test_devices_that_cannot_be_meant_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        searched(**given)


def test_names_divided_by_commas_are_several() -> None:
    assert device_names("cuda:0,cuda:1") == ["cuda:0", "cuda:1"]
    assert device_names(torch.device("cpu")) == ["cpu"]
    assert device_names(None) == [None]


def _lost() -> None:
    raise ConnectionError("the machine was switched off")


class _Losing(Executor):
    """An executor that loses the process of its n-th calls, as a cluster loses a machine."""

    def __init__(self, inner: Executor, *lost: int) -> None:
        self.inner, self.lost, self.calls = inner, lost, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        given = (_lost,) if self.calls in self.lost else (fn, *args)
        return self.inner.submit(*given)


@pytest.mark.slow
def test_a_probe_whose_machine_went_away_is_given_to_another() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        executor = _Losing(pool, 6, 9)
        options = autofit.SearchOptions(executor=executor)
        report = searched(device="cpu", max_probes=5, options=options)
    assert executor.calls > 9
    assert all(trial.ok for trial in report.trials)
    assert numbers(report) == list(range(len(report.trials)))


class _Answering(Executor):
    """An executor that runs nothing: it raises, or gives an answer of its own, or none."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self.answer, Exception):
            raise self.answer
        if isinstance(self.answer, BaseException):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("an answer", "str.*distributed"),
        ({"reply": "x"}, "dict.*distributed"),
        (pickle.dumps(7), r"x80.*distributed"),
        (message_of_reply(Reply("no device")), "no device.*distributed"),
        (b"bytes", "bytes.*distributed"),
        (KeyError("full"), "full"),
        (KeyboardInterrupt("there"), "lost twice.*KeyboardInterrupt"),
        (SystemExit(0), "lost twice.*SystemExit"),
    ],
)
def test_an_executor_that_runs_nothing_is_named(answer: Any, words: str) -> None:
    with pytest.raises(WorkerFailed, match=words):
        searched(device="cpu", options=autofit.SearchOptions(executor=_Answering(answer)))


@pytest.mark.slow
def test_an_executor_that_never_answers_is_ended_by_the_timeout() -> None:
    with pytest.raises(SearchTimedOut):
        searched(device="cpu", timeout=1, options=autofit.SearchOptions(executor=_Answering()))


@pytest.mark.slow
def test_ctrl_c_while_two_plans_run_returns_what_was_measured() -> None:
    def interrupt_soon(event: Any) -> None:
        if event.progress.probes >= 3 and not timer.ident:
            timer.start()

    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    report = searched(device=["cpu", "cpu"], max_probes=12, progress=interrupt_soon)
    assert len(report.trials) >= 3
    assert "interrupted" in report.record.search.stopped_because.lower()


# -- What ends a search: limits, interrupts, and what begins afterwards.


def test_more_time_is_asked_for_where_the_timeout_ended_the_search(
    device: SimulatedDevice,
) -> None:
    prober = device.prober()
    result = run_search(
        prober, device.spec(), timeout_s=100.0, clock=lambda: 20.0 * len(prober.probed), began=0.0
    )
    assert result.search.stopped_because == "the timeout of 100 s was reached"
    assert result.with_more_time is not None
    assert result.with_more_time not in {trial.plan for trial in result.trials}


class _Gone:
    """A prober whose worker is gone; it notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise WorkerFailed("no worker starts")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkerFailed("no worker starts")], ids=repr)
def test_nothing_more_is_run_after_an_interrupt_or_without_a_worker(
    device: SimulatedDevice, error: BaseException
) -> None:
    result = run_search(device.prober(fails_from(5, error)), device.spec(), timeout_s=1e8)
    assert result.search.stopped_because in (INTERRUPTED, "no worker starts")
    assert result.best.plan != result.baseline.plan
    assert not result.may_probe
    assert result.with_more_time is None
    prober: Any = _Gone()
    assert difference_of(prober, device.spec(), result) is None
    assert memory_of(prober, device.spec(), result) == {}
    assert prober.asked == []


class Waits(torch.nn.Linear):
    """Takes a while for each micro-batch, whatever its size."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(rows)


def waited(max_probes: int, progress: Any) -> autofit.Report:
    """Search where 8 samples at once are the fastest, as six probes tell."""
    return autofit.search(
        Waits(8, 4), torch.randn(1, 8), global_batch=8, device="cpu", vram_budget="8MiB",
        strategies=[], max_probes=max_probes, progress=progress,
    )  # fmt: skip


@pytest.mark.parametrize(
    "stage", ["comparing the answer", "measuring what bounds a step", "ending the worker"]
)
def test_ctrl_c_after_the_search_leaves_its_answer(stage: str) -> None:
    def press(event: events.Event) -> None:
        if isinstance(event, events.StageStarted) and event.stage.startswith(stage):
            raise KeyboardInterrupt

    report = waited(6, press)
    assert report.record.search.stopped_because == INTERRUPTED
    assert report.best.ok


@pytest.mark.parametrize(("max_probes", "looked_at"), [(1, "baseline"), (6, "best")])
def test_only_the_plan_that_is_answered_is_looked_at_after_the_comparison(
    max_probes: int, looked_at: str
) -> None:
    seen: list[events.Event] = []
    report = waited(max_probes, seen.append)
    assert (report.plan == report.baseline.plan) is (looked_at == "baseline")
    started = of_kind(seen, events.StageStarted)
    stages = [each.stage for each in started]
    plans = [stage for stage in stages if stage.startswith("looking where the memory")]
    assert len(plans) == 1
    compared = [stage for stage in stages if stage.startswith("comparing the answer's gradients")]
    assert len(compared) == (looked_at == "best")
    assert (report.record.difference is not None) is (looked_at == "best")
    kept = {"best"}  # as the only plan that ran, the baseline is the best one, too
    assert report.record.memory.keys() == report.record.findings["bounds"].keys() == kept
    assert report.record.findings["flops"]["per_sample"] == 2 * 2 * 8 * 4
    assert stages[-1] == "writing the report"
    assert started[-1].progress.probes == report.record.search.probes <= max_probes
    assert started[-1].progress.best is not None
    finished = [each.trial for each in of_kind(seen, events.ProbeFinished)]
    assert finished == list(report.trials)


def _forgets_to_update(training: Any, batch: Any) -> torch.Tensor:
    loss = training.model(batch).square().mean()
    training.backward(loss)
    return loss.detach()


def test_a_training_that_never_updates_is_warned_of() -> None:
    workload = autofit.Workload(
        build, torch.randn(4, 32), training_step=_forgets_to_update, global_batch=4
    )
    found = autofit.search(workload, device="cpu", strategies=["precision"], max_probes=1)
    assert NEVER_UPDATED.removeprefix(ACT) in found.warnings


# -- The limits of a search, given its trials, and the checks of its arguments


def trials(count: int, seconds: float = 1.0) -> list[Trial]:
    """So many probes, and a vetoed proposal, which is none."""
    ran = Measurement(Outcome.OK, step_times_s=[0.1], seconds=seconds)
    roles = [TrialKind.SEARCH] * count + [TrialKind.VETOED]
    return [Trial(number, kind, Plan(4), ran) for number, kind in enumerate(roles)]


@pytest.mark.parametrize(
    ("probe_s", "start_s", "short"), [(2.0, 0.0, False), (2.0, 3.0, True), (12.0, 0.0, True)]
)
def test_time_is_short_if_another_probe_would_not_leave_enough_for_the_comparison(
    probe_s: float, start_s: float, short: bool
) -> None:
    bounded = Allowance(None, 60.0, clock=lambda: 35.0, began=0.0)
    reason = bounded.spent(trials(3, probe_s), start_s)
    assert (reason == "the timeout of 60 s was reached") is short


def test_a_share_of_the_time_at_most_is_kept_for_the_comparison() -> None:
    bounded = Allowance(None, 60.0)
    assert bounded.comparison_s(trials(3, seconds=2.0), start_s=1.0) == COMPARISON_PROBES * 3.0
    assert bounded.comparison_s(trials(3, seconds=40.0), start_s=1.0) == MAX_COMPARISON_SHARE * 60.0
    assert bounded.comparison_s([], start_s=1.0) == 0.0


GOOD: dict[str, Any] = {
    "max_probes": 3,
    "timeout": 1.5,
    "study": Path("study.log"),
    "progress": print,
    "planned_steps": 1000,
}


@pytest.mark.parametrize(
    ("most", "before_comparison"), [(1, 1), (2, 2), (3, 2), (4, 2), (9, 7), (None, None)]
)
def test_probes_are_kept_back_for_the_comparison_and_the_baseline_is_run_whatever_the_limits(
    most: int | None, before_comparison: int | None
) -> None:
    """Of the incumbent and the baseline, if another plan than the baseline can be tried."""
    bounded = Allowance(most, 1e-9 if most is None else None)
    assert bounded.spent([]) is None
    if before_comparison is not None:
        assert bounded.spent(trials(before_comparison)) == f"max_probes={most} was reached"
        assert before_comparison == 1 or bounded.spent(trials(before_comparison - 1)) is None


@pytest.mark.parametrize("given", [{}, GOOD, GOOD | {"progress": True}])
def test_valid_arguments_pass(given: dict[str, Any]) -> None:
    asked = SearchArguments(**given)
    assert {name: getattr(asked, name) for name in given} == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_probes", value) for value in (0, 1.5, True)),
        *(("planned_steps", value) for value in (-1, 2.5)),
        *(("timeout", value) for value in (0, "3", float("nan"))),
        *(("study", value) for value in (3, b"x", "")),
        ("progress", 3),
    ],
)
def test_invalid_arguments_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        SearchArguments(**GOOD | {name: value})
