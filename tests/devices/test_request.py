"""Budgets and names of devices, before there is a device."""

from __future__ import annotations

import pytest

from autofit.devices.request import budget_bytes, check_budget
from autofit.errors import InvalidArgument


@pytest.mark.parametrize("fraction", [0.01, 0.125, 0.5, 1.0])
def test_any_fraction_may_be_a_budget(fraction: float) -> None:
    check_budget(fraction)


@pytest.mark.parametrize("given", [0.0, 1.01, float("nan"), 2**60, "1024PiB", "2000000TiB"])
def test_what_no_device_has_is_refused(given: float | str) -> None:
    with pytest.raises(InvalidArgument):
        check_budget(given)


def test_a_budget_larger_than_the_cpu_names_the_way_to_search_on_it() -> None:
    for is_cpu in (True, False):
        with pytest.raises(InvalidArgument, match=r"24\.0 GiB.*15\.0 GiB") as refused:
            budget_bytes("24GiB", total_bytes=15 * 2**30, free_bytes=2**30, is_cpu=is_cpu)
        assert ('device="cpu"' in str(refused.value)) == is_cpu
