"""Workers of a shared study in one process, whose moments a random order interleaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import optuna
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from autofit.planning.search_spec import SearchSpec
from autofit.report.record import Record, SearchSummary
from autofit.searching.limits import Allowance
from autofit.searching.result import SearchResult
from autofit.searching.shared_search import Moment, SharedSearch
from autofit.searching.shared_study import SharedStore
from autofit.searching.storage import AskTellStudy
from autofit.testing import SimulatedProber

_MOST_MOMENTS = 20_000


def make_record(result: SearchResult, who: str) -> Record:
    """A record of a search on a simulated device, which tells who made it."""
    return Record(
        version="0",
        created=who,
        environment={"device": "cpu", "torch": "0"},
        workload={
            "fingerprint": "simulated",
            "parameters": 1,
            "global_batch": None,
            "loss": None,
            "sample_shapes": {},
        },
        vram_budget_bytes=result.spec.vram_budget_bytes,
        search=SearchSummary(
            result.probes, result.oom_probes, 0.0, result.stopped_because, result.spec.seed
        ),
        dimensions=result.spec.space.dimensions,
        trials=result.trials,
        best_number=result.best.number,
        baseline_number=result.baseline.number,
    )


class OneWorker:
    """A worker that does nothing but what `step` lets it do."""

    def __init__(
        self,
        storage: InMemoryStorage,
        spec: SearchSpec,
        prober: SimulatedProber,
        max_probes: int | None = None,
    ) -> None:
        optuna.create_study(
            study_name="autofit", storage=storage, direction="maximize", load_if_exists=True
        )
        study = AskTellStudy("autofit", storage)
        self.held = ExitStack()
        self.store = SharedStore(study, "in memory", None, self.held)
        self.store._close_abandoned_trials()
        self.store.begin(spec)
        self.prober = prober
        self.search = SharedSearch(
            prober,
            spec,
            self.store,
            None,
            Allowance(max_probes, None),
            lambda event: None,
            may_veto=False,
        )
        self.store.workers.leave()  # nobody beats here: `lose` says who is gone
        self.moments: Iterator[Moment] = self.search.moments()
        self.result: SearchResult | None = None
        self.record: Record | None = None

    def lose(self, left: Mapping[str, int]) -> None:
        """Take those for gone that have no moment left."""
        me = self.store.workers

        def absent(entries: Mapping[str, Any]) -> frozenset[str]:
            return frozenset(key for key in entries if left.get(key) == 0 and key != me.key)

        me.absent = absent  # type: ignore[method-assign]  # all have one process here
        me.grace_s = 1e9

    def step(self) -> Moment | None:
        """Go on to the next moment; None: this worker's search has ended."""
        moment = next(self.moments, None)
        if moment is None:
            result = self.search.result(self.search._stop)
            self.result = result
            who = self.store.workers.key
            self.record = self.store.agreed(lambda: make_record(result, who))
        return moment


def searched_together(
    make: Callable[[InMemoryStorage], OneWorker],
    workers: int,
    order: random.Random,
    lost: int = 0,
) -> list[OneWorker]:
    """Let workers search one study, in a random order of their moments; return them.

    Args:
        make: makes a worker on a storage.
        workers: how many.
        order: draws who goes on.
        lost: how many of them do not go on any more from some moment, as if they had been killed.

    Raises:
        AssertionError: two of them ran one plan at the same time, or they came to no end.
    """
    storage = InMemoryStorage()
    everybody = [make(storage) for _ in range(workers)]
    left = {worker.store.workers.key: order.randrange(2, 60) for worker in everybody[:lost]}
    for worker in everybody:
        worker.lose(left)
    # What one worker has computed of the same trials serves all: it follows from them alone.
    posterior, decided = everybody[0].search._posterior, everybody[0].search._decided
    active = list(everybody)
    for _ in range(_MOST_MOMENTS):
        if not active:
            return everybody
        worker = order.choice(active)
        key = worker.store.workers.key
        if key in left:
            left[key] -= 1
        worker.search._posterior, worker.search._decided = posterior, decided
        moment = worker.step()
        posterior, decided = worker.search._posterior, worker.search._decided
        if moment is Moment.PUBLISHED:
            check_no_plan_runs_twice(worker.store.study)
        if moment is None or left.get(key) == 0:
            active.remove(worker)
    raise AssertionError(f"{len(active)} workers came to no end in {_MOST_MOMENTS} moments")


def check_no_plan_runs_twice(study: optuna.Study) -> None:
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    plans = [str(trial.user_attrs.get("autofit_published")) for trial in running]
    published = [plan for plan in plans if plan != "None"]
    assert len(set(published)) == len(published), published
