"""The gate finds every unit that trains otherwise when it runs twice, and no other."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
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
        self.calls = 0
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.changed(x))).exp())

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x


def changing(changed: Callable[[Any, torch.Tensor], torch.Tensor]) -> type[Clean]:
    """Return a kind of block whose input is changed so."""
    return type("Changing", (Clean,), {"changed": changed})


Dropout = changing(lambda _, x: torch.dropout(x, 0.3, True))
BatchNorm = changing(lambda block, x: block.norm(x))
NumpyRandom = changing(lambda _, x: x * np.random.rand())
PythonRandom = changing(lambda _, x: x * random.random())
InPlace = changing(lambda _, x: x.mul_(1.1))


class WritesThroughData(Clean):
    def changed(self, x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(1.1)
        return x


class AverageInPlace(Clean):
    def changed(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * self.average


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
    def __init__(self, kinds: list[type[Clean]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


FINE: list[type[Clean]] = [
    Clean,
    Dropout,
    BatchNorm,
    AverageInPlace,
    NumpyRandom,
    PythonRandom,
    SometimesSkips,
    ShowsWhatItGot,
]
Gate = Callable[[nn.Module, list[list[str]]], Any]
HARMFUL = {
    Counts: r"attribute blocks\.\d\.calls",
    RemembersTheLastStep: "gradient|loss",
    AverageInADict: "gradient|loss",
    DrawsFromItsOwn: "gradient|loss",
    InPlace: "cannot be recomputed",
    WritesThroughData: "gradient",
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _context(model: nn.Module) -> PlainContext:
    batch = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    return PlainContext(lambda: Workload(model, batch, optimizer=torch.optim.SGD))


@pytest.fixture
def gate(checkpointing: Any, part: Callable[[str], Any]) -> Gate:
    """The gate's answer for some layers of units of a model."""
    check = part("levels").check_parity
    return lambda model, layers: check(checkpointing, _context(model), layers)


def test_what_is_made_right_is_let_through(gate: Gate) -> None:
    assert gate(Stack(FINE), [[f"blocks.{index}" for index in range(len(FINE))]]).left_out == {}


class NotANumber(Clean):
    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x * math.nan


def test_a_model_whose_loss_is_not_a_number_can_be_compared(gate: Gate) -> None:
    assert gate(Stack([Clean, NotANumber, Clean]), [["blocks.0", "blocks.1"]]).left_out == {}


@pytest.mark.parametrize(("kind", "why"), HARMFUL.items())
def test_what_is_not_is_found_and_said(gate: Gate, kind: type[Clean], why: str) -> None:
    units = [f"blocks.{index}" for index in range(3)]
    found = gate(Stack([Clean, kind, Clean]), [units]).left_out
    assert set(found) == {"blocks.1"}
    assert [reason for reason in found.values() if not re.search(why, reason)] == []


class CountsOutside(Clean):
    """In a place that no one can put back."""

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.scale)

    scale = count(1)


def test_where_a_step_cannot_be_repeated_nothing_is_offered(gate: Gate) -> None:
    units = [f"blocks.{index}" for index in range(3)]
    found = gate(Stack([Clean, CountsOutside, Clean]), [units]).left_out
    assert set(found) == set(units)
    assert all("two identical steps" in why for why in found.values())


class Rounds(torch.autograd.Function):
    """Its gradients are a rounding larger in some of the steps, as kernels may be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, larger: Iterator[bool]) -> torch.Tensor:
        ctx.larger = larger
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * (1 + next(ctx.larger) * 2.0**-23), None


@pytest.mark.parametrize("steps", [(False, True), (False, False, True)])
def test_noise_of_a_rounding_is_no_difference(gate: Gate, steps: tuple[bool, ...]) -> None:
    """Neither between plain steps nor where only a step with units checkpointed meets it."""
    larger = cycle(steps)

    class Noisy(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Rounds.apply(super().forward(x), larger)  # type: ignore[no-untyped-call]  # torch does not annotate it

    units = [f"blocks.{index}" for index in range(4)]
    found = gate(Noisy([Clean, Clean, WritesThroughData, Clean]), [units]).left_out
    assert set(found) == {"blocks.2"}


def test_sparse_gradients_are_compared(gate: Gate) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, WIDTH, sparse=True)
            self.stack = Stack([Clean, WritesThroughData])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stack(self.words((9 * x.abs()).long()).mean(1))

    units = [f"stack.blocks.{index}" for index in range(2)]
    assert set(gate(Words(), [units]).left_out) == {"stack.blocks.1"}


def test_it_says_which_buffers_a_forward_changes(gate: Gate) -> None:
    model = Stack([Clean, BatchNorm, AverageInPlace])
    found = gate(model, [["blocks.1"]]).state
    assert found == {
        "blocks.1.norm.running_mean",
        "blocks.1.norm.running_var",
        "blocks.1.norm.num_batches_tracked",
        "blocks.2.average",
    }


def test_it_says_which_random_states_a_forward_moves(gate: Gate) -> None:
    found = gate(Stack([Clean, PythonRandom, Dropout]), [["blocks.1", "blocks.2"]])
    assert found.left_out == {}
    assert found.state == {"Python's random state"}


def test_units_that_never_ran_are_judged_by_their_like(gate: Gate) -> None:
    class Skips(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Stack.forward(self, x) if len(self.blocks) < 3 else self.blocks[0](x).mean()

    units = [f"blocks.{index}" for index in range(3)]
    found = gate(Skips([Clean, Counts, Clean]), [units]).left_out
    assert set(found) == {"blocks.1"}
    assert "not tried" in found["blocks.1"]


class CountsNowAndThen(Clean):
    """From the second of three seeds alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if random.random() < 0.5:
            self.calls += 1
        return super().forward(x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("first_layer", "expected"), [(0, {"blocks.1", "blocks.1.inner"}), (1, {"blocks.1.inner"})]
)
def test_what_a_later_seed_alone_shows_is_found_in_the_units_within(
    gate: Gate, first_layer: int, expected: set[str]
) -> None:
    model = Stack([])
    model.blocks.extend([Around(Clean()), Around(CountsNowAndThen()), Around(Clean())])
    layers = [[f"blocks.{index}" for index in range(3)], ["blocks.0.inner", "blocks.1.inner"]]
    found = gate(model, layers[first_layer:])
    assert set(found.left_out) == expected
    assert all("calls" in why for why in found.left_out.values())


def test_a_step_that_only_fits_with_checkpointing(gate: Gate) -> None:
    """Then every unit is tried by leaving it alone out."""
    model = Stack([Clean, Counts, Clean])
    patched = [block.__dict__ for block in model.blocks]

    def refuse(*_: Any) -> None:
        if sum("forward" not in attributes for attributes in patched) > 1:
            raise torch.OutOfMemoryError("no room")

    model.register_forward_pre_hook(refuse)
    layers = [["blocks.0", "blocks.1", "blocks.2"], ["blocks.0.wide"]]
    found = gate(model, layers).left_out
    assert set(found) == {"blocks.1", "blocks.0.wide"}
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
