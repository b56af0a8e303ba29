"""Every installed strategy passes the suite that third parties run on theirs."""

from __future__ import annotations

import pytest

from autofit.registry import installed_names
from autofit.testing.conformance import check_strategy


def test_the_built_in_strategies_are_installed() -> None:
    assert {"precision", "memory_format", "checkpointing"} <= set(installed_names())


@pytest.mark.parametrize("name", installed_names())
def test_conformance(name: str) -> None:
    plain_ones = 2  # one of each workload
    assert check_strategy(name) > plain_ones, "a strategy that offers nothing was not tried"
