"""Looking at a step leaves what the user has compiled compiled: while it looks, and afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from autofit import Workload
from autofit.registry import installed_names, load_strategies
from autofit.strategy import calls_watched
from autofit.testing import PlainContext
from tests.strategies.trainings import WAYS_TO_COMPILE, in_place

Calls = import_module("autofit.strategies.calls").Calls  # lies elsewhere in the tree


@pytest.fixture
def backend() -> Any:
    """A backend of torch's compiler that notes each run of what it compiled in `ran`."""
    torch._dynamo.reset()
    ran: list[int] = []

    def compiled(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)

        return run

    compiled.ran = ran  # type: ignore[attr-defined]  # a plain function takes attributes
    yield compiled
    torch._dynamo.reset()


class Block(nn.Module):
    """Attention, a convolution and a feed-forward part, with an activation of the user's own."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mix, self.activation = nn.Conv1d(4, 4, 1), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(x).unsqueeze(1)
        x = x + scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        return x + self.down(self.activation(self.up(x)))


def gated(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.sigmoid(x)).square()


def of_a_function(backend: Any) -> nn.Module:
    compiled = torch.compile(gated, backend=backend, fullgraph=True)
    return nn.Sequential(*(Block(compiled) for _ in range(4)))


def of_blocks(backend: Any, compiled: Callable[..., nn.Module] = in_place) -> nn.Module:
    blocks = (Block(gated) for _ in range(4))
    return nn.Sequential(*(compiled(each, backend=backend, fullgraph=True) for each in blocks))


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4, 16)).square().mean().backward()


# A unit that is compiled in place for a full graph cannot be traced by torch 2.8: none is offered.
WAYS_WITH_LEVELS = [w for w in WAYS_TO_COMPILE if torch.__version__ >= "2.9" or w is not in_place]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, of_a_function) for name in installed_names() if name != "parallel"),
        *(("checkpointing", partial(of_blocks, compiled=way)) for way in WAYS_WITH_LEVELS),
    ],
)
# torch 2.8 compiles a block once more for each way of looking at it
@torch._dynamo.config.patch(recompile_limit=64)  # type: ignore[untyped-decorator]  # torch
def test_a_look_leaves_what_is_compiled_compiled(
    name: str,
    make: Callable[[Any], nn.Module],
    backend: Any,
) -> None:
    """Checkpointing finds its levels in steps that run compiled."""
    model = make(backend)
    step(model)
    before = len(backend.ran)
    (strategy,) = load_strategies([name])
    context = PlainContext(lambda: Workload(model, torch.ones(8, 4, 16)))
    levels = strategy.dimensions(context).get("checkpointing.level")
    context.close()
    assert levels is None or len(levels.values) > 1
    assert levels is None or len(backend.ran) > before
    backend.ran.clear()
    step(model)
    assert len(backend.ran) == before == 4


def test_calls_are_watched_around_compiled_code_and_not_within(backend: Any) -> None:
    model = of_blocks(backend)
    seen: list[tuple[str, str]] = []
    names = {module: name for name, module in model.named_modules()}
    with calls_watched(
        model,
        names,
        lambda module, args, kwargs: seen.append(("enter", names[module])),
        lambda module, output: seen.append(("leave", names[module])),
    ):
        step(model)
    blocks = [(what, str(number)) for number in range(4) for what in ("enter", "leave")]
    assert seen == [("enter", ""), *blocks, ("leave", "")]
    del seen[:]
    step(model)
    assert seen == []


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_call_that_raises_is_left(is_compiled: bool, backend: Any) -> None:
    left: list[nn.Module] = []
    module: nn.Module = Block(gated)
    if is_compiled:
        module.compile(backend=backend)
    with (
        calls_watched(module, [module], lambda *_: None, lambda module, _: left.append(module)),
        pytest.raises(RuntimeError),
    ):
        module(torch.ones(3, 5, 7))
    assert left == [module]


def test_what_is_compiled_takes_no_look_in(backend: Any) -> None:
    told: list[str] = []
    compiled = torch.compile(gated, backend=backend, fullgraph=True)
    x = torch.ones(3)
    with Calls(lambda function, _: told.append(getattr(function, "__name__", ""))):
        for _ in range(10):  # more often than the compiler repeats itself
            torch.tanh(compiled(x))
    assert told.count("tanh") == 10
    assert len(backend.ran) == 10, "the look is no part of what is compiled, in one piece"
    compiled(x)
    assert len(backend.ran) == 11
