"""A shared study: whose turn it is, and who is gone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

import autofit
from autofit.errors import InvalidRequest, StudyRefused
from autofit.measurement import Outcome, Role
from autofit.plan import Dimension, Plan
from autofit.planning.planner import NothingLeft
from autofit.planning.posterior import Posterior
from autofit.searching.claim import this_process
from autofit.searching.engine import run_search
from autofit.searching.liveness import Workers, backend_of
from autofit.searching.shared_study import SharedStore
from autofit.searching.sharing import (
    Close,
    Flight,
    Leave,
    Limits,
    Read,
    Run,
    Situation,
    Wait,
    next_step,
)
from autofit.searching.study import Store
from tests.shared_workers import OneWorker, make_record, searched_together
from tests.simulated import IDENTITY, MakeDevice, SimulatedDevice, make_trial, measured

PRECISIONS = {"precision.dtype": Dimension(("as_is", "bfloat16"))}
STOPPED = "no plan left is expected to gain enough"


@pytest.fixture
def small(make_device: MakeDevice) -> SimulatedDevice:
    """Two variants, so that decisions are quick."""
    return make_device(dimensions=PRECISIONS)


# Whose turn it is: pure


def limits(decided: Plan | NothingLeft, spent: str | None = None) -> Limits:
    return Limits(lambda trials: spent, lambda trials: True, lambda posterior: decided)


NOTHING = NothingLeft(STOPPED)


def test_the_baseline_comes_first_and_alone(small: SimulatedDevice) -> None:
    posterior, baseline = Posterior(small.spec(), ()), small.space.baseline
    first = next_step(Situation("me"), posterior, limits(NOTHING))
    assert first == Run(baseline, Role.BASELINE)
    flying = Situation("me", in_flight=(Flight(0, "other", baseline, Role.BASELINE),))
    assert next_step(flying, posterior, limits(NOTHING)) == Wait()


def test_probes_in_flight_count_and_end_before_the_comparison(small: SimulatedDevice) -> None:
    trials = measured(small, [small.space.baseline])
    posterior = Posterior(small.spec(), trials)
    plan = small.space.plan(8, small.space.plain_settings)
    flying = Situation("me", trials, (Flight(1, "other", plan, Role.SEARCH),))
    counts: list[int] = []

    def spent(of: Any) -> str | None:
        counts.append(len(of))
        return None

    step = next_step(flying, posterior, replace(limits(NOTHING), spent=spent))
    assert counts == [2]
    assert step == Wait()
    alone = next_step(replace(flying, in_flight=()), posterior, limits(NOTHING))
    assert alone == Run(small.space.baseline, Role.CONFIRMED, STOPPED, is_exhausted=True)


def test_one_worker_confirms_until_it_is_gone(small: SimulatedDevice) -> None:
    fast = small.space.plan(8, {"precision.dtype": "bfloat16"})
    trials = measured(small, [small.space.baseline, fast, fast])
    trials = (*trials[:2], replace(trials[2], role=Role.CONFIRMED))
    posterior = Posterior(small.spec(), trials)
    seen = Situation("me", trials, confirmer="me", stopped_because=STOPPED, was_exhausted=True)
    mine = next_step(seen, posterior, limits(NOTHING))
    assert mine == Run(small.space.baseline, Role.CONFIRMED, STOPPED, is_exhausted=True)
    others = replace(seen, confirmer="other")
    assert next_step(others, posterior, limits(NOTHING)) == Wait()
    gone = replace(others, is_confirmer_gone=True)
    taken_over = next_step(gone, posterior, limits(NOTHING))
    assert isinstance(taken_over, Run)
    assert taken_over.is_anew, "the other device's blocks cannot be compared"
    assert taken_over.plan == fast


def test_a_worker_whose_own_limits_are_reached_waits_while_others_search(
    small: SimulatedDevice,
) -> None:
    trials = measured(small, [small.space.baseline])
    posterior = Posterior(small.spec(), trials)
    spent = limits(small.space.plan(8, small.space.plain_settings), spent="over")
    alone = next_step(Situation("me", trials), posterior, spent)
    assert alone == Run(small.space.baseline, Role.CONFIRMED, "over")
    together = Situation("me", trials, others_search=True)
    assert next_step(together, posterior, spent) == Wait(is_spent=True)
    late = replace(spent, is_out_of_time=True)
    assert next_step(together, posterior, late) == Leave()


def test_a_report_that_is_written_is_read_unless_there_is_more_to_do(
    small: SimulatedDevice,
) -> None:
    baseline = small.space.baseline
    trials = measured(small, [baseline, baseline])
    trials = (trials[0], replace(trials[1], role=Role.CONFIRMED))
    posterior = Posterior(small.spec(), trials)
    closed = Situation("me", trials, confirmer="other", stopped_because="over", is_closed=True)
    more = small.space.plan(8, small.space.plain_settings)
    assert next_step(closed, posterior, limits(more, spent="over")) == Read()
    assert next_step(closed, posterior, limits(more)) == Run(more, Role.SEARCH, is_anew=True)
    ended = replace(closed, ended=STOPPED)
    assert next_step(ended, posterior, limits(more)) == Read()


def test_a_comparison_that_a_worker_of_less_time_cut_short_is_run_anew(
    small: SimulatedDevice,
) -> None:
    fast = small.space.plan(8, {"precision.dtype": "bfloat16"})
    trials = measured(small, [small.space.baseline, fast, fast])
    trials = (*trials[:2], replace(trials[2], role=Role.CONFIRMED))
    posterior = Posterior(small.spec(), trials)
    seen = Situation("me", trials, confirmer="other", stopped_because="over", is_closed=True)
    anew = Run(fast, Role.CONFIRMED, STOPPED, is_exhausted=True, is_anew=True)
    assert next_step(seen, posterior, limits(NOTHING)) == anew
    for left in (0, 1):  # too few to compare anything

        def may_compare(finished: Any, most: int = len(trials) + left) -> bool:
            return len(finished) < most

        few = replace(limits(NOTHING), may_compare=may_compare)
        assert next_step(seen, posterior, few) == Read()


def test_nothing_that_fits_is_compared_by_nobody(small: SimulatedDevice) -> None:
    trials = (make_trial(0, small.space.baseline, Outcome.OOM),)
    situation = Situation("me", trials)
    step = next_step(situation, Posterior(small.spec(), trials), limits(NOTHING))
    assert step == Leave(STOPPED)


def test_the_end_of_the_comparison_closes_the_search(small: SimulatedDevice) -> None:
    baseline = small.space.baseline
    trials = measured(small, [baseline, baseline, baseline])
    trials = (trials[0], *(replace(trial, role=Role.CONFIRMED) for trial in trials[1:]))
    situation = Situation("me", trials, confirmer="me", stopped_because=STOPPED, was_exhausted=True)
    step = next_step(situation, Posterior(small.spec(), trials), limits(NOTHING))
    assert step == Close(STOPPED, is_exhausted=True)


def test_after_a_block_that_did_not_fit_no_two_workers_wait_for_one_another(
    small: SimulatedDevice,
) -> None:
    baseline, plain = small.space.baseline, small.space.plain_settings
    failed = make_trial(1, small.space.plan(8, plain), Outcome.OOM)
    trials = (*measured(small, [baseline]), replace(failed, role=Role.CONFIRMED))
    posterior = Posterior(small.spec(), trials)
    seen = Situation("me", trials, confirmer="other", stopped_because="over")
    for own in (limits(NOTHING), limits(NOTHING, spent="over")):
        assert next_step(seen, posterior, own) == Wait(is_spent=True)
    confirmer = replace(seen, me="other")
    goes_on = next_step(confirmer, posterior, limits(NOTHING, spent="over"))
    assert goes_on == Run(baseline, Role.CONFIRMED, "over")


# Workers in a random order


def check_agreement(workers: list[OneWorker]) -> None:
    ended = [worker for worker in workers if worker.record is not None]
    assert ended
    records = [worker.record.to_dict() for worker in ended if worker.record is not None]
    assert all(record == records[0] for record in records)
    assert records[0]["created"] in {worker.store.workers.key for worker in workers}


@pytest.mark.parametrize("seed", range(4))
def test_workers_in_any_order_run_no_plan_at_once_and_agree(
    small: SimulatedDevice, seed: int
) -> None:
    def make(storage: InMemoryStorage) -> OneWorker:
        return OneWorker(storage, small.spec(), small.prober())

    order = random.Random(seed)
    workers = searched_together(make, 2 + seed % 3, order)
    check_agreement(workers)
    best = workers[0].result
    assert best is not None
    assert small.speed(best.best.plan) > 0.98 * small.optimum()
    compared = {
        worker.store.workers.name
        for worker in workers
        if any(request.full_accumulation for request in worker.prober.probed)
    }
    assert len(compared) == 1


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_are_lost_hold_up_nobody(small: SimulatedDevice, seed: int) -> None:
    def make(storage: InMemoryStorage) -> OneWorker:
        return OneWorker(storage, small.spec(), small.prober())

    workers = searched_together(make, 3, random.Random(100 + seed), lost=2)
    check_agreement(workers)
    assert workers[2].record is not None
    running = workers[2].store.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    assert running == []


def test_one_worker_decides_as_a_search_alone(device: SimulatedDevice, tmp_path: Path) -> None:
    alone = run_search(device.prober(), device.spec())
    with SharedStore.open(tmp_path / "study.journal", IDENTITY) as store:
        shared = run_search(device.prober(), device.spec(), store=store)
    assert [(t.role, t.plan) for t in shared.trials] == [(t.role, t.plan) for t in alone.trials]
    assert shared.best.plan == alone.best.plan
    assert shared.stopped_because == alone.stopped_because


def test_max_probes_holds_for_all_workers_together(small: SimulatedDevice) -> None:
    def make(storage: InMemoryStorage) -> OneWorker:
        return OneWorker(storage, small.spec(), small.prober(), max_probes=5)

    for seed in range(3):
        workers = searched_together(make, 3, random.Random(seed))
        assert len(workers[0].store.trials) == 5
        check_agreement(workers)


# Who is gone


def test_a_worker_is_gone_when_its_counter_stands_still_on_the_observers_clock() -> None:
    import optuna

    now = 0.0
    study = optuna.create_study()
    workers = Workers(study, grace_s=60.0, clock=lambda: now)
    elsewhere = this_process() | {
        "host": "elsewhere", "name": "e", "searches": True, "has_left": False, "beats": 3,
    }  # fmt: skip
    assert workers.absent({"other": elsewhere}) == frozenset()
    now = 59.0
    assert workers.absent({"other": elsewhere}) == frozenset()
    now = 61.0
    assert workers.absent({"other": elsewhere}) == {"other"}
    assert workers.absent({"other": elsewhere | {"beats": 4}}) == frozenset()
    assert workers.absent({"other": elsewhere | {"beats": 5, "has_left": True}}) == {"other"}


def test_a_worker_whose_process_ended_on_this_host_is_gone_at_once() -> None:
    import optuna

    workers = Workers(optuna.create_study())
    here = this_process() | {"name": "h", "searches": True, "has_left": False, "beats": 1}
    assert workers.absent({"other": here}) == frozenset()
    assert workers.absent({"other": here | {"started": 1}}) == {"other"}


def test_a_worker_that_was_taken_for_gone_drops_its_trial_and_goes_on(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    with SharedStore.open(tmp_path / "study.journal", IDENTITY) as store:
        prober = small.prober()
        probe = prober.probe

        def ended_by_others(request: Any) -> Any:
            if len(prober.probed) == 2:
                running = store.study.get_trials(states=(TrialState.RUNNING,))
                store.study.tell(running[0].number, state=TrialState.FAIL)
            return probe(request)

        prober.probe = ended_by_others  # type: ignore[method-assign]  # as at this moment
        result = run_search(prober, small.spec(), store=store)
    assert result.comparison_ended
    assert len(prober.probed) == result.probes + 1


def test_a_worker_that_was_taken_for_gone_at_its_turn_draws_another_number(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    lost: list[int] = []
    with SharedStore.open(tmp_path / "study.journal", IDENTITY) as store:
        publish = store.publish

        def ended_by_others(step: Any) -> bool:
            if not lost:
                running = store.study.get_trials(states=(TrialState.RUNNING,))
                lost.append(running[0].number)
                store.study.tell(lost[0], state=TrialState.FAIL)
            return publish(step)

        store.publish = ended_by_others  # type: ignore[method-assign]  # as at this moment
        result = run_search(small.prober(), small.spec(), store=store)
    assert result.comparison_ended
    assert lost[0] not in {trial.number for trial in result.trials}


def test_a_report_holds_for_the_trials_in_it_alone(small: SimulatedDevice, tmp_path: Path) -> None:
    """Not for those of a worker that took the one that wrote it for gone."""
    path = tmp_path / "study.journal"
    with SharedStore.open(path, IDENTITY) as store, SharedStore.open(path, IDENTITY) as other:
        result = run_search(small.prober(), small.spec(), store=store)
        other.begin(small.spec())

        def described() -> Any:
            with other.turn():
                other.publish(Run(result.best.plan, Role.SEARCH))
                with other.asking(result.best.plan) as asked:
                    other.record(asked, replace(result.best, role=Role.SEARCH))
            return make_record(result, "late")

        record = store.agreed(described)
        assert not other.look().is_closed
    assert sum(record.search.workers.values()) == record.search.probes == len(record.trials)


def test_a_timeout_ends_a_worker_whose_turn_does_not_come(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    path = tmp_path / "study.journal"
    with SharedStore.open(path, IDENTITY) as store:
        run_search(small.prober(), small.spec(), store=store, max_probes=1)
    with SharedStore.open(path, IDENTITY) as store, SharedStore.open(path, IDENTITY) as other:
        with other.turn():
            late = run_search(small.prober(), small.spec(), store=store, timeout_s=0.2)
        assert not other.look().others_search, "nobody need wait for it"
        assert late.stopped_because == "the timeout of 0.2 s was reached"
        running = store.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    assert running == []


def test_a_comparison_that_another_worker_cut_short_is_told_without_a_limit_of_its_own(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    path = tmp_path / "study.journal"
    with SharedStore.open(path, IDENTITY) as store:
        cut = run_search(small.prober(), small.spec(), store=store, max_probes=2)
        store.agreed(lambda: make_record(cut, "cut"))
    assert not cut.comparison_ended
    with SharedStore.open(path, IDENTITY) as store:
        read = run_search(small.prober(), small.spec(), store=store, max_probes=3)
    assert read.trials == cut.trials
    assert read.stopped_because.endswith("because another worker's limit was reached")


def test_costly_settings_that_a_timeout_left_out_are_tried_by_who_has_more_time(
    make_device: MakeDevice, tmp_path: Path
) -> None:
    costly = {"compile.mode": Dimension(("off", "default"), trial_cost_s=500.0)}
    device, path = make_device(dimensions=costly), tmp_path / "study.journal"
    with SharedStore.open(path, IDENTITY) as store:
        cut = run_search(device.prober(), device.spec(), store=store, timeout_s=100.0)
        store.agreed(lambda: make_record(cut, "cut"))
    assert cut.with_more_time is not None
    with SharedStore.open(path, IDENTITY) as store:
        whole = run_search(device.prober(), device.spec(), store=store)
    assert {t.plan.settings["compile.mode"] for t in whole.trials} == {"off", "default"}


# Studies


def test_cards_that_differ_are_refused_where_both_start_a_study_at_once(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    path = tmp_path / "study.journal"
    l4, h100 = ({**IDENTITY, "device": f"NVIDIA {card}"} for card in ("L4", "H100"))
    with SharedStore.open(path, l4) as first, SharedStore.open(path, h100) as second:
        first.begin(replace(small.spec(), identity=l4))
        with pytest.raises(StudyRefused, match="NVIDIA L4 and an NVIDIA H100 cannot be compared"):
            second.begin(replace(small.spec(), identity=h100))


def test_a_writer_whose_lock_was_taken_for_stale_goes_on(
    small: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "study.journal", os.fsync

    def slow(file: int) -> None:
        """Take so long that another writer breaks the lock."""
        path.with_name("study.journal.lock").unlink(missing_ok=True)
        fsync(file)

    with SharedStore.open(path, IDENTITY) as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", slow)
            store.begin(small.spec())
        assert store.spec == small.spec()


@pytest.mark.parametrize("first", ["shared", "alone"])
def test_a_search_that_does_not_share_keeps_others_out(tmp_path: Path, first: str) -> None:
    path = tmp_path / "study.journal"
    kinds: dict[str, type[Store]] = {"shared": SharedStore, "alone": Store}
    second = kinds["alone" if first == "shared" else "shared"]
    with (
        kinds[first].open(path, IDENTITY),
        pytest.raises(StudyRefused, match=r"add --share|start it with --share"),
    ):
        second.open(path, IDENTITY)
    with SharedStore.open(path, IDENTITY), SharedStore.open(path, IDENTITY):
        pass


def test_what_a_killed_writer_left_of_a_line_is_cut_off(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    path = tmp_path / "study.journal"
    with SharedStore.open(path, IDENTITY) as store:
        store.begin(small.spec())
        with SharedStore.open(path, IDENTITY) as other:
            with path.open("ab") as file:
                file.write(b'{"op_code":8,"worker_id":"x","trial')
            other.begin(small.spec())
            result = run_search(small.prober(), small.spec(), store=other)
        assert [trial.number for trial in store.trials] == [t.number for t in result.trials]
    for line in path.read_text().splitlines():
        json.loads(line)


def test_sqlite_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(StudyRefused, match="in SQLite cannot be shared"):
        SharedStore.open(f"sqlite:///{tmp_path / 'study.db'}", IDENTITY)


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "needs study="), ({"study": "x", "sampler": True}, "planned by autofit")],
)
def test_a_share_of_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    import optuna
    import torch

    if "sampler" in given:
        given = given | {"sampler": optuna.samplers.RandomSampler()}
    with pytest.raises(InvalidRequest, match=message):
        autofit.search(torch.nn.Linear(1, 1), torch.ones(1, 1), share=True, **given)


def test_another_effort_beside_others_is_refused(small: SimulatedDevice, tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    from autofit.planning.search_spec import Effort

    quick = replace(small.spec(), effort=Effort.QUICK)
    with SharedStore.open(path, IDENTITY) as store:
        store.begin(small.spec())
        with (
            SharedStore.open(path, IDENTITY) as other,
            pytest.raises(StudyRefused, match=r"1 other worker of the study .* effort 'normal'"),
        ):
            other.begin(quick)
    with SharedStore.open(path, IDENTITY) as later:
        later.begin(quick)
        assert later.spec is not None
        assert later.spec.effort is Effort.QUICK


def test_cards_that_differ_are_refused(small: SimulatedDevice, tmp_path: Path) -> None:
    path, of_l4 = tmp_path / "study.journal", {**IDENTITY, "device": "NVIDIA L4"}
    with SharedStore.open(path, of_l4) as store:
        store.begin(replace(small.spec(), identity=of_l4))
        with pytest.raises(StudyRefused, match="NVIDIA L4 and an NVIDIA H100 cannot be compared"):
            SharedStore.open(path, {**IDENTITY, "device": "NVIDIA H100"})
    with Store.open(path, IDENTITY) as alone:  # as before it was shared
        assert alone.spec is not None


def test_a_study_that_was_begun_without_sharing_is_refused(
    small: SimulatedDevice, tmp_path: Path
) -> None:
    path = tmp_path / "study.journal"
    with Store.open(path, IDENTITY) as alone:
        alone.begin(small.spec())
    of_l4 = {**IDENTITY, "device": "NVIDIA L4", "driver": "580", "torch": "2.13"}
    whole = (
        r"another search \(a search that did not share it began it, and did not note its device\)"
    )
    with pytest.raises(StudyRefused, match=whole):
        SharedStore.open(path, of_l4)


# Processes

_WORKER = """
import os, random, signal, sys, time
sys.path[:0] = {path!r}
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
from autofit.measurement import Role
from autofit.plan import Dimension
from autofit.searching import shared_search
from autofit.searching.engine import run_search
from autofit.searching.shared_study import SharedStore
from autofit.space import Space
from tests.shared_workers import make_record
from tests.simulated import IDENTITY, SimulatedDevice

