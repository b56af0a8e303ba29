"""Large spaces: what a decision looks at, and that nothing is lost by it."""

from __future__ import annotations

import math

import optuna
import pytest
from autofit.planning.posterior import Posterior

from autofit.measurement import Trial, TrialKind
from autofit.plan import Dimension, Plan
from autofit.planning import confirmation, planner
from autofit.planning.constants import MOST_VARIANTS
from autofit.planning.planner import believing
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB, MIB

LEVEL, DTYPE, COSTLY, HARMFUL = "checkpointing.level", "precision.dtype", "slow.start", "harm.on"
SMALL = {
    DTYPE: Dimension(("default", "bfloat16")),
    LEVEL: Dimension(tuple(range(8))),
    **{f"x{number}.y": Dimension(("a", "b")) for number in range(3)},
    HARMFUL: Dimension((False, True)),
}
LARGE = {**SMALL, DTYPE: Dimension(("default", "tf32", "bfloat16", "float16"))}


def _seconds(plan: Plan) -> float:
    """Half with another precision, 4 % less for every "b", and 1 % more a level."""
    settings = plan.settings
    log = math.log(0.5) if settings[DTYPE] != "default" else 0.0
    log -= 0.04 * list(settings.values()).count("b")
    log -= 0.2 if settings.get(COSTLY) else 0.0
    log += 0.4 if settings[HARMFUL] else 0.0
    return 5e-3 + 1e-3 * plan.micro_batch * math.exp(log + 0.01 * int(settings[LEVEL]))


def _bytes(plan: Plan) -> float:
    return GIB + 64 * MIB * plan.micro_batch / (1 + int(plan.settings[LEVEL]) / 4)


def _spec(dimensions: dict[str, Dimension], **space: object) -> SearchSpec:
    space = {"max_micro_batch": 1024} | space
    return SearchSpec(Space(dimensions, 8, **space), 8 * GIB)  # type: ignore[arg-type]  # as the test wrote them


def _prober() -> SimulatedProber:
    return SimulatedProber(8 * GIB, _bytes, _seconds, time_noise=0.003)


def test_a_small_space_has_a_column_for_every_variant() -> None:
    spec = _spec(SMALL)
    every = list(spec.space.variants())
    trials = run_search(_prober(), spec, max_probes=6).trials
    assert len(every) == MOST_VARIANTS
    assert Posterior(spec, trials).variants == every


@pytest.fixture(scope="module")
def trials() -> tuple[Trial, ...]:
    """Of a search of a large space."""
    return run_search(_prober(), _spec(LARGE), max_probes=9).trials


def test_a_shortlist_has_what_ran_and_every_value(trials: tuple[Trial, ...]) -> None:
    spec = _spec(LARGE)
    posterior = Posterior(spec, trials)
    assert posterior.variants[0] == spec.space.default_settings
    assert all(trial.plan.settings in posterior.variants for trial in trials)
    for name, dimension in LARGE.items():
        assert {settings[name] for settings in posterior.variants} == set(dimension.values)
    told = {pair for settings, _ in confirmation.left_out(posterior) for pair in settings.items()}
    ran = {pair for trial in trials for pair in trial.plan.variant}
    missing = {(n, v) for n, d in LARGE.items() for v in d.values} - ran - told
    assert not missing


def test_a_plan_that_is_not_on_the_shortlist_is_judged_all_the_same(
    trials: tuple[Trial, ...],
) -> None:
    spec = _spec(LARGE)
    posterior = Posterior(spec, trials)
    missing = [v for v in spec.space.variants() if v not in posterior.variants]
    plan, large = spec.space.plan(8, missing[0]), spec.space.plan(1000, missing[0])
    assert planner.veto(posterior, plan) is None
    assert planner.veto(posterior, large) is not None
    assert planner.forecast(posterior, plan).peak_bytes == pytest.approx(_bytes(plan), rel=0.3)
    believed = believing(posterior, [(plan, TrialKind.SEARCH)])
    assert planner.decide(believed) != plan
    assert plan.settings in believed.variants


def test_another_sampler_searches_a_large_space() -> None:
    sampler = optuna.samplers.RandomSampler(seed=0)
    result = run_search(_prober(), _spec(LARGE), sampler=sampler, max_probes=6)
    assert result.best.ok
