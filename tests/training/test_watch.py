"""What a plan's user is warned of, by the numbers of samples that a step is given."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from autofit.plan import Plan
from autofit.training.batch import describe
from autofit.training.samples import MicroBatches, Rows
from autofit.training.watch import BatchWatch

LENGTH = 8


def collated(samples: int, length: int = LENGTH) -> dict[str, Any]:
    return {"x": torch.zeros(samples, length), "codebook": torch.zeros(64, LENGTH)}


def warned_of(*steps: tuple[int, int]) -> list[str]:
    """What is said of steps of (samples, length), where the plan and the search had 16 of 8."""
    watch = BatchWatch(Plan(16), {}, micro_batch_shapes=describe(collated(16)))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for samples, length in steps:
            made = MicroBatches((collated(samples, length),), (samples,))
            watch.look(made, stacklevel=1)
    return [str(each.message) for each in warned]


@pytest.mark.parametrize("samples", [2, 15])
def test_fewer_samples_beside_a_constant_are_not_larger_samples(samples: int) -> None:
    """Each has a larger share of the constant."""
    (about_size,) = warned_of((samples, LENGTH))
    assert f"got {samples} samples" in about_size
    assert "16" in about_size


def test_larger_samples_are_said_with_their_own_elements() -> None:
    (larger,) = warned_of((16, LENGTH), (16, 8 * LENGTH))
    assert "64 elements a sample" in larger
    assert "8 at most" in larger


def test_a_tensor_that_is_larger_beside_a_larger_one_is_said() -> None:
    shapes = {"['image']": "float32[4, 3072]", "['ids']": "int64[4, 10]"}
    watch = BatchWatch(Plan(4), {}, micro_batch_shapes=shapes)
    given = {"image": torch.zeros(4, 3072), "ids": torch.zeros(4, 500, dtype=torch.int64)}
    with pytest.warns(UserWarning, match="ids.* has 500 elements a sample"):
        watch.look(MicroBatches((given,), (4,)), stacklevel=1)


def test_fewer_samples_that_are_larger_take_no_more_than_the_plan_does() -> None:
    (about_size,) = warned_of((2, 2 * LENGTH))
    assert "got 2 samples" in about_size


def test_ignored_targets_are_counted_beside_each_micro_batchs_own_padding() -> None:
    """Half of the targets are ignored in both, and a sample has 4 valid ones or 2."""

    def targets(length: int) -> torch.Tensor:
        ids = torch.zeros(2, length, dtype=torch.int64)
        ids[:, length // 2 :] = -100
        return ids

    def said(*lengths: int) -> list[str]:
        watch = BatchWatch(Plan(2, accumulation_steps=2), {}, weighs_samples=True)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            watch.look(MicroBatches(tuple(map(targets, lengths)), (2, 2)), stacklevel=1)
        return [str(each.message) for each in warned]

    assert said(8, 8) == []
    (unequal,) = said(8, 4)
    assert "loss_weight" in unequal


def test_values_that_all_micro_batches_get_whole_are_no_targets() -> None:
    rows = Rows(frozenset({"ids"}), frozenset({"places"}))
    watch = BatchWatch(Plan(3, accumulation_steps=2), {}, samples=rows, weighs_samples=True)
    places = torch.tensor([0, 1, -100])
    given = tuple(
        {"ids": torch.zeros(size, 4, dtype=torch.int64), "places": places} for size in (3, 2)
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        watch.look(MicroBatches(given, (3, 2)), stacklevel=1)
    assert [str(each.message) for each in warned if "loss_weight" in str(each.message)] == []
