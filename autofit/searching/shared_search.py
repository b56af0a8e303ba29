"""The loop of a worker on a shared study: look, draw a number, decide at one's turn, run, record.

Promises: those of `autofit.searching.engine`, of all workers together; a worker holds no number
while it waits; all workers that come to the end of the search return one report.

In: a prober of this worker's own device, and the open study. Out: the result, and whether this
worker is the one that writes the report.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, closing
from enum import Enum, auto
from typing import Any

from autofit.errors import SearchTimedOut
from autofit.measurement import Role, Trial
from autofit.plan import Plan
from autofit.planning import planner
from autofit.planning.planner import NothingLeft
from autofit.planning.posterior import Posterior
from autofit.searching import events
from autofit.searching.engine import Search, Stop
from autofit.searching.shared_study import SharedStore
from autofit.searching.sharing import (
    Close,
    Leave,
    Limits,
    Read,
    Run,
    Situation,
    Step,
    Wait,
    next_step,
)


class Moment(Enum):
    """Where a worker stands when others may do something in between."""

    WAITS = auto()
    LOOKED = auto()
    DREW = auto()
    DECIDED = auto()
    PUBLISHED = auto()
    RECORDED = auto()


class SharedSearch(Search):
    """One worker's part in a search; the arguments are those of `run_search`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self._store, SharedStore)
        self._shared = self._store
        self._confirmed_here: set[Plan] = set()
        self._has_confirmed = False
        self._stop = Stop("")
        self._is_out_of_time = False  # for plans of the search
        self._with_more_time: Plan | None = None  # as of the beginning of the comparison
        self._decided: tuple[list[Trial], Plan | NothingLeft] | None = None

    def run(self) -> Stop:
        """Take turns until there is a reason to stop; return the reason."""
        is_waiting = False
        with closing(self.moments()) as moments:  # an interrupt gives up its number at once
            for moment in moments:
                self.interrupts.check()
                if moment is Moment.WAITS:
                    if not is_waiting:
                        told = events.StageStarted("waiting for other workers", self._progress())
                        self._on_event(told)
                    self._shared.pause()
                is_waiting = moment is Moment.WAITS
        return self._stop

    def moments(self) -> Generator[Moment]:
        """Take turns, and yield wherever others may do something in between."""
        while True:
            step = self._step(self._shared.look())
            if isinstance(step, Wait):
                yield Moment.WAITS
                continue
            if isinstance(step, Read | Leave):
                self._end_with(step)
                return
            yield Moment.LOOKED
            with ExitStack() as turn:
                turn.enter_context(self._shared.turn())
                yield Moment.DREW
                while (situation := self._shared.look()).undecided:
                    if self._allowance.seconds_left == 0:
                        self._see(situation)
                        self._end_with(Leave())
                        return
                    yield Moment.WAITS
                step = self._step(situation)
                if isinstance(step, Close):
                    if not self._shared.publish(None):
                        continue
                    self._shared.keep_turn(turn.pop_all())
                    self._end_with(step)
                    return
                if not isinstance(step, Run):
                    continue  # another worker was quicker: withdraw
                yield Moment.DECIDED
                if not self._shared.publish(step):
                    continue  # others took this worker for gone
                yield Moment.PUBLISHED
                self._take(step)
            yield Moment.RECORDED

    def _see(self, situation: Situation) -> None:
        self._trials = situation.trials
        self._posterior = self._posterior.updated(situation.trials)

    def _step(self, situation: Situation) -> Step:
        self._see(situation)
        suspect = None
        if all(flight.role is Role.SEARCH for flight in situation.in_flight):
            suspect = self._plan_to_suspect_machine()
        if suspect is not None:
            return Run(suspect, Role.SEARCH)
        step = next_step(situation, self._posterior, self._limits())
        is_spent = isinstance(step, Wait) and step.is_spent
        is_spent |= isinstance(step, Close) or self._is_out_of_time
        self._shared.workers.searches(still=not is_spent)
        return step

    def _limits(self) -> Limits:
        allowance, start_s = self._allowance, self._prober.start_s

        def spent(trials: Any) -> str | None:
            over = allowance.time_is_over if self._is_out_of_time else None
            return over or allowance.spent(trials, start_s)

        def may_compare(trials: Any) -> bool:
            is_short = allowance.time_is_short(trials, start_s)
            return allowance.probes_left(trials) != 0 and not is_short

        return Limits(spent, may_compare, self._decide, allowance.seconds_left == 0)

    def _decide(self, posterior: Posterior) -> Plan | NothingLeft:
        """Ask the planner; what it said of the same probes holds."""
        if self._decided is None or self._decided[0] != posterior.probes:
            seconds_left = self._seconds_left(Role.SEARCH)
            decided = planner.decide(posterior, seconds_left=seconds_left)
            self._decided = posterior.probes, decided
        return self._decided[1]

    def _take(self, step: Run) -> None:
        """Run a plan whose turn it was; its block of a comparison in a worker of its own.

        A plan that the timeout ends is not stored, and this worker searches no further.
        """
        if step.role is Role.CONFIRMED:
            if not self._has_confirmed:
                self._with_more_time = self._left_out_for_time()
                self._on_event(events.Confirming(step.because or "", self._progress()))
            if not self._confirmed_here or step.plan in self._confirmed_here:
                self._prober.renew()  # the blocks of one plan need workers of their own
                self._confirmed_here = set()
            self._confirmed_here.add(step.plan)
            self._has_confirmed = True
        else:
            self._confirmed_here, self._has_confirmed = set(), False
        try:
            trial = self._probe(step.plan, step.role)
            if not trial.ok:  # what is compared next begins anew
                self._confirmed_here = set()
        except SearchTimedOut:
            if not self.has_ok_trial:
                raise self._allowance.too_short() from None
            self._is_out_of_time = True

    def _end_with(self, step: Close | Read | Leave) -> None:
        self._shared.workers.searches(still=False)
        if isinstance(step, Close):
            more = self._with_more_time if self._has_confirmed else self._left_out_for_time()
            self._stop = Stop(step.because, step.is_exhausted, more)
            self.mark_ended(self._stop)
        elif isinstance(step, Leave):
            self._stop = self.stop_for_time() if step.because is None else Stop(step.because)
        else:
            self._stop = Stop(self._shared.ended or "its report is written")

    def _left_out_for_time(self) -> Plan | None:
        return None if self._shared.ended is not None else self._next_without_timeout()
