"""What the recorder sees of a forward pass: bytes kept, calls, and what the model does itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.memory.tracer import MemoryTracer

NeedsSavedTensors = importlib.import_module(
    "autofit.strategies.checkpointing.saved_tensors"
).NeedsSavedTensors
BATCH, WIDTH = 4, 16
ACTIVATION = BATCH * WIDTH * 4


class Block(nn.Module):
    """Keeps what it is given, what tanh returns (twice, counted once) and what exp returns."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x))).exp()


class Stack(nn.Module):
    def __init__(self, itself: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.itself = itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if self.itself and index == 1:
                x = checkpoint(block, x, use_reentrant=self.itself == "reentrant")
            else:
                x = block(x)
        return x.mean()


class Outer(nn.Module):
    def __init__(self, itself: str) -> None:
        super().__init__()
        self.stack = Stack(itself)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(self.first(x))


Record = Callable[..., Any]


def _batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


@pytest.mark.parametrize("keep", [True, False])
def test_bytes_are_counted_once_and_weights_not(record: Record, keep: bool) -> None:
    model = Stack()
    timeline = record(model, _batch(), keep=keep).timeline
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    inner = 2 * ACTIVATION
    assert timeline.saved_bytes == 3 * inner
    assert timeline.gain("blocks.0") == ACTIVATION, "what it returns the next one keeps anyway"
    assert timeline.gain("blocks.2") == inner
    assert timeline.gain("blocks.1.one") <= 0


def test_letting_go_needs_no_memory_for_activations(record: Record) -> None:
    peaks: list[int] = []
    model, batch = nn.Sequential(*(Block() for _ in range(6))), _batch()
    for keep in (True, False):
        with MemoryTracer() as tracer:
            record(model, batch, keep=keep)
        peaks.append(tracer.allocator.peak_allocated_bytes)
    assert peaks[1] < peaks[0] / 2


def test_a_forward_that_needs_what_it_saved_is_recognized(
    record: Record,
) -> None:
    class Physics(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
            return slope.mean()

    with pytest.raises(NeedsSavedTensors):
        record(Physics(), _batch(), keep=False)
    assert record(Physics(), _batch(), keep=True).timeline.saved_bytes > 0


@pytest.mark.parametrize("itself", ["reentrant", "not reentrant"])
def test_a_model_that_checkpoints_itself_is_noticed(record: Record, itself: str) -> None:
    recorder = record(Outer(itself), _batch(), keep=True)
    timeline = recorder.timeline
    assert recorder.checkpointing == {"stack"}
    assert recorder.around_checkpoints == {"", "stack"}
    gains = {unit: timeline.gain(unit) for unit in timeline.calls_of if "blocks.1" in unit}
    assert all(gain <= 0 for gain in gains.values()), "there is nothing left to gain in it"


def test_inputs_that_change_in_place_are_noticed(record: Record) -> None:
    """Whether the module changes them or what runs after it."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.own, self.kept = nn.Identity(), nn.SiLU(inplace=True), nn.Tanh()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sine = (self.scale * x).sin()
            read = self.read(sine) * 2
            sine.add_(1)
            own: torch.Tensor = self.own(self.kept(sine)) + read
            return own.mean()

    assert record(Residual(), _batch()).overwritten == {"read", "own"}
