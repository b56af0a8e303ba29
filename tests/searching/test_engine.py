"""The loop of a search: what ends it, what reaches the user, and what is returned."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState

from autofit.errors import (
    InvalidArgument,
    SearchTimedOut,
    WorkerFailed,
    WorkloadFailed,
)
from autofit.measurement import Measurement, Outcome, TrialKind
from autofit.plan import Dimension, NoFeasiblePlan, Plan, ResolvedPlan
from autofit.planning.constants import (
    MAX_TRANSIENT,
    USUAL_PROBES,
    USUAL_PROBES_OF_SIZES,
    USUAL_PROBES_WITH_LINES,
)
from autofit.planning.search_spec import Effort, SearchSpec
from autofit.probing.requests import NoReply, ProbeRequest, Reply
from autofit.report.record import INTERRUPTED, Record, Undecided
from autofit.searching import events
from autofit.searching.engine import MAX_VETOES, run_search
from autofit.searching.sampler import Sampler
from autofit.searching.study import Store
from autofit.space import Space
from autofit.testing import SimulatedProber
from tests.searching.conftest import fails_from, of_kind
from tests.simulated import FEW_DIMENSIONS, MakeDevice, SimulatedDevice, with_predicted_lines

GIB = 2**30


def _is_half(plan: Plan) -> bool:
    return plan.settings["precision.dtype"] == "bfloat16"


def _failing(
    outcome: Outcome, when: Callable[[Plan], bool]
) -> Callable[[Plan], Measurement | None]:
    return lambda plan: Measurement(outcome, detail="on purpose") if when(plan) else None


def test_what_is_asked_of_the_device_and_told_of_it(device: SimulatedDevice) -> None:
    prober = device.prober()
    seen: list[events.Event] = []
    result = run_search(prober, device.spec(), max_probes=6, on_event=seen.append)
    assert result.best.kind is TrialKind.CONFIRMATION
    assert prober.renewals == 1
    assert prober.probed[-1].full_accumulation
    assert [request.plan for request in prober.probed].count(result.best.plan) >= 2
    assert result.baseline.plan == device.space.baseline
    started, finished = (of_kind(seen, k) for k in (events.ProbeStarted, events.ProbeFinished))
    assert [e.plan for e in started] == [e.trial.plan for e in finished]
    assert [e.trial for e in finished] == list(result.trials)
    assert len(finished) == result.search.probes == len(prober.probed) == 6
    assert (finished[-1].progress.probes, finished[-1].progress.probes_left) == (6, 0)
    assert started[0].predicted_peak_bytes is None
    assert all((event.predicted_peak_bytes or 0) > GIB for event in started[1:])
    assert len(of_kind(seen, events.Confirming)) == 1
    incumbents = [request.incumbent_samples_per_second for request in prober.probed]
    assert incumbents[0] is None
    assert all(rate is not None and rate > 0 for rate in incumbents[1:-2])
    assert incumbents[-1] is None  # a confirmation is measured to the end


@pytest.mark.parametrize(
    ("spec_of", "usual"),
    [
        (SimulatedDevice.spec, USUAL_PROBES),
        (with_predicted_lines, USUAL_PROBES_WITH_LINES),
        (lambda device: SearchSpec(Space({}, 4), device.budget), USUAL_PROBES_OF_SIZES),
        (lambda device: replace(device.spec(), effort=Effort.QUICK), None),
    ],
    ids=["all", "with lines", "sizes alone", "quick"],
)
def test_events_tell_how_many_probes_such_a_search_takes(
    device: SimulatedDevice, spec_of: Callable[[SimulatedDevice], SearchSpec], usual: Any
) -> None:
    seen: list[events.Event] = []
    run_search(device.prober(), spec_of(device), max_probes=2, on_event=seen.append)
    assert {event.progress.usual_probes for event in seen} == {usual}


@pytest.mark.parametrize("most", [1, 2, 4, 5])
def test_no_more_probes_than_allowed(device: SimulatedDevice, most: int) -> None:
    """Four are enough for a confirmed answer."""
    result = run_search(device.prober(), device.spec(), max_probes=most)
    assert result.search.probes == most
    assert result.search.stopped_because == f"max_probes={most} was reached"
    assert len({trial.plan for trial in result.trials}) >= min(most, 2)
    compared = {trial.plan for trial in result.trials if trial.kind is TrialKind.CONFIRMATION}
    is_enough = most >= 4
    assert compared == ({result.best.plan, device.space.baseline} if is_enough else set())
    assert (result.best.kind is TrialKind.CONFIRMATION) is is_enough
    assert result.best.plan != device.space.baseline or not is_enough
    assert result.search.comparison_ended is is_enough
    if most == 1:
        assert result.search.undecided_because is Undecided.MAX_PROBES
        assert result.recommended == result.baseline


@pytest.mark.parametrize("most", [2, 3, 6])
def test_what_a_limit_cut_without_a_yardstick_is_not_decided(
    device: SimulatedDevice, most: int
) -> None:
    """Of a baseline that is out of memory no speed is known, nor of plans that did not run."""
    prober = device.prober(_failing(Outcome.OOM, lambda plan: plan == device.space.baseline))
    result = run_search(prober, device.spec(), max_probes=most)
    assert result.best.ok
    assert result.search.undecided_because is Undecided.MAX_PROBES


class _Wrapped:
    """A prober that does something more around another one's probes."""

    def __init__(self, inner: Any, then: Callable[[Any, Reply], Reply]) -> None:
        self._inner, self._then = inner, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def probe(self, request: ProbeRequest) -> Reply:
        return self._then(self._inner, self._inner.probe(request))


