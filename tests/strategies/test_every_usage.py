"""Every built-in strategy trains as plain PyTorch does, in every usage of autograd, or refuses."""

from __future__ import annotations

import pytest

from autofit.registry import installed_names
from autofit.strategy import Capabilities
from autofit.testing import Usage, check_usages, usages

OF_RANKS = {"parallel"}
COMPILED = {"compile"}
BUILT_IN = (
    "attention",
    "checkpointing",
    "convolution",
    "head_loss",
    "memory_format",
    "offload",
    "optimizer",
    "precision",
)
DEVICE = Capabilities("cuda", bfloat16=True, float16=True, tf32=True, compute_capability=(9, 0))
"""What is only offered on an NVIDIA GPU is tried too; it runs on the CPU."""

each_usage = pytest.mark.parametrize("usage", usages, ids=lambda usage: usage.name)
pytestmark = pytest.mark.usefixtures("any_time_is_worth_it")


def test_no_built_in_strategy_is_left_out() -> None:
    of_others = {"adam_state"}  # of an example, where it is installed
    assert {*installed_names()} - of_others == {*BUILT_IN, *COMPILED, *OF_RANKS}


@each_usage
@pytest.mark.parametrize("name", BUILT_IN)
def test_each_value_trains_alike(name: str, usage: Usage) -> None:
    check_usages(name, usages=[usage], capabilities=DEVICE)


@pytest.mark.slow
@each_usage
def test_compiled_models_train_alike(usage: Usage) -> None:
    check_usages("compile", usages=[usage])


@pytest.mark.slow
@each_usage
def test_each_pair_trains_alike(usage: Usage) -> None:
    check_usages(BUILT_IN, usages=[usage], pairs=True, capabilities=DEVICE)