dies_at = {dies_at!r}

def die(moment):
    if moment == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

class Dying(shared_search.SharedSearch):
    def moments(self):
        for moment in super().moments():
            die(moment.name)
            if moment.name == "RECORDED":
                print(max(t.number for t in self._store.trials), flush=True)
            yield moment

    def _take(self, step):
        die(step.role.value)
        super()._take(step)

shared_search.SharedSearch = Dying
precisions = {{"precision.dtype": Dimension(("as_is", "bfloat16"))}}
device = SimulatedDevice(Space(precisions, sample_batch_size=4))
prober = device.prober()
probe = prober.probe

def slow(request):
    time.sleep({probe_s})
    if len(prober.probed) == 1:
        die("probing")
    return probe(request)

prober.probe = slow
with SharedStore.open({study!r}, IDENTITY) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    result = run_search(prober, device.spec(), store=store, timeout_s={timeout_s!r})
    def described():
        die("closing")
        return make_record(result, str(os.getpid()))
    record = store.agreed(described)
import json
print(json.dumps(record.to_dict()), flush=True)
"""


@pytest.fixture
def start(python: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Start a worker on a study, which may kill itself at a moment."""

    def child(
        study: str, dies_at: str = "", probe_s: float = 0.3, timeout_s: float | None = None
    ) -> subprocess.Popen[str]:
        code = textwrap.dedent(_WORKER).format(
            path=sys.path, study=study, dies_at=dies_at, probe_s=probe_s, timeout_s=timeout_s
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return python("-c", code, text=True, forks_workers=False, **pipes)

    return child


def check_that_killed_workers_lose_only_what_they_ran(
    start: Any, study: str, deaths: tuple[str, ...]
) -> None:
    """All but one of the workers die, and the last one ends the search.

    At the end of the search, where one worker has something to do, it waits for the others to die.
    """
    workers = [start(study, dies_at) for dies_at in (*deaths, "")]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n", worker.communicate()[1]
    for worker in workers[:-1]:
        worker.stdin.write("\n")
        worker.stdin.flush()
    if set(deaths) <= {"confirmed", "closing"}:
        for worker in workers[:-1]:
            worker.wait(timeout=240)
    workers[-1].stdin.write("\n")
    told = [worker.communicate(timeout=240) for worker in workers]
    assert workers[-1].returncode == 0, told[-1][1]
    *_, written = told[-1][0].splitlines()
    record = json.loads(written)
    numbers = [trial["number"] for trial in record["trials"]]
    recorded = set()
    for worker, (out, errors) in zip(workers[:-1], told[:-1], strict=True):
        assert worker.returncode == -signal.SIGKILL, errors
        recorded |= {int(line) for line in out.splitlines()}
    assert recorded <= set(numbers)
    with SharedStore.open(study, IDENTITY) as store:
        trials = store.study.get_trials(deepcopy=False)
        assert all(trial.state.is_finished() for trial in trials)
        lost = [
            trial
            for trial in trials
            if trial.user_attrs.get("autofit_published") and trial.number not in numbers
        ]
        closings = [t for t in lost if t.user_attrs["autofit_published"]["role"] == "closing"]
        assert len(lost) - len(closings) <= len(deaths)
    assert record["search"]["comparison_ended"] or record["best"]["role"] == "confirmed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [("DREW", "PUBLISHED"), ("probing", "RECORDED"), ("confirmed", "confirmed"), ("closing",)],
)
def test_killed_workers_lose_at_most_what_they_were_running(
    tmp_path: Path, start: Any, deaths: tuple[str, ...]
) -> None:
    check_that_killed_workers_lose_only_what_they_ran(
        start, str(tmp_path / "study.journal"), deaths
    )


