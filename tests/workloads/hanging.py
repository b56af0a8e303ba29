"""Programs whose workers hang, for tests that kill or interrupt them: see `main`.

A worker that hangs writes its process id to the file $HANGS.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import autofit
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.worker_channel import WorkerProcess
from autofit.testing.digest import differences, digest

SECONDS = 600


def _say_who_hangs(pid: int) -> None:
    written = Path(os.environ["HANGS"] + ".part")
    written.write_text(str(pid))
    written.rename(os.environ["HANGS"])


def sleep() -> None:
    _say_who_hangs(os.getpid())
    time.sleep(SECONDS)


def hold_the_interpreter() -> None:
    _say_who_hangs(os.getpid())
    ctypes.PyDLL(None).sleep(SECONDS)


def refuse_the_death_signal() -> None:
    ctypes.CDLL(None).prctl(1, 0)
    sleep()


class Hangs(nn.Module):
    """Hangs in a forward of more than `above` samples."""

    def __init__(self, hang: Callable[[], None], above: int) -> None:
        super().__init__()
        self.hang, self.above, self.layer = hang, above, nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > self.above:
            self.hang()
        return self.layer(inputs)


HANGS_WHEN_IMPORTED = """
import os, time
open(os.environ["HANGS"] + ".part", "w").write(str(os.getpid()))
os.rename(os.environ["HANGS"] + ".part", os.environ["HANGS"])
time.sleep(600)
"""


def start_importing() -> None:
    """Start a worker where torch is another module, whose import hangs."""
    folder = Path(os.environ["HANGS"]).with_name("first on the path")
    folder.mkdir()
    (folder / "torch.py").write_text(HANGS_WHEN_IMPORTED)
    sys.path.insert(0, str(folder))
    WorkerProcess()


def start() -> None:
    """Start a worker and ask it nothing."""
    worker = WorkerProcess()
    _say_who_hangs(worker.pid)
    time.sleep(SECONDS)
    worker.kill()


def probe(hang: str) -> None:
    """Probe a plan whose first forward hangs."""
    workload = autofit.Workload(Hangs(globals()[hang], above=1), torch.ones(2, 16))
    with open_prober(workload, target=Target("cpu", "64MiB")) as prober:
        prober.probe(ProbeRequest(ResolvedPlan(Plan(2))))


def search() -> None:
    """Search where larger micro-batches than the baseline's hang; say what came of it."""
    model = Hangs(sleep, above=2)
    torch.manual_seed(3)
    before = digest({"model": model})
    try:
        report = autofit.search(
            model,
            torch.ones(2, 16),
            device="cpu",
            vram_budget="64MiB",
            strategies=[],
            progress=lambda event: print(type(event).__name__, event.progress.probes, flush=True),
        )
        print("report:", report.record.search.stopped_because, report.best.plan.micro_batch)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        print("changed:", differences(before, digest({"model": model})), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
