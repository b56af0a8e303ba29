"""What is tried after the expert plans, costly values among it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import CostHint, Dimension, NoFeasiblePlan, Plan, variant_key
from autofit.planning import planner
from autofit.planning.beliefs import Beliefs
from autofit.planning.candidates import _is_needless, planned_seconds
from autofit.planning.constants import MAX_VARIANTS
from autofit.planning.planner import Proposal, believing
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB, MIB

MODE, BUDGET, DTYPE = "compile.mode", "compile.memory_budget", "precision.dtype"
COMPILED = {
    DTYPE: Dimension(("default", "bfloat16"), lever="bfloat16"),
    MODE: Dimension(("off", "blocks", "whole"), trial_costs_s={"blocks": 10.0, "whole": 40.0}),
    BUDGET: Dimension(
        (0, 1, 2),
        when={MODE: ("blocks", "whole")},
        hints={n: CostHint(1 - 0.25 * n, seconds_per_sample=1 + 0.02 * n) for n in (1, 2)},
    ),
}
COST_S = {"off": 0.0, "blocks": 10.0, "whole": 40.0}


def _seconds(plan: Plan) -> float:
    each = 4.0 if plan.settings[DTYPE] == "bfloat16" else 8.0
    faster = {"off": 1.0, "blocks": 1.3, "whole": 1.5}[str(plan.settings[MODE])]
    slower = 1 + 0.02 * int(plan.settings[BUDGET])
    return plan.accumulation_steps * 0.02 + 1e-3 * each / faster * slower * plan.samples_per_step


def _bytes(plan: Plan) -> float:
    each = (60 if plan.settings[DTYPE] == "bfloat16" else 100) * MIB
    return GIB + each * (1 - 0.25 * int(plan.settings[BUDGET])) * plan.micro_batch


def _searched(steps: int, budget: int = 4 * GIB) -> tuple[SearchSpec, Sequence[Trial]]:
    space = Space(COMPILED, 8, global_batch=64)
    spec = SearchSpec(space, budget, planned_samples=64 * steps)
    prober = SimulatedProber(budget, _bytes, _seconds, time_noise=0.002)
    trials = run_search(prober, spec).trials
    return spec, [
        replace(trial, measurement=replace(trial.measurement, seconds=1.0 + _cost_s(trial.plan)))
        for trial in trials
    ]


def _cost_s(plan: Plan) -> float:
    return COST_S[str(plan.settings[MODE])]


def test_a_costly_value_is_first_tried_at_the_size_of_the_plan_beside_it() -> None:
    _, trials = _searched(10_000)
    seen: set[str] = set()
    for at, trial in enumerate(trials):
        mode = str(trial.plan.settings[MODE])
        if mode != "off" and mode not in seen:
            cheap = {**trial.plan.settings, MODE: "off", BUDGET: 0}
            ran = [each.plan for each in trials[:at]]
            assert any((p.micro_batch, p.settings) == (trial.plan.micro_batch, cheap) for p in ran)
            seen.add(mode)
    assert seen == {"blocks", "whole"}


def test_the_value_that_costs_least_is_tried_first() -> None:
    _, trials = _searched(10_000)
    modes = [str(t.plan.settings[MODE]) for t in trials if t.plan.settings[MODE] != "off"]
    assert modes[0] == "blocks"


def test_sizes_are_tried_again_with_a_costly_value_where_that_recomputes() -> None:
    """64 samples fit with a memory budget alone, and the step has one launch in place of two."""
    _, trials = _searched(100_000, round(3.9 * GIB))
    best = max((t for t in trials if t.ok), key=lambda t: t.samples_per_second or 0.0)
    assert best.plan.settings[MODE] == "whole"
    assert best.plan.micro_batch == 64


@pytest.mark.parametrize("steps", [0, 10, 300, 1000, 10_000])
def test_costly_probes_take_at_most_a_tenth_of_the_training(steps: int) -> None:
    spec, trials = _searched(steps) if steps else _searched(1)
    spent_s = sum(
        _cost_s(t.plan) for t in trials if t.kind is not TrialKind.CONFIRMATION and _cost_s(t.plan)
    )
    cheap = [trial for trial in trials if not _cost_s(trial.plan)]
    assert spent_s <= 0.1 * planned_seconds(Beliefs(spec, cheap))


@pytest.mark.parametrize(("took_s", "modes"), [(10.0, {"off", "blocks"}), (2.0, {"whole"})])
def test_a_dearer_value_is_tried_where_a_cold_start_took_less_than_expected(
    took_s: float, modes: set[str]
) -> None:
    """40 s are more than a tenth of this training, and a fifth of that is not."""
    spec, trials = _searched(1000)
    assert {trial.plan.settings[MODE] for trial in trials} == {"off", "blocks"}
    searched = [
        replace(
            trial,
            measurement=replace(
                trial.measurement, seconds=1.0 + took_s, start_up_s=took_s, start_is_warm=False
            ),
        )
        if _cost_s(trial.plan)
        else trial
        for trial in trials
        if trial.kind is not TrialKind.CONFIRMATION
    ]
    decided = planner.decide(Beliefs(spec, searched))
    mode = decided.plan.settings[MODE] if isinstance(decided, Proposal) else "off"
    assert mode in modes


LEVEL, COSTLY, HARMFUL = "checkpointing.level", "slow.start", "harm.on"
LARGE = {
    DTYPE: Dimension(("default", "tf32", "bfloat16", "float16")),
    LEVEL: Dimension(tuple(range(8))),
    **{f"x{number}.y": Dimension(("a", "b")) for number in range(4)},
    HARMFUL: Dimension((False, True)),
}


def _seconds_of_large(plan: Plan) -> float:
    """Half with another precision, 4 % less for every "b", and 1 % more a level."""
    log = math.log(0.5) if plan.settings[DTYPE] != "default" else 0.0
    log -= 0.04 * list(plan.settings.values()).count("b")
    log += 0.4 if plan.settings[HARMFUL] else 0.0
    return 5e-3 + 1e-3 * plan.micro_batch * math.exp(log + 0.01 * int(plan.settings[LEVEL]))


def _bytes_of_large(plan: Plan) -> float:
    return GIB + 64 * MIB * plan.micro_batch / (1 + int(plan.settings[LEVEL]) / 4)


def _large() -> tuple[SearchSpec, SimulatedProber]:
    spec = SearchSpec(Space(LARGE, 8, max_micro_batch=1024), 8 * GIB)
    prober = SimulatedProber(8 * GIB, _bytes_of_large, _seconds_of_large, time_noise=0.003)
    return spec, prober


def test_a_large_space_is_searched_to_near_its_best() -> None:
    spec, prober = _large()
    assert len(list(spec.space.variants())) > MAX_VARIANTS
    best = run_search(prober, spec).best.plan
    largest = (
        spec.space.plan(int(7 * 16 * (1 + int(settings[LEVEL]) / 4)), settings)
        for settings in spec.space.variants()
    )
    fastest = max(plan.micro_batch / _seconds_of_large(plan) for plan in largest)
    assert best.micro_batch / _seconds_of_large(best) >= 0.95 * fastest


def test_any_plan_of_a_large_space_is_judged() -> None:
    spec, prober = _large()
    beliefs = Beliefs(spec, run_search(prober, spec, max_probes=9).trials)
    ran = {trial.plan.variant for trial in beliefs.probes}
    settings = next(v for v in spec.space.variants() if variant_key(v) not in ran)
    plan, large = spec.space.plan(8, settings), spec.space.plan(1000, settings)
    judged = planner.Proposal.of_stranger(beliefs, plan)
    assert judged.veto is None
    assert judged.forecast.peak_bytes == pytest.approx(_bytes_of_large(plan), rel=0.3)
    assert planner.Proposal.of_stranger(beliefs, large).veto is not None
    decided: Any = planner.decide(believing(beliefs, [(plan, TrialKind.SEARCH)]))
    assert decided.plan != plan


def test_the_cost_of_a_risk_grows_with_every_oom_that_was_chosen() -> None:
    spec, prober = _large()
    trials = run_search(prober, spec, max_probes=3).trials
    cost, twice = (Beliefs(spec, trials).oom_cost(np.array([risk])) for risk in (0.1, 0.2))
    assert twice == pytest.approx(2 * cost)


def test_a_costly_value_is_tried_beside_a_plan_that_recomputes() -> None:
    """Where nothing fits without recomputation but a plan that is slow."""
    dimensions = {
        LEVEL: Dimension(
            (0, 1, 2),
            hints={n: CostHint(1 - 0.4 * n, seconds_per_sample=1 + 0.05 * n) for n in (1, 2)},
        ),
        MODE: Dimension(("off", "whole"), trial_cost_s=60.0),
    }
    spec = SearchSpec(Space(dimensions, 1, global_batch=64), 2 * GIB, planned_samples=10**8)

    def seconds(plan: Plan) -> float:
        faster = 1.7 if plan.settings[MODE] == "whole" else 1.0
        slower = 1 + 0.05 * int(plan.settings[LEVEL])
        return (plan.accumulation_steps * 0.2 + 0.005 * slower * plan.samples_per_step) / faster

    def held(plan: Plan) -> float:
        return GIB + 64 * MIB * (1 - 0.4 * int(plan.settings[LEVEL])) * plan.micro_batch

    prober = SimulatedProber(2 * GIB, held, seconds, time_noise=0.002)
    best = run_search(prober, spec).best.plan
    assert (best.settings[MODE], best.settings[LEVEL], best.micro_batch) == ("whole", 2, 64)


def test_a_costly_value_that_takes_no_accumulation_is_tried_at_the_whole_batch() -> None:
    graphs = Dimension(("off", "graphs"), trial_cost_s=20.0, accumulation={"graphs": False})
    spec = SearchSpec(Space({MODE: graphs}, 8, global_batch=64), 2 * GIB, planned_samples=10**8)

    def seconds(plan: Plan) -> float:
        each = 0.01 + 2e-3 * plan.micro_batch + 2e-5 * plan.micro_batch**2
        return plan.accumulation_steps * each / (2.5 if plan.settings[MODE] == "graphs" else 1.0)

    prober = SimulatedProber(2 * GIB, lambda plan: GIB + 8 * MIB * plan.micro_batch, seconds)
    trials = run_search(prober, spec).trials
    assert any(trial.plan.settings[MODE] == "graphs" and trial.ok for trial in trials)


def test_a_global_batch_of_more_samples_than_a_step_may_have_micro_batches_is_searched() -> None:
    def seconds(plan: Plan) -> float:
        return plan.accumulation_steps * (0.01 + 1e-4 * plan.micro_batch)

    spec = SearchSpec(Space({}, 8, global_batch=2**17), GIB)
    prober = SimulatedProber(GIB, lambda plan: 14 * MIB * plan.micro_batch, seconds)
    assert run_search(prober, spec).best.plan.micro_batch > 8


def test_several_in_flight_show_no_value_to_work() -> None:
    """A value that failed stays excluded while plans without it are pending."""
    spec, prober = _large()
    beliefs = Beliefs(spec, run_search(prober, spec, max_probes=3).trials)
    harmful = spec.space.plan(8, {**spec.space.default_settings, HARMFUL: True})
    failed = Trial(9, TrialKind.SEARCH, harmful, Measurement(Outcome.UNSUPPORTED))
    after = Beliefs(spec, [*beliefs.measured, failed])
    pending = believing(after, [(harmful, TrialKind.SEARCH)])
    assert pending.exclusions.why(harmful.settings) == after.exclusions.why(harmful.settings)
    assert after.exclusions.why(harmful.settings) is not None
    beside = {**harmful.settings, DTYPE: "bfloat16"}
    assert pending.exclusions.why(beside) == after.exclusions.why(beside) is not None


def test_a_plan_that_recomputes_is_needless_where_the_same_variant_ran_without() -> None:
    space = Space({LEVEL: Dimension((0, 1), hints={1: CostHint(0.5, seconds_per_sample=1.1)})}, 8)
    ran = Measurement(
        Outcome.OK, step_times_s=[0.1] * 3, peak_reserved_bytes=GIB // 2, non_torch_bytes=0
    )
    beliefs = Beliefs(SearchSpec(space, GIB), [Trial(0, TrialKind.BASELINE, space.baseline, ran)])
    needless = _is_needless(beliefs, np.array([0, 1, 1]), np.array([8, 8, 64]))
    assert needless.tolist() == [False, True, False]


def test_nothing_that_fits_is_no_error_of_a_global_batch_that_is_too_large_for_one_step() -> None:
    spec = SearchSpec(Space({}, 8, global_batch=2**17), GIB)
    prober = SimulatedProber(GIB, lambda plan: 2.0 * GIB, lambda plan: 1.0)
    with pytest.raises(NoFeasiblePlan):
        run_search(prober, spec)