@pytest.mark.slow
@pytest.mark.parametrize("ends_by", ["Ctrl-C", "timeout"])
def test_a_worker_that_ends_early_returns_what_was_measured_and_holds_up_nobody(
    tmp_path: Path, start: Any, ends_by: str
) -> None:
    """Its report is its own; that of the one who goes on holds its trials, too."""
    study = str(tmp_path / "study.journal")
    if ends_by == "timeout":  # of fewer probes than a search takes
        early = start(study, probe_s=0.5, timeout_s=2.0)
    else:  # it is long amid its second probe
        early = start(study, probe_s=3.0)
    late = start(study)
    for worker in (early, late):
        assert worker.stdout.readline() == "ready\n", worker.communicate()[1]
    late.stdin.write("\n")
    late.stdin.flush()
    assert late.stdout.readline(), late.communicate()[1]  # it has recorded a trial
    late.send_signal(signal.SIGSTOP)  # so that the search cannot end before the early one has
    early.stdin.write("\n")
    early.stdin.flush()
    if ends_by == "Ctrl-C":
        assert early.stdout.readline(), early.communicate()[1]
        early.send_signal(signal.SIGINT)
    out, errors = early.communicate(timeout=240)
    late.send_signal(signal.SIGCONT)
    rest = late.communicate(timeout=240)
    assert (early.returncode, late.returncode) == (0, 0), (errors, rest[1])
    own, whole = (json.loads(told.splitlines()[-1]) for told in (out, rest[0]))
    because = {"Ctrl-C": "interrupted", "timeout": "the timeout of 2 s was reached"}
    assert own["search"]["stopped_because"].endswith(because[ends_by])
    assert sum(own["search"]["workers"].values()) == len(own["trials"])
    numbers = {trial["number"] for trial in whole["trials"]}
    assert {trial["number"] for trial in own["trials"]} <= numbers
    assert len(whole["search"]["workers"]) == 2 or ends_by == "timeout"
    with SharedStore.open(study, IDENTITY) as store:
        assert all(trial.state.is_finished() for trial in store.study.get_trials())


