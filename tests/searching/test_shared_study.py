"""Who compares on a shared study, who is not waited for, and whose report holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import TrialState

from autofit.errors import StudyRefused
from autofit.measurement import Measurement, Outcome, Role
from autofit.plan import Dimension, Plan
from autofit.probing.messages import ProbeRequest, ProbeResult
from autofit.searching import shared_study, trial_codec
from autofit.searching.engine import run_search
from autofit.searching.shared_study import SharedStore
from autofit.searching.sharing import Run
from tests.shared_workers import make_record
from tests.simulated import IDENTITY, MakeDevice, SimulatedDevice, measured

PRECISIONS = {"precision.dtype": Dimension(("as_is", "bfloat16"))}


@pytest.fixture
def small(make_device: MakeDevice) -> SimulatedDevice:
    """Two variants, so that decisions are quick."""
    return make_device(dimensions=PRECISIONS)


@contextmanager
def two_workers(path: Path, device: SimulatedDevice) -> Iterator[tuple[SharedStore, SharedStore]]:
    with SharedStore.open(path, IDENTITY) as first, SharedStore.open(path, IDENTITY) as second:
        for store in (first, second):
            store.begin(device.spec())
        yield first, second


def run(store: SharedStore, device: SimulatedDevice, plan: Plan, role: Role) -> None:
    """Run a plan, as a worker does whose turn it is."""
    (trial,) = measured(device, [plan])
    with store.turn():
        assert store.publish(Run(plan, role, "because"))
        with store.asking(plan) as asked:
            store.record(asked, replace(trial, role=role))


def test_a_confirmer_that_does_nothing_for_long_is_not_waited_for(
    small: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its process runs: it may be stopped, or its own training may be."""
    now_s, baseline = 0.0, small.space.baseline
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(shared_study, "time", clock)
    with two_workers(tmp_path / "study.journal", small) as (confirmer, other):
        run(confirmer, small, baseline, Role.BASELINE)
        run(confirmer, small, baseline, Role.CONFIRMED)
        assert not other.look().is_confirmer_gone
        grace_s = other.workers.grace_s
        now_s = 1.5 * grace_s
        assert not other.look().is_confirmer_gone
        run(confirmer, small, baseline, Role.CONFIRMED)
        now_s = 3.0 * grace_s
        assert not other.look().is_confirmer_gone, "it has run another block meanwhile"
        now_s = 5.5 * grace_s
        assert other.look().is_confirmer_gone


