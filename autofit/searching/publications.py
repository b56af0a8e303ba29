"""What a worker publishes under its number, and what all that was published tells the others.

Promises: what is read is what a worker wrote, or an error; a block of the comparison whose result
was lost says nothing of who compares.

In: Optuna's trials of a shared study. Out: a `Situation` of `autofit.searching.sharing`, as far as
trials tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from autofit.measurement import Role, Trial
from autofit.plan import PLAN, Plan
from autofit.searching.liveness import WORKER
from autofit.searching.sharing import Flight, Run, Situation
from autofit.shapes import FLAG, TEXT, Maybe, check_shape

PUBLISHED = "autofit_published"
"""The attribute of a trial that holds what its worker runs."""
_CLOSING = "closing"
_PUBLICATION = {
    "role": TEXT,
    "plan": Maybe(PLAN),
    "because": Maybe(TEXT),
    "is_exhausted": FLAG,
}


def publication(step: Run | None) -> dict[str, Any]:
    """Return what a worker publishes that runs a plan; None: it writes the report."""
    if step is None:
        return {"role": _CLOSING, "plan": None, "because": None, "is_exhausted": False}
    return {
        "role": step.role.value,
        "plan": step.plan.to_dict(),
        "because": step.because,
        "is_exhausted": step.is_exhausted,
    }


def seen_in(
    stored: Sequence[FrozenTrial],
    trials: tuple[Trial, ...],
    compared_from: int,
    *,
    me: str,
    own: int | None,
) -> Situation:
    """Return what the trials of a study tell of the situation.

    Args:
        stored: all of them.
        trials: those finished, as of `trial_codec.trials_in`.
        compared_from: the first number that may belong to the present comparison.
        me: the key of the worker that looks.
        own: the number that it holds; None: none.

    Raises:
        InvalidRequest: what was published is damaged.
    """
    situation = Situation(me, trials)
    in_flight: list[Flight] = []
    undecided: list[int] = []
    counted_ones = {trial.number for trial in trials}
    for trial in stored:
        if trial.number == own:
            continue
        runs = trial.state == TrialState.RUNNING
        published = trial.user_attrs.get(PUBLISHED)
        if published is None:
            if runs and (own is None or trial.number < own):
                undecided.append(trial.number)
            continue
        check_shape(published, _PUBLICATION, "a published plan")
        worker = str(trial.user_attrs.get(WORKER))
        is_closing = published["role"] == _CLOSING
        role = None if is_closing else Role(published["role"])
        if runs:
            plan = None if is_closing else Plan.from_dict(published["plan"])
            in_flight.append(Flight(trial.number, worker, plan, role))
        is_of_comparison = role is Role.CONFIRMED and trial.number >= compared_from
        if is_of_comparison and trial.number in counted_ones:
            situation = replace(
                situation,
                confirmer=worker,
                stopped_because=situation.stopped_because or published["because"],
                was_exhausted=situation.was_exhausted or published["is_exhausted"],
            )
    return replace(situation, in_flight=tuple(in_flight), undecided=tuple(undecided))
