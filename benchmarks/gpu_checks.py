"""What `benchmarks/on_gpu.sh` holds against a GPU besides tests and searches, one JSON line each.

    python -m benchmarks.gpu_checks predictions gpt2_small vit --micro-batches 1 2 4 8 16
    python -m benchmarks.gpu_checks faults

`predictions` predicts each training and probes it. `faults` lets a probe run out of memory again
and again, fail an assertion on the device, and be killed; the plain plan has to run after each as
it ran before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from autofit import Plan, Workload, predict
from autofit.errors import PredictionUnavailable
from autofit.measurement import Measurement
from autofit.plan import ResolvedPlan
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from benchmarks import workloads

PLAIN, STORM, ASSERTS, DIES = 2, 64, 65, 66
"""Micro-batches of `Faulty`."""


class Faulty(nn.Module):
    """A linear layer that fails at some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        if len(inputs) == STORM:
            output = output + output.new_empty(2**42).max()
        elif len(inputs) == ASSERTS:
            output.new_zeros(4)[torch.tensor([10**6], device=output.device)]
        elif len(inputs) == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        return output


def probed(prober: Prober, micro_batch: int) -> Measurement:
    """Run a plan of plain settings."""
    return prober.probe(ProbeRequest(ResolvedPlan(Plan(micro_batch)))).measurement


def faults(storm: int) -> Iterator[dict[str, Any]]:
    """Yield what became of each fault, and of the plain plan after it."""
    workload = Workload(Faulty(), torch.randn(PLAIN, 16))
    with open_prober(workload, (), Target("cuda", "4GiB")) as prober:
        before = probed(prober, PLAIN)
        for name, size, times in (("OOM", STORM, storm), ("assert", ASSERTS, 1), ("kill", DIES, 1)):
            outcomes = {str(probed(prober, size).outcome) for _ in range(times)}
            after = probed(prober, PLAIN)
            same = after.ok and after.peak_reserved_bytes == before.peak_reserved_bytes
            yield {"fault": name, "times": times, "outcomes": sorted(outcomes), "ok_after": same}


def predictions(names: Sequence[str], micro_batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield predicted and measured bytes of each training."""
    gpu = torch.cuda.get_device_name()
    for name in names:
        workload = getattr(workloads, name)()
        with open_prober(workload, (), Target("cuda")) as prober:
            for size in micro_batches:
                told: dict[str, Any] = {"workload": name, "micro_batch": size}
                with suppress(PredictionUnavailable):
                    found = predict(workload, plan=Plan(size), gpu=gpu)
                    told |= {
                        "allocated": found.peak_allocated_bytes,
                        "required": found.required_bytes,
                    }
                measured = probed(prober, size)
                yield told | {
                    "outcome": str(measured.outcome),
                    "measured_allocated": measured.peak_allocated_bytes,
                    "measured_held": measured.held_bytes if measured.ok else None,
                }


def main() -> int:
    """Print the lines; a fault that was not survived ends it with 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    told = kinds.add_parser("predictions")
    told.add_argument("workloads", nargs="+")
    told.add_argument("--micro-batches", nargs="+", type=int, required=True)
    kinds.add_parser("faults").add_argument("--storm", type=int, default=30)
    given = parser.parse_args()
    if given.kind == "faults":
        lines = faults(given.storm)
    else:
        lines = predictions(given.workloads, given.micro_batches)
    failed = 0
    for line in lines:
        print(json.dumps(line), flush=True)
        failed += line.get("ok_after") is False
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
