"""What a plan's user is warned of, by the numbers of samples that a step is given."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autofit.plan import Plan
from autofit.training.batch import FlatBatch, describe
from autofit.training.samples import MicroBatches, Rows
from autofit.training.watch import BatchWatch

LENGTH = 8


def said(watch: BatchWatch, *steps: tuple[Sequence[Any], Sequence[int]]) -> list[str]:
    """What is said of steps of these micro-batches, of so many samples each."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batches, sizes in steps:
            step = MicroBatches(tuple(map(FlatBatch.of, batches)), tuple(sizes))
            watch.look(step, stacklevel=1)
    return [str(each.message) for each in warned]


def collated(samples: int, length: int = LENGTH) -> dict[str, Any]:
    return {"x": torch.zeros(samples, length), "codebook": torch.zeros(64, LENGTH)}


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([(2, LENGTH)], ["got 2 samples", "16"]),  # each has a larger share of the constant
        ([(15, LENGTH)], ["got 15 samples", "16"]),
        ([(2, 2 * LENGTH)], ["got 2 samples"]),  # that take no more than 16 of the plan do
        ([(16, LENGTH), (16, 8 * LENGTH)], ["64 elements a sample", "8 at most"]),
    ],
)
def test_fewer_samples_and_larger_ones_are_said_once(
    steps: list[tuple[int, int]], words: list[str]
) -> None:
    """Where the plan and the search had 16 samples of 8."""
    watch = BatchWatch(Plan(16), {}, micro_batch_shapes=describe(collated(16)))
    (text,) = said(watch, *(([collated(*step)], step[:1]) for step in steps))
    assert all(word in text for word in words)


def test_a_tensor_that_is_larger_beside_a_larger_one_is_said() -> None:
    shapes = {"['image']": "float32[4, 3072]", "['ids']": "int64[4, 10]"}
    watch = BatchWatch(Plan(4), {}, micro_batch_shapes=shapes)
    given = {"image": torch.zeros(4, 3072), "ids": torch.zeros(4, 500, dtype=torch.int64)}
    (text,) = said(watch, ([given], [4]))
    assert "['ids'] has 500 elements a sample" in text


@pytest.mark.parametrize(("lengths", "is_said"), [((8, 8), False), ((8, 4), True)])
def test_ignored_targets_are_counted_beside_each_micro_batchs_own_padding(
    lengths: tuple[int, int], is_said: bool
) -> None:
    """Half of the targets are ignored in both, and a sample has 4 valid ones or 2."""
    targets = [torch.zeros(2, length, dtype=torch.int64) for length in lengths]
    for ids in targets:
        ids[:, ids.shape[1] // 2 :] = -100
    watch = BatchWatch(Plan(2, accumulation_steps=2), {}, weighs_samples=True)
    assert ["loss_weight" in text for text in said(watch, (targets, [2, 2]))] == [True] * is_said


def test_values_that_all_micro_batches_get_whole_are_no_targets() -> None:
    rows = Rows(frozenset({"ids"}), frozenset({"places"}))
    watch = BatchWatch(Plan(3, accumulation_steps=2), {}, samples=rows, weighs_samples=True)
    ids, places = torch.zeros(3, 4, dtype=torch.int64), torch.tensor([0, 1, -100])
    given = [{"ids": ids[:size], "places": places} for size in (3, 2)]
    assert not any("loss_weight" in text for text in said(watch, (given, [3, 2])))
