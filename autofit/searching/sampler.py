"""The planner as an Optuna sampler.

It decides from the study alone, so any process that opens the study continues with the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autofit.errors import InvalidArgument
from autofit.measurement import TrialKind
from autofit.plan import Dimension, Plan, Scalar
from autofit.planning import confirmation, planner
from autofit.planning.beliefs import Beliefs
from autofit.planning.planner import Proposal, believing
from autofit.planning.search_spec import SearchSpec
from autofit.searching import trial_codec
from autofit.space import Space
from autofit.units import parse_bytes


class Sampler(BaseSampler):
    """Proposes the plan that is most worth a probe, in any study that maximizes samples per second.

    A trial's parameters are the settings, as categories, and `micro_batch`; `suggest` asks a trial
    for them, whatever sampler the study has. A trial that fits has a constraint named "vram" of at
    most zero: the bytes that it held as a share of the budget, less one. A trial that ran out of
    memory is pruned with a constraint above zero. A trial that fails blames the settings that never
    worked. Once no plan is worth a trial the sampler repeats the best one and stops the study.

    Args:
        settings: name -> values, the default first; an `autofit.Dimension` can also hint at costs.
            None: the study is one that `autofit.search` made, and says so itself.
        sample_batch_size: the micro-batch of the first trial.
        vram_budget: the most that a trial may hold: bytes, or a text such as "24GiB".
        global_batch: samples per optimizer step to keep, by accumulation; None: free.
        max_micro_batch: the largest micro-batch to try.
        seed: of all random choices.

    Raises:
        InvalidArgument: a count is below one, or the budget is not a size.
    """

    def __init__(
        self,
        settings: Mapping[str, Dimension | Sequence[Scalar]] | None = None,
        *,
        sample_batch_size: int = 1,
        vram_budget: int | str = "1TiB",
        global_batch: int | None = None,
        max_micro_batch: int | None = None,
        seed: int = 0,
    ) -> None:
        self._spec = None
        if settings is not None:
            dimensions = {
                name: given if isinstance(given, Dimension) else Dimension(given)
                for name, given in settings.items()
            }
            space = Space(
                dimensions,
                sample_batch_size,
                global_batch=global_batch,
                max_micro_batch=max_micro_batch,
            )
            self._spec = SearchSpec(space, parse_bytes(str(vram_budget)), seed=seed)

    def suggest(self, trial: optuna.Trial) -> Plan:
        """Return the plan of a trial, whose parameters are asked for here, of whatever sampler."""
        space = self._spec_of(trial.study).space
        params: dict[str, Any] = {
            name: trial.suggest_categorical(name, tuple(dimension.values))
            for name, dimension in space.dimensions.items()
        }
        largest = trial_codec.largest_number(space)
        params[trial_codec.MICRO_BATCH] = trial.suggest_int(
            trial_codec.MICRO_BATCH, 1, largest, log=True
        )
        return trial_codec.plan_of(params, space)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all settings and the micro-batch: they are decided together."""
        return trial_codec.distributions(self._spec_of(study).space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of the plan.

        Raises:
            InvalidArgument: the study does not maximize one value.
        """
        if study.directions != [StudyDirection.MAXIMIZE]:
            raise InvalidArgument(
                "the sampler maximizes samples per second: make the study with "
                'direction="maximize" and return them'
            )
        beliefs = self._beliefs(study, trial)
        decided = planner.decide(beliefs)
        if isinstance(decided, Proposal):
            return trial_codec.params_of(decided.plan)
        with suppress(RuntimeError):  # of a study that is asked and told, whose owner decides
            study.stop()
        best = confirmation.best_of(beliefs)
        return trial_codec.params_of(beliefs.spec.space.baseline if best is None else best.plan)

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
        raise InvalidArgument(
            f"a plan has no parameter {param_name!r} with this range: a study of this "
            "sampler has only the settings of plans and their micro_batch"
        )

    def _spec_of(self, study: Study) -> SearchSpec:
        return self._spec or trial_codec.spec_of(study)

    def _beliefs(self, study: Study, asked: FrozenTrial) -> Beliefs:
        spec, trials = self._spec_of(study), study.get_trials(deepcopy=False)
        compared_from = study.user_attrs.get(trial_codec.COMPARED_FROM, 0)
        measured = trial_codec.trials_in(trials, compared_from, spec)
        names = {*spec.space.dimensions, trial_codec.MICRO_BATCH}
        running = [
            (trial_codec.plan_of(trial.params, spec.space), TrialKind.SEARCH)
            for trial in trials
            if trial.state is TrialState.RUNNING and trial.number != asked.number
            if names <= trial.params.keys()
        ]
        return believing(Beliefs(spec, measured), running)
