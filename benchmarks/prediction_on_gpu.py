"""Accuracy of predictions on this machine's GPU, for models that no recorded training has.

Each plan is predicted for this GPU and then run three times in a worker process: with all memory,
to compare peak allocated; within the upper end of the predicted interval, which must suffice; and
within 15 % less than the predicted required bytes, which should not.

    python -m benchmarks.prediction_on_gpu [--json FILE]

Needs a GPU. Exits with 1 if a plan that was predicted to fit did not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from autofit import Plan, Workload
from autofit.devices.cuda import CudaDevice
from autofit.devices.gpus import Gpu
from autofit.plan import ResolvedPlan
from autofit.prediction.predict import Calibration, predict
from autofit.prediction.variant_lines import gpu_of
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Prober, Target, open_prober
from autofit.registry import load_strategies
from benchmarks.emulation_cases import Case, workload_of

MODELS = ("llama", "t5", "wav2vec2", "convnext_tiny", "unet_2d")
"""Of `benchmarks.emulated_models`; none of their kinds is among the recorded trainings."""
MICRO_BATCHES = (4, 16, 48)
PRECISIONS = ("default", "bfloat16")
TOO_LITTLE = 0.85


@dataclass(frozen=True)
class Row:
    """One plan.

    Attributes:
        name: workload, precision and micro-batch.
        allocated_error: of the predicted peak allocated, as a share of the measured one.
        enough: whether it ran within the upper end of the interval.
        too_little: whether it also ran within 15 % less than the predicted required bytes.
    """

    name: str
    allocated_error: float
    enough: bool
    too_little: bool


def rows(gpu: Gpu) -> Iterator[Row]:
    """Yield every workload at every precision and micro-batch, with one worker per workload."""
    for name in MODELS:
        workload = workload_of(Case(name, PRECISIONS[0], "adamw", checkpointed=False))
        workload = replace(workload, model=workload.build_model())
        with open_prober(workload, load_strategies(["precision"]), Target("cuda")) as prober:
            for precision in PRECISIONS:
                for micro_batch in MICRO_BATCHES:
                    plan = Plan(micro_batch, settings={"precision.dtype": precision})
                    yield _row(f"{name} {precision} {micro_batch}", prober, workload, plan, gpu)


def _row(name: str, prober: Prober, workload: Workload, plan: Plan, gpu: Gpu) -> Row:
    request = ProbeRequest(ResolvedPlan(plan, strategies=prober.strategies), full_accumulation=True)
    free = prober.probe(request).measurement
    if free.peak_allocated_bytes is None or free.non_torch_bytes is None:
        raise RuntimeError(f"{name} did not run: {free.outcome} {free.detail}")
    prediction = predict(workload, plan=plan, gpu=gpu, calibration=Calibration.learn(free))

    def runs_within(budget: float) -> bool:
        return prober.probe(replace(request, vram_budget_bytes=int(budget))).measurement.ok

    return Row(
        name,
        prediction.peak_allocated_bytes / free.peak_allocated_bytes - 1,
        runs_within(prediction.interval[1]),
        runs_within(TOO_LITTLE * prediction.required_bytes),
    )


def _report(found: Sequence[Row], path: Path | None) -> None:
    """Print the last row and write all of them, so that an interrupted run leaves its results."""
    row = found[-1]
    print(f"{row.name:28}{row.allocated_error:>+9.2%}  enough {row.enough}", flush=True)
    if path is not None:
        path.write_text(json.dumps([asdict(each) for each in found], indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this needs a GPU; benchmarks.prediction_accuracy needs none", file=sys.stderr)
        return 2
    gpu = gpu_of(CudaDevice().environment)
    assert gpu is not None  # the environment is a GPU's
    found = []
    for row in rows(gpu):
        found.append(row)
        _report(found, options.json)
    errors = [abs(row.allocated_error) for row in found]
    wrong = sum(not row.enough for row in found)
    generous = sum(row.too_little for row in found)
    print(f"peak allocated: median error {statistics.median(errors):.2%}, most {max(errors):.2%}")
    print(f"predicted to fit and did not: {wrong}; ran within 15 % less than required: {generous}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