@pytest.mark.parametrize(("whole", "sample", "limit"), [(16, 4, 7), (28, 7, 10)])
def test_the_largest_permitted_size_below_a_limit_is_found(
    whole: int, sample: int, limit: int
) -> None:
    """Sizes that a global batch permits may be further apart than half of what is left."""
    precision = {"precision.dtype": Dimension(("default",))}
    device = SimulatedDevice(Space(precision, sample, global_batch=whole), 1000 * GIB)
    result = run_search(device.prober(size_limit=lambda plan: limit), device.spec())
    assert result.best.plan == device.space.plan(limit, {"precision.dtype": "default"})


@pytest.mark.slow
def test_a_plan_that_no_longer_fits_when_confirmed_is_not_returned(device: SimulatedDevice) -> None:
    def shrunk(inner: Any, result: Reply) -> Reply:
        request = inner.probed[-1]
        fits = not request.full_accumulation or request.plan.micro_batch <= 10
        return result if fits else Reply(Measurement(Outcome.OOM))

    result = run_search(_Wrapped(device.prober(), shrunk), device.spec(), max_probes=40)
    assert result.best.plan.micro_batch <= 10
    assert result.best.kind is TrialKind.CONFIRMATION


def test_proposals_of_another_sampler_over_the_budget_are_vetoed(
    device: SimulatedDevice,
) -> None:
    prober = device.prober()
    result = run_search(prober, device.spec(), sampler=TPESampler(seed=1), max_probes=12)
    ran = {request.plan for request in prober.probed}
    vetoed = [trial.plan for trial in result.trials if trial.kind is TrialKind.VETOED]
    over = [plan for plan in vetoed if device.memory(plan) > device.budget]
    assert len(over) > result.search.oom_probes
    assert ran.isdisjoint(over)
    assert len(prober.probed) == result.search.probes <= 12


def test_an_interrupt_that_was_swallowed_still_ends_the_search(device: SimulatedDevice) -> None:
    def swallow(_: Any, result: Reply) -> Reply:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return result

    result = run_search(_Wrapped(device.prober(), swallow), device.spec())
    assert result.search.stopped_because == INTERRUPTED
    assert result.search.probes == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_value_that_needs_a_fresh_worker_shares_none(make_device: MakeDevice) -> None:
    dimensions = {
        "precision.dtype": Dimension(("default", "bfloat16"), fresh_worker=True),
        "checkpointing.level": Dimension((0, 1, 2, 3, 4)),
    }
    other = make_device(dimensions=dimensions)
    workers: list[tuple[int, bool]] = []

    def remember(inner: Any, result: Reply) -> Reply:
        workers.append((inner.renewals, _is_half(inner.probed[-1].plan)))
        return result

    prober, sampler = _Wrapped(other.prober(), remember), RandomSampler(seed=0)
    run_search(prober, other.spec(), sampler=sampler, max_probes=12)
    in_worker = Counter(worker for worker, _ in workers)
    alone = [worker for worker, half in workers if half]
    assert len(alone) >= 2
    assert all(in_worker[worker] == 1 for worker in alone)
    shared = [worker for worker, half in workers if not half]
    assert len(set(shared)) < len(shared)  # the others still share theirs


