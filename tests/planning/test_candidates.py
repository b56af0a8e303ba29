"""What is tried after the expert plans, costly values among it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import CostHint, Dimension, NoFeasiblePlan, Plan, Settings, variant_key
from autofit.planning import planner
from autofit.planning.beliefs import Beliefs
from autofit.planning.candidates import _is_needless, planned_seconds
from autofit.planning.constants import MAX_VARIANTS
from autofit.planning.experts import Experts
from autofit.planning.planner import Proposal, believing
from autofit.planning.search_spec import SearchSpec
from autofit.report.record import Record
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.testing.simulated import PlanFunction
from autofit.units import GIB, MIB
from tests.simulated import make_trial

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


def _run(spec: SearchSpec, held: PlanFunction, seconds: PlanFunction) -> Record:
    """Search on a device of these bytes and seconds of a plan."""
    return run_search(
        SimulatedProber(spec.vram_budget_bytes, held, seconds, time_noise=0.002), spec
    )


def _mode(trial: Trial) -> str:
    return str(trial.plan.settings[MODE])


def _searched(steps: int, budget: int = 4 * GIB) -> tuple[SearchSpec, Sequence[Trial]]:
    spec = SearchSpec(Space(COMPILED, 8, global_batch=64), budget, planned_samples=64 * steps)
    return spec, [
        replace(trial, measurement=replace(trial.measurement, seconds=1.0 + COST_S[_mode(trial)]))
        for trial in _run(spec, _bytes, _seconds).trials
    ]


def test_the_value_that_costs_least_is_tried_first_and_at_the_size_of_the_plan_beside_it() -> None:
    _, trials = _searched(10_000)
    first = {_mode(trial): at for at, trial in reversed(list(enumerate(trials)))}
    assert first["off"] < first["blocks"] < first["whole"]
    for at in (first["blocks"], first["whole"]):
        plan = trials[at].plan
        cheap = {**plan.settings, MODE: "off", BUDGET: 0}
        ran = [(each.plan.micro_batch, each.plan.settings) for each in trials[:at]]
        assert (plan.micro_batch, cheap) in ran


def test_sizes_are_tried_again_with_a_costly_value_where_that_recomputes() -> None:
    """64 samples fit with a memory budget alone, and the step has one launch in place of two."""
    _, trials = _searched(100_000, round(3.9 * GIB))
    best = max((t for t in trials if t.ok), key=lambda t: t.samples_per_second or 0.0)
    assert (_mode(best), best.plan.micro_batch) == ("whole", 64)


@pytest.mark.parametrize("steps", [1, 10, 300, 1000, 10_000])
def test_costly_probes_take_at_most_a_tenth_of_the_training(steps: int) -> None:
    spec, trials = _searched(steps)
    spent_s = sum(COST_S[_mode(t)] for t in trials if t.kind is not TrialKind.CONFIRMATION)
    cheap = [trial for trial in trials if _mode(trial) == "off"]
    assert spent_s <= 0.1 * planned_seconds(Beliefs(spec, cheap))


@pytest.mark.parametrize(("took_s", "modes"), [(10.0, {"off", "blocks"}), (2.0, {"whole"})])
def test_a_dearer_value_is_tried_where_a_cold_start_took_less_than_expected(
    took_s: float, modes: set[str]
) -> None:
    """40 s are more than a tenth of this training, and a fifth of that is not."""
    spec, trials = _searched(1000)
    assert {_mode(trial) for trial in trials} == {"off", "blocks"}
    took: Any = {"seconds": 1.0 + took_s, "start_up_s": took_s, "start_is_warm": False}
    searched = [
        replace(t, measurement=replace(t.measurement, **(took if COST_S[_mode(t)] else {})))
        for t in trials
        if t.kind is not TrialKind.CONFIRMATION
    ]
    decided = planner.decide(Beliefs(spec, searched))
    assert (decided.plan.settings[MODE] if isinstance(decided, Proposal) else "off") in modes


LEVEL, HARMFUL = "checkpointing.level", "harm.on"
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
    hints: Any = {n: CostHint(1 - 0.4 * n, seconds_per_sample=1 + 0.05 * n) for n in (1, 2)}
    dimensions = {
        LEVEL: Dimension((0, 1, 2), hints=hints),
        MODE: Dimension(("off", "whole"), trial_cost_s=60.0),
    }
    spec = SearchSpec(Space(dimensions, 1, global_batch=64), 2 * GIB, planned_samples=10**8)

    def seconds(plan: Plan) -> float:
        faster = 1.7 if plan.settings[MODE] == "whole" else 1.0
        slower = 1 + 0.05 * int(plan.settings[LEVEL])
        return (plan.accumulation_steps * 0.2 + 0.005 * slower * plan.samples_per_step) / faster

    def held(plan: Plan) -> float:
        return GIB + 64 * MIB * (1 - 0.4 * int(plan.settings[LEVEL])) * plan.micro_batch

    best = _run(spec, held, seconds).best.plan
    assert (best.settings[MODE], best.settings[LEVEL], best.micro_batch) == ("whole", 2, 64)


def test_a_costly_value_that_takes_no_accumulation_is_tried_at_the_whole_batch() -> None:
    graphs = Dimension(("off", "graphs"), trial_cost_s=20.0, accumulation={"graphs": False})
    spec = SearchSpec(Space({MODE: graphs}, 8, global_batch=64), 2 * GIB, planned_samples=10**8)

    def seconds(plan: Plan) -> float:
        each = 0.01 + 2e-3 * plan.micro_batch + 2e-5 * plan.micro_batch**2
        return plan.accumulation_steps * each / (2.5 if plan.settings[MODE] == "graphs" else 1.0)

    trials = _run(spec, lambda plan: GIB + 8 * MIB * plan.micro_batch, seconds).trials
    assert any(_mode(trial) == "graphs" and trial.ok for trial in trials)


def test_a_global_batch_of_more_samples_than_a_step_may_have_micro_batches_is_searched() -> None:
    spec = SearchSpec(Space({}, 8, global_batch=2**17), GIB)
    found = _run(
        spec,
        lambda plan: 14 * MIB * plan.micro_batch,
        lambda plan: plan.accumulation_steps * (0.01 + 1e-4 * plan.micro_batch),
    )
    assert found.best.plan.micro_batch > 8
    with pytest.raises(NoFeasiblePlan):
        _run(spec, lambda plan: 2.0 * GIB, lambda plan: 1.0)


def test_several_in_flight_show_no_value_to_work() -> None:
    """A value that failed stays excluded while plans without it are pending."""
    spec, prober = _large()
    harmful = spec.space.plan(8, {**spec.space.default_settings, HARMFUL: True})
    failed = Trial(9, TrialKind.SEARCH, harmful, Measurement(Outcome.UNSUPPORTED))
    after = Beliefs(spec, [*run_search(prober, spec, max_probes=3).trials, failed])
    pending = believing(after, [(harmful, TrialKind.SEARCH)])
    for settings in (harmful.settings, {**harmful.settings, DTYPE: "bfloat16"}):
        why = after.exclusions.why(settings)
        assert pending.exclusions.why(settings) == why is not None


def test_a_plan_that_recomputes_is_needless_where_the_same_variant_ran_without() -> None:
    space = Space({LEVEL: Dimension((0, 1), hints={1: CostHint(0.5, seconds_per_sample=1.1)})}, 8)
    ran = Measurement(
        Outcome.OK, step_times_s=[0.1] * 3, peak_reserved_bytes=GIB // 2, non_torch_bytes=0
    )
    beliefs = Beliefs(SearchSpec(space, GIB), [Trial(0, TrialKind.BASELINE, space.baseline, ran)])
    needless = _is_needless(beliefs, np.array([0, 1, 1]), np.array([8, 8, 64]))
    assert needless.tolist() == [False, True, False]


# -- The first plans of a search: those that an expert would try.

LAYOUT, FUSED = "layout.format", "optimizer.fused"
LEVERS = {
    FUSED: Dimension(("default", "fused"), lever="fused"),
    DTYPE: Dimension(("default", "tf32", "bfloat16", "float16"), lever="bfloat16"),
    LAYOUT: Dimension(("default", "channels_last"), lever="channels_last"),
}
LEVELS = Dimension(
    (0, 1, 2),
    hints={n: CostHint(1 - 0.3 * n, seconds_per_sample=1 + 0.15 * n) for n in (1, 2)},
)
NUMERICS = {DTYPE: 2, LAYOUT: 1, FUSED: 1}


def _spec(dimensions: dict[str, Dimension], budget: int = 8 * GIB, **space: Any) -> SearchSpec:
    return SearchSpec(Space(dimensions, 4, **space), budget, numerics=NUMERICS)


def test_each_precision_is_tried_with_all_levers_on_and_alone() -> None:
    space = _spec({**LEVERS, LEVEL: LEVELS})
    experts = Experts.of(space)
    assert experts.leading == DTYPE
    on: Settings = {FUSED: "fused", LAYOUT: "channels_last", LEVEL: 0}
    off: Settings = {FUSED: "default", LAYOUT: "default", LEVEL: 0}
    order = ["bfloat16", "float16", "tf32", "default"]
    expected: list[Settings] = [{**on, DTYPE: value} for value in order]
    assert experts.variants == [*expected, *({**off, DTYPE: value} for value in order)]


def _seconds_of_expert(plan: Plan) -> float:
    settings = plan.settings
    of_sample = {"default": 10.0, "tf32": 6.0, "bfloat16": 4.0, "float16": 4.1}[
        str(settings.get(DTYPE, "default"))
    ]
    of_sample *= 0.9 if settings.get(LAYOUT) == "channels_last" else 1.0
    of_sample *= 1 + 0.15 * int(settings.get(LEVEL, 0))
    update = 0.004 if settings.get(FUSED) == "fused" else 0.01
    return plan.accumulation_steps * 0.005 + 1e-3 * of_sample * plan.samples_per_step + update


def _bytes_of_expert(plan: Plan) -> float:
    half = plan.settings.get(DTYPE) in ("bfloat16", "float16")
    growing = (60 if half else 100) * (1 - 0.3 * int(plan.settings.get(LEVEL, 0)))
    return GIB + growing * MIB * plan.micro_batch


def test_without_a_lever_the_plain_variant_is_all_that_an_expert_knows() -> None:
    spec = _spec({"a.x": Dimension(("off", "on"))})
    assert Experts.of(spec) == Experts(None, [{"a.x": "off"}])


def test_levers_that_exclude_each_other_are_not_tried_together() -> None:
    apart = Dimension(("off", "on"), lever="on", when={DTYPE: ("default",)})
    variants = Experts.of(_spec({**LEVERS, "other.on": apart})).variants
    assert {v["other.on"] for v in variants if v[DTYPE] != "default"} == {"off"}


@pytest.mark.parametrize(("excluded", "left"), [(FUSED, LAYOUT), (LAYOUT, FUSED)])
def test_all_levers_together_are_those_that_no_fault_excludes(excluded: str, left: str) -> None:
    spec = _spec({**LEVERS, LEVEL: LEVELS})
    plain = spec.space.default_settings
    failed = spec.space.plan(4, {**plain, excluded: LEVERS[excluded].values[1]})
    ran = make_trial(0, spec.space.plan(4, plain), step_times_s=[0.1])
    beliefs = Beliefs(spec, [ran, make_trial(1, failed, Outcome.NONFINITE)])
    first = Experts.of(spec, beliefs.exclusions.why).variants[0]
    assert first == {**plain, DTYPE: "bfloat16", left: LEVERS[left].values[1]}


def test_the_plans_of_an_expert_are_run_with_the_levers_that_are_left() -> None:
    spec = _spec(LEVERS, max_micro_batch=256)

    def fault(plan: Plan) -> Measurement | None:
        fails = plan.settings[FUSED] == "fused"
        return Measurement(Outcome.UNSUPPORTED, detail="no kernel") if fails else None

    prober = SimulatedProber(8 * GIB, _bytes_of_expert, _seconds_of_expert, fault=fault)
    ran = [trial.plan.settings for trial in run_search(prober, spec).trials]
    assert {FUSED: "default", LAYOUT: "channels_last", DTYPE: "bfloat16"} in ran


def _searched_by_expert(budget: int = 8 * GIB, **space: Any) -> Record:
    spec = _spec({**LEVERS, LEVEL: LEVELS}, budget, **space)
    return _run(spec, _bytes_of_expert, _seconds_of_expert)


ON: Settings = {FUSED: "fused", LAYOUT: "channels_last", DTYPE: "bfloat16", LEVEL: 0}


def test_a_search_begins_with_the_plans_of_an_expert_and_its_answer_is_not_behind_them() -> None:
    found = _searched_by_expert(max_micro_batch=256)
    first = [trial.plan for trial in found.trials[:5]]
    assert first[0] == Plan(4, settings=first[0].settings)
    assert (first[1].micro_batch, first[1].settings) == (8, first[0].settings)
    assert first[2].settings == ON
    assert first[2].micro_batch > 16
    assert all(plan.settings[LEVEL] == 0 for plan in first)
    searched = [t for t in found.trials if t.kind is not TrialKind.CONFIRMATION]
    assert {t.plan.settings[DTYPE] for t in searched} == {"default", "tf32", "bfloat16", "float16"}
    fitting = (Plan(n, settings=ON) for n in range(1, 257))
    largest = [plan for plan in fitting if _bytes_of_expert(plan) <= 8 * GIB][-1]
    expert_s, best_s = map(_seconds_of_expert, (largest, found.best.plan))
    assert found.best.plan.micro_batch / best_s >= 0.98 * largest.micro_batch / expert_s


@pytest.mark.parametrize("global_batch", [None, 64])
def test_no_probe_recomputes_where_the_same_variant_is_known_to_fit_without(
    global_batch: int | None,
) -> None:
    """Unless it measured faster there, which it is not here."""
    largest: dict[tuple[Any, ...], int] = {}
    for trial in _searched_by_expert(5 * GIB, global_batch=global_batch).trials:
        bare = tuple({**trial.plan.settings, LEVEL: 0}.items())
        if trial.plan.settings[LEVEL]:
            assert trial.plan.micro_batch > largest.get(bare, 0)
        elif trial.ok:
            largest[bare] = max(largest.get(bare, 0), trial.plan.micro_batch)


@pytest.mark.parametrize("budget_gib", [2, 3, 5, 8])
def test_an_answer_that_recomputes_holds_less_than_the_plain_plan_of_its_size_or_is_faster(
    budget_gib: int,
) -> None:
    best = _searched_by_expert(budget_gib * GIB, global_batch=64).best.plan
    plain = replace(best, settings={**best.settings, LEVEL: 0})
    if best != plain:
        assert _bytes_of_expert(best) < _bytes_of_expert(plain)
        assert _bytes_of_expert(plain) > 0.97 * budget_gib * GIB


def test_a_size_above_one_that_failed_against_expectation_is_tried_once() -> None:
    """The caching allocator fails at 9 and 10 samples alone."""

    def held(plan: Plan) -> float:
        return 3 * GIB if plan.micro_batch in (8, 9, 10) else 100 * MIB * plan.micro_batch

    result = _run(_spec({}, 2 * GIB, max_micro_batch=16), held, _seconds_of_expert)
    assert result.best.plan.micro_batch == 16
    assert result.search.oom_probes <= 1


def test_bfloat16_at_the_whole_batch_is_tried_where_half_of_it_is_slower() -> None:
    """As on a processor, where weights are cast once a micro-batch."""
    dimensions = {DTYPE: Dimension(("default", "bfloat16"), lever="bfloat16")}
    spec = SearchSpec(Space(dimensions, 8, global_batch=32), 2 * GIB, numerics=NUMERICS)

    def seconds(plan: Plan) -> float:
        half = plan.settings[DTYPE] == "bfloat16"
        cast = 0.03 if half else 0.0
        return plan.accumulation_steps * (0.005 + cast) + 0.032 * (2.0 if half else 3.0)

    def held(plan: Plan) -> float:
        return GIB + (28 if plan.settings[DTYPE] == "bfloat16" else 40) * MIB * plan.micro_batch

    best = _run(spec, held, seconds).best.plan
    assert (best.micro_batch, best.settings[DTYPE]) == (32, "bfloat16")
