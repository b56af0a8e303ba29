"""Which plans a search may choose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from autofit.codec import from_json, to_json
from autofit.dimension import DimensionForm, payloads_of
from autofit.errors import InvalidArgument
from autofit.plan import Dimension, Plan
from autofit.planning.feasibility import Sizes
from autofit.registry import resolve
from autofit.space import UNBOUNDED_MICRO_BATCH, Space

DIMENSIONS = {
    "precision.dtype": Dimension(["default", "bfloat16"]),
    "checkpointing.level": Dimension([0, 1, 2], payloads={1: ["a"], 2: ["a", "b"]}),
    "compile.mode": Dimension(
        ["off", "default"],
        when={"precision.dtype": ["bfloat16"]},
        trial_cost_s=30.0,
        fresh_worker=True,
    ),
}


def test_every_variant_comes_once_the_plain_one_first_and_conditions_hold() -> None:
    variants = list(Space(DIMENSIONS, 4).variants())
    assert variants[0] == Space(DIMENSIONS, 4).default_settings
    assert len({tuple(sorted(variant.items())) for variant in variants}) == len(variants) == 9
    assert all(
        variant["precision.dtype"] == "bfloat16"
        for variant in variants
        if variant["compile.mode"] == "default"
    )


def test_without_a_global_batch_the_baseline_is_the_sample_batch() -> None:
    assert Space(DIMENSIONS, 4).baseline == Plan(4, settings=Space(DIMENSIONS, 4).default_settings)
    assert Space({}, 4).largest_micro_batch == UNBOUNDED_MICRO_BATCH
    many = UNBOUNDED_MICRO_BATCH + 1
    assert Space({}, many).baseline.micro_batch == Space({}, many).largest_micro_batch == many


@pytest.mark.parametrize(
    ("samples", "global_batch", "sizes"),
    [(4, 10, (4, 3, 3)), (4, 8, (4, 4)), (5, 8, (4, 4)), (4, 3, (3,)), (1, 3, (1, 1, 1))],
)
def test_with_one_the_baseline_is_the_split_nearest_below_it(
    samples: int, global_batch: int, sizes: tuple[int, ...]
) -> None:
    baseline = Space({}, samples, global_batch=global_batch).baseline
    assert baseline.micro_batch_sizes == sizes
    assert baseline.global_batch == global_batch


ONE_VALUE = Space({}, 4, fixed={"memory_format.layout": "default"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Space({}, 9, max_micro_batch=6), r"max_micro_batch=6 .* baseline"),
        (
            lambda: Space({}, 9, global_batch=64, max_micro_batch=6),
            r"max_micro_batch=6 .* baseline",
        ),
        (lambda: Space({}, 4, global_batch=0), r"global_batch.*\b0"),
        (lambda: Space({}, 4, max_micro_batch=0), r"max_micro_batch.*\b0"),
        (
            lambda: ONE_VALUE.complete({"memory_format.layout": "channels_last"}),
            r"\['default'\]",
        ),
        (lambda: Space(DIMENSIONS, 4).complete({"precision.type": "x"}), r"'precision\.type'"),
        (
            lambda: Space(DIMENSIONS, 4).complete({"precision.dtype": "float8"}),
            r"'float8'.*'default'",
        ),
    ],
)
def test_what_is_no_space_and_no_setting_of_it_is_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make()


def test_a_bound_below_the_sample_batch_renames_no_baseline() -> None:
    assert Space({}, 9, global_batch=5, max_micro_batch=6).baseline == Plan.split(5, 5)


def test_a_plan_never_exceeds_what_was_asked_nor_the_bounds() -> None:
    free = Space({}, 4, max_micro_batch=6)
    assert free.plan(100, {}).micro_batch == 6
    assert free.plan(0, {}).micro_batch == 1
    kept = Space({}, 4, global_batch=10, max_micro_batch=6)
    assert kept.plan(100, {}) == Plan.split(10, 6)
    assert kept.largest_micro_batch == 6


def test_where_splitting_changes_the_gradients_the_count_stays() -> None:
    space = Space({}, 4, global_batch=10, may_change_accumulation=False)
    assert {space.plan(micro_batch, {}) for micro_batch in (1, 4, 10)} == {space.baseline}
    assert space.largest_micro_batch == space.only_micro_batch == space.baseline.micro_batch


def test_settings_are_completed_and_checked() -> None:
    space = Space(DIMENSIONS, 4)
    assert space.complete({"checkpointing.level": 2}) == {
        "precision.dtype": "default",
        "checkpointing.level": 2,
        "compile.mode": "off",
    }
    assert ONE_VALUE.complete({}) == {}, "no plan needs to name it"
    named = {"memory_format.layout": "default"}
    assert ONE_VALUE.complete(named) == named


def test_costs_and_payloads_belong_to_values_that_are_not_plain() -> None:
    space = Space(DIMENSIONS, 4)
    plain = space.default_settings
    compiled = {**plain, "precision.dtype": "bfloat16", "compile.mode": "default"}
    assert space.is_costly(compiled)
    assert space.needs_fresh_worker(compiled)
    assert not space.is_costly(plain)
    assert not space.needs_fresh_worker(plain)
    dimensions = space.dimensions
    level = {**plain, "checkpointing.level": 1}
    assert payloads_of(dimensions, level) == {"checkpointing.level": ["a"]}
    assert payloads_of(dimensions, plain) == {}


@pytest.mark.parametrize(("samples", "ranks"), [(64, 4), (13, 3)])
def test_the_planner_of_several_ranks_proposes_what_plans_can_be_split_into(
    samples: int, ranks: int
) -> None:
    space = Space({}, 8, global_batch=samples, world_size=ranks)
    sizes = Sizes(space, [1])
    for wanted in range(1, space.largest_micro_batch + 1):
        assert int(sizes.down(np.array([float(wanted)]))[0]) == space.plan(wanted, {}).micro_batch
    assert space.baseline.world_size == ranks
    assert space.largest_micro_batch == -(-samples // ranks)


@pytest.mark.parametrize(
    ("geometry", "largest"),
    [
        ({}, 0),
        ({"global_batch": 13}, 7),
        ({"global_batch": 13, "world_size": 2}, 4),
        ({"global_batch": 2, "world_size": 2}, 0),
        ({"global_batch": 15, "even_split": True}, 5),
        ({"global_batch": 13, "max_micro_batch": 5}, 5),
        ({"global_batch": 12, "may_change_accumulation": False}, 4),
        ({"global_batch": 4, "may_change_accumulation": False}, 0),
    ],
)
def test_what_needs_accumulation_is_tried_where_there_is_some(
    geometry: dict[str, int], largest: int
) -> None:
    shared = Dimension(["once", "each"], accumulation={"each": True})
    space = Space({**DIMENSIONS, "parallel.accumulation": shared}, 4, **geometry)  # type: ignore[arg-type]  # as above
    assert from_json(to_json(DimensionForm.of(shared)), DimensionForm, "it").dimension() == shared
    each = {**space.default_settings, "parallel.accumulation": "each"}
    assert space.largest_micro_batch_of(each) == largest
    assert space.largest_micro_batch_of(space.default_settings) == space.largest_micro_batch
    tried = [v for v in space.variants() if v["parallel.accumulation"] == "each"]
    assert len(tried) == (9 if largest else 0)
    for size in range(1, 16):
        plan = space.plan(size, each)
        chosen = plan.settings["parallel.accumulation"]
        assert chosen == ("each" if plan.accumulation_steps > 1 else "once")
        if chosen == "each":
            assert plan.micro_batch <= largest


@pytest.mark.parametrize(
    ("geometry", "size"),
    [
        ({"global_batch": 13}, 13),
        ({"global_batch": 13, "world_size": 2}, 7),
        ({"global_batch": 2, "world_size": 2}, 1),
        ({"global_batch": 13, "max_micro_batch": 5}, 0),
        ({"global_batch": 12, "may_change_accumulation": False}, 0),
        ({"global_batch": 4, "may_change_accumulation": False}, 4),
    ],
)
def test_what_forbids_accumulation_is_tried_where_there_need_not_be_any(
    geometry: dict[str, int], size: int
) -> None:
    whole = Dimension(["step", "backward"], accumulation={"backward": False})
    space = Space({**DIMENSIONS, "update.when": whole}, 4, **geometry)  # type: ignore[arg-type]  # as above
    assert from_json(to_json(DimensionForm.of(whole)), DimensionForm, "it").dimension() == whole
    backward = {**space.default_settings, "update.when": "backward"}
    assert space.largest_micro_batch_of(backward) == size
    assert space.smallest_micro_batch_of(space.default_settings) == 1
    assert len([v for v in space.variants() if v["update.when"] == "backward"]) == (
        9 if size else 0
    )
    for wanted in range(1, 16):
        plan = space.plan(wanted, backward)
        is_split = plan.accumulation_steps > 1
        assert plan.settings["update.when"] == ("step" if is_split else "backward")
        assert is_split or plan.micro_batch >= space.smallest_micro_batch_of(backward)


def test_one_value_of_several_may_forbid_accumulation() -> None:
    modes = Dimension(["off", "default", "graphs"], accumulation={"graphs": False})
    space = Space({"compile.mode": modes}, 4, global_batch=8)
    for mode, smallest in (("default", 1), ("graphs", 8)):
        settings = {"compile.mode": mode}
        assert space.smallest_micro_batch_of(settings) == smallest
        assert space.plan(8, settings).settings == settings
    assert space.plan(4, {"compile.mode": "default"}).settings == {"compile.mode": "default"}
    assert space.plan(4, {"compile.mode": "graphs"}).settings == {"compile.mode": "off"}
    asked = Plan.split(8, 4, settings={"compile.mode": "graphs"})
    with pytest.raises(InvalidArgument, match="graphs is for plans of one micro-batch"):
        resolve(asked, space)
    assert resolve(Plan.split(8, 4, settings={"compile.mode": "default"}), space)


def test_what_depends_on_a_setting_that_needs_accumulation_goes_with_it() -> None:
    dimensions = {
        "parallel.bucket": Dimension(["small", "large"], when={"parallel.accumulation": ["each"]}),
        "parallel.accumulation": Dimension(["once", "each"], accumulation={"each": True}),
    }
    space = Space(dimensions, 8, global_batch=32)
    asked = {"parallel.bucket": "large", "parallel.accumulation": "each"}
    assert space.plan(8, asked).settings == asked
    assert space.plan(32, asked).settings == space.default_settings
    assert space.plan(8, {**asked, "parallel.accumulation": "once"}).settings == (
        space.default_settings
    )


def test_settings_that_exclude_each_other_are_reset_in_the_order_of_the_space() -> None:
    exclusive = {
        "a.x": Dimension([0, 1], when={"b.y": [0]}),
        "b.y": Dimension([0, 1], when={"a.x": [0]}),
    }
    both = {"a.x": 1, "b.y": 1}
    assert Space(exclusive, 4).plan(4, both).settings == {"a.x": 0, "b.y": 1}
    turned = dict(reversed(exclusive.items()))
    assert Space(turned, 4).plan(4, both).settings == {"a.x": 1, "b.y": 0}


def test_a_plan_does_not_depend_on_how_texts_are_hashed() -> None:
    code = (
        "from autofit.plan import Dimension; from autofit.space import Space; "
        "names = [f's{n}.x' for n in range(6)]; "
        "d = {n: Dimension([0, 1], when={o: [0] for o in names if o != n}) for n in names}; "
        "print(Space(d, 4).plan(4, dict.fromkeys(names, 1)))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert len(said) == 1


def test_what_a_value_depends_on_may_be_any_iterable() -> None:
    with_one = Dimension([0, 1], when={"b.y": iter([1, None])})  # type: ignore[dict-item]  # what a plug-in may give all the same
    assert with_one.allowed_with({"b.y": 1})
    assert with_one.allowed_with({"b.y": 1})
    assert with_one.allowed_with({})


@pytest.mark.parametrize(("values", "settings"), [(60, 3), (8, 12), (2, 60)])
def test_a_space_too_large_to_plan_is_refused_by_its_size(values: int, settings: int) -> None:
    names = [f"big.d{number}" for number in range(settings)]
    space = Space({name: Dimension(range(values)) for name in names}, 4)
    with pytest.raises(InvalidArgument) as refused:
        space.check_can_be_planned()
    assert f"{values**settings:,}" in str(refused.value)
    assert f"big.d0 ({values} values)" in str(refused.value)


def test_what_conditions_rule_out_does_not_count() -> None:
    names = [f"s.d{number}" for number in range(18)]
    alone = {
        name: Dimension([0, 1], when={other: [0] for other in names if other != name})
        for name in names
    }
    Space(alone, 4).check_can_be_planned()  # 2**18 combinations, of which 19 are variants
    with pytest.raises(InvalidArgument):
        Space({name: Dimension([0, 1]) for name in names}, 4).check_can_be_planned()


@pytest.mark.parametrize(("batch", "better"), [(509, 512), (13, 12), (7, 8), (1021, 1024)])
def test_a_global_batch_that_hardly_splits_evenly_is_noted(batch: int, better: int) -> None:
    (note,) = Space({}, batch, global_batch=batch, even_split=True).notes()
    assert str(batch) in note
    assert f"such as {better}" in note
    assert not [*Space({}, batch, global_batch=batch).notes()]
    assert not [*Space({}, better, global_batch=better, even_split=True).notes()] or better < 16