# A database


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [("DREW", "PUBLISHED", "probing"), ("confirmed",), ("closing",)])
def test_killed_workers_on_a_database_lose_at_most_what_they_were_running(
    database: str, start: Any, deaths: tuple[str, ...]
) -> None:
    check_that_killed_workers_lose_only_what_they_ran(start, database, deaths)


@pytest.mark.slow
def test_a_database_without_heartbeats_of_a_trial_ends_it(
    small: SimulatedDevice, database: str
) -> None:
    """By the database's clock: who has just come need not watch a counter first."""
    import psycopg
    from optuna.storages import RDBStorage

    with SharedStore.open(database, IDENTITY) as store:
        store.begin(small.spec())
        backend = backend_of(store.study)
        assert isinstance(backend, RDBStorage)
        with store.turn():
            store.workers.trial_id = None  # it beats no more
            for minutes in (0, 2):
                back = f"heartbeat = now() - interval '{minutes} min'"
                with psycopg.connect(database.replace("+psycopg", "")) as connection:
                    changed = connection.execute(f"update trial_heartbeats set {back}".encode())
                    assert changed.rowcount >= 1
                with SharedStore.open(database, IDENTITY) as late:
                    assert bool(late.look().undecided) is (minutes == 0)


@pytest.mark.slow
def test_a_shared_database_keeps_searches_out_that_do_not_share_it(
    small: SimulatedDevice, database: str
) -> None:
    with (
        SharedStore.open(database, IDENTITY),
        SharedStore.open(database, IDENTITY),
        pytest.raises(StudyRefused, match="add --share"),
    ):
        Store.open(database, IDENTITY)
    with (
        Store.open(database, IDENTITY),
        pytest.raises(StudyRefused, match="start it with --share too"),
    ):
        SharedStore.open(database, IDENTITY)


_TARGET = """
import torch
from torch import nn
import autofit

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    return autofit.Workload(model, (torch.randn(8, 16), torch.randn(8, 4)), criterion=nn.MSELoss())
"""


@pytest.mark.slow
def test_two_processes_on_one_study_write_the_same_report(
    tmp_path: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "train.py").write_text(_TARGET)
    options = "--device cpu --vram-budget 32MiB --strategies precision --max-probes 8 --share"
    reports = [tmp_path / f"{number}.json" for number in range(2)]
    workers = [
        python(
            *("-m", "autofit", "search", "train.py:make", *options.split(" ")),
            *("--study", "search.log", "--out", str(report)),
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for report in reports
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=240)
        assert worker.returncode == 0, errors
    first, second = (report.read_text() for report in reports)
    assert first == second
    search = json.loads(first)["search"]
    assert sum(search["workers"].values()) == search["probes"] == 8
