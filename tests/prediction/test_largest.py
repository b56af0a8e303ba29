"""The search for the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autofit.prediction.largest import MOST_LOOKS, largest_that_fits


def looks(need: Callable[[int], int], budget: int, start: int) -> tuple[int | None, list[int]]:
    looked: list[int] = []

    def watched(micro_batch: int) -> int:
        looked.append(micro_batch)
        return need(micro_batch)

    return largest_that_fits(watched, budget, start=start), looked


@pytest.mark.parametrize("start", [1, 7, 100, 5000])
def test_a_line_takes_few_looks(start: int) -> None:
    found, looked = looks(lambda n: 1000 + 10 * n, 8000, start)
    assert found == 700
    assert len(looked) <= 8


def test_steps_in_the_line_do_not_mislead() -> None:
    def need(n: int) -> int:
        return 1000 + -(-10 * n // 256) * 256

    found, _ = looks(need, 20_000, 8)
    assert found is not None
    assert need(found) <= 20_000 < need(found + 30)


@pytest.mark.parametrize("start", [1, 8, 10**6, 10**10])
@pytest.mark.parametrize("sample_bytes", [40, 160, 10_000])
def test_long_steps_hide_no_larger_micro_batch(start: int, sample_bytes: int) -> None:
    """A small model's needs stay the same until the allocator takes another segment of 2 MiB."""

    def need(n: int) -> int:
        return 600 * 2**20 + -(-sample_bytes * n // 2**21) * 2**21

    budget = 22 * 2**30
    found, _ = looks(need, budget, start)
    largest = (budget - 600 * 2**20) // sample_bytes
    assert found is not None
    assert 0.998 * largest < found <= largest


def test_nothing_fits() -> None:
    assert looks(lambda n: 1000 + n, 1000, 16)[0] is None


def test_exactly_one_sample_fits() -> None:
    assert looks(lambda n: 500 * n, 999, 16)[0] == 1


def test_the_number_of_looks_is_bounded() -> None:
    _, looked = looks(lambda n: int(n**0.3 * 1e6), int(2**6 * 1e6), 3)
    assert len(looked) <= MOST_LOOKS
