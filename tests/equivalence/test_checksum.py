"""A checksum of a tensor changes with its values, their order and their bits."""

from __future__ import annotations

import pytest
import torch

from autofit.equivalence.steps import checksum

MANY = 2**20 + 5  # elements of more than one piece


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int8])
def test_values_that_change_places_are_seen(dtype: torch.dtype) -> None:
    one = torch.zeros(MANY, dtype=dtype)
    one[0] = 1
    sums = {checksum(one.roll(places)) for places in (0, 1, MANY // 2, MANY - 3, MANY - 1)}
    assert len(sums) == 5


def test_the_last_bit_of_one_value_is_seen() -> None:
    values = torch.randn(7, 9).t()
    changed = values.clone()
    changed[4, 3] = torch.nextafter(changed[4, 3], torch.tensor(10.0))
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(changed)


def test_complex_values_and_none_at_all_have_a_checksum() -> None:
    assert checksum(torch.tensor([1 + 2j])) != checksum(torch.tensor([2 + 1j]))
    assert checksum(torch.empty(0)) == checksum(torch.empty(0))
