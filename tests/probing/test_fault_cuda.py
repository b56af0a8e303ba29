"""The rows of the catalogue that need a GPU: real faults of a real device."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.nvml import Nvml, device_uuid
from autofit.errors import WorkerFailed
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.registry import load_strategies
from autofit.training.workload import Workload
from autofit.units import GIB, MIB

pytestmark = pytest.mark.cuda

NO_FAULT, FAULTY = 2, 64
ALL = 2**50
THREADS = 8
SECONDS_FOR_MEMORY_TO_COME_BACK = 30.0
SECONDS_FOR_AN_ANSWER = 20.0

NEIGHBOUR = """
import sys, torch
held = [torch.zeros(1, device="cuda")]
print("ready", flush=True)
for line in sys.stdin:
    take, leave = map(int, line.split())
    piece = 2**30
    while piece >= 2**24:  # smaller ones share a segment of 20 MiB, which leaves less than asked
        if piece > take or torch.cuda.mem_get_info()[0] - piece < leave:
            piece //= 2
            continue
        try:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
            take -= piece
        except torch.OutOfMemoryError:
            piece //= 2
    print("took", flush=True)
"""


KILLED = """
import torch
from torch import nn
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Target, open_prober
from autofit.training.workload import Workload

class Hangs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, inputs):
        self.held = torch.empty(2**30, dtype=torch.uint8, device=inputs.device)
        print("hanging", flush=True)
        torch.cuda._sleep(1 << 45)
        return self.layer(inputs)

with open_prober(Workload(Hangs(), torch.ones(2, 16)), target=Target("cuda")) as prober:
    print("ready", flush=True)
    prober.probe(ProbeRequest(ResolvedPlan(Plan(2))))