def test_a_space_too_large_to_plan_is_refused_before_the_first_probe(
    device: SimulatedDevice,
) -> None:
    prober = device.prober()
    large = {f"big.d{number}": Dimension(range(60)) for number in range(3)}
    spec = replace(device.spec(), space=Space(large, 4))
    with pytest.raises(InvalidArgument, match="216,000"):
        run_search(prober, spec)
    assert not prober.probed


# -- What ends a search early, and what is said then

NO_WORKER = WorkerFailed("no worker starts")


@pytest.mark.parametrize(
    ("end", "why"),
    [(KeyboardInterrupt(), Undecided.INTERRUPTED), (NO_WORKER, Undecided.FAILED)],
    ids=repr,
)
def test_what_was_cut_short_says_why_and_recommends_the_baseline(
    device: SimulatedDevice, end: BaseException, why: Undecided
) -> None:
    """Beside a machine that is slow at times, one probe each tells nothing at 95 %."""
    slow = device.prober(fails_from(2, end), slowdown=lambda seconds: 2.2 if seconds < 1.5 else 1.0)
    result = run_search(slow, device.spec())
    assert result.best.plan != result.baseline.plan
    assert result.recommended == result.baseline
    assert result.search.undecided_because is why


def _slower_than_plain(device: SimulatedDevice, fault: Any = None) -> SimulatedProber:
    """A prober on which no plan is as fast as the baseline."""

    def step_time(plan: Plan) -> float:
        return device.step_time(plan) * (1 if plan == device.space.baseline else 10)

    return SimulatedProber(device.budget, device.memory, step_time, fault=fault)


@pytest.mark.parametrize("after", [2, 3])
@pytest.mark.parametrize(
    ("end", "why"),
    [
        (KeyboardInterrupt(), Undecided.INTERRUPTED),
        (NO_WORKER, Undecided.FAILED),
        (None, Undecided.MAX_PROBES),
        (None, Undecided.TIMEOUT),
    ],
    ids=repr,
)
def test_a_search_that_was_cut_does_not_say_that_no_plan_is_faster(
    device: SimulatedDevice, end: BaseException | None, why: Undecided, after: int
) -> None:
    """The baseline is ahead of the few that ran, and others were worth a probe."""
    prober = _slower_than_plain(device, None if end is None else fails_from(after, end))
    limits: dict[Undecided, Any] = {
        Undecided.MAX_PROBES: {"max_probes": after},
        Undecided.TIMEOUT: {
            "timeout_s": 10.0 * after, "clock": lambda: 10.0 * len(prober.probed), "began": 0.0,
        },
    }  # fmt: skip
    result = run_search(prober, device.spec(), **limits.get(why, {}))
    assert result.recommended.plan == result.best.plan == result.baseline.plan
    assert result.search.undecided_because is why


def test_a_search_that_came_to_its_end_says_that_no_plan_is_faster(
    device: SimulatedDevice,
) -> None:
    """And so does one that was interrupted afterwards, as its comparison began."""
    whole = run_search(_slower_than_plain(device), device.spec())
    assert whole.recommended.plan == whole.baseline.plan
    assert whole.is_decided
    searched = sum(trial.kind is not TrialKind.CONFIRMATION for trial in whole.trials)
    cut = _slower_than_plain(device, fails_from(searched, KeyboardInterrupt()))
    result = run_search(cut, device.spec())
    assert result.search.stopped_because == INTERRUPTED
    assert result.is_decided


def test_a_timeout_before_anything_was_measured_is_an_error(device: SimulatedDevice) -> None:
    prober = device.prober()
    with pytest.raises(SearchTimedOut, match=r"timeout of 0 s .*longer") as caught:
        run_search(prober, device.spec(), timeout_s=0.0)
    assert caught.value.exit_code == 5
    assert prober.probed == []


