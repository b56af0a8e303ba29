"""Looks that end a worker, and the first probe of a process, which loads libraries."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.base import MemoryReading
from autofit.devices.cpu import CpuDevice
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.registry import load_strategies
from autofit.searching.engine import run_search
from autofit.training.workload import Workload
from autofit.units import MIB

SAMPLES = 4


class Ends(nn.Module):
    """Does something to its process from a micro-batch on."""

    def __init__(self, end: Callable[[], object], least: int) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
        self.body, self.end, self.least = nn.Sequential(*layers), end, least

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) >= self.least:
            self.end()
        return self.body(inputs)


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDS: dict[str, Callable[[], object]] = {"killed": _is_killed, "hangs": partial(time.sleep, 3600.0)}


def _opened(end: str, least: int, *names: str, **more: Any) -> Prober:
    workload = Workload(Ends(ENDS[end], least), torch.randn(SAMPLES, 64), **more)
    deadlines = Deadlines(shortest_s=8.0, patience=1.0)
    return open_prober(
        workload, load_strategies(names), Target("cpu", "64MiB"), deadlines=deadlines
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_look_that_ends_its_worker_leaves_its_strategy_out(end: str) -> None:
    with _opened(end, 16, "checkpointing", "optimizer") as prober:
        survey = prober.survey()
    assert set(survey.dimensions) >= {"optimizer.when"}
    assert "checkpointing.level" not in survey.dimensions
    (note,) = (note for note in survey.notes if note.startswith("checkpointing"))
    assert "left out" in note


def _refused() -> None:
    raise ValueError("too many samples")


def test_a_model_that_refuses_more_samples_is_looked_at_with_few() -> None:
    workload = Workload(Ends(_refused, SAMPLES + 1), torch.randn(SAMPLES, 64))
    with open_prober(
        workload, load_strategies(["checkpointing"]), Target("cpu", "64MiB")
    ) as prober:
        survey = prober.survey()
    assert len(survey.dimensions["checkpointing.level"].values) > 1


@pytest.mark.slow
def test_such_a_model_is_searched_below_the_size_that_ends_its_worker() -> None:
    with _opened("killed", 16, "checkpointing", global_batch=32) as prober:
        survey = prober.survey()
        spec = SearchSpec(survey.space(), 64 * MIB, seed=0, identity={"test": "ends"})
        result = run_search(prober, spec, max_probes=8)
    assert result.best.ok
    assert result.best.plan.micro_batch < 16
    assert result.baseline.plan.samples_per_step == 32


# -- The first probe of a process loads libraries, for which the cap that was set left no room

BUDGET = 64 * MIB
LIBRARIES = 16 * MIB


class LoadsLibraries(CpuDevice):
    """Beside its allocator, it holds libraries from its first training on."""

    loaded_bytes = 0

    def read(self) -> MemoryReading:
        return replace(super().read(), non_torch_bytes=self.loaded_bytes)

    def limit(self, vram_budget_bytes: int) -> None:
        super().limit(vram_budget_bytes - self.loaded_bytes)

    @contextmanager
    def accounting(self) -> Iterator[None]:
        self.loaded_bytes = LIBRARIES
        with super().accounting():
            yield


class Greedy(nn.Module):
    """Once holds some MiB, frees them, and asks for more than the cache then has in one piece."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for size in self.sizes:
            held = inputs.new_zeros(size * MIB // 4)
            del held
        self.sizes = ()
        return self.layer(inputs)


def loads_libraries(device: CpuDevice) -> CpuDevice:
    return LoadsLibraries()


@pytest.mark.parametrize(("sizes", "outcome"), [((22, 30), Outcome.OK), ((54,), Outcome.OOM)])
def test_a_probe_that_loads_libraries_is_held_to_the_budget_beside_them(
    sizes: tuple[int, ...], outcome: Outcome, open_probing: Any
) -> None:
    prober: Any = open_probing(
        Greedy(*sizes),
        sample_batch=torch.ones(2, 4),
        vram_budget="64MiB",
        tamper=loads_libraries,
    ).prober
    measured = prober.probe(ProbeRequest(ResolvedPlan(Plan(2)))).measurement
    assert measured.outcome is outcome, measured
    if measured.ok:
        assert LIBRARIES < measured.held_bytes <= BUDGET
