"""Buffers of reductions, against sizes recorded on an H200 (132 multiprocessors)."""

from __future__ import annotations

import pytest

from autofit.prediction.cuda.reductions import Reduction, scratch_of_reduction
from autofit.prediction.gpus import find_gpu

H200 = find_gpu("H200")


@pytest.mark.parametrize(
    ("rows", "columns", "sizes"),
    [
        (4096, 512, [16777216, 16]),
        (4096, 2048, [67108864, 64]),
        (4096, 1536, [50331648, 48]),
        (4608, 12000, [141312000, 376]),
    ],
)
def test_the_gradient_of_a_bias(rows: int, columns: int, sizes: list[int]) -> None:
    reduction = Reduction((rows, columns), (columns, 1), frozenset({0}))
    assert scratch_of_reduction(reduction, H200) == sizes


def test_the_gradient_of_a_convolutions_bias() -> None:
    """A batch of 8 images of 192x192 with 32 channels, channel by channel."""
    strides = (32 * 192 * 192, 192 * 192, 192, 1)
    reduction = Reduction((8, 32, 192, 192), strides, frozenset({0, 2, 3}))
    assert scratch_of_reduction(reduction, H200) == [2176, 128]


@pytest.mark.parametrize(
    ("strides", "along"), [((0, 0), False), ((0, 1), True), ((1, 0), False), ((1, 4096), True)]
)
def test_the_gradient_of_a_mean_is_one_number_expanded(
    strides: tuple[int, int], along: bool
) -> None:
    """TensorIterator puts reduced dimensions first where strides do not tell them apart."""
    assert Reduction((4096, 512), strides, frozenset({0})).along_fastest is along


def test_a_small_reduction_needs_no_buffer() -> None:
    assert scratch_of_reduction(Reduction((8, 8), (8, 1), frozenset({0})), H200) == []


def test_nothing_reduced_and_nothing_there() -> None:
    assert scratch_of_reduction(Reduction((0, 8), (8, 1), frozenset({0})), H200) == []