class _Timed:
    """A simulated device on a machine where everything takes its time, and much goes wrong.

    Args:
        device: the device.
        fault: of its probes.
        hang_s: seconds until a hang is seen.
    """

    strategies = ()
    start_s = 5.0

    def __init__(self, device: SimulatedDevice, fault: Any = None, hang_s: float = 60.0) -> None:
        self.now, self._hang_s, self._is_fresh = 0.0, hang_s, False
        self.inner = device.prober(fault)

    def searched(self, device: SimulatedDevice, timeout_s: float | None = None) -> Record:
        return run_search(
            self, device.spec(), timeout_s=timeout_s, clock=lambda: self.now, began=0.0
        )

    def probe(self, request: ProbeRequest) -> Reply:
        measured = self.inner.probe(request).measurement
        seconds = 1.0 + sum(measured.step_times_s)
        if measured.outcome is Outcome.TIMEOUT:
            seconds = self._hang_s
        started = 0.0 if self._is_fresh else self.start_s
        self._is_fresh = measured.outcome in (Outcome.OK, Outcome.OOM)
        if request.seconds_left is not None and started + seconds > request.seconds_left:
            self.now += request.seconds_left
            raise SearchTimedOut
        self.now += started + seconds
        return Reply(replace(measured, seconds=seconds))

    def renew(self) -> None:
        self._is_fresh = False
        self.inner.renew()


_DEATHS = (Outcome.CRASHED, Outcome.TIMEOUT, Outcome.HOST_OOM, Outcome.POISONED)


@pytest.mark.slow
@pytest.mark.parametrize(("attempt", "outcome"), list(zip((0, 1, 6, 7), _DEATHS, strict=True)))
def test_one_transient_failure_costs_one_worker_and_changes_nothing(
    device: SimulatedDevice, outcome: Outcome, attempt: int
) -> None:
    undisturbed = run_search(device.prober(), device.spec())
    result = run_search(_Timed(device, fails_from(attempt, outcome, once=True)), device.spec())
    assert all(trial.ok or trial.measurement.outcome.about_memory for trial in result.trials)
    assert result.best.plan.variant == undisturbed.best.plan.variant
    assert device.speed(result.best.plan) > 0.98 * device.speed(undisturbed.best.plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 3, 5, 7])  # each timeout and each probability
def test_whatever_dies_the_answer_ran_and_the_timeout_is_kept(
    device: SimulatedDevice, seed: int
) -> None:
    timeout_s, probability = (20.0, 60.0, 300.0)[seed % 3], (0.0, 0.1, 0.3, 1.0)[seed % 4]
    random = Random(seed)

    def fault(plan: Plan) -> Measurement | None:
        return Measurement(random.choice(_DEATHS)) if random.random() < probability else None

    prober = _Timed(device, fault)
    try:
        result = prober.searched(device, timeout_s)
    except (SearchTimedOut, WorkerFailed, WorkloadFailed):
        assert probability > 0
    else:
        assert result.best.ok
        assert result.best in result.trials
        compared = any(trial.kind is TrialKind.CONFIRMATION for trial in result.trials)
        assert compared or probability > 0  # time was kept back for the first turn at least
    assert prober.now <= timeout_s


def test_a_failure_that_comes_again_is_blamed_on_the_plan_and_repeated_once_per_variant(
    make_device: MakeDevice,
) -> None:
    bare = make_device(dimensions={})
    prober = bare.prober(_failing(Outcome.CRASHED, lambda plan: plan.micro_batch > 20))
    result = run_search(prober, bare.spec())
    failed = [trial.plan for trial in result.trials if not trial.ok]
    assert result.best.plan.micro_batch <= 20
    assert len(prober.probed) == result.search.probes + 1
    assert sum(request.plan in failed for request in prober.probed) == len(failed) + 1


@pytest.mark.parametrize("baseline", [None, *map(Measurement, (Outcome.CRASHED, Outcome.HOST_OOM))])
def test_a_transient_failure_is_repeated_once_and_told(
    device: SimulatedDevice, baseline: Measurement | None
) -> None:
    """Also of a baseline that ran before."""
    fault = fails_from(2, Outcome.CRASHED, once=True) if baseline is None else None
    before = None if baseline is None else Reply(baseline)
    seen: list[events.Event] = []
    result = run_search(
        device.prober(fault), device.spec(), max_probes=3, baseline=before, on_event=seen.append
    )
    assert result.baseline.ok
    (repeating,) = of_kind(seen, events.Repeating)
    assert repeating.first.outcome is (baseline.outcome if baseline else Outcome.CRASHED)
    started, finished = (of_kind(seen, k) for k in (events.ProbeStarted, events.ProbeFinished))
    assert len(finished) == 3
    assert len(started) == (3 if baseline is None else 2)


