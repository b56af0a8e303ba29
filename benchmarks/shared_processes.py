"""How much faster a search is with several workers: real processes, probes that sleep.

    python -m benchmarks.shared_processes --workers 1 2 4 --probe-s 2
    python -m benchmarks.shared_processes --workers 1 --alone

The device is that of the tests, with ten variants, and the same for all. The study is a new journal
file, or --study the URL of an empty database.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import optuna

from autofit.planning.search_spec import SearchSpec
from autofit.probing.messages import ProbeRequest, ProbeResult
from autofit.searching.engine import run_search
from autofit.searching.shared_study import SharedStore
from autofit.searching.study import Store
from autofit.space import Space
from autofit.testing import SimulatedProber
from tests.simulated import DIMENSIONS, IDENTITY, SimulatedDevice


class _Sleeping(SimulatedProber):
    probe_s = 0.0

    def probe(self, request: ProbeRequest) -> ProbeResult:
        time.sleep(self.probe_s)
        return super().probe(request)


def main() -> None:
    """Print a line of Markdown for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--probe-s", type=float, default=2.0)
    parser.add_argument("--alone", action="store_true", help="one worker, without sharing")
    parser.add_argument("--study", help="URL of an empty database; for one number of workers")
    asked = parser.parse_args()
    print("| workers | seconds | probes | plan | load |\n| ---: | ---: | ---: | --- | ---: |")
    for workers in asked.workers:
        with tempfile.TemporaryDirectory() as folder:
            study = asked.study or str(Path(folder) / "study.journal")
            _show(study, workers, asked.probe_s, asked.alone)


def _show(study: str, workers: int, probe_s: float, alone: bool) -> None:
    context = get_context("spawn")
    barrier = context.Barrier(workers + 1)
    with context.Manager() as manager:
        found: Any = manager.list()
        processes = [
            context.Process(target=_work, args=(study, probe_s, alone, barrier, found))
            for _ in range(workers)
        ]
        for process in processes:
            process.start()
        barrier.wait()
        began = time.monotonic()
        for process in processes:
            process.join()
        seconds = time.monotonic() - began
        plans = {plan for plan, _ in found}
        probes = max(count for _, count in found)
        load = os.getloadavg()[0]
        print(
            f"| {workers} | {seconds:.1f} | {probes} | {'; '.join(sorted(plans))} | {load:.1f} |",
            flush=True,
        )


def _work(study: str, probe_s: float, alone: bool, barrier: Any, found: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    device = SimulatedDevice(Space(DIMENSIONS, sample_batch_size=4))
    prober = _Sleeping(
        device.budget, device.memory, device.step_time, memory_noise=0.005, time_noise=0.003
    )
    prober.probe_s = probe_s
    spec = SearchSpec(device.space, device.budget, seed=3, identity=IDENTITY)
    kind = Store if alone else SharedStore
    barrier.wait()
    with kind.open(study, IDENTITY) as store:
        result = run_search(prober, spec, store=store)
    found.append((str(result.best.plan), result.probes))


if __name__ == "__main__":
    main()