def test_a_block_of_the_comparison_that_was_lost_is_nobodys(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    baseline = small.space.baseline
    with two_workers(tmp_path / "study.journal", small) as (loser, other):
        run(loser, small, baseline, Role.BASELINE)
        with loser.turn():
            loser.publish(Run(baseline, Role.CONFIRMED, "its time was over"))
            assert other.look().in_flight
        seen = other.look()
        assert (seen.confirmer, seen.stopped_because) == (None, None)
        run(other, small, baseline, Role.CONFIRMED)
        seen = loser.look()
        assert (seen.confirmer, seen.stopped_because) == (other.workers.key, "because")


def test_of_two_workers_that_close_a_search_the_first_one_writes_the_report(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    with two_workers(tmp_path / "study.journal", small) as (slow, quick):
        result = run_search(small.prober(), small.spec(), store=slow)
        slow.workers.leave()  # it is taken for gone before it has written
        same = run_search(small.prober(), small.spec(), store=quick)
        first = quick.agreed(lambda: make_record(same, "quick"))
        second = slow.agreed(lambda: make_record(result, "slow"))
        assert first.created == second.created == "quick"
        assert second.to_dict() == first.to_dict()


def test_a_worker_taken_for_gone_as_it_closes_the_search_draws_another_number(
    small: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes the report holds a number, so that nobody else writes it meanwhile."""
    lost: list[int] = []
    with two_workers(tmp_path / "study.journal", small) as (closer, other):
        publish = closer.publish

        def ended_by_others(step: Run | None) -> bool:
            if step is None and not lost:
                (running,) = closer.study.get_trials(states=(TrialState.RUNNING,))
                lost.append(running.number)
                closer.study.tell(running.number, state=TrialState.FAIL)
            return publish(step)

        monkeypatch.setattr(closer, "publish", ended_by_others)
        result = run_search(small.prober(), small.spec(), store=closer)
        (closing,) = other.look().in_flight
        assert (closing.worker, closing.role) == (closer.workers.key, None)
        assert closing.number > lost[0]
        closer.agreed(lambda: make_record(result, "closer"))
        assert other.look().is_closed
        assert not other.look().in_flight


def test_a_trial_that_others_ended_as_it_was_recorded_counts(
    small: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_workers(tmp_path / "study.journal", small) as (slow, other):
        tell = slow.study.tell

        def told_late(*arguments: Any) -> Any:
            """Tell Optuna after the other worker has found the record, and ended its trial."""
            other.look()
            return tell(*arguments)

        slow.workers.leave()
        monkeypatch.setattr(slow.study, "tell", told_late)
        run(slow, small, small.space.baseline, Role.BASELINE)
        assert [trial.plan for trial in other.look().trials] == [small.space.baseline]


def test_a_worker_waits_for_what_one_before_it_writes_of_a_new_study(
    small: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, spec = tmp_path / "study.journal", replace(small.spec(), identity={"workload": "first's"})
    with SharedStore.open(path, IDENTITY) as first, SharedStore.open(path, IDENTITY) as second:
        turn = ExitStack()
        turn.enter_context(first.turn())

        def pause() -> None:
            first.study.set_user_attr(trial_codec.SPEC, spec.to_dict())
            turn.close()

        monkeypatch.setattr(second, "pause", pause)
        with pytest.raises(StudyRefused, match="belongs to another search"):
            second.begin(small.spec())
        assert trial_codec.spec_of(first.study) == spec


def test_the_number_of_a_worker_that_has_left_holds_up_nobody(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    with (
        two_workers(tmp_path / "study.journal", small) as (gone, other),
        gone.turn(),
        other.turn(),
    ):
        assert other.look().undecided
        gone.workers.leave()
        assert not other.look().undecided


def test_a_worker_that_writes_no_report_gives_up_its_number(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    with two_workers(tmp_path / "study.journal", small) as (closer, other):
        run_search(small.prober(), small.spec(), store=closer)
        closer.close()
        assert all(trial.state.is_finished() for trial in other.study.get_trials())


@pytest.mark.parametrize("unfit", [0, 1, 2])
def test_a_shared_comparison_asks_for_fresh_workers_as_one_alone(
    small: SimulatedDevice, tmp_path: Path, unfit: int
) -> None:
    """Also one that begins again, after blocks that did not fit and what was searched then."""

    def probed(store: SharedStore | None) -> list[tuple[Plan, int]]:
        prober, left = small.prober(), unfit
        probe = prober.probe
        seen: list[tuple[Plan, int]] = []

        def failing(request: ProbeRequest) -> ProbeResult:
            nonlocal left
            seen.append((request.plan, prober.renewals))
            result = probe(request)
            if request.full_accumulation and left:
                left -= 1
                return replace(result, measurement=Measurement(Outcome.OOM))
            return result

        prober.probe = failing  # type: ignore[method-assign]  # on this device alone
        run_search(prober, small.spec(), store=store)
        return seen

    alone = probed(None)
    assert alone[-1][1] > unfit
    with SharedStore.open(tmp_path / "study.journal", IDENTITY) as store:
        assert probed(store) == alone


def test_who_comes_after_the_end_of_a_shared_search_reads_why_it_ended(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    with two_workers(tmp_path / "study.journal", small) as (first, late):
        result = run_search(small.prober(), small.spec(), store=first)
        first.agreed(lambda: make_record(result, "first"))
        prober = small.prober()
        read = run_search(prober, small.spec(), store=late)
    assert read.stopped_because == result.stopped_because
    assert not prober.probed