@pytest.mark.parametrize("last", [1, 7])
def test_a_machine_that_becomes_ill_ends_the_search_with_what_was_measured(
    device: SimulatedDevice, last: int
) -> None:
    result = run_search(_Timed(device, fails_from(last, Outcome.CRASHED)), device.spec())
    assert "at fault" in result.search.stopped_because
    assert result.best.ok
    assert sum(trial.ok for trial in result.trials) == last
    assert len(result.trials) <= last + MAX_TRANSIENT + 1
    fastest = max(trial.samples_per_second or 0 for trial in result.trials if trial.ok)
    assert result.best.samples_per_second == pytest.approx(fastest, rel=0.02)


def test_a_machine_that_is_ill_from_the_start_is_no_fault_of_the_workload(
    device: SimulatedDevice,
) -> None:
    prober = device.prober(fails_from(0, Outcome.HOST_OOM))
    with pytest.raises(WorkerFailed, match=r"at fault.*host_oom.*on purpose") as caught:
        run_search(prober, device.spec())
    assert caught.value.exit_code == 4


def test_a_probe_that_the_timeout_ends_is_not_blamed_on_its_plan(device: SimulatedDevice) -> None:
    prober = _Timed(device, fails_from(3, Outcome.TIMEOUT, once=True), hang_s=1e9)
    result = prober.searched(device, timeout_s=100.0)
    assert result.search.stopped_because == "the timeout of 100 s was reached"
    assert all(trial.ok for trial in result.trials)
    assert result.best.kind is TrialKind.CONFIRMATION


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), NoReply(Outcome.CRASHED, "gone"), KeyError("x")], ids=repr
)
def test_an_error_that_nobody_foresaw_leaves_what_was_measured(
    device: SimulatedDevice, error: Exception, caplog: Any
) -> None:
    result = run_search(device.prober(fails_from(3, error)), device.spec())
    assert result.search.probes == 3
    assert result.best.ok
    assert type(error).__name__ in result.search.stopped_because
    assert not result.may_probe
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt()], ids=repr)
def test_what_ends_a_search_before_anything_ran_is_passed_on(
    device: SimulatedDevice, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        run_search(device.prober(fails_from(0, error)), device.spec())


def test_an_error_of_who_listens_is_raised(device: SimulatedDevice) -> None:
    def listen(event: events.Event) -> None:
        if isinstance(event, events.ProbeFinished) and event.trial.number == 2:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        run_search(device.prober(), device.spec(), on_event=listen)


USERS_ERROR = Reply(Measurement(Outcome.USER_ERROR, "KeyError: 'labels'"), KeyError("labels"))


@pytest.mark.parametrize(("baseline", "probes"), [(None, 1), (USERS_ERROR, 0)])
def test_an_error_of_the_users_code_reaches_the_user_after_one_probe(
    device: SimulatedDevice, baseline: Reply | None, probes: int
) -> None:
    """Also of a baseline that ran before."""
    prober = device.prober()
    with pytest.raises(KeyError, match="labels"):
        run_search(_Wrapped(prober, lambda *_: USERS_ERROR), device.spec(), baseline=baseline)
    assert len(prober.probed) == probes


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Outcome.USER_ERROR, Outcome.UNSUPPORTED),  # of the setting: plain PyTorch trains
        (Outcome.NONFINITE, Outcome.NONFINITE),
    ],
)
def test_an_error_of_one_variant_excludes_it(
    device: SimulatedDevice, fault: Outcome, outcome: Outcome
) -> None:
    result = run_search(device.prober(_failing(fault, _is_half)), device.spec(), max_probes=10)
    assert not _is_half(result.best.plan)
    failed = [trial.measurement.outcome for trial in result.trials if not trial.ok]
    assert set(failed) == {outcome}
    assert len(failed) <= 3  # the first may have had a second new setting to blame
    skipped = [(dict(skip.settings), skip.why) for skip in result.skipped]
    assert ({"precision.dtype": "bfloat16"}, f"{outcome.value}: on purpose") in skipped


