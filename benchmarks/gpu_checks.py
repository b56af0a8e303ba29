"""What `benchmarks/on_gpu.sh` holds against a GPU besides tests and searches, one JSON line each.

    python -m benchmarks.gpu_checks by_hand gpt2_small 24GiB REPORT.json
    python -m benchmarks.gpu_checks predictions gpt2_small 24GiB REPORT.json
    python -m benchmarks.gpu_checks faults

`by_hand` probes a report's answer and the plans that a person writes, step by step and then at the
largest size that fits, in one worker; the last line is the answer over the fastest of them.
`predictions` predicts every plan that a search ran, and sets the bytes beside those that it
measured. `faults` lets a probe run out of memory again and again, fail an assertion on the device,
and be killed; the plain plan has to run after each as it ran before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

import autofit
from autofit import Plan, Workload, predict
from autofit.errors import PredictionUnavailable
from autofit.measurement import Measurement, Trial, TrialKind, probes_of
from autofit.plan import ResolvedPlan, Scalar
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.registry import resolve, strategies_of
from autofit.space import Space
from benchmarks.workloads import WORKLOADS

PLAIN, STORM, ASSERTS, DIES = 2, 64, 65, 66
"""Micro-batches of `Faulty`."""
SIZES = (8, 16, 32, 64, 128, 256)
"""That a person tries; the first is the size of what is not "the largest that fits"."""
HALF: Mapping[str, Scalar] = {"precision.dtype": "bfloat16"}
FUSED: Mapping[str, Scalar] = {**HALF, "optimizer.implementation": "fused"}
COMPILED: Mapping[str, Scalar] = {**FUSED, "compile.mode": "default"}
LAST: Mapping[str, Mapping[str, Scalar]] = {
    "gpt2_small": {"head_loss.rows": 2048},
    "resnet50": {"memory_format.layout": "channels_last"},
}
"""What a person turns on last, by workload."""


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


def probed(prober: Prober, resolved: ResolvedPlan) -> Measurement:
    """Run a plan."""
    return prober.probe(ProbeRequest(resolved)).measurement


def by_hand(name: str, budget: str, report: autofit.Report) -> Iterator[dict[str, Any]]:
    """Yield the speed of the answer, and of each plan, what is worth most first."""
    workload, last, record = WORKLOADS[name](), LAST.get(name, {}), report.record
    answer, found = record.resolve_plan(), list[Trial]()
    strategies = strategies_of(record.recommended.plan)
    with open_prober(workload, strategies, Target("cuda", budget)) as prober:

        def run(resolved: ResolvedPlan) -> dict[str, Any]:
            trial = Trial(len(found), TrialKind.SEARCH, resolved.plan, probed(prober, resolved))
            found.append(trial)
            plan = trial.plan.without(record.default_settings)
            told = {"plan": str(plan), "outcome": str(trial.measurement.outcome)}
            return told | {"samples_per_second": trial.samples_per_second}

        def plan(size: int, settings: Mapping[str, Scalar]) -> ResolvedPlan:
            """Return a plan with these settings, those that the search was offered."""
            space = Space(record.dimensions, size)
            own = {k: v for k, v in settings.items() if v in space.dimensions[k].values}
            made = Plan.split(workload.global_batch or size, size, settings=space.complete(own))
            return resolve(made, space, strategies, record.payloads(made.settings))

        yield run(answer)
        yield from (run(plan(SIZES[0], settings)) for settings in ({}, HALF, FUSED))
        for size in (each for each in SIZES[1:] if each <= (workload.global_batch or each)):
            yield run(plan(size, FUSED))
            if not found[-1].ok:
                break
        largest = max(trial.plan.micro_batch for trial in found[1:] if trial.ok)
        yield from (run(plan(largest, {**each, **last})) for each in (FUSED, COMPILED))
        yield from (run(plan(size, COMPILED)) for size in (largest, SIZES[0]))
        yield run(answer)
    speeds = [trial.samples_per_second or 0.0 for trial in found]
    ours, theirs = max(speeds[0], speeds[-1]), max(speeds[1:-1])
    yield {"best by hand": theirs, "autofit": ours, "autofit over it": ours / theirs}


def faults(storm: int) -> Iterator[dict[str, Any]]:
    """Yield what became of each fault, and of the plain plan after it."""
    workload = Workload(Faulty(), torch.randn(PLAIN, 16))
    with open_prober(workload, (), Target("cuda", "4GiB")) as prober:
        before = probed(prober, ResolvedPlan(Plan(PLAIN)))
        for name, size, times in (("OOM", STORM, storm), ("assert", ASSERTS, 1), ("kill", DIES, 1)):
            failing = ResolvedPlan(Plan(size))
            outcomes = {str(probed(prober, failing).outcome) for _ in range(times)}
            after = probed(prober, ResolvedPlan(Plan(PLAIN)))
            same = after.ok and after.peak_reserved_bytes == before.peak_reserved_bytes
            yield {"fault": name, "times": times, "outcomes": sorted(outcomes), "ok_after": same}


def predictions(name: str, report: autofit.Report) -> Iterator[dict[str, Any]]:
    """Yield predicted and measured bytes of each plan that a search ran."""
    workload, gpu = WORKLOADS[name](), torch.cuda.get_device_name()
    for trial in probes_of(report.record.trials):
        measured = trial.measurement
        told: dict[str, Any] = {"plan": str(trial.plan), "outcome": str(measured.outcome)}
        try:
            found = predict(workload, plan=trial.plan, gpu=gpu)
        except PredictionUnavailable as refusal:
            told["refused"] = str(refusal)[:100]
        else:
            told |= {"allocated": found.peak_allocated_bytes, "required": found.required_bytes}
        yield told | {
            "measured_allocated": measured.peak_allocated_bytes,
            "measured_held": measured.held_bytes if measured.ok else None,
        }


def main() -> int:
    """Print the lines; a fault that was not survived ends it with 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("by_hand", "predictions", "faults"))
    parser.add_argument("workload", nargs="?", default="")
    parser.add_argument("budget", nargs="?", default="")
    parser.add_argument("report", nargs="?", type=autofit.load)
    parser.add_argument("--storm", type=int, default=30, help="how often memory runs out")
    asked = parser.parse_args()
    if asked.kind == "faults":
        lines = faults(asked.storm)
    elif asked.kind == "by_hand":
        lines = by_hand(asked.workload, asked.budget, asked.report)
    else:
        lines = predictions(asked.workload, asked.report)
    failed = 0
    for line in lines:
        print(json.dumps(line), flush=True)
        failed += line.get("ok_after") is False
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
