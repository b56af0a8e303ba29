"""Every installed strategy passes the suite that third parties run on theirs."""

from __future__ import annotations

import pytest

from autofit.registry import installed_names
from autofit.testing.conformance import check_strategy
from tests.testing.test_conformance import perceptron

WITH_TESTS_OF_THEIR_OWN = {
    "attention",
    "compile",
    "convolution",
    "head_loss",
    "offload",
    "parallel",
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(set(installed_names()) - WITH_TESTS_OF_THEIR_OWN))
def test_conformance(name: str) -> None:
    plain_ones = 2  # one of each workload
    assert check_strategy(name) > plain_ones, "a strategy that offers nothing was not tried"


def test_conformance_of_compile() -> None:
    assert check_strategy("compile", workloads=[perceptron]) == 2  # off, on