def test_a_larger_plan_that_raises_costs_that_plan_alone(device: SimulatedDevice) -> None:
    size = device.space.baseline.micro_batch
    fault = _failing(Outcome.USER_ERROR, lambda plan: plan.micro_batch > size)
    result = run_search(device.prober(fault), device.spec(), max_probes=8)
    raised = [t.measurement.outcome for t in result.trials if t.plan.micro_batch > size]
    assert set(raised) == {Outcome.UNSUPPORTED}
    assert result.best.ok


def test_nothing_fits_names_the_smallest_plan_and_both_sizes(make_device: MakeDevice) -> None:
    other = make_device(budget=GIB)
    with pytest.raises(NoFeasiblePlan, match=r"nothing fits: .*budget is 1\.00 GiB") as caught:
        run_search(other.prober(), other.spec())
    assert caught.value.plan is not None
    assert caught.value.plan.micro_batch == 1
    assert caught.value.allowed_bytes == GIB
    assert caught.value.exit_code == 1


def test_where_only_one_split_was_tried_the_way_to_others_is_named(make_device: MakeDevice) -> None:
    other = make_device(budget=GIB, global_batch=8, may_change_accumulation=False)
    words = r"no other micro-batch than 4 .*allow_accumulation_change=True"
    with pytest.raises(NoFeasiblePlan, match=words):
        run_search(other.prober(), other.spec())


# -- Samplers of the user's


class _Proposing(RandomSampler):
    """Proposes what a function of a parameter's name and values says."""

    def __init__(self, propose: Callable[[str, Any], Any]) -> None:
        super().__init__(seed=0)
        self._propose = propose

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._propose(name, distribution)


def test_proposals_that_never_fit_end_the_search(device: SimulatedDevice) -> None:
    greedy = _Proposing(lambda name, of: of.high if name == "micro_batch" else of.choices[0])
    result = run_search(device.prober(), device.spec(), sampler=greedy, max_probes=20)
    assert result.search.stopped_because.startswith(f"{MAX_VETOES} proposals in a row")
    assert sum(trial.kind is TrialKind.VETOED for trial in result.trials) == MAX_VETOES
    assert result.search.probes == 2


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.UNSUPPORTED, Outcome.OOM])
def test_a_repeated_proposal_is_pruned_and_not_run(
    device: SimulatedDevice, outcome: Outcome
) -> None:
    stubborn = _Proposing(lambda name, of: 4 if name == "micro_batch" else of.choices[-1])
    fault = _failing(outcome, _is_half) if outcome is not Outcome.OK else None
    with Store.open(None, {}) as store:
        prober = device.prober(fault)
        result = run_search(prober, device.spec(), store=store, sampler=stubborn, max_probes=20)
        states = {trial.number: trial.state for trial in store.study.trials}
    vetoed = [trial for trial in result.trials if trial.kind is TrialKind.VETOED]
    assert len(vetoed) == MAX_VETOES
    assert {trial.measurement.outcome for trial in vetoed} == {outcome}
    assert {states[trial.number] for trial in vetoed} == {TrialState.PRUNED}
    # The baseline twice, and the plan twice if it fits.
    assert len(prober.probed) == result.search.probes == (4 if outcome is Outcome.OK else 3)
    assert "had run before" in result.search.stopped_because
    assert "not to fit" not in result.search.stopped_because


