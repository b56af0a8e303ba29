"""What the report of a shared study says of its workers."""

from __future__ import annotations

from datetime import datetime, timedelta

from optuna.trial import FrozenTrial, TrialState, create_trial

from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.searching.liveness import WORKER
from autofit.searching.shared_report import of_all_workers
from tests.shared_workers import make_record
from tests.simulated import SimulatedDevice


def stored(number: int, worker: str | None, start_s: float, end_s: float) -> FrozenTrial:
    """A trial that a worker ran from one second to another."""
    began = datetime(2026, 1, 1)
    trial = create_trial(
        state=TrialState.COMPLETE,
        value=1.0,
        user_attrs={} if worker is None else {WORKER: worker},
    )
    trial.number = number
    trial.datetime_start = began + timedelta(seconds=start_s)
    trial.datetime_complete = began + timedelta(seconds=end_s)
    return trial


def test_seconds_in_which_several_workers_ran_count_once(device: SimulatedDevice) -> None:
    spec: SearchSpec = device.spec()
    record = make_record(run_search(device.prober(), spec, max_probes=5), "here")
    assert [trial.number for trial in record.trials] == [0, 1, 2, 3, 4]
    workers = {"a": {"name": "host:1"}, "b": {"name": "host:2"}}
    trials = [
        stored(0, None, 0, 10),  # before the study was shared
        stored(1, "a", 10, 30),
        stored(2, "b", 15, 25),  # within the one before
        stored(3, "b", 28, 40),
        stored(4, "a", 100, 105),
        stored(5, "a", 200, 300),  # after the record was made
    ]
    search = of_all_workers(record, trials, workers).search
    assert search.seconds == 45
    assert search.workers == {"unshared": 1, "host:1": 2, "host:2": 2}
    assert search.sessions == 3
