"""The arithmetic of batches, and plans and dimensions that survive JSON and pickling."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from autofit.codec import from_json, to_json
from autofit.dimension import DimensionForm
from autofit.errors import InvalidArgument
from autofit.plan import (
    MAX_RANKS,
    CostHint,
    Dimension,
    Plan,
    Scalar,
    split_evenly,
    steps_for,
    variant_key,
)

SETTINGS: list[tuple[str, Scalar]] = [("b.x", 1), ("a.y", "z")]


@pytest.mark.parametrize("samples", [1, 2, 7, 10, 64, 97])
def test_every_split_keeps_all_samples_in_sizes_that_differ_by_at_most_one(samples: int) -> None:
    for micro_batch in range(1, samples + 2):
        sizes = split_evenly(samples, steps_for(samples, micro_batch))
        assert sum(sizes) == samples
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= micro_batch
        assert sizes == tuple(sorted(sizes, reverse=True))


@pytest.mark.parametrize(
    ("plan", "sizes", "words"),
    [
        (Plan.split(10, 4), (4, 3, 3), "4 x 3"),
        (Plan.split(10, 9), (5, 5), "5 x 2"),
        (Plan.split(3, 8), (3,), "3 x 1"),
        (Plan.split(8, 2, ranks=4), (2,), "2 x 1 on each of 4 ranks"),
        (Plan.split(6, 2, ranks=4), (2,), "2 x 1 on each of 4 ranks (6 samples in all)"),
        (Plan(4, ranks=MAX_RANKS), (4,), f"4 x 1 on each of {MAX_RANKS} ranks"),
        (Plan(4, settings={"b.x": 1, "a.y": "z"}), (4,), "4 x 1, a.y=z, b.x=1"),
    ],
)
def test_a_plan_has_the_micro_batches_that_it_really_runs(
    plan: Plan, sizes: tuple[int, ...], words: str
) -> None:
    assert plan.micro_batch_sizes_of(0) == sizes
    assert str(plan) == words


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
@pytest.mark.parametrize("count", ["micro_batch", "accumulation_steps", "global_batch"])
def test_counts_are_whole_numbers_from_one(count: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=count):
        Plan(**{"micro_batch": 1, count: value})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Plan.split(0, 4), "global_batch"),
        (lambda: Plan.split(-2, 4), "global_batch"),
        (lambda: Plan.split(4, 0), "micro_batch"),
        (lambda: Plan.split(4, -1), "micro_batch"),
        (lambda: Plan(5, accumulation_steps=3, global_batch=10), "micro_batch=4"),
        (lambda: Plan(1, accumulation_steps=3, global_batch=2), r"\b2\b.*\b3\b"),
        (lambda: Plan(4, ranks=10**9), r"ranks.*1000000000"),
        (lambda: Plan(1, accumulation_steps=10**18), r"accumulation_steps.*1000000000000000000"),
        (lambda: Plan.split(10**18, 1), "accumulation_steps"),
        (lambda: Plan.split(6, 1, ranks=8), r"6 samples .* 8 ranks"),
        (lambda: Plan.split(7, 1, ranks=2, even=True), r"7 samples .* 2 ranks"),
        (lambda: Plan(6, global_batch=6).on(8), r"6 samples .* 8 ranks"),
        (lambda: Dimension([]), "value"),
        (lambda: Dimension(["a", "a"]), "distinct"),
        # a search of them did not end by its timeout
        (lambda: Dimension(range(200_000)), "at most 1000 values, got 200000"),
        (lambda: Dimension([1, 2], hints={3: CostHint(0.5)}), r"hints.*'3'"),
    ],
)
def test_what_makes_no_plan_and_no_dimension_is_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make()


def test_settings_have_no_order_and_cannot_be_changed() -> None:
    one, other = (Plan(4, settings=dict(each)) for each in (SETTINGS, reversed(SETTINGS)))
    assert {one} == {other}
    assert one.variant == variant_key(dict(SETTINGS))
    with pytest.raises(TypeError):
        one.settings["b.x"] = 2  # type: ignore[index]  # that it cannot be done is what is tested


@pytest.mark.parametrize(
    "plan", [Plan(3), Plan.split(10, 4, {"precision.dtype": "bfloat16", "checkpointing.level": 2})]
)
def test_plans_survive_json_and_pickling(plan: Plan) -> None:
    assert from_json(to_json(plan), Plan, "the plan") == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert from_json(to_json(plan) | {"from": "a later version"}, Plan, "the plan") == plan


def test_dimensions_survive_json_and_pickling() -> None:
    dimension = Dimension(
        [0, 1, 2],
        payloads={1: {"units": ["a"]}, 2: {"units": ["a", "b"]}},
        hints={2: CostHint(bytes_per_sample=0.4, fixed_bytes=0.5)},
        when={"precision.dtype": ["bfloat16"]},
        trial_cost_s=20.0,
        fresh_worker=True,
    )
    assert (
        from_json(to_json(DimensionForm.of(dimension)), DimensionForm, "it").dimension()
        == dimension
    )
    assert pickle.loads(pickle.dumps(dimension)) == copy.deepcopy(dimension) == dimension
    assert from_json({"values": ["default"]}, DimensionForm, "it").dimension() == Dimension(
        ["default"]
    )


@pytest.mark.parametrize(
    ("settings", "is_allowed"),
    [
        ({"a.x": "on", "b.y": 2}, True),
        ({"a.x": "off", "b.y": 2}, False),
        ({"a.x": "on"}, False),
    ],
)
def test_when_limits_a_dimension_to_settings_of_others(
    settings: dict[str, Scalar], is_allowed: bool
) -> None:
    dimension = Dimension([0, 1], when={"a.x": ["on"], "b.y": [1, 2]})
    assert dimension.allowed_with(settings) is is_allowed


@pytest.mark.parametrize(("samples", "ranks"), [(16, 2), (14, 2), (13, 3), (9, 4), (7, 4), (4, 4)])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
def test_ranks_share_all_samples_in_sizes_that_differ_by_at_most_one(
    samples: int, ranks: int, micro_batch: int
) -> None:
    plan = Plan.split(samples, micro_batch, ranks=ranks)
    by_rank = [plan.micro_batch_sizes_of(rank) for rank in range(ranks)]
    sizes = [size for own in by_rank for size in own]
    assert {len(own) for own in by_rank} == {plan.accumulation_steps}
    assert all(sum(own) > 0 for own in by_rank)
    assert sum(sizes) == samples == plan.samples_per_step
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == plan.micro_batch <= micro_batch
    assert from_json(to_json(plan), Plan, "the plan") == plan


@pytest.mark.parametrize(
    ("values", "is_ordered"),
    [
        ((0, 1, 2), True),
        ((1.0, 0.5, 0.05), True),
        ((0, 2048, 256), False),
        ((1.0, 0.5), False),
        ((False, True, 2), False),
        (("1", "2", "3"), False),
    ],
)
def test_values_are_ordered_where_three_or_more_grow_or_fall(
    values: tuple[Scalar, ...], is_ordered: bool
) -> None:
    assert Dimension(values).is_ordered is is_ordered
