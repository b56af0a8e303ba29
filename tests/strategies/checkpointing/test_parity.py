"""The gate finds every unit that trains otherwise when it runs twice, and no other."""

from __future__ import annotations

import importlib
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autofit.strategy import Strategy
from autofit.testing import PlainContext
from autofit.training.workload import Workload

WIDTH = 8


class Clean(nn.Module):
    """What the others are made of."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls, self.counts = 0, False
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.changed(x))).exp())

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return x


def changing(changed: Callable[[Any, torch.Tensor], torch.Tensor]) -> type[Clean]:
    """Return a kind of block whose input is changed so."""
    return type("Changing", (Clean,), {"changed": changed})


Dropout = changing(lambda _, x: torch.dropout(x, 0.3, True))
BatchNorm = changing(lambda block, x: block.norm(x))
NumpyRandom = changing(lambda _, x: x * np.random.rand())
PythonRandom = changing(lambda _, x: x * random.random())
InPlace = changing(lambda _, x: x.mul_(1.1))


NotANumber = changing(lambda _, x: x * math.nan)
WritesThroughData = changing(lambda _, x: x.data.mul_(1.1) + x * 0)
AverageInPlace = changing(
    lambda block, x: x * block.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1).clone()
)
OUTSIDE = count(1)  # which no one can put back
CountsOutside = changing(lambda _, x: x * next(OUTSIDE))


class SometimesSkips(Clean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1 if random.random() < 0.5 else super().forward(x)


class Counts(Clean):
    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class ShowsWhatItGot(Clean):
    """An attribute that each run writes alike is no harm."""

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.shown = [x]
        return x


class DrawsFromItsOwn(Clean):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


class CannotBeShown(Clean):
    """Its text is no key for what it is."""

    def extra_repr(self) -> str:
        raise RuntimeError


class RemembersTheLastStep(Clean):
    """As Transformer-XL does, in an attribute that the first step makes."""

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        before = vars(self).get("memory")
        self.memory = x.detach()
        return x if before is None else torch.cat([x, before])[: len(x)] + before.mean()


class AverageInADict(Clean):
    """Which a part of it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"mean": torch.ones(WIDTH)}
        vars(self.norm)["kept"] = self.kept

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["mean"].mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        kept: dict[str, torch.Tensor] = vars(self.norm)["kept"]
        return x * kept["mean"]


