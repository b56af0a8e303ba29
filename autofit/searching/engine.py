"""The loop of a search: decide, probe, store; then confirm the leading plans.

Promises: the baseline is the first probe; every finished trial is stored before the next is asked
for; a plan that was not run is never returned; a fault of one plan costs one probe, while an error
of the user's own code on the plain workload reaches the user as it was raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from optuna.samplers import BaseSampler

from autofit.interrupts import Interrupts, interrupts_remembered
from autofit.measurement import (
    Measurement,
    Outcome,
    Role,
    Trial,
    fastest_of,
    oom_probes_of,
    probes_of,
)
from autofit.plan import Plan
from autofit.planning import confirmation, planner
from autofit.planning.posterior import Posterior
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Prober, ProbeRequest
from autofit.registry import resolve
from autofit.searching import events, result, trial_codec
from autofit.searching.limits import Allowance
from autofit.searching.result import INTERRUPTED, SearchResult, skips
from autofit.searching.sampler import OnePlan, PlannerSampler
from autofit.searching.study import Store
from autofit.space import Space

# One plan of a search, run in a worker that suits it, and whose fault it is where it fails.


def run_plan(
    plan: Plan,
    role: Role,
    *,
    prober: Prober,
    space: Space,
    trials: Sequence[Trial],
    expected_seconds: float | None,
) -> Measurement:
    """Run a plan as its role asks; an error that the plan itself brings about is `unsupported`.

    Args:
        plan: what to run.
        role: a confirmation is run in full, and has no rate to beat.
        prober: runs it.
        space: the search space that the plan is of.
        trials: what was run before.
        expected_seconds: what the probe is expected to take; None: unknown.
    """
    confirmed = role is Role.CONFIRMED
    leader = None if confirmed else fastest_of(trials)
    request = ProbeRequest(
        resolve(plan, space, prober.strategies),
        incumbent_samples_per_second=leader.samples_per_second if leader else None,
        full_accumulation=confirmed,
        expected_seconds=expected_seconds,
    )
    alone = space.needs_fresh_worker(plan.settings)
    measurement = _probe_alone(prober, request) if alone else prober.probe(request)
    if measurement.outcome is Outcome.USER_ERROR and not _is_plain(plan, space, trials):
        return replace(measurement, outcome=Outcome.UNSUPPORTED)
    return measurement


def _probe_alone(prober: Prober, request: ProbeRequest) -> Measurement:
    """Probe in a worker that ran nothing before and runs nothing after."""
    prober.renew()
    measurement = prober.probe(request)
    prober.renew()
    return measurement


def _is_plain(plan: Plan, space: Space, trials: Sequence[Trial]) -> bool:
    """Whether what happens to this plan happens to the user's own training.

    Once the baseline has run, a larger micro-batch that raises is that plan's own affair.
    """
    baseline = space.baseline
    if any(trial.ok and trial.plan == baseline for trial in trials):
        return False
    return plan.variant == baseline.variant and plan.micro_batch >= baseline.micro_batch


MOST_VETOES = 50
"""Vetoed proposals in a row that end a search: its sampler has nothing else to offer."""

_MOST_RETURNS = 2  # from confirming to searching, each after a leading plan that did not fit


def run_search(
    prober: Prober,
    spec: SearchSpec,
    *,
    store: Store | None = None,
    sampler: BaseSampler | None = None,
    max_probes: int | None = None,
    timeout_s: float | None = None,
    on_event: events.OnEvent | None = None,
    veto: bool = True,
) -> SearchResult:
    """Search for the fastest plan that fits.

    Args:
        prober: runs the plans; it is not closed.
        spec: what to search.
        store: the open study; None: in memory.
        sampler: any Optuna sampler that proposes plans; None: the planner. What others propose
            is run unless it must be expected not to fit.
        max_probes: the most probes, baseline, confirmations and those of earlier runs counted.
        timeout_s: when to end, in seconds from now; a probe under way is not cut short.
        on_event: told what happens.
        veto: refuse what another sampler proposes where it must be expected not to fit.

    Returns:
        What was found; also after Ctrl-C, if anything that fits had been measured.

    Raises:
        NoFeasiblePlan: not one plan that was tried fits the budget.
        WorkloadFailed: the plain workload itself failed, or its loss is not finite.
        StudyRefused: the study cannot be written.
        Exception: whatever the user's code raised on the plain workload.
    """
    held = nullcontext(store) if store is not None else Store.open(None, spec.identity)
    with held as opened:
        search = _Search(
            prober=prober,
            spec=spec,
            store=opened,
            sampler=sampler,
            max_probes=max_probes,
            timeout_s=timeout_s,
            on_event=on_event,
            veto=veto,
        )
        return search.result()


class _Search:
    """One call of `run_search`; its arguments are those of that."""

    def __init__(
        self,
        *,
        prober: Prober,
        spec: SearchSpec,
        store: Store,
        sampler: BaseSampler | None,
        max_probes: int | None,
        timeout_s: float | None,
        on_event: events.OnEvent | None,
        veto: bool,
    ) -> None:
        store.begin(spec)
        self._prober, self._spec, self._store = prober, spec, store
        self._foreign_sampler = None if isinstance(sampler, PlannerSampler) else sampler
        self._allowance = Allowance(max_probes, timeout_s)
        self._may_veto = veto
        self._tell = on_event or (lambda event: None)
        self._trials = store.trials
        self._posterior = Posterior(spec, self._trials)
        self._interrupts = Interrupts()

    def result(self) -> SearchResult:
        """Search, confirm, and put together what came out."""
        try:
            with interrupts_remembered() as self._interrupts:
                stopped_because = self._search_and_confirm()
        except KeyboardInterrupt:
            if not any(trial.ok for trial in self._trials):
                raise
            stopped_because = INTERRUPTED
        best = confirmation.best_of(self._posterior)
        if best is None:
            raise result.nothing_fits(self._spec, self._trials)
        return SearchResult(
            self._spec,
            self._trials,
            best,
            self._trials[0],
            skips(self._posterior),
            stopped_because,
        )

    def _search_and_confirm(self) -> str:
        stopped_because = self._explore()
        returns = _MOST_RETURNS
        while not self._confirmed(stopped_because, may_return=returns > 0):
            returns -= 1
            stopped_because = self._explore()
        if self._allowance.spent(self._trials) is None:
            self._store.mark_ended(stopped_because)
        return stopped_because

    def _explore(self) -> str:
        """Probe until there is a reason to stop; the reason."""
        vetoes = 0
        while True:
            reason = self._allowance.spent(self._trials)
            if reason is not None:
                return reason
            if not self._trials:
                self._probe(OnePlan(self._spec.space.baseline), Role.BASELINE)
                continue
            sampler = self._foreign_sampler
            if sampler is None or self._planner_ends_sampling:
                if self._store.ended is not None:
                    return self._store.ended
                decision = planner.decide(self._posterior)
                if decision.plan is None:
                    return decision.stopped_because or "nothing is left to try"
                sampler = sampler or OnePlan(decision.plan)
            vetoes = 0 if self._probe(sampler, Role.SEARCH) else vetoes + 1
            if self._store.study.stopped:
                return "the sampler has offered all it can"
            if vetoes == MOST_VETOES:
                return f"{MOST_VETOES} proposals in a row could not be expected to fit"

    @property
    def _planner_ends_sampling(self) -> bool:
        """Whether a foreign sampler is asked no more once the planner expects no plan left to win.

        Hardly one stops by itself: it gets the probes that were asked for, and where no number was
        asked for, the planner says when more of them would be wasted.
        """
        return self._allowance.max_probes is None

    def _confirmed(self, stopped_because: str, *, may_return: bool) -> bool:
        """Run the leading plans again, in a fresh worker, at their full accumulation.

        False where one did not fit after all: then there may be a plan just below it to search,
        if the search may be returned to.
        """
        begun = False
        while True:
            plan = confirmation.confirm(self._posterior)
            if plan is None or self._may_not_probe():
                return True
            if not begun:
                begun = True
                self._tell(events.Confirming(stopped_because, self._progress()))
                self._prober.renew()
            self._probe(OnePlan(plan), Role.CONFIRMED)
            failed = not self._trials[-1].ok
            if failed and may_return and self._allowance.spent(self._trials) is None:
                return False

    def _may_not_probe(self) -> bool:
        allowance = self._allowance
        return allowance.probes_left(self._trials) == 0 or allowance.time_is_short(self._trials, 1)

    def _probe(self, sampler: BaseSampler, role: Role) -> bool:
        """Ask for a plan, run it unless it is vetoed, store it; whether it was run."""
        self._interrupts.check()
        with self._store.asking(sampler) as asked:
            plan = trial_codec.plan_of(asked.params, self._spec.space)
            forecast = planner.forecast(self._posterior, plan)
            veto = None
            if self._may_veto and sampler is self._foreign_sampler:
                veto = planner.veto(self._posterior, plan)
            if veto is not None:
                role, measurement = Role.VETOED, veto
            else:
                self._tell(events.ProbeStarted(plan, role, forecast.peak_bytes, self._progress()))
                measurement = run_plan(
                    plan,
                    role,
                    prober=self._prober,
                    space=self._spec.space,
                    trials=self._trials,
                    expected_seconds=forecast.seconds,
                )
            number = len(self._trials)
            self._store.record(asked, Trial(number, role, plan, measurement, forecast.peak_bytes))
        self._trials = self._store.trials
        self._posterior = self._posterior.updated(self._trials)
        finished = events.Vetoed if veto is not None else events.ProbeFinished
        self._tell(finished(self._trials[-1], self._progress()))
        error = result.hopeless(self._trials[-1], self._prober)
        if error is not None:
            raise error
        return veto is None

    def _progress(self) -> events.Progress:
        return events.Progress(
            len(probes_of(self._trials)),
            oom_probes_of(self._trials),
            fastest_of(self._trials),
            self._allowance.elapsed_s,
            self._allowance.seconds_left,
            self._allowance.probes_left(self._trials),
        )
