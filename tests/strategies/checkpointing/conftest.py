"""Five small networks that trip up plain checkpointing, each built alike every time."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from autofit.plan import Dimension, Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.strategy import Strategy
from autofit.testing import PlainContext
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

SETTING = "checkpointing.level"


class Normed(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))) + torch.tanh(x)


class Chain(nn.Module):
    """Blocks in turn, each called by `step(number, block, value)`; the loss is a mean square."""

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        step: Callable[[int, nn.Module, Any], Any],
        first: Callable[[torch.Tensor], Any] = lambda x: x,
        last: Callable[[Any], torch.Tensor] = lambda value: value,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.step, self.first, self.last = step, first, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.first(x)
        for number, block in enumerate(self.blocks):
            value = self.step(number, block, value)
        return self.last(value).square().mean()


def _layer() -> nn.Module:
    """A transformer layer with dropout."""
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)


def _recur(number: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Add what an LSTM returns, in tuples."""
    output, (hidden, _) = block(x)
    return x + output + hidden[-1].unsqueeze(1)


@dataclass
class Walk:
    """What blocks hand on: features, what earlier blocks left, and a count."""

    features: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0


class Keeping(nn.Module):
    """Writes to the object that it is given, and draws from Python's random numbers.

    Objects, None, dicts and keyword arguments go in, a dict comes out.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys, self.mix = nn.Linear(width, width), nn.Linear(2 * width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(
        self, walk: Walk, *, options: dict[str, Any], mask: torch.Tensor | None = None
    ) -> dict[str, Walk]:
        walk.calls += 1
        walk.keys.append(self.keys(walk.features))
        seen = torch.cat([walk.keys[-1].sin(), walk.keys[0] + options["mean"]], -1)
        mixed = torch.tanh(self.mix(seen)).exp() * random.uniform(0.5, options["most"])
        left = self.narrow(mixed) / walk.calls
        walk.features = walk.features + (left if mask is None else left * mask)
        return {"walk": walk}


def _hand_on(number: int, block: nn.Module, walk: Walk) -> Walk:
    mask = torch.ones_like(walk.features) if number % 2 else None
    options = {"mean": walk.features.mean(), "most": 1.5}
    made: dict[str, Walk] = block(walk, options=options, mask=mask)
    return made["walk"]


def _images() -> torch.Tensor:
    return torch.randn(4, 4, 12, 12)


def _words() -> torch.Tensor:
    return torch.randn(4, 10, 16)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "batch norm": (lambda: nn.Sequential(*(Normed(4) for _ in range(6))), _images),
    "dropout transformer": (
        lambda: Chain((_layer() for _ in range(6)), lambda _, block, x: block(src=x)),
        _words,
    ),
    "lstm": (
        lambda: Chain((nn.LSTM(12, 12, batch_first=True) for _ in range(6)), _recur),
        lambda: torch.randn(4, 6, 12),
    ),
    "shared layer": (lambda: Chain([_layer()] * 8, lambda _, block, x: block(x)), _words),
    "structured arguments": (
        lambda: Chain((Keeping(16) for _ in range(6)), _hand_on, Walk, lambda walk: walk.features),
        lambda: torch.randn(32, 16),
    ),
}


def workload(name: str) -> Workload:
    """The workload of one of the networks; the same weights and batch each time."""
    make_model, make_batch = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_model()
        return Workload(model, make_batch(), optimizer=lambda p: torch.optim.AdamW(p, 1e-2))


QUICK = ("structured arguments",)
"""What the quick tiers try; the others are slow."""


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in NETS]
)
def net(request: pytest.FixtureRequest) -> str:
    """The name of each network in turn."""
    return request.param


@pytest.fixture
def build(net: str) -> Callable[[], Workload]:
    """A function that builds the network's workload."""
    return lambda: workload(net)


@lru_cache
def _levels_of(net: str) -> Dimension:
    (strategy,) = load_strategies(["checkpointing"])
    return strategy.dimensions(PlainContext(lambda: workload(net)))[SETTING]


@pytest.fixture
def levels(net: str) -> Dimension:
    """The dimension that the strategy finds for the network, found once."""
    return _levels_of(net)


@pytest.fixture
def checkpointing() -> Strategy:
    return load_strategies(["checkpointing"])[0]


@pytest.fixture
def record() -> Callable[..., Any]:
    """What is recorded of a forward pass, and of the backward pass where it keeps what it needs."""
    recorder_of = importlib.import_module("autofit.strategies.checkpointing.saved_tensors").Recorder

    def run(model: nn.Module, batch: torch.Tensor, *, keep: bool = True) -> Any:
        weights = [*model.parameters()] or [nn.Parameter(torch.zeros(1))]
        resolved, cpu = ResolvedPlan(Plan(len(batch))), torch.device("cpu")
        with Training(model, torch.optim.SGD(weights), Recipe(), resolved, device=cpu) as training:
            recorder = recorder_of(training, batch, keep=keep)
            with recorder.watching():
                loss = training.loss(batch)
                if keep:
                    training.backward(loss)
        return recorder.recording()

    return run


@pytest.fixture
def train_at(checkpointing: Strategy) -> Callable[..., Training]:
    """A training of a workload with a level's payload; None: plain."""

    def make(
        workload: Workload, payload: Mapping[str, Any] | None, micro_batch: int | None = None
    ) -> Training:
        model = workload.build_model()
        settings = {SETTING: 0 if payload is None else 1}
        return Training(
            model,
            workload.build_optimizer(model),
            workload.recipe,
            ResolvedPlan(
                Plan(micro_batch or workload.sample_batch_size, settings=settings),
                {} if payload is None else {SETTING: payload},
                [checkpointing],
            ),
            device=torch.device("cpu"),
        )

    return make
