"""Levels train bit for bit as plain PyTorch does, in less memory, also under DDP."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.memory.tracer import MemoryTracer
from autofit.plan import Dimension
from autofit.training.training import Training
from autofit.training.workload import Workload

Build = Callable[[], Workload]
STEPS = 3
SAMPLES = 128
OF_EVERY_LEVEL = ("dropout transformer", "structured arguments")
"""Networks of which all levels train; of the others the first and the last do."""


def _after_training(training: Training, batch: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    random.seed(5)
    with training:
        losses = [training.step(batch) for _ in range(STEPS)]
    optimizer: Any = training.optimizer
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


# -- Two processes train a checkpointed model under DistributedDataParallel as they do a plain

PROGRAM = Path(__file__).parents[2] / "workloads" / "ddp_rank.py"
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
}


@pytest.fixture(scope="module")
def trained(
    python: Callable[..., subprocess.Popen[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the weights of both ranks."""
    folder = tmp_path_factory.mktemp("ddp")
    more = (folder, json.dumps(CASES))
    ranks = [python(PROGRAM, rank, *more, forks_workers=False) for rank in range(2)]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(trained: Path, case: str) -> None:
    for rank in range(2):
        plain, checkpointed = torch.load(trained / f"{case}-{rank}.pt")
        assert plain.keys() == checkpointed.keys()
        assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
