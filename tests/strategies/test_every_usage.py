"""Every built-in strategy trains as plain PyTorch does, in every usage of autograd, or refuses."""

from __future__ import annotations

from functools import cache

import pytest

from autofit import Strategy
from autofit.registry import installed_names, load_strategies
from autofit.testing import PlainContext, Usage, check_usages, usages
from benchmarks.usage_matrix import DEVICE, STRATEGIES as BUILT_IN

OF_RANKS = {"parallel"}
COMPILED = {"compile"}
ON_A_GPU = {"cuda_allocator"}  # the arithmetic is the same
each_usage = pytest.mark.parametrize("usage", usages, ids=lambda usage: usage.name)
pytestmark = pytest.mark.usefixtures("any_time_is_worth_it")


def test_no_built_in_strategy_is_left_out() -> None:
    of_others = {"adam_state"}  # of an example, where it is installed
    assert {*installed_names()} - of_others == {*BUILT_IN, *COMPILED, *ON_A_GPU, *OF_RANKS}


@each_usage
@pytest.mark.parametrize("name", BUILT_IN)
def test_each_value_trains_alike(name: str, usage: Usage) -> None:
    check_usages(name, usages=[usage], capabilities=DEVICE)


PLAIN = Usage("plain", next(u.make_workload for u in usages if u.name == "lengths that change"))
SAME_MODEL = {
    "forward hooks",
    "forward hooks that read",
    "forward pre-hooks",
    "full backward hooks",
    "full backward pre-hooks",
    "hooks of all modules",
    "tensor hooks",
    "custom autograd functions",
    "vmap",
    "jvp",
    "retained graph",
    "weights written in place",
    "weights moved between passes",
    "activations written in place",
    "views of images written in place",
    "copies of images written in place",
    "inputs written after a frozen head",
    "unused branch",
    "gradients missing in a step",
    "loss in a reentrant checkpoint",
    "reentrant checkpoint",
    "second model",
    "average of weights",
    "state taken before",
    "deepcopy inside",
    "pickle inside",
}
"""What may come to a training after its search, without another model."""


@cache
def searched(name: str) -> Strategy:
    """Return a strategy that has looked at the plain training, once for all usages."""
    (strategy,) = load_strategies([name])
    found = strategy.dimensions(PlainContext(PLAIN.make_workload, "cpu", DEVICE))
    vars(strategy)["dimensions"] = lambda context: found
    return strategy


@pytest.mark.parametrize(
    "usage", [u for u in usages if u.name in SAME_MODEL], ids=lambda usage: usage.name
)
@pytest.mark.parametrize("name", BUILT_IN)
def test_what_comes_after_the_search_trains_alike(name: str, usage: Usage) -> None:
    check_usages(searched(name), usages=[usage], capabilities=DEVICE)


@pytest.mark.slow
@each_usage
@pytest.mark.timeout(1200)  # of twenty lengths the compiler sees several
@pytest.mark.usefixtures("any_blocks_are_worth_it")
def test_compiled_models_train_alike(usage: Usage) -> None:
    check_usages("compile", usages=[usage])


@pytest.mark.slow
@each_usage
def test_each_pair_trains_alike(usage: Usage) -> None:
    check_usages(BUILT_IN, usages=[usage], pairs=True, capabilities=DEVICE)
