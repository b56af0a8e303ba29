"""Which plans a search may choose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from autofit.dimension import payloads_of
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
    [
        (4, 10, (4, 3, 3)),
        (4, 8, (4, 4)),
        (5, 8, (4, 4)),
        (4, 3, (3,)),
        (1, 3, (1, 1, 1)),
        (9, 5, (5,)),
    ],
)
def test_with_one_the_baseline_is_the_split_nearest_below_it(
    samples: int, global_batch: int, sizes: tuple[int, ...]
) -> None:
    for bound in (None, max(sizes) + 1):  # which renames no baseline
        space = Space({}, samples, global_batch=global_batch, max_micro_batch=bound)
        assert space.baseline.micro_batch_sizes == sizes
        assert space.baseline.global_batch == global_batch


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


@pytest.mark.parametrize(
    ("given", "largest", "wanted", "plan"),
    [
        ({"max_micro_batch": 6}, 6, 100, Plan(6)),
        ({"max_micro_batch": 6}, 6, 0, Plan(1)),
        ({"global_batch": 10, "max_micro_batch": 6}, 6, 100, Plan.split(10, 6)),
        # where splitting changes the gradients the count stays
        ({"global_batch": 10, "may_change_accumulation": False}, 4, 1, Plan.split(10, 4)),
        ({"global_batch": 10, "may_change_accumulation": False}, 4, 10, Plan.split(10, 4)),
    ],
)
def test_a_plan_never_exceeds_what_was_asked_nor_the_bounds(
    given: dict[str, Any], largest: int, wanted: int, plan: Plan
) -> None:
    space = Space({}, 4, **given)
    assert space.plan(wanted, {}) == plan
    assert space.largest_micro_batch == largest
    may_change = given.get("may_change_accumulation", True)
    assert space.only_micro_batch == (None if may_change else largest)


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
    assert [space.is_costly(each) for each in (plain, compiled)] == [False, True]
    assert [space.needs_fresh_worker(each) for each in (plain, compiled)] == [False, True]
    level = {**plain, "checkpointing.level": 1}
    assert payloads_of(space.dimensions, level) == {"checkpointing.level": ["a"]}
    assert payloads_of(space.dimensions, plain) == {}


@pytest.mark.parametrize(("samples", "ranks"), [(64, 4), (13, 3)])
def test_the_planner_of_several_ranks_proposes_what_plans_can_be_split_into(
    samples: int, ranks: int
) -> None:
    space = Space({}, 8, global_batch=samples, ranks=ranks)
    sizes = Sizes(space, [1])
    for wanted in range(1, space.largest_micro_batch + 1):
        assert int(sizes.down(np.array([float(wanted)]))[0]) == space.plan(wanted, {}).micro_batch
    assert space.baseline.ranks == ranks
    assert space.largest_micro_batch == -(-samples // ranks)


@pytest.mark.parametrize(
    ("geometry", "largest"),
    [
        ({}, 0),
        ({"global_batch": 13}, 7),
        ({"global_batch": 13, "ranks": 2}, 4),
        ({"global_batch": 2, "ranks": 2}, 0),
        ({"global_batch": 15, "even_split": True}, 5),
        ({"global_batch": 13, "max_micro_batch": 5}, 5),
        ({"global_batch": 12, "may_change_accumulation": False}, 4),
        ({"global_batch": 4, "may_change_accumulation": False}, 0),
    ],
)
def test_what_needs_accumulation_is_tried_where_there_is_some(
    geometry: dict[str, Any], largest: int
) -> None:
    shared = Dimension(["once", "each"], accumulation={"each": True})
    space = Space({**DIMENSIONS, "parallel.accumulation": shared}, 4, **geometry)
    each = {**space.default_settings, "parallel.accumulation": "each"}
    assert space.largest_micro_batch_of(each) == largest
    assert space.largest_micro_batch_of(space.default_settings) == space.largest_micro_batch
    tried = [v["parallel.accumulation"] for v in space.variants()]
    assert tried.count("each") == (9 if largest else 0)
    plans = [space.plan(size, each) for size in range(1, 16)]
    assert [plan.settings["parallel.accumulation"] for plan in plans] == [
        "each" if plan.accumulation_steps > 1 else "once" for plan in plans
    ]
    assert all(p.micro_batch <= largest for p in plans if p.accumulation_steps > 1)


@pytest.mark.parametrize(
    ("geometry", "size"),
    [
        ({"global_batch": 13}, 13),
        ({"global_batch": 13, "ranks": 2}, 7),
        ({"global_batch": 2, "ranks": 2}, 1),
        ({"global_batch": 13, "max_micro_batch": 5}, 0),
        ({"global_batch": 12, "may_change_accumulation": False}, 0),
        ({"global_batch": 4, "may_change_accumulation": False}, 4),
    ],
)
def test_what_forbids_accumulation_is_tried_where_there_need_not_be_any(
    geometry: dict[str, Any], size: int
) -> None:
    whole = Dimension(["step", "backward"], accumulation={"backward": False})
    space = Space({**DIMENSIONS, "update.when": whole}, 4, **geometry)
    backward = {**space.default_settings, "update.when": "backward"}
    assert space.largest_micro_batch_of(backward) == size
    assert space.smallest_micro_batch_of(space.default_settings) == 1
    tried = [variant["update.when"] for variant in space.variants()]
    assert tried.count("backward") == (9 if size else 0)
    plans = [space.plan(wanted, backward) for wanted in range(1, 16)]
    assert [plan.settings["update.when"] for plan in plans] == [
        "step" if plan.accumulation_steps > 1 else "backward" for plan in plans
    ]
    least = space.smallest_micro_batch_of(backward)
    assert all(p.micro_batch >= least for p in plans if p.accumulation_steps == 1)


@pytest.mark.parametrize(
    ("asked", "smallest", "when_split"), [("default", 1, "default"), ("graphs", 8, "off")]
)
def test_one_value_of_several_may_forbid_accumulation(
    asked: str, smallest: int, when_split: str
) -> None:
    modes = Dimension(["off", "default", "graphs"], accumulation={"graphs": False})
    space, settings = Space({"compile.mode": modes}, 4, global_batch=8), {"compile.mode": asked}
    assert space.smallest_micro_batch_of(settings) == smallest
    assert space.plan(8, settings).settings == settings
    assert space.plan(4, settings).settings == {"compile.mode": when_split}
    refused = pytest.raises(InvalidArgument, match="graphs needs a plan with one micro-batch")
    with refused if asked == "graphs" else nullcontext():
        resolve(Plan.split(8, 4, settings=settings), space)


def test_what_depends_on_a_setting_that_needs_accumulation_goes_with_it() -> None:
    dimensions = {
        "parallel.bucket": Dimension(["small", "large"], when={"parallel.accumulation": ["each"]}),
        "parallel.accumulation": Dimension(["once", "each"], accumulation={"each": True}),
    }
    space = Space(dimensions, 8, global_batch=32)
    asked = {"parallel.bucket": "large", "parallel.accumulation": "each"}
    without = {**asked, "parallel.accumulation": "once"}
    found = [space.plan(*given).settings for given in ((8, asked), (32, asked), (8, without))]
    assert found == [asked, space.default_settings, space.default_settings]


@pytest.mark.parametrize("turned", [False, True])
def test_settings_that_exclude_each_other_are_reset_in_the_order_of_the_space(
    turned: bool,
) -> None:
    exclusive = {
        "a.x": Dimension([0, 1], when={"b.y": [0]}),
        "b.y": Dimension([0, 1], when={"a.x": [0]}),
    }
    first, last = sorted(exclusive, reverse=turned)
    space = Space({name: exclusive[name] for name in (first, last)}, 4)
    assert space.plan(4, {"a.x": 1, "b.y": 1}).settings == {first: 0, last: 1}


def test_a_plan_does_not_depend_on_how_texts_are_hashed() -> None:
    code = (
        "from autofit.plan import Dimension; from autofit.space import Space; "
        "names = [f's{n}.x' for n in range(6)]; "
        "d = {n: Dimension([0, 1], when={o: [0] for o in names if o != n}) for n in names}; "
        "print(Space(d, 4).plan(4, dict.fromkeys(names, 1)))"
    )
    said = {
        subprocess.check_output(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}
        )
        for seed in ("0", "1", "2")
    }
    assert len(said) == 1


@pytest.mark.parametrize("settings", [{"b.y": 1}, {}])
def test_what_a_value_depends_on_may_be_any_iterable(settings: dict[str, int]) -> None:
    with_one = Dimension([0, 1], when={"b.y": iter([1, None])})  # type: ignore[dict-item]  # what a plug-in may give all the same
    assert with_one.allowed_with(settings)
    assert with_one.allowed_with(settings), "also when it is asked again"


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


@pytest.mark.parametrize(("batch", "better"), [(509, 512), (13, 12), (7, 8), (1021, 1024)])
def test_a_global_batch_that_hardly_splits_evenly_is_noted(batch: int, better: int) -> None:
    (note,) = Space({}, batch, global_batch=batch, even_split=True).notes()
    assert str(batch) in note
    assert f"such as {better}" in note
    assert not [*Space({}, batch, global_batch=batch).notes()]
    assert not [*Space({}, better, global_batch=better, even_split=True).notes()] or better < 16
