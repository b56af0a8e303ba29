"""A prober in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.devices.cuda import open_device
from autofit.measurement import Measurement
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.worker_channel import WorkerChannel
from autofit.training.workload import Workload
from tests.faulty_model import NO_FAULT


@dataclass
class Probing:
    """A worker prober and short words for what tests do with it."""

    prober: Prober
    raised: BaseException | None = None
    """What the user's code raised in the last probe."""

    def at(self, micro_batch: int, *, patient: bool = True) -> Measurement:
        """Probe that micro-batch; a patient probe may take a minute, another the least deadline."""
        expected_seconds = 3.0 if patient else 0.01
        result = self.prober.probe(
            ProbeRequest(ResolvedPlan(Plan(micro_batch)), expected_seconds=expected_seconds)
        )
        self.raised = result.user_exception
        return result.measurement

    @property
    def worker(self) -> int | None:
        """The process id of the worker, None where there is none now."""
        return self.prober.worker_pid


class Tampering:
    """Once a worker has read it, the device that it opens is what `tamper` makes of it."""

    def __init__(self, tamper: Callable[[Any], Any]) -> None:
        self._tamper = tamper

    def __reduce__(self) -> Any:
        return tamper_with_devices, (self._tamper,)


def tamper_with_devices(tamper: Callable[[Any], Any]) -> None:
    """In a worker, before it opens its device."""
    from autofit.probing import worker

    vars(worker)["open_device"] = lambda *args, **kwargs: tamper(open_device(*args, **kwargs))


Opens = Callable[..., Probing]


@contextmanager
def opener() -> Iterator[Opens]:
    """A function that opens probers with short deadlines; they are closed at the end."""
    with ExitStack() as opened:

        def open_one(
            model: Any,
            *,
            vram_budget: str | None = "64MiB",
            shortest_s: float = 60.0,
            tamper: Callable[[Any], Any] | None = None,
            device: str | None = "cpu",
            sample_batch: Any = None,
        ) -> Probing:
            if tamper is not None:
                model.tampering = Tampering(tamper)
            prober = open_prober(
                Workload(model, torch.ones(NO_FAULT, 16) if sample_batch is None else sample_batch),
                target=Target(device, vram_budget),
                deadlines=Deadlines(shortest_s=shortest_s, unknown_s=60.0),
            )
            return Probing(opened.enter_context(prober))

        yield open_one


@pytest.fixture
def open_probing() -> Iterator[Opens]:
    """`opener`, for one test."""
    with opener() as opens:
        yield opens


@pytest.fixture(scope="module")
def open_module_probing() -> Iterator[Opens]:
    """`opener`, for all tests of a module."""
    with opener() as opens:
        yield opens


@pytest.fixture
def channel() -> Iterator[WorkerChannel]:
    """To a worker that nobody has opened yet, nor asked for anything."""
    workload = Workload(torch.nn.Linear(4, 4), torch.ones(8, 4), loss_fn=lambda m, b: m(b).mean())
    with closing(WorkerChannel(workload, device="cpu")) as channel:
        yield channel


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended (one that nobody has reaped yet has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.fixture
def running() -> Callable[[int], bool]:
    """`is_running`, for tests."""
    return is_running
