"""Predicted peaks of evaluations, held against the emulated GPU, on models that nobody here wrote.

Each model of transformers in `benchmarks.emulated_models` trains as its first case of
`benchmarks.emulation_models` does, and then evaluates four times as many samples. Compared is what
torch's caching allocator reserves in that evaluation on the emulated card with what
`autofit.predict` tells by a dry run, both without non-torch bytes.

    emulated-gpu run --no-values -- python -m benchmarks.emulation_evaluations [MODEL ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autofit import Plan, Workload, predict
from autofit.devices.gpus import find_gpu
from autofit.plan import Dimension
from autofit.registry import resolve, strategies_of
from autofit.space import Space
from benchmarks.emulated_models import MODELS
from benchmarks.emulation_cases import cases, workload_of
from benchmarks.emulation_models import GPU
from benchmarks.oracle.emulation import Emulation

TIMES = 4
"""An evaluation has so many times the samples of a training step: its peak is then of its own."""
PROMISED = 0.02


def evaluate(model: torch.nn.Module, batch: Any) -> None:
    """Compute the model's outputs and its loss."""
    model(**batch)


def evaluated(workload: Workload) -> Workload:
    return replace(workload, eval_step=evaluate, eval_batch=TIMES * workload.sample_batch_size)


def peaks(workload: Workload, plan: Plan) -> tuple[int, int]:
    """Return the bytes that a dry run tells, and those of the emulated card."""
    told = predict(workload, plan=plan, gpu=GPU)
    assert told.evaluation_bytes is not None  # the workload has one
    strategies = strategies_of(plan)
    dimensions = {name: Dimension([value]) for name, value in plan.settings.items()}
    resolved = resolve(plan, Space(dimensions, workload.sample_batch_size), strategies)
    with Emulation(workload, strategies, find_gpu(GPU)) as emulation:
        seen = emulation.ample(resolved)
    assert seen.evaluation_peak_bytes is not None, seen.failure
    return told.evaluation_bytes - told.breakdown["non_torch"], seen.evaluation_peak_bytes


def main(names: Sequence[str]) -> int:
    asked = names or [name for name, model in MODELS.items() if model.package == "transformers"]
    firsts = {case.model: case for case in reversed(list(cases()))}
    errors: list[float] = []
    failed = 0
    for name in asked:
        case = firsts[name]
        settings = {} if case.precision == "default" else {"precision.dtype": case.precision}
        workload = evaluated(workload_of(case))
        try:
            told, seen = peaks(workload, Plan(workload.sample_batch_size, settings=settings))
        except Exception as error:  # of any kind: the other models are run all the same
            failed += 1
            print(f"| {case.name} | {type(error).__name__}: {error} | | |"[:200], flush=True)
            continue
        errors.append(told / seen - 1)
        print(f"| {case.name} | {told:,} | {seen:,} | {errors[-1]:+.2%} |", flush=True)
    within = sum(abs(error) <= PROMISED for error in errors)
    print(f"\n{within} of {len(errors)} within {PROMISED:.0%}; {failed} failed", flush=True)
    return 0 if within == len(errors) and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
