"""Levels of every network train bit for bit as plain PyTorch does, in less memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autofit.memory.tracer import MemoryTracer
from autofit.plan import Dimension
from autofit.training.training import Training
from autofit.training.workload import Workload

Build = Callable[[], Workload]
STEPS = 3
SAMPLES = 128
OF_EVERY_LEVEL = ("dropout transformer", "objects handed on")
"""Networks of which all levels train; of the others the first and the last do."""


def _after_training(training: Training, batch: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    random.seed(5)
    with training:
        losses = [training.step(batch) for _ in range(STEPS)]
    optimizer = training.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    moments = {
        f"{key} of parameter {index}": value
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    random_states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    tensors = {**training.model.state_dict(), **dict(training.model.named_buffers()), **moments}
    return {"losses": torch.stack(losses), **tensors, **random_states}


def _assert_same(plain: Mapping[str, Any], other: Mapping[str, Any], level: object) -> None:
    assert plain.keys() == other.keys()
    for name, value in plain.items():
        same = torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
        assert same, f"{name} differs at level {level}"


def test_every_level_is_bit_exact(
    net: str, build: Build, levels: Dimension, train_at: Callable[..., Training]
) -> None:
    assert len(levels.values) > 2, "there must be something between none and least memory"
    batch = build().sample_batch
    plain = _after_training(train_at(build(), None), batch)
    chosen = levels.values[1:] if net in OF_EVERY_LEVEL else [levels.values[1], levels.values[-1]]
    for level in chosen:
        trained = _after_training(train_at(build(), levels.payloads[level]), batch)
        _assert_same(plain, trained, level)


def _peak_bytes(training: Training, batch: Any) -> int:
    tracer = MemoryTracer()
    with training, tracer:
        training.accumulate(batch)
    return tracer.allocator.peak_allocated_bytes


def test_the_least_memory_level_needs_less_than_half(
    build: Build, levels: Dimension, train_at: Callable[..., Training]
) -> None:
    batch = build().batch(SAMPLES)
    least = levels.values[-1]
    peaks = {
        level: _peak_bytes(train_at(build(), levels.payloads.get(level), SAMPLES), batch)
        for level in (0, least)
    }
    assert peaks[least] < peaks[0] / 2
