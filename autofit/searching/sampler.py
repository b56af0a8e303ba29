"""Optuna samplers that ask for plans: the planner, and one given plan.

`PlannerSampler` reads the spec from the study's attributes and decides from its trials alone, so
any process that has the study goes on with the same plan.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autofit.errors import InvalidRequest
from autofit.plan import Plan
from autofit.planning import confirmation, planner
from autofit.planning.posterior import Posterior
from autofit.searching import trial_codec


class _PlanSampler(BaseSampler):
    """Decides every parameter of a plan at once."""

    @abstractmethod
    def _plan(self, study: Study) -> Plan: ...

    def infer_relative_search_space(
        self,
        study: Study,
        trial: FrozenTrial,
    ) -> dict[str, BaseDistribution]:
        """All settings and the micro-batch."""
        return trial_codec.distributions(trial_codec.spec_of(study).space)

    def sample_relative(
        self,
        study: Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """The plan's parameters."""
        return trial_codec.params_of(self._plan(study))

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """A parameter that is no part of a plan.

        Raises:
            InvalidRequest: always; there is no such parameter.
        """
        raise InvalidRequest(f"a plan has no parameter {param_name!r}")


class OnePlan(_PlanSampler):
    """Asks for that plan, whatever was measured: a baseline or a confirmation."""

    def __init__(self, plan: Plan) -> None:
        self._given = plan

    def _plan(self, study: Study) -> Plan:
        return self._given


class PlannerSampler(_PlanSampler):
    """autofit's planner; once nothing can be expected to win, it repeats the best plan."""

    def _plan(self, study: Study) -> Plan:
        posterior = Posterior(trial_codec.spec_of(study), trial_codec.trials_of(study))
        plan = planner.decide(posterior).plan
        if plan is not None:
            return plan
        best = confirmation.best_of(posterior)
        return posterior.spec.space.baseline if best is None else best.plan
