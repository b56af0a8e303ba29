"""The first probe of a process loads libraries, for which the cap that was set left no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.base import MemoryReading
from autofit.devices.cpu import CpuDevice
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.messages import ProbeRequest
from autofit.units import MIB

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
    prober = open_probing(
        Greedy(*sizes),
        sample_batch=torch.ones(2, 4),
        vram_budget="64MiB",
        tamper=loads_libraries,
    ).prober
    measured = prober.probe(ProbeRequest(ResolvedPlan(Plan(2)))).measurement
    assert measured.outcome is outcome, measured
    if measured.ok:
        assert measured.held_bytes is not None
        assert LIBRARIES < measured.held_bytes <= BUDGET
