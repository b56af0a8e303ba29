"""The first plans of a search: those that an expert would try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import CostHint, Dimension, Plan, Settings
from autofit.planning.beliefs import Beliefs
from autofit.planning.experts import Experts
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB, MIB
from tests.simulated import make_trial

DTYPE, LAYOUT, FUSED, LEVEL = "precision.dtype", "layout.format", "optimizer.fused", "level.of"
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


def test_without_a_lever_the_plain_variant_is_all_that_an_expert_knows() -> None:
    spec = _spec({"a.x": Dimension(("off", "on"))})
    assert Experts.of(spec) == Experts(None, [{"a.x": "off"}])


def test_levers_that_exclude_each_other_are_not_tried_together() -> None:
    apart = Dimension(("off", "on"), lever="on", when={DTYPE: ("default",)})
    variants = Experts.of(_spec({**LEVERS, "other.on": apart})).variants
    assert {v["other.on"] for v in variants if v[DTYPE] != "default"} == {"off"}


def test_all_levers_together_are_those_that_no_fault_excludes() -> None:
    spec = _spec({**LEVERS, LEVEL: LEVELS})
    plain = spec.space.default_settings
    ran = make_trial(0, spec.space.plan(4, plain), step_times_s=[0.1])
    for excluded, left in ((FUSED, LAYOUT), (LAYOUT, FUSED)):
        failed = spec.space.plan(4, {**plain, excluded: LEVERS[excluded].values[1]})
        beliefs = Beliefs(spec, [ran, make_trial(1, failed, Outcome.NONFINITE)])
        first = Experts.of(spec, beliefs.exclusions.why).variants[0]
        assert first == {**plain, DTYPE: "bfloat16", left: LEVERS[left].values[1]}


def test_the_plans_of_an_expert_are_run_with_the_levers_that_are_left() -> None:
    spec = _spec(LEVERS, max_micro_batch=256)

    def fault(plan: Plan) -> Measurement | None:
        fails = plan.settings[FUSED] == "fused"
        return Measurement(Outcome.UNSUPPORTED, detail="no kernel") if fails else None

    prober = SimulatedProber(spec.vram_budget_bytes, _bytes, _seconds, fault=fault)
    ran = [trial.plan.settings for trial in run_search(prober, spec).trials]
    assert {FUSED: "default", LAYOUT: "channels_last", DTYPE: "bfloat16"} in ran


def _seconds(plan: Plan) -> float:
    settings = plan.settings
    of_sample = {"default": 10.0, "tf32": 6.0, "bfloat16": 4.0, "float16": 4.1}[
        str(settings.get(DTYPE, "default"))
    ]
    of_sample *= 0.9 if settings.get(LAYOUT) == "channels_last" else 1.0
    of_sample *= 1 + 0.15 * int(settings.get(LEVEL, 0))
    update = 0.004 if settings.get(FUSED) == "fused" else 0.01
    return plan.accumulation_steps * 0.005 + 1e-3 * of_sample * plan.samples_per_step + update


def _bytes(plan: Plan) -> float:
    half = plan.settings.get(DTYPE) in ("bfloat16", "float16")
    growing = (60 if half else 100) * (1 - 0.3 * int(plan.settings.get(LEVEL, 0)))
    return GIB + growing * MIB * plan.micro_batch


def _searched(spec: SearchSpec) -> Sequence[Trial]:
    prober = SimulatedProber(spec.vram_budget_bytes, _bytes, _seconds, time_noise=0.002)
    return run_search(prober, spec).trials


def test_the_first_trials_are_a_second_size_and_the_plans_of_an_expert() -> None:
    trials = _searched(_spec({**LEVERS, LEVEL: LEVELS}, max_micro_batch=256))
    first = [trial.plan for trial in trials[:5]]
    assert first[0] == Plan(4, settings=first[0].settings)
    assert (first[1].micro_batch, first[1].settings) == (8, first[0].settings)
    on = {FUSED: "fused", LAYOUT: "channels_last", DTYPE: "bfloat16", LEVEL: 0}
    assert first[2].settings == on
    assert first[2].micro_batch > 16
    assert all(plan.settings[LEVEL] == 0 for plan in first)


def test_every_precision_runs_before_the_comparison() -> None:
    trials = _searched(_spec(LEVERS, max_micro_batch=256))
    ran = {t.plan.settings[DTYPE] for t in trials if t.kind is not TrialKind.CONFIRMATION}
    assert ran == {"default", "tf32", "bfloat16", "float16"}


def test_the_answer_is_never_behind_all_levers_at_the_largest_size() -> None:
    spec = _spec({**LEVERS, LEVEL: LEVELS}, max_micro_batch=256)
    prober = SimulatedProber(spec.vram_budget_bytes, _bytes, _seconds, time_noise=0.002)
    best = run_search(prober, spec).best.plan
    on: Settings = {
        FUSED: "fused",
        LAYOUT: "channels_last",
        DTYPE: "bfloat16",
        LEVEL: 0,
    }
    largest = max(
        (Plan(size, settings=on) for size in range(1, 257)),
        key=lambda plan: (_bytes(plan) <= 8 * GIB, plan.micro_batch),
    )
    expert = largest.micro_batch / _seconds(largest)
    assert best.micro_batch / _seconds(best) >= 0.98 * expert


@pytest.mark.parametrize("global_batch", [None, 64])
def test_no_probe_recomputes_where_the_same_variant_is_known_to_fit_without(
    global_batch: int | None,
) -> None:
    """Unless it measured faster there, which it is not here."""
    spec = _spec({**LEVERS, LEVEL: LEVELS}, 5 * GIB, global_batch=global_batch)
    largest: dict[tuple[Any, ...], int] = {}
    for trial in _searched(spec):
        bare = tuple({**trial.plan.settings, LEVEL: 0}.items())
        if trial.plan.settings[LEVEL]:
            assert trial.plan.micro_batch > largest.get(bare, 0)
        elif trial.ok:
            largest[bare] = max(largest.get(bare, 0), trial.plan.micro_batch)


@pytest.mark.parametrize("budget_gib", [2, 3, 5, 8])
def test_an_answer_that_recomputes_holds_less_than_the_plain_plan_of_its_size_or_is_faster(
    budget_gib: int,
) -> None:
    spec = _spec({**LEVERS, LEVEL: LEVELS}, budget_gib * GIB, global_batch=64)
    prober = SimulatedProber(spec.vram_budget_bytes, _bytes, _seconds, time_noise=0.002)
    best = run_search(prober, spec).best.plan
    plain = spec.space.plan(best.micro_batch, {**best.settings, LEVEL: 0})
    if best != plain:
        assert _bytes(best) < _bytes(plain)
        assert _bytes(plain) > 0.97 * spec.vram_budget_bytes


def test_a_size_above_one_that_failed_against_expectation_is_tried_once() -> None:
    """The caching allocator fails at 9 and 10 samples alone."""
    spec = _spec({}, 2 * GIB, max_micro_batch=16)

    def held(plan: Plan) -> float:
        return 3 * GIB if plan.micro_batch in (8, 9, 10) else 100 * MIB * plan.micro_batch

    prober = SimulatedProber(2 * GIB, held, _seconds, time_noise=0.001)
    result = run_search(prober, spec)
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

    prober = SimulatedProber(2 * GIB, held, seconds, time_noise=0.002)
    best = run_search(prober, spec).best.plan
    assert (best.micro_batch, best.settings[DTYPE]) == (32, "bfloat16")
