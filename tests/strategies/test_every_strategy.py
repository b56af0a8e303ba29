"""Every installed strategy passes the suite that third parties run on theirs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.registry import installed_names
from autofit.testing.conformance import check_strategy
from autofit.training.workload import Workload

WITH_TESTS_OF_THEIR_OWN = {
    "attention",
    "compile",
    "convolution",
    "cuda_allocator",
    "head_loss",
    "offload",
    "parallel",
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(set(installed_names()) - WITH_TESTS_OF_THEIR_OWN))
def test_conformance(name: str) -> None:
    plain_ones = 2  # one of each workload
    assert check_strategy(name) > plain_ones, "a strategy that offers nothing was not tried"


def perceptron() -> Workload:
    """Little to compile: every training of the suite is compiled anew."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    batch = torch.randn(4, 8), torch.randn(4, 8)
    return Workload(model, batch, criterion=nn.functional.mse_loss)


def test_conformance_of_compile() -> None:
    assert check_strategy("compile", workloads=[perceptron]) == 3  # off, on, a budget
