"""The loop of a search: decide, probe, store; then compare the finalists.

Promises: the baseline is the first probe; every finished trial is stored before the next is asked
for; a plan that was not run is never returned; a fault of one plan costs one probe, while an error
of the user's own code on the plain workload reaches the user as it was raised. What may be a
transient failure of the machine is blamed on a plan only if it comes again in a fresh worker. A
probe that the timeout ends is not stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import optuna
from optuna.samplers import BaseSampler

from autofit.errors import (
    AutofitError,
    DeviceUnavailable,
    SearchTimedOut,
    StudyError,
    WorkerFailed,
    is_users,
    mark_users,
    users_code,
    with_type,
)
from autofit.interrupts import Interrupts, interruptible, interrupts_remembered
from autofit.measurement import (
    Measurement,
    Outcome,
    Trial,
    TrialKind,
    fastest_of,
    oom_probes_of,
    probes_of,
)
from autofit.plan import Plan
from autofit.planning import confirmation, planner
from autofit.planning.beliefs import Beliefs
from autofit.planning.constants import COMPARED_LONGER, MAX_TRANSIENT
from autofit.planning.planner import Forecast, Proposal, believing
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import SupportsProbing
from autofit.probing.requests import ProbeRequest, Reply
from autofit.registry import resolve
from autofit.report.record import (
    INTERRUPTED,
    Record,
    SearchSummary,
    Skipped,
    Undecided,
)
from autofit.searching import events, trial_codec
from autofit.searching.options import COMPARED, Allowance
from autofit.searching.runner import Job, Runner
from autofit.searching.study import Store
from autofit.units import format_rate

_LOGGER = logging.getLogger("autofit")

# Vetoed proposals in a row that end a search: its sampler has nothing else to offer.
MAX_VETOES = 50

# From the comparison back to searching, each after a finalist that did not fit.
MAX_RETURNS = 2


def run_search(
    prober: SupportsProbing | Runner,
    spec: SearchSpec,
    *,
    store: Store | None = None,
    sampler: BaseSampler | None = None,
    max_probes: int | None = None,
    timeout_s: float | None = None,
    on_event: events.OnEvent | None = None,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
    after_s: float = 0.0,
    baseline: Reply | None = None,
) -> Record:
    """Search for the fastest plan that fits.

    Args:
        prober: runs the plans, or a `Runner` of several; it is not closed.
        spec: what to search.
        store: the open study; None: in memory.
        sampler: any Optuna sampler that proposes plans; None: the planner. The plans that another
            sampler proposes are run unless they are expected not to fit.
        max_probes: the most probes, baseline, confirmations and those of earlier runs counted.
        timeout_s: when to end, in seconds from `began`; a probe that runs by then is ended.
        on_event: called with each event.
        clock: tells the time in seconds.
        began: when the time began to count, by the clock; None: now.
        after_s: seconds of `timeout_s` for what comes after the search.
        baseline: of its probe, where that ran before; a study that has one keeps its own.

    Returns:
        The record, as far as a search knows it by itself; also after Ctrl-C, or where the machine
        failed, no worker can be started any more, the study cannot be read or written or this
        code fails, if anything that fits had been measured.

    Raises:
        NoFeasiblePlan: not one plan that was tried fits the budget.
        WorkloadFailed: the plain workload itself failed, or its loss is not finite.
        InvalidArgument: the space is too large.
        StudyError: the study cannot be written, and nothing that fits had been measured.
        WorkerFailed: no worker could be started, or one plan after the other failed transiently.
        SearchTimedOut: the time was over before anything that fits had been measured.
        Exception: whatever the user's code raised on the plain workload, or `on_event`.
    """
    spec.space.check_can_be_planned()
    started = clock() if began is None else began
    allowance = Allowance(max_probes, timeout_s, clock, started, after_s)
    held = nullcontext(store) if store is not None else Store.open(None, spec.identity)
    with held as opened:
        opened.begin(spec)
        search = Search(
            prober if isinstance(prober, Runner) else Runner(prober),
            spec,
            opened,
            None if sampler is None else _of_others(sampler),
            allowance,
            on_event or (lambda event: None),
            baseline,
        )
        return search.result(_ended(search))


def _of_others(sampler: BaseSampler) -> BaseSampler | None:
    """Return a sampler that is not the planner itself."""
    from autofit.searching.sampler import Sampler  # most searches are given none

    return None if isinstance(sampler, Sampler) else sampler


def _ended(search: Search) -> Stop:
    """Search and confirm until there is a reason to stop, or an error that leaves an answer."""
    try:
        with interrupts_remembered() as search.interrupts:
            stop, returns = search.explore(), MAX_RETURNS
            while not search.confirm(stop.because, may_return=returns > 0):
                stop, returns = search.explore(), returns - 1
            search.mark_ended(stop)
    except (
        KeyboardInterrupt, SearchTimedOut, WorkerFailed, DeviceUnavailable, StudyError
    ) as error:  # fmt: skip
        stop = search.cut_short(error)
    except Exception as error:
        if isinstance(error, AutofitError) or is_users(error):
            raise
        _LOGGER.error("the search was ended by an error", exc_info=error)
        stop = search.cut_short(error)
    finally:
        with suppress(StudyError):  # what is being raised says so already
            search.abandon()
    return stop


@dataclass(frozen=True)
class Stop:
    """Why no further plan is searched.

    Attributes:
        because: in words.
        is_exhausted: whether the planner itself had nothing left to try.
        with_more_time: see `Record`.
        may_probe: see `Record`.
    """

    because: str
    is_exhausted: bool = False
    with_more_time: Plan | None = None
    may_probe: bool = True


_COMPARISON_OVER = Stop("the comparison is over")

Choice: TypeAlias = tuple[Proposal | BaseSampler, TrialKind]
"""What runs next, or who proposes it, and why it runs."""


class Search:
    """The state of one call of `run_search`, whose arguments these are.

    One step after the other: choose a plan, run it, store its trial. The runner may take several
    plans before the first has ended; what is chosen then counts on their forecasts.
    The study may hold trials of earlier searches, so this one's own are known by what `_tell`
    stores, never by their place in the study.
    """

    def __init__(
        self,
        runner: Runner,
        spec: SearchSpec,
        store: Store,
        foreign_sampler: BaseSampler | None,
        allowance: Allowance,
        on_event: events.OnEvent,
        measured_baseline: Reply | None,
    ) -> None:
        self._runner, self._spec, self._store = runner, spec, store
        self._foreign_sampler, self._measured_baseline = foreign_sampler, measured_baseline
        self._allowance = allowance
        self._on_event = users_code()(on_event)  # what it raises ends the search, as it was raised
        left = allowance.probes_left(store.trials)
        if store.ended is None and (left is None or left >= COMPARED):
            store.compare_anew()
        self._trials = store.trials
        self._beliefs = Beliefs(spec, self._trials)
        self._failures: list[Trial] = []  # the last probes, as far as all failed transiently
        self._vetoes = 0  # the last proposals, as far as none of them ran
        self.interrupts = Interrupts()

    @property
    def _pending(self) -> Collection[Job]:
        """What runs, and whose trials are not stored yet."""
        return self._runner.pending

    @property
    def _baseline(self) -> Trial | None:
        """The baseline's trial; None before it is stored, or if the machine was at fault then."""
        return next((t for t in self._beliefs.probes if t.kind is TrialKind.BASELINE), None)

    @property
    def has_ok_trial(self) -> bool:
        """Whether anything that fits has been measured."""
        return any(trial.ok for trial in self._trials)

    def cut_short(self, error: BaseException) -> Stop:
        """Return the end of a search that an error ended, if it found a plan that fits.

        Raises:
            BaseException: the error, where it found none.
        """
        if not self.has_ok_trial:
            raise error
        if isinstance(error, SearchTimedOut):
            return self.stop_for_time()
        because = str(error) if isinstance(error, AutofitError) else with_type(error)
        if isinstance(error, KeyboardInterrupt):
            because = INTERRUPTED
        return Stop(because, may_probe=False)

    def stop_for_time(self) -> Stop:
        """Return the end of a search that its timeout ended."""
        return Stop(self._allowance.time_is_over, with_more_time=self._next_without_timeout())

    def result(self, stop: Stop) -> Record:
        """Return the record as it stands.

        Raises:
            NoFeasiblePlan, WorkloadFailed: no plan can be returned.
            StudyError: the study has lost its baseline.
        """
        answer, allowance = confirmation.answer_of(self._beliefs), self._allowance
        if answer is None:
            if allowance.seconds_left == 0:
                raise allowance.too_short()
            from autofit.searching.infeasible import nothing_fits  # few searches end so

            raise nothing_fits(self._beliefs, self._trials)
        baseline = self._baseline
        if baseline is None:  # it is the first probe of any study that is whole
            raise StudyError(
                f"{self._store.name} has no trial of its baseline: start another study"
            )
        return Record(
            self._spec.vram_budget_bytes,
            self._summary(stop, answer),
            self._spec.space.dimensions,
            self._trials,
            answer.best.number,
            baseline.number,
            skipped=tuple(Skipped(*each) for each in confirmation.left_out(self._beliefs)),
            recommended_number=answer.recommended.number,
            with_more_time=stop.with_more_time,
            may_probe=stop.may_probe,
        )

    def _summary(self, stop: Stop, answer: confirmation.Answer) -> SearchSummary:
        """Return how the search went and why it ended, its final comparison included."""
        has_compared = confirmation.next_turn(self._beliefs) is None
        because, spec, sessions = stop.because, self._spec, self._store.session_seconds
        if stop.may_probe and not has_compared:
            limit = self._allowance.comparison_limit(self._trials)
            because += f", and its final comparison because {limit}" if limit != because else ""
        return SearchSummary(
            len(probes_of(self._trials)),
            oom_probes_of(self._trials),
            sum(sessions),
            because,
            spec.seed,
            spec.effort.value,
            len(sessions),
            comparison_ended=has_compared,
            undecided_because=self._why_undecided(stop, answer, has_compared=has_compared),
            planned_samples=spec.planned_samples,
        )

    def _why_undecided(
        self, stop: Stop, answer: confirmation.Answer, *, has_compared: bool
    ) -> Undecided | None:
        """Return why the answer is not decided; None: it is.

        What cut the search before the planner's end leaves open how fast a plan is that had no time
        to run: where only one ran, the baseline did not fit, or it is the answer and other plans
        were worth a probe.
        """
        ran = {trial.plan for trial in self._beliefs.probes if trial.ok}
        plain = self._spec.space.baseline
        is_alone = len(ran) == 1 or plain not in ran
        may_be_cut = not stop.may_probe or self._spent() is not None
        is_open = is_alone or (answer.best.plan == plain and self._next_plan() is not None)
        is_cut = may_be_cut and is_open and not stop.is_exhausted and self._store.ended is None
        if answer.is_decided and not is_cut:
            return None
        if has_compared and not is_cut:
            return Undecided.NOISE
        if not stop.may_probe:
            return Undecided.INTERRUPTED if stop.because == INTERRUPTED else Undecided.FAILED
        allowance = self._allowance
        has_timeout = allowance.timeout_s is not None
        of_time = has_timeout and (not has_compared or stop.because == allowance.time_is_over)
        no_probe_left = allowance.probes_left(self._trials) == 0
        return Undecided.TIMEOUT if of_time and not no_probe_left else Undecided.MAX_PROBES

    def _next_without_timeout(self) -> Plan | None:
        """Return the plan that would be next without the timeout; None: none, or unknown."""
        if self._store.ended is not None:
            return None
        unlimited = replace(self._allowance, timeout_s=None)
        may_probe = unlimited.spent(self._trials) is None
        if self._allowance == unlimited or not may_probe or self._foreign_sampler is not None:
            return None
        return self._next_plan()

    def _next_plan(self) -> Plan | None:
        """Return the plan that is most worth a probe, whatever the limits.

        None if there is none.
        """
        decided = planner.decide(self._beliefs, may_repeat=False)
        return decided.plan if isinstance(decided, Proposal) else None

    def mark_ended(self, stop: Stop) -> None:
        """Note in the study that the planner finished by itself, not because of a limit."""
        if stop.is_exhausted and stop.with_more_time is None and self._spent() is None:
            self._store.mark_ended(stop.because)

    def _spent(self) -> str | None:
        return self._allowance.spent(self._begun, self._runner.start_s)

    def explore(self) -> Stop:
        """Probe until there is a reason to stop; return the reason.

        Raises:
            SearchTimedOut: the time was over before anything that fits had been measured.
        """
        try:
            self._take_measured_baseline()
            stop = self._run_all(self._next_choice)
            return replace(stop, with_more_time=self._next_without_timeout())
        except SearchTimedOut:
            self.abandon()
            if not self.has_ok_trial:
                raise self._allowance.too_short() from None
            return self.stop_for_time()

    def confirm(self, stopped_because: str, *, may_return: bool) -> bool:
        """Run the finalists again, in fresh workers, at their full accumulation.

        Return False where one did not fit after all, and the search may be returned to: then there
        may be a plan just below it to find.
        """
        before = {trial.number for trial in self._trials}

        def has_failed() -> bool:
            new = (t for t in self._trials if t.kind is TrialKind.CONFIRMATION and not t.ok)
            has_new = any(trial.number not in before for trial in new)
            return has_new and may_return and self._spent() is None

        try:
            if not isinstance(self._next_turn(), Stop):
                self._on_event(events.Confirming(stopped_because, self._progress()))
            self._run_all(lambda: _COMPARISON_OVER if has_failed() else self._next_turn())
            return not has_failed()
        except SearchTimedOut:
            self.abandon()
            return True

    def _run_all(self, choose: Callable[[], Choice | Stop | None]) -> Stop:
        """Submit what is chosen and tell what ends, until a stop is chosen and nothing is pending.

        Args:
            choose: what to run next; None: first what is pending ends.
        """
        stop: Stop | None = None
        while stop is None or self._pending:
            is_full = len(self._pending) == self._runner.slots
            choice = None if stop or is_full else choose()
            if isinstance(choice, Stop):
                stop = choice
            elif choice is None:
                self._tell(*self._runner.next_ended())
            else:
                self._submit(*choice)
        return stop

    def _take_measured_baseline(self) -> None:
        """Store the baseline's trial where it ran before; run it again if it failed transiently."""
        probed, self._measured_baseline = self._measured_baseline, None
        if probed is not None and not self._trials:
            plan = self._spec.space.baseline
            proposal = Proposal(plan, Forecast(None, None))
            self._tell(Job(self._store.ask(plan), TrialKind.BASELINE, proposal), probed)

    def _next_choice(self) -> Choice | Stop | None:
        """Return what to run next, or who proposes it; None: first what is pending ends."""
        if self._store.study.stopped:
            return Stop("the sampler has no more plans to offer")
        if self._vetoes == MAX_VETOES:
            return Stop(self._why_vetoed())
        if (reason := self._spent()) is not None:
            return Stop(reason)
        if (works := self._plan_to_suspect_machine()) is not None:
            return self._alone(works, TrialKind.SEARCH)
        if self._baseline is None:
            return self._alone(self._spec.space.baseline, TrialKind.BASELINE)
        # Hardly any sampler stops by itself: it gets the probes that were asked for, and
        # where no number was asked for, the planner decides when more would be wasted.
        foreign = self._foreign_sampler
        if foreign is not None and self._allowance.max_probes is not None:
            return foreign, TrialKind.SEARCH
        if self._store.ended is not None:
            return Stop(self._store.ended)
        choose = partial(planner.decide, self._believed(), may_repeat=foreign is None)
        decided = choose(seconds_left=self._seconds_left(TrialKind.SEARCH))
        if isinstance(decided, Proposal):
            return foreign or decided, TrialKind.SEARCH
        if self._pending:
            return None
        if self._allowance.timeout_s is not None and isinstance(choose(), Proposal):
            return Stop(self._allowance.time_is_over)  # for what takes longer than is left
        return Stop(decided.because, is_exhausted=foreign is None)

    def _why_vetoed(self) -> str:
        """Return why the last proposals of a sampler were not run."""
        ran = {trial.plan for trial in self._beliefs.probes}
        again = sum(trial.plan in ran for trial in self._trials[-MAX_VETOES:])
        rest = MAX_VETOES - again
        whys = {"had run before": again, "were expected not to fit or not to work": rest}
        said = " and ".join(f"{count} {why}" for why, count in whys.items() if count)
        return f"{MAX_VETOES} proposals in a row were not run: {said}"

    def _alone(self, plan: Plan, kind: TrialKind) -> Choice | None:
        """Return the choice of a plan that runs while nothing else does.

        None if something does.
        """
        return None if self._pending else (Proposal.of(self._beliefs, plan), kind)

    def _next_turn(self) -> Choice | Stop | None:
        """Return what the comparison runs next; None: first what is pending ends.

        After too many transient failures it is a plan that shows, alone, whether the machine is to
        blame.
        """
        if not self._may_not_probe():
            works = self._plan_to_suspect_machine()
            if works is not None:
                return self._alone(works, TrialKind.SEARCH)
            plan = confirmation.next_turn(self._believed())
            if plan is not None:
                return Proposal.of(self._beliefs, plan), TrialKind.CONFIRMATION
        return None if self._pending else _COMPARISON_OVER

    def abandon(self) -> None:
        """End what is pending, without a trial of it."""
        self._runner.cancel()
        self._store.abandon()

    def _believed(self) -> Beliefs:
        """Return what is believed where what is pending turns out as forecast."""
        return believing(self._beliefs, [(job.plan, job.kind) for job in self._pending])

    @property
    def _begun(self) -> tuple[Trial, ...]:
        """The trials, and what is pending as if it had ended."""
        return (*self._trials, *self._believed().pending)

    def _may_not_probe(self) -> bool:
        allowance, kept_s = self._allowance, self._runner.start_s
        no_probe_left = allowance.probes_left(self._begun) == 0
        return no_probe_left or allowance.time_is_short(self._trials, kept_s)

    def _plan_to_suspect_machine(self) -> Plan | None:
        """Return a plan that worked and is least like those of too many transient failures.

        Raises:
            WorkerFailed: no plan has worked yet.
        """
        if len(self._failures) < MAX_TRANSIENT or self._may_not_probe():
            return None
        suspects = {pair for trial in self._failures for pair in trial.plan.variant}
        suspects -= set(self._spec.space.baseline.variant)
        works = min(
            (trial for trial in self._trials if trial.ok),
            key=lambda t: (len(suspects & set(t.plan.variant)), -(t.samples_per_second or 0.0)),
            default=None,
        )
        if works is None:
            raise WorkerFailed(_diagnosis(self._failures))
        return works.plan

    def _submit(self, choice: Proposal | BaseSampler, kind: TrialKind) -> None:
        """Run a plan, or a sampler's choice; a vetoed one is only stored as a trial."""
        self.interrupts.check()
        asked = self._asked(choice)
        if isinstance(choice, BaseSampler):
            plan = trial_codec.plan_of(asked.params, self._spec.space)
            choice = Proposal.of_stranger(self._beliefs, plan)
        if choice.veto is not None:
            self._vetoes += 1
            self._stored(Job(asked, TrialKind.VETOED, choice), choice.veto)
            return
        self._vetoes = 0
        plan, peak_bytes = choice.plan, choice.forecast.peak_bytes
        self._tell_of_costs(plan)
        self._on_event(events.ProbeStarted(plan, kind, peak_bytes, self._progress()))
        job = Job(asked, kind, choice, self._spec.space.needs_fresh_worker(plan.settings))
        self._runner.submit(job, self._request(job))

    def _tell_of_costs(self, plan: Plan) -> None:
        """Show the answer so far before the first plan that takes long to try."""
        space, best = self._spec.space, self._progress().best
        begun = [*(t.plan for t in self._trials), *(job.plan for job in self._pending)]
        is_first = not any(space.is_costly(each.settings) for each in begun)
        if best is None or not is_first or not space.is_costly(plan.settings):
            return
        named = best.plan.without(space.default_settings)
        rate = format_rate(best.samples_per_second or 0.0)
        stage = (
            f"the fastest so far is {named}, {rate}; what comes next takes about "
            f"{space.trial_cost_s(plan.settings):.0f} s to try, and Ctrl-C keeps what was found"
        )
        self._on_event(events.StageStarted(stage, self._progress()))

    def _asked(self, choice: Proposal | BaseSampler) -> optuna.Trial:
        """Return a new trial; a sampler that has not answered when the time is over is left alone.

        Raises:
            SearchTimedOut: it has not: nothing can end code of the user's in the thread that waits.
        """
        if isinstance(choice, Proposal):
            return self._store.ask(choice.plan)
        if self._allowance.timeout_s is None:
            return self._store.ask(choice)
        try:
            return interruptible(partial(self._store.ask, choice), self._allowance.seconds_left)
        except TimeoutError as error:
            if self._allowance.seconds_left:  # it is the sampler's own
                raise
            raise SearchTimedOut(
                f"{type(choice).__name__} proposed no plan before the time of the search was over"
            ) from error

    def _tell(self, job: Job, probed: Reply) -> None:
        """Store the trial of a job that ended; what may be a transient failure runs again first.

        Raises:
            SearchTimedOut: no time is left to run it again.
            WorkerFailed: the plan that was to show whether the machine is at fault failed too.
            Exception: the plain workload itself failed, as its user's code raised it.
        """
        measurement = probed.measurement
        if job.is_repeated or not self._may_be_transient(job.plan, measurement):
            self._finish(job, probed)
            return
        self._on_event(events.Repeating(job.plan, measurement, self._progress()))
        again = replace(job, is_repeated=True)
        self._runner.submit(again, self._request(again))

    def _finish(self, job: Job, probed: Reply) -> None:
        """Store the trial of a plan that ran; raise as `_tell` does."""
        measurement, error = self._blamed(job.plan, probed)
        trial = self._stored(job, measurement)
        if error is None and not trial.ok:
            from autofit.searching.infeasible import workload_failure  # few probes fail

            error = workload_failure(trial)
        if error is not None:
            mark_users(error)
            raise error
        ended_well = not trial.measurement.outcome.may_be_transient
        self._failures = [] if ended_well else [*self._failures, trial]
        if len(self._failures) > MAX_TRANSIENT:  # the last is of a plan that ran before
            raise WorkerFailed(_diagnosis(self._failures))

    def _stored(self, job: Job, measurement: Measurement) -> Trial:
        """Make and store the trial of a job, and tell of it."""
        expected = job.proposal.forecast.peak_bytes
        trial = Trial(job.asked.number, job.kind, job.plan, measurement, expected)
        self._store.record(job.asked, trial)
        self._trials = self._store.trials
        if trial.blames_workload:
            self._trials += (trial,)  # for its event; the study no longer shows it
        self._beliefs = self._beliefs.updated(self._trials)
        told = events.Vetoed if trial.kind is TrialKind.VETOED else events.ProbeFinished
        self._on_event(told(trial, self._progress()))
        return trial

    def _may_be_transient(self, plan: Plan, measurement: Measurement) -> bool:
        """Return whether the plan need not be to blame, so that it is worth another worker.

        A hang is none while nothing is known to take less time, and neither is what larger plans of
        the variant have shown to come again, unless this size has worked.
        """
        outcome = measurement.outcome
        alike = [trial for trial in self._trials if trial.plan.variant == plan.variant]
        if not outcome.may_be_transient or (outcome is Outcome.TIMEOUT and not self.has_ok_trial):
            return False
        has_worked = any(t.ok and t.plan.micro_batch >= plan.micro_batch for t in alike)
        return has_worked or all(t.measurement.outcome is not outcome for t in alike)

    def _request(self, job: Job) -> ProbeRequest:
        """Return the request of a job; a confirmation is run in full, and has no rate to beat.

        Raises:
            SearchTimedOut: no time is left for it.
        """
        seconds_left = self._seconds_left(job.kind)
        if seconds_left == 0:
            raise SearchTimedOut("no time is left for another probe")
        is_confirmation = job.kind is TrialKind.CONFIRMATION
        incumbent = None if is_confirmation else fastest_of(self._trials)
        return ProbeRequest(
            resolve(job.plan, self._spec.space, self._runner.strategies),
            self._spec.vram_budget_bytes,
            incumbent_samples_per_second=incumbent.samples_per_second if incumbent else None,
            full_accumulation=is_confirmation,
            expected_seconds=job.proposal.forecast.seconds,
            seconds_left=seconds_left,
            most_timed_seconds=self._spec.effort.most_timed_seconds
            * (COMPARED_LONGER if is_confirmation else 1.0),
        )

    def _seconds_left(self, kind: TrialKind) -> float | None:
        """Return the seconds until a probe is ended: all but those that the comparison needs."""
        left, needed_s = self._allowance.seconds_left, 0.0
        if kind is TrialKind.SEARCH:
            needed_s = self._allowance.comparison_s(self._trials, self._runner.start_s)
        return None if left is None else max(0.0, left - needed_s)

    def _blamed(self, plan: Plan, probed: Reply) -> tuple[Measurement, BaseException | None]:
        """Return the measurement and the user's error; one that the plan causes is `unsupported`.

        On the baseline and larger plain plans an error is the user's, until the baseline has run:
        a larger micro-batch that raises after that is a fault of its plan.
        """
        measurement, baseline = probed.measurement, self._spec.space.baseline
        if measurement.outcome is not Outcome.USER_ERROR:
            return measurement, None
        has_run = any(trial.ok and trial.plan == baseline for trial in self._trials)
        is_plain = plan.variant == baseline.variant and plan.micro_batch >= baseline.micro_batch
        if is_plain and not has_run:
            return measurement, probed.user_exception
        return replace(measurement, outcome=Outcome.UNSUPPORTED), None

    def _progress(self) -> events.Progress:
        return self._allowance.progress(self._trials, self._spec.usual_probes)


def _diagnosis(failures: Sequence[Trial]) -> str:
    """Return a sentence about a machine on which these trials were run one after the other."""
    last = failures[-1].measurement
    ends = ", ".join(f"{t.plan}: {t.measurement.outcome.value}" for t in failures)
    return (
        f"{len(failures)} plans in a row failed in two workers each, so the machine or the "
        f"workload is at fault, not the plans ({ends}; the last one: "
        f"{last.detail or 'no detail'}). Check the host's memory and the driver's log"
    )