class Stack(nn.Module):
    def __init__(self, kinds: Iterable[Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Skips(Stack):
    """Runs its first block alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x).mean()


class Rounds(torch.autograd.Function):
    """Its gradients are a rounding larger in some of the steps, as kernels may be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, larger: Iterator[bool]) -> torch.Tensor:
        ctx.larger = larger
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * (1 + next(ctx.larger) * 2.0**-23), None


class Noisy(Stack):
    def __init__(self, kinds: Iterable[type[Clean]], *steps: bool) -> None:
        super().__init__(kinds)
        self.larger = cycle(steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Rounds.apply(super().forward(x), self.larger)  # type: ignore[no-untyped-call]  # torch does not annotate it


class Words(Stack):
    """Its embedding has sparse gradients."""

    def __init__(self, kinds: Iterable[type[Clean]]) -> None:
        super().__init__(kinds)
        self.words = nn.Embedding(20, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.words((9 * x.abs()).long()).mean(1))


def _with_a_flag() -> Clean:
    """Return a clean block but for an attribute of the instance, as a last block may have one."""
    block = Clean()
    block.counts = True
    return block


Expected = Mapping[str, str]
AMONG: dict[type[Clean], str] = {
    Counts: r"attribute blocks\.\d\.calls",
    RemembersTheLastStep: "gradient|loss",
    AverageInADict: "gradient|loss",
    DrawsFromItsOwn: "gradient|loss",
    InPlace: "cannot be recomputed",
    WritesThroughData: "gradient",
}
FINE: list[type[Clean]] = [Clean, Dropout, BatchNorm, AverageInPlace, NumpyRandom, PythonRandom]
CASES: dict[str, tuple[Callable[[], Stack], Expected]] = {
    "what is made right": (
        lambda: Stack([*FINE, SometimesSkips, ShowsWhatItGot, CannotBeShown]),
        {},
    ),
    "no number": (lambda: Stack([Clean, NotANumber, Clean]), {}),
    **{
        kind.__name__ + why: (partial(Stack, [Clean, kind, Clean]), {"1": why})
        for kind, why in AMONG.items()
    },
    "the last of its kind": (
        lambda: Stack([*[Clean] * 7, _with_a_flag]),
        {"7": "calls"},
    ),
    "a step that differs from itself": (
        lambda: Stack([Clean, CountsOutside, Clean]),
        dict.fromkeys("012", "two identical steps"),
    ),
    "noise between plain steps": (
        lambda: Noisy([Clean, Clean, WritesThroughData, Clean], False, True),
        {"2": "gradient"},
    ),
    "noise that only a checkpointed step meets": (
        lambda: Noisy([Clean, Clean, WritesThroughData, Clean], False, False, True),
        {"2": "gradient"},
    ),
    "sparse gradients": (lambda: Words([Clean, WritesThroughData]), {"1": "gradient"}),
    "what never ran": (lambda: Skips([Clean, Counts, Clean]), {"1": "not tried"}),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _gate(strategy: Strategy, model: nn.Module, layers: list[list[str]]) -> Any:
    """Return the gate's answer for some layers of units of a model."""
    batch = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    context = PlainContext(lambda: Workload(model, batch, optimizer=torch.optim.SGD))
    check = importlib.import_module("autofit.strategies.checkpointing.levels").check_parity
    return check(strategy, context, layers)


@pytest.mark.parametrize(("build", "expected"), CASES.values(), ids=CASES)
def test_what_differs_is_found_and_said_and_nothing_else(
    checkpointing: Strategy, build: Callable[[], Stack], expected: Expected
) -> None:
    model = build()
    units = [f"blocks.{number}" for number in range(len(model.blocks))]
    found = _gate(checkpointing, model, [units]).left_out
    assert found.keys() == {f"blocks.{number}" for number in expected}
    for number, why in expected.items():
        assert re.search(why, found[f"blocks.{number}"])


def test_it_says_what_a_forward_changes(checkpointing: Strategy) -> None:
    model = Stack([Clean, BatchNorm, AverageInPlace, PythonRandom, Dropout])
    assert _gate(checkpointing, model, [["blocks.1"]]).state == {
        "blocks.1.norm.running_mean",
        "blocks.1.norm.running_var",
        "blocks.1.norm.num_batches_tracked",
        "blocks.2.average",
        "Python's random state",
    }


class CountsNowAndThen(Counts):
    """From the second of three seeds alone."""

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return super().changed(x) if random.random() < 0.5 else x


class Around(nn.Sequential):
    """Counts its calls, where that is asked for."""

    calls = 0

    def __init__(self, inner: nn.Module, *, counts: bool = False) -> None:
        super().__init__(inner)
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return self[0](x)


@pytest.mark.parametrize("counts", [False, True], ids=["", "around it differs from the first on"])
@pytest.mark.parametrize(
    ("first_layer", "expected"), [(0, {"blocks.1", "blocks.1.0"}), (1, {"blocks.1.0"})]
)
def test_what_a_later_seed_alone_shows_is_found_in_the_units_within(
    checkpointing: Strategy, first_layer: int, expected: set[str], counts: bool
) -> None:
    middle = partial(Around, CountsNowAndThen(), counts=counts)
    model = Stack([partial(Around, Clean()), middle, partial(Around, Clean())])
    layers = [["blocks.0", "blocks.1", "blocks.2"], ["blocks.0.0", "blocks.1.0"]]
    found = _gate(checkpointing, model, layers[first_layer:]).left_out
    assert found.keys() == expected
    assert all("calls" in why for why in found.values())


def test_a_step_that_only_fits_with_checkpointing(checkpointing: Strategy) -> None:
    """Then every unit is tried by leaving it alone out."""
    model = Stack([Clean, Counts, Clean])
    blocks = list(model.blocks)

    def refuse(*_: Any) -> None:
        if sum("forward" not in vars(block) for block in blocks) > 1:
            raise torch.OutOfMemoryError("no room")

    model.register_forward_pre_hook(refuse)
    layers = [["blocks.0", "blocks.1", "blocks.2"], ["blocks.0.wide"]]
    found = _gate(checkpointing, model, layers).left_out
    assert found.keys() == {"blocks.1", "blocks.0.wide"}
    assert "calls" in found["blocks.1"]
    assert "does not fit" in found["blocks.0.wide"]


def test_the_report_notes_it(checkpointing: Strategy) -> None:
    model = Stack([Clean, Counts, Clean, Clean])
    context = PlainContext(lambda: Workload(model, torch.randn(4, WIDTH)))
    levels = checkpointing.dimensions(context)["checkpointing.level"]
    assert [note for note in context.notes if "'blocks.1' " in note and "calls" in note]
    named = {unit for payload in levels.payloads.values() for unit in payload["units"]}
    assert {"blocks.0", "blocks.2"} <= named
    assert "blocks.1" not in named
