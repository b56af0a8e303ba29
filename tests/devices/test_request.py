"""Budgets and names of devices, before there is a device."""

from __future__ import annotations

import pytest

from autofit.devices.request import check_budget
from autofit.errors import InvalidArgument


@pytest.mark.parametrize("fraction", [0.01, 0.125, 0.5, 1.0])
def test_any_fraction_may_be_a_budget(fraction: float) -> None:
    check_budget(fraction)


@pytest.mark.parametrize("given", [0.0, 1.01, float("nan"), 2**60, "1024PiB", "2000000TiB"])
def test_what_no_device_has_is_refused(given: float | str) -> None:
    with pytest.raises(InvalidArgument):
        check_budget(given)