"""


class AllocatesInBackward(torch.autograd.Function):
    """Needs 2 GiB in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + gradient.new_empty(2 * GIB // 4).max()


class Hungry(nn.Module):
    """Needs 1.5 GiB or more in a given phase, at a faulty micro-batch."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase
        # 384 MiB of weights: with gradients and Adam's two states 1.5 GiB, at any micro-batch.
        self.layer = nn.Linear(16, 6 * MIB if phase == "optimizer" else 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        if len(inputs) < FAULTY:
            return output
        if self.phase == "forward":
            return output + output.new_empty(2 * GIB // 4).max()
        return AllocatesInBackward.apply(output)  # type: ignore[no-any-return, no-untyped-call]  # torch left it so


class Faulty(nn.Module):
    """Runs `fault` from a micro-batch of `least` on."""

    def __init__(self, fault: Callable[[torch.Tensor], object], least: int = FAULTY) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.fault, self.least = fault, least

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        if len(inputs) >= self.least:
            self.fault(output)
        return output


def asserts_on_the_device(output: torch.Tensor) -> None:
    """Asynchronous: nothing in the step looks at the result."""
    output.new_zeros(4)[torch.tensor([10**6], device=output.device)]


def never_ends(_: torch.Tensor) -> None:
    torch.cuda._sleep(1 << 45)  # type: ignore[no-untyped-call]  # torch left it so


def uses_cublas_anew(output: torch.Tensor) -> None:
    """Each new thread needs a handle, and a workspace for it (8 MiB at least)."""
    errors: list[BaseException] = []
    together = threading.Barrier(THREADS)

    def multiply() -> None:
        try:
            left = output.detach()[:16, :16].contiguous()
            torch.mm(left, left)
        except RuntimeError as error:
            errors.append(error)
        together.wait()  # a thread that ends would leave its handle to the next

    threads = [threading.Thread(target=multiply) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def does_no_more(_: torch.Tensor) -> None:
    pass


@dataclass(frozen=True)
class WhenOthersTook:
    """Asks the test for what a neighbour is to take, waits until it has, then runs `then`."""

    folder: Path
    then: Callable[[torch.Tensor], None]

    def __call__(self, output: torch.Tensor) -> None:
        (self.folder / "asked").touch()
        _await(self.folder / "answered")
        self.then(output)

    @contextmanager
    def answered_by(self, take: Callable[[], None]) -> Iterator[None]:
        """While this is open, `take` is called once the model asks."""

        def answer() -> None:
            _await(self.folder / "asked")
            take()
            (self.folder / "answered").touch()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def _await(path: Path) -> None:
    end = time.monotonic() + SECONDS_FOR_AN_ANSWER
    while not path.exists():
        assert time.monotonic() < end, f"nobody made {path.name}"
        time.sleep(0.01)


class Probing:
    """Probes in a worker on the GPU."""

    def __init__(self) -> None:
        self.prober: Prober | None = None
        self.shortest_s = 30.0
        """The least time for a probe before it counts as hung."""

    def __call__(
        self, model: nn.Module, micro_batch: int, vram_budget: str | None = "4GiB"
    ) -> Measurement:
        prober = self.prober or self.opened(model, vram_budget)
        request = ProbeRequest(ResolvedPlan(Plan(micro_batch)), expected_seconds=0.1)
        return prober.probe(request).measurement

    def opened(
        self, model: nn.Module, vram_budget: str | None = "4GiB", strategies: Sequence[str] = ()
    ) -> Prober:
        """Return its prober, of that model and with those strategies."""
        self.prober = open_prober(
            Workload(model, torch.ones(NO_FAULT, 16)),
            load_strategies(strategies),
            Target("cuda", vram_budget),
            deadlines=Deadlines(shortest_s=self.shortest_s),
        )
        return self.prober

    @property
    def worker(self) -> int | None:
        """The process id of the worker, None where there is none now."""
        return None if self.prober is None else self.prober.worker_pid


@pytest.fixture
def probe() -> Iterator[Probing]:
    """Probes of one model; the prober is closed at the end."""
    probing = Probing()
    yield probing
    if probing.prober is not None:
        probing.prober.close()


@pytest.mark.parametrize(
    ("phase", "micro_batch"), [("forward", FAULTY), ("backward", FAULTY), ("optimizer", NO_FAULT)]
)
def test_the_cap_is_met_in_any_phase(probe: Probing, phase: str, micro_batch: int) -> None:
    model = Hungry(phase)
    measurement = probe(model, micro_batch, "1.5GiB")
    assert measurement.outcome is Outcome.OOM
    assert "Tried to allocate" in str(measurement.detail)
    if micro_batch != NO_FAULT:
        assert probe(model, NO_FAULT).ok


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(asserts_on_the_device, Outcome.POISONED), (never_ends, Outcome.TIMEOUT)],
)
def test_after_a_fault_of_the_device_the_search_goes_on(
    probe: Probing, fault: Any, outcome: Outcome
) -> None:
    model = Faulty(fault)
    probe.shortest_s = 8.0
    assert probe(model, NO_FAULT).ok
    assert probe(model, FAULTY).outcome is outcome
    assert probe.worker is None
    assert probe(model, NO_FAULT).ok


def test_a_strategy_under_which_the_device_dies_looks_at_fewer_samples(probe: Probing) -> None:
    """Profiles run more samples than the sample batch has."""
    model = Faulty(asserts_on_the_device, least=NO_FAULT + 1)
    prober = probe.opened(model, strategies=["checkpointing", "precision"])
    survey = prober.survey()
    note = next(note for note in survey.notes if note.startswith("checkpointing"))
    assert "left out" not in note
    assert "assert" in note
    assert list(survey.dimensions) == ["checkpointing.level", "precision.dtype"]
    assert probe(model, NO_FAULT).ok


def test_a_device_that_dies_at_every_look_is_said(probe: Probing) -> None:
    prober = probe.opened(Faulty(asserts_on_the_device, least=1))
    with pytest.raises(WorkerFailed, match="index out of range"):
        prober.survey()


@pytest.fixture
def nvml() -> Nvml:
    """The first visible device as NVML sees it."""
    return Nvml(device_uuid(0))


def used_bytes(nvml: Nvml) -> int:
    used = nvml.used_bytes()
    if used is None:
        pytest.skip("NVML does not tell the device's memory here")
    return used


class Neighbour:
    """Another process on the device, with a context and nothing else until it is asked."""

    def __init__(self, python: Any) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = python("-c", NEIGHBOUR, forks_workers=False, **pipes)
        self._await("ready")

    def takes(self, nbytes: int, *, leaving: int = 0) -> None:
        """Have it hold so many bytes more, or as many as leave so many free."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{nbytes} {leaving}\n")
        self._process.stdin.flush()
        self._await("took")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _await(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{word}\n"


@pytest.fixture
def neighbour(python: Any) -> Iterator[Neighbour]:
    """A neighbour that is gone after the test."""
    process = Neighbour(python)
    yield process
    process.kill()


def await_used_at_most(nvml: Nvml, nbytes: int) -> None:
    """Until the driver has taken back what a process that was killed had held."""
    end = time.monotonic() + SECONDS_FOR_MEMORY_TO_COME_BACK
    while used_bytes(nvml) > nbytes and time.monotonic() < end:
        time.sleep(0.1)
    assert used_bytes(nvml) <= nbytes


def test_memory_that_another_process_takes_marks_the_probe(
    probe: Probing, nvml: Nvml, neighbour: Neighbour, tmp_path: Path
) -> None:
    used_bytes(nvml)
    asks = WhenOthersTook(tmp_path, does_no_more)
    model = Faulty(asks)
    assert not probe(model, NO_FAULT).contended
    with asks.answered_by(lambda: neighbour.takes(8 * GIB, leaving=4 * GIB)):
        measurement = probe(model, FAULTY)
    assert measurement.ok
    assert measurement.contended


def test_cublas_without_memory_for_a_handle_is_out_of_memory(
    probe: Probing, nvml: Nvml, neighbour: Neighbour, tmp_path: Path
) -> None:
    asks = WhenOthersTook(tmp_path, uses_cublas_anew)
    model = Faulty(asks)
    assert probe(model, NO_FAULT, vram_budget=None).ok
    before = used_bytes(nvml)
    with asks.answered_by(lambda: neighbour.takes(ALL, leaving=24 * MIB)):
        measurement = probe(model, FAULTY)
    assert measurement.outcome is Outcome.OOM
    neighbour.kill()
    await_used_at_most(nvml, before)
    assert probe(model, NO_FAULT).ok


def test_a_device_too_full_for_a_new_worker_costs_the_probe_alone(
    probe: Probing, nvml: Nvml, neighbour: Neighbour
) -> None:
    model = Hungry("never")
    before = used_bytes(nvml)
    assert probe(model, NO_FAULT).ok
    assert probe.prober is not None
    probe.prober.renew()
    await_used_at_most(nvml, before + 64 * MIB)
    neighbour.takes(ALL, leaving=24 * MIB)
    measurement = probe(model, NO_FAULT)
    assert measurement.outcome is Outcome.OOM
    assert measurement.contended
    neighbour.kill()
    await_used_at_most(nvml, before + 64 * MIB)
    assert probe(model, NO_FAULT).ok


def test_a_killed_parent_gives_the_device_its_memory_back(nvml: Nvml, python: Any) -> None:
    before = used_bytes(nvml)
    parent = python("-c", KILLED, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    while used_bytes(nvml) < before + GIB:
        assert parent.poll() is None
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    await_used_at_most(nvml, before + 64 * MIB)
