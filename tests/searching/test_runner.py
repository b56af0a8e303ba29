"""Jobs that a search has in flight: one, or one at each of several places."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from optuna.samplers import GridSampler, RandomSampler
from optuna.trial import TrialState

from autofit.errors import WorkerFailed
from autofit.measurement import Outcome, TrialKind
from autofit.plan import Plan
from autofit.probing.requests import ignore_stage
from autofit.report.record import Record
from autofit.searching import events
from autofit.searching.engine import run_search
from autofit.searching.runner import ParallelRunner, Runner
from autofit.searching.study import Store
from autofit.testing import SimulatedProber
from tests.searching.conftest import fails_from
from tests.simulated import SimulatedDevice


@contextmanager
def places(*probers: SimulatedProber) -> Iterator[Runner]:
    """One place where a job can run, or several at once."""
    if len(probers) == 1:
        yield Runner(probers[0])
        return
    threads = [ThreadPoolExecutor(1) for _ in probers]
    try:
        at = dict(zip(map(Runner, probers), threads, strict=True))
        yield ParallelRunner(at, ignore_stage)
    finally:
        for thread in threads:
            thread.shutdown()


def in_flight(seen: list[events.Event]) -> list[int]:
    """How many plans were in flight after each event, the repeated among them."""
    counts, now = [], 0
    for event in seen:
        now += isinstance(event, events.ProbeStarted) - isinstance(event, events.ProbeFinished)
        counts.append(now)
    return counts


def test_each_place_has_a_plan_and_no_two_the_same(device: SimulatedDevice) -> None:
    probers, seen = [device.prober() for _ in range(3)], list[events.Event]()
    with places(*probers) as runner:
        result = run_search(runner, device.spec(), on_event=seen.append)
    assert max(in_flight(seen)) == 3
    assert in_flight(seen)[-1] == 0
    assert all(prober.probed for prober in probers)
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))
    running: list[Plan] = []
    for event in seen:  # replicates of the comparison may run beside one another
        if isinstance(event, events.ProbeStarted) and event.kind is TrialKind.SEARCH:
            assert event.plan not in running
            running.append(event.plan)
        if isinstance(event, events.ProbeFinished) and event.trial.plan in running:
            running.remove(event.trial.plan)
    alone = run_search(device.prober(), device.spec())
    assert device.speed(result.best.plan) > 0.95 * device.speed(alone.best.plan)


def test_one_place_has_one_plan_at_a_time(device: SimulatedDevice) -> None:
    seen: list[events.Event] = []
    run_search(device.prober(), device.spec(), max_probes=6, on_event=seen.append)
    assert set(in_flight(seen)) == {0, 1}


@pytest.mark.parametrize("most", [1, 2, 4, 7])
def test_several_places_take_no_more_probes_than_allowed(
    device: SimulatedDevice, most: int
) -> None:
    probers = [device.prober() for _ in range(3)]
    with places(*probers) as runner:
        result = run_search(runner, device.spec(), max_probes=most)
    assert result.search.probes == sum(len(prober.probed) for prober in probers) == most


def test_a_sampler_of_the_users_fills_several_places(device: SimulatedDevice) -> None:
    probers, seen = [device.prober() for _ in range(2)], list[events.Event]()
    with places(*probers) as runner:
        result = run_search(
            runner, device.spec(), sampler=RandomSampler(0), max_probes=9, on_event=seen.append
        )
    assert result.search.probes == 9
    assert max(in_flight(seen)) == 2


@pytest.mark.parametrize("count", [1, 2], ids=["one place", "two places"])
@pytest.mark.parametrize(
    "how", [KeyboardInterrupt(), WorkerFailed("no worker starts"), Outcome.HOST_OOM], ids=repr
)
def test_however_a_search_ends_no_trial_of_its_study_is_left_running(
    device: SimulatedDevice, count: int, how: Any
) -> None:
    fault = fails_from(5, how)
    with Store.open(None, {}) as store, places(*(device.prober(fault) for _ in range(count))) as at:
        result: Record = run_search(at, device.spec(), store=store)
        states = {trial.number: trial.state for trial in store.study.trials}
    assert result.best.ok
    assert TrialState.RUNNING not in states.values()
    assert {trial.number for trial in result.trials} <= states.keys()


def test_a_plan_that_no_time_is_left_to_repeat_is_no_trial(device: SimulatedDevice) -> None:
    now = iter(range(10_000))
    fault = fails_from(3, Outcome.CRASHED)
    with Store.open(None, {}) as store:
        result = run_search(
            device.prober(fault), device.spec(), store=store,
            timeout_s=60.0, clock=lambda: float(next(now)), began=0.0,
        )  # fmt: skip
        states = [trial.state for trial in store.study.trials]
    assert TrialState.RUNNING not in states
    assert result.best.ok


def test_a_grid_ends_the_search_once_each_of_its_plans_has_run(device: SimulatedDevice) -> None:
    grid: dict[str, list[str | float | int | bool | None]] = {
        "precision.dtype": ["default", "bfloat16"],
        "checkpointing.level": [0],
        "micro_batch": [4, 6],
    }
    sampler = GridSampler(grid, seed=0)
    result = run_search(device.prober(), device.spec(), sampler=sampler, max_probes=40)
    assert result.search.stopped_because == "the sampler has no more plans to offer"
    assert result.is_decided  # it was not cut
    sizes = {(t.plan.settings["precision.dtype"], t.plan.micro_batch) for t in result.trials}
    assert {("bfloat16", 4), ("bfloat16", 6), ("default", 6)} <= sizes
