"""The rows of the catalogue that need a GPU: real faults of a real device."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.nvml import Nvml, device_uuid
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan
from autofit.probing.client import WorkerProber
from autofit.probing.deadlines import Deadlines
from autofit.probing.prober import ProbeRequest
from autofit.units import GIB, MIB
from autofit.workload import Workload

pytestmark = pytest.mark.cuda

CALM, STORMY = 2, 64
SECONDS_FOR_MEMORY_TO_COME_BACK = 30.0

NEIGHBOUR = """
import sys, torch
held = torch.zeros(1, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    held = torch.empty(int(line), dtype=torch.uint8, device="cuda")
    print("held", flush=True)
"""

INNOCENT = """
import torch
from torch import nn
from autofit.plan import Plan
from autofit.probing.client import WorkerProber
from autofit.probing.prober import ProbeRequest
from autofit.workload import Workload

with WorkerProber(Workload(nn.Linear(16, 16), torch.ones(2, 16)), device="cuda") as prober:
    print(prober.probe(ProbeRequest(Plan(2))).outcome, torch.cuda.is_initialized())
"""

KILLED = """
import torch
from torch import nn
from autofit.plan import Plan
from autofit.probing.client import WorkerProber
from autofit.probing.prober import ProbeRequest
from autofit.workload import Workload

class Hangs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, inputs):
        self.held = torch.empty(2**30, dtype=torch.uint8, device=inputs.device)
        print("hanging", flush=True)
        torch.cuda._sleep(1 << 45)
        return self.layer(inputs)

with WorkerProber(Workload(Hangs(), torch.ones(2, 16)), device="cuda") as prober:
    print("ready", flush=True)
    prober.probe(ProbeRequest(Plan(2)))
"""


class AllocatesInBackward(torch.autograd.Function):
    """Needs 6 GiB in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + gradient.new_empty(6 * GIB // 4).max()


class Hungry(nn.Module):
    """Needs more than 4 GiB in the phase that it is told to, at a stormy micro-batch."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase
        # 1.25 GiB of weights: with gradients and Adam's two states 5 GiB, at any micro-batch.
        self.layer = nn.Linear(16, 20 * MIB if phase == "optimizer" else 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        if len(inputs) < STORMY:
            return output
        if self.phase == "forward":
            return output + output.new_empty(6 * GIB // 4).max()
        return AllocatesInBackward.apply(output)  # type: ignore[no-any-return, no-untyped-call]  # torch left it so


class Faulty(nn.Module):
    """Runs `fault` at a stormy micro-batch."""

    def __init__(self, fault: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.fault = fault

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        if len(inputs) >= STORMY:
            self.fault(output)
        return output


def asserts_on_the_device(output: torch.Tensor) -> None:
    """Asynchronous: nothing in the step looks at the result."""
    output.new_zeros(4)[torch.tensor([10**6], device=output.device)]


def never_ends(_: torch.Tensor) -> None:
    torch.cuda._sleep(1 << 45)  # type: ignore[no-untyped-call]  # torch left it so


def uses_cublas_anew(output: torch.Tensor) -> None:
    """A new thread needs a handle, which cuBLAS allocates outside torch's allocator."""
    errors: list[BaseException] = []

    def multiply() -> None:
        left = output.detach()[:16, :16].contiguous()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch left it so
                torch.mm(left, left)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def probe() -> Iterator[Callable[..., Measurement]]:
    """Probes in a worker on the GPU; its `.prober` is the prober opened last."""
    opened: list[WorkerProber] = []

    def run(model: nn.Module, micro_batch: int, vram_budget: str | None = "4GiB") -> Measurement:
        if not opened:
            opened.append(
                WorkerProber(
                    Workload(model, torch.ones(CALM, 16)),
                    device="cuda",
                    vram_budget=vram_budget,
                    deadlines=Deadlines(shortest_s=20.0),
                )
            )
        request = ProbeRequest(Plan(micro_batch), expected_seconds=0.1)
        return opened[0].probe(request)

    yield run
    for prober in opened:
        prober.close()


@pytest.mark.parametrize(
    ("phase", "micro_batch"), [("forward", STORMY), ("backward", STORMY), ("optimizer", CALM)]
)
def test_the_cap_is_met_in_any_phase(probe: Any, phase: str, micro_batch: int) -> None:
    model = Hungry(phase)
    measurement = probe(model, micro_batch)
    assert measurement.outcome is Outcome.OOM
    assert "Tried to allocate" in measurement.detail
    if micro_batch != CALM:
        assert probe(model, CALM).ok


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(asserts_on_the_device, Outcome.POISONED), (never_ends, Outcome.TIMEOUT)],
)
def test_after_a_fault_of_the_device_the_search_goes_on(
    probe: Any, fault: Any, outcome: Outcome
) -> None:
    model = Faulty(fault)
    assert probe(model, STORMY).outcome is outcome
    assert probe(model, CALM).ok


@pytest.fixture
def nvml() -> Nvml:
    """The first visible device as NVML sees it."""
    return Nvml(device_uuid(0))


def used_bytes(nvml: Nvml) -> int:
    reading = nvml.read()
    if reading is None:
        pytest.skip("NVML does not tell the device's memory here")
    return reading.used_bytes


class Neighbour:
    """Another process on the device, with a context and nothing else until it is told."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._await("ready")

    def holds(self, nbytes: int) -> None:
        """Have it hold so many bytes from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{nbytes}\n")
        self._process.stdin.flush()
        self._await("held")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _await(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{word}\n"


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    """A neighbour that is gone after the test."""
    process = Neighbour()
    yield process
    process.kill()


def test_memory_that_another_process_takes_marks_the_probe(
    probe: Any, nvml: Nvml, neighbour: Neighbour
) -> None:
    used_bytes(nvml)
    model = Faulty(lambda _: time.sleep(0.3))
    assert not probe(model, CALM).contended
    timer = threading.Timer(0.5, neighbour.holds, [8 * GIB])
    timer.start()
    try:
        assert probe(model, STORMY).contended
    finally:
        timer.join()


def test_cublas_without_memory_for_a_handle_is_out_of_memory(
    probe: Any, nvml: Nvml, neighbour: Neighbour
) -> None:
    used_bytes(nvml)
    model = Faulty(uses_cublas_anew)
    assert probe(model, CALM, vram_budget=None).ok
    reading = nvml.read()
    assert reading is not None
    neighbour.holds(reading.free_bytes - 24 * MIB)
    measurement = probe(model, STORMY)
    assert measurement.outcome is Outcome.OOM
    neighbour.kill()
    assert probe(model, CALM).ok


def test_a_killed_parent_gives_the_device_its_memory_back(nvml: Nvml) -> None:
    before = used_bytes(nvml)
    parent = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    while used_bytes(nvml) < before + GIB:
        assert parent.poll() is None
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    end = time.monotonic() + SECONDS_FOR_MEMORY_TO_COME_BACK
    while used_bytes(nvml) > before + 64 * MIB and time.monotonic() < end:
        time.sleep(0.1)
    assert used_bytes(nvml) <= before + 64 * MIB


def test_the_parent_makes_no_context() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INNOCENT], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "ok False\n"
