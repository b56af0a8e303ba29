"""The planner as an Optuna sampler.

It reads the specification from the study's attributes and decides from its trials alone, so any
process that opens the study continues with the same plan.
"""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.planning import confirmation, planner
from autofit.planning.posterior import Posterior
from autofit.searching import trial_codec
from autofit.space import Space


class PlannerSampler(BaseSampler):
    """Proposes the planner's next plan, and the best plan once none is worth a probe.

    Args:
        plan: propose this plan instead; a search runs its baseline, its confirmations and the
            plans that it has already decided on in this way.
        space: of the study; None: it is read from its specification.
    """

    def __init__(self, plan: Plan | None = None, space: Space | None = None) -> None:
        self._given, self._space = plan, space

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all settings and the micro-batch: they are decided together."""
        return trial_codec.distributions(self._space or trial_codec.spec_of(study).space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of the plan."""
        return trial_codec.params_of(self._given or _decided(study))

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse a parameter that is not part of a plan.

        Raises:
            InvalidArgument: always.
        """
        raise InvalidArgument(f"a plan has no parameter {param_name!r}")


def _decided(study: Study) -> Plan:
    compared_from = study.user_attrs.get(trial_codec.COMPARED_FROM, 0)
    trials = trial_codec.trials_in(study.get_trials(deepcopy=False), compared_from)
    posterior = Posterior(trial_codec.spec_of(study), trials)
    decided = planner.decide(posterior, may_repeat=False)
    if isinstance(decided, Plan):
        return decided
    best = confirmation.best_of(posterior)
    return posterior.spec.space.baseline if best is None else best.plan