@pytest.mark.slow
def test_without_max_probes_the_planner_ends_another_samplers_search(
    device: SimulatedDevice,
) -> None:
    """One that proposes what the planner does, and so in the end nothing new."""

    class Foreign(RandomSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
            return Sampler().infer_relative_search_space(study, trial)

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
            return Sampler().sample_relative(study, trial, search_space)

    result = run_search(device.prober(), device.spec(), sampler=Foreign(seed=0))
    because = result.search.stopped_because
    assert because == "no plan left is expected to gain enough to be worth a probe"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before_trial", "sample_independent"])
def test_a_sampler_that_hangs_ends_with_the_timeout(device: SimulatedDevice, where: str) -> None:
    ends, calls = threading.Event(), itertools.count(1)
    method = getattr(RandomSampler, where)

    def waits(*given: Any) -> Any:
        if next(calls) == 2:
            ends.wait()
        return method(*given)

    sampler = type("Waiting", (RandomSampler,), {where: waits})(seed=0)
    try:
        result = run_search(
            device.prober(), device.spec(), sampler=sampler, max_probes=20, timeout_s=2.0
        )
    finally:
        ends.set()
    assert result.best.ok
    assert "timeout of 2 s" in result.search.stopped_because


# -- A baseline that ran before the search


@pytest.fixture
def ran_before(device: SimulatedDevice) -> tuple[SimulatedProber, Reply]:
    prober = device.prober()
    request = ProbeRequest(ResolvedPlan(device.spec().space.baseline), device.budget)
    return prober, prober.probe(request)


def test_a_baseline_that_ran_before_is_not_run_again(
    device: SimulatedDevice, ran_before: tuple[SimulatedProber, Reply]
) -> None:
    prober, before = ran_before
    result = run_search(prober, device.spec(), max_probes=3, baseline=before)
    assert result.baseline.kind is TrialKind.BASELINE
    assert result.baseline.measurement == before.measurement
    assert len(prober.probed) == result.search.probes == 3


def test_where_no_time_is_left_the_baseline_that_ran_is_the_answer(
    device: SimulatedDevice, ran_before: tuple[SimulatedProber, Reply]
) -> None:
    prober, before = ran_before
    now = itertools.count(100.0)
    result = run_search(
        prober, device.spec(), timeout_s=10.0, clock=lambda: next(now), began=0.0, baseline=before
    )
    assert result.best.plan == result.baseline.plan == device.spec().space.baseline
    assert "timeout of 10 s" in result.search.stopped_because
    assert len(prober.probed) == 1


# -- What costs much, and how much effort is made

COMPILE = {"compile.mode": Dimension(("off", "default"), trial_cost_s=500.0)}


def _compiles(plan: Plan) -> bool:
    return plan.settings["compile.mode"] != "off"


@pytest.mark.slow
def test_a_probe_may_take_as_long_as_its_settings_say(make_device: MakeDevice) -> None:
    other = make_device(dimensions=COMPILE)

    def timed(_: Any, result: Reply) -> Reply:
        return replace(result, value=replace(result.measurement, seconds=2.0))

    inner = other.prober()
    run_search(_Wrapped(inner, timed), other.spec())
    expected = {_compiles(each.plan): each.expected_seconds or 0 for each in inner.probed[1:]}
    assert expected[False] < 20
    assert expected[True] > 500


@pytest.mark.slow
def test_it_says_what_more_time_would_have_tried(make_device: MakeDevice) -> None:
    other = make_device(dimensions=COMPILE)
    result: Any = run_search(other.prober(), other.spec(), timeout_s=100.0)
    assert not any(_compiles(trial.plan) for trial in result.trials)
    assert _compiles(result.with_more_time)


def test_the_answer_so_far_is_shown_before_anything_is_compiled(make_device: MakeDevice) -> None:
    """Once, and after the baseline and the plans that cost nothing."""
    modes = {"compile.mode": Dimension(("off", "default"), trial_cost_s=30.0)}
    device = make_device(dimensions=FEW_DIMENSIONS | modes)
    seen: list[events.Event] = []
    run_search(device.prober(), device.spec(), on_event=seen.append)
    (stage,) = of_kind(seen, events.StageStarted)
    before = of_kind(seen[: seen.index(stage)], events.ProbeStarted)
    assert not any(_compiles(each.plan) for each in before)
    assert any(_compiles(each.plan) for each in of_kind(seen, events.ProbeStarted))
    assert not _compiles(stage.progress.best.plan)


@pytest.mark.slow
def test_less_effort_takes_fewer_probes_and_still_finds_most(make_device: MakeDevice) -> None:
    probes, other = {}, make_device(global_batch=64)
    for effort in Effort:
        result = run_search(other.prober(), replace(other.spec(), effort=effort))
        probes[effort] = result.search.probes
        assert other.speed(result.best.plan) > 0.85 * other.optimum()
    assert probes[Effort.QUICK] < probes[Effort.NORMAL] <= probes[Effort.THOROUGH]


@pytest.mark.parametrize(
    ("effort", "seconds"), [(Effort.QUICK, 1.0), (Effort.NORMAL, 2.0), (Effort.THOROUGH, 2.0)]
)
def test_a_quick_search_times_fewer_steps(
    device: SimulatedDevice, effort: Effort, seconds: float
) -> None:
    prober = device.prober()
    run_search(prober, replace(device.spec(), effort=effort), max_probes=2)
    assert {request.most_timed_seconds for request in prober.probed} == {seconds}
