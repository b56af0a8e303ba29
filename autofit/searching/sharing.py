"""What a worker of a shared study does next: pure functions of what all workers can see.

Promises: the same situation gives the same step in every worker, so that whose turn it is decides
alone; no plan is proposed that another worker is running; the final comparison and the report come
from one worker, on one device.

In: the situation of the study (finished trials, plans in flight, who is absent) and the worker's
own limits. Out: run a plan, wait, close the search (which writes the report that all return), read
that report, or leave with what was measured so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autofit.measurement import Role, Trial
from autofit.plan import Plan
from autofit.planning import confirmation
from autofit.planning.in_flight import believing
from autofit.planning.planner import NothingLeft
from autofit.planning.posterior import Posterior
from autofit.searching.engine import MOST_RETURNS


@dataclass(frozen=True)
class Flight:
    """What a worker is doing under a number whose turn it was.

    Attributes:
        number: of the trial.
        worker: its key.
        plan, role: what it runs; None: it writes the report.
    """

    number: int
    worker: str
    plan: Plan | None
    role: Role | None


@dataclass(frozen=True)
class Situation:
    """A shared study as one worker sees it.

    Attributes:
        me: the key of that worker.
        trials: finished, as of `trial_codec.trials_in`.
        in_flight: of all other workers.
        undecided: numbers lower than the worker's own whose turn has not ended.
        confirmer: who ran the last probe of the present comparison; None: it has not begun.
        is_confirmer_gone: whether nothing more is expected of it.
        stopped_because: why the search ended before that comparison; None: it has not begun.
        was_exhausted: whether the planner itself had nothing left to try then.
        others_search: whether another worker that is there may still run plans for the search.
        is_closed: whether the report of these trials is written.
        ended: why nothing was left to try, once that is written.
    """

    me: str
    trials: tuple[Trial, ...] = ()
    in_flight: tuple[Flight, ...] = ()
    undecided: tuple[int, ...] = ()
    confirmer: str | None = None
    is_confirmer_gone: bool = False
    stopped_because: str | None = None
    was_exhausted: bool = False
    others_search: bool = False
    is_closed: bool = False
    ended: str | None = None

    @property
    def is_comparing(self) -> bool:
        """Whether the final comparison is on: until a plan does not fit, as often as that counts.

        Then there may be a plan just below it to find.
        """
        compared = [trial for trial in self.trials if trial.role is Role.CONFIRMED]
        failed = sum(not trial.ok for trial in compared)
        return bool(compared) and (compared[-1].ok or failed > MOST_RETURNS)

    def without_comparison(self) -> Situation:
        """Return the situation with the trials of the comparison as trials of the search."""
        trials = tuple(
            replace(trial, role=Role.SEARCH) if trial.role is Role.CONFIRMED else trial
            for trial in self.trials
        )
        return replace(
            self,
            trials=trials,
            confirmer=None,
            stopped_because=None,
            was_exhausted=False,
            is_closed=False,
        )


@dataclass(frozen=True)
class Limits:
    """What one worker may do.

    Attributes:
        spent: trials, those in flight included -> why it may search no further; None: it may.
        may_compare: finished trials -> whether it may run another plan for the comparison.
        decide: the planner, on a posterior that believes plans in flight.
        is_out_of_time: whether its timeout was reached.
    """

    spent: Callable[[Sequence[Trial]], str | None]
    may_compare: Callable[[Sequence[Trial]], bool]
    decide: Callable[[Posterior], Plan | NothingLeft]
    is_out_of_time: bool = False


@dataclass(frozen=True)
class Run:
    """Run a plan.

    Attributes:
        plan, role: what to run.
        because: why the search ended, for a plan of the comparison.
        is_exhausted: whether the planner itself had nothing left to try then.
        is_anew: whether the trials of an earlier comparison count for the search alone from here.
    """

    plan: Plan
    role: Role
    because: str | None = None
    is_exhausted: bool = False
    is_anew: bool = False


@dataclass(frozen=True)
class Wait:
    """Do nothing until something changes.

    Attributes:
        is_spent: whether the worker's own limits let it search no further.
    """

    is_spent: bool = False


@dataclass(frozen=True)
class Close:
    """Write the report that every worker returns.

    Attributes:
        because: why the search ended.
        is_exhausted: whether the planner itself had nothing left to try.
    """

    because: str
    is_exhausted: bool


@dataclass(frozen=True)
class Read:
    """Return the report that is written."""


@dataclass(frozen=True)
class Leave:
    """Return what was measured so far.

    Attributes:
        because: why; None: the timeout was reached.
    """

    because: str | None = None


Step: TypeAlias = Run | Wait | Close | Read | Leave


def next_step(situation: Situation, posterior: Posterior, limits: Limits) -> Step:
    """Return what to do.

    Args:
        situation: of the study.
        posterior: any of this search; it is brought up to the situation's trials.
        limits: the worker's own.
    """
    if situation.is_closed and situation.ended is not None:
        return Read()
    if situation.is_closed:  # a worker that was allowed less closed it
        further = _next_step(situation.without_comparison(), posterior, limits)
        if isinstance(further, Run) and (
            further.role is Role.SEARCH or _may_finish_comparison(situation, posterior, limits)
        ):
            return replace(further, is_anew=True)
        return Read()
    step = _next_step(situation, posterior, limits)
    if isinstance(step, Wait) and limits.is_out_of_time:
        return Leave()
    return step


def _may_finish_comparison(situation: Situation, posterior: Posterior, limits: Limits) -> bool:
    """Return whether the comparison has not ended, and the worker may run one of two plans."""
    trials = situation.trials
    has_ended = confirmation.next_turn(posterior.updated(trials)) is None
    return not has_ended and limits.may_compare((*trials, trials[-1]))


def _next_step(situation: Situation, posterior: Posterior, limits: Limits) -> Step:
    if any(flight.role is not Role.SEARCH for flight in situation.in_flight):
        return Wait()  # for the baseline, a block of the comparison, or the report
    posterior = posterior.updated(situation.trials)
    if all(trial.role is not Role.BASELINE for trial in posterior.probes):
        baseline = posterior.spec.space.baseline
        return Wait() if situation.in_flight else Run(baseline, Role.BASELINE)
    is_exhausted = situation.was_exhausted or situation.ended is not None
    because = situation.stopped_because or situation.ended or ""
    if not situation.is_comparing:
        plans = [flight.plan for flight in situation.in_flight if flight.plan is not None]
        believed = believing(posterior, plans)
        spent = limits.spent((*situation.trials, *believed.in_flight))
        if situation.ended is None and spent is None:
            decided = limits.decide(believed)
            if isinstance(decided, Plan):
                return Run(decided, Role.SEARCH)
            is_exhausted, because = True, decided.because
        elif situation.ended is None and spent is not None:
            because = spent
            if situation.others_search:
                return Wait(is_spent=True)
        if situation.in_flight:
            return Wait(is_spent=spent is not None)
    if confirmation.best_of(posterior) is None:
        return Leave(because)
    return _step_of_comparison(situation, posterior, limits, Close(because, is_exhausted))


def _step_of_comparison(
    situation: Situation, posterior: Posterior, limits: Limits, end: Close
) -> Step:
    is_mine = situation.confirmer in (None, situation.me)
    if not is_mine and not situation.is_confirmer_gone:
        # After a block that did not fit, the confirmer waits for those that may search.
        return Wait(is_spent=not situation.is_comparing)
    plan = confirmation.next_turn(posterior)
    if plan is None or not limits.may_compare(situation.trials):
        return end
    if is_mine:
        return Run(plan, Role.CONFIRMED, end.because, end.is_exhausted)
    # Blocks that another device ran cannot be compared with this one's.
    anew = posterior.updated(situation.without_comparison().trials)
    first = confirmation.next_turn(anew)
    if first is None:
        return end
    return Run(first, Role.CONFIRMED, end.because, end.is_exhausted, is_anew=True)
