"""The emulated GPU against what was recorded on an H200: 30 trainings, and plans of two grids.

    emulated-gpu run --no-values -- python -m benchmarks.emulation_recorded trainings [--json FILE]
    emulated-gpu run --no-values -- python -m benchmarks.emulation_recorded plans [--json FILE]

The trainings of `benchmarks/traces` run each in a process of its own. Compared are peak allocated,
peak reserved and the smallest limit under which the allocator does not retry (bisected to 1 %, as
it was recorded). Every plan of `benchmarks/grids/h200.jsonl` runs six steps under the recorded cap,
and the answer, that it runs or runs out of memory, is compared; peaks where both ran. Both run on a
real GPU as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit.units import GIB
from benchmarks.grids.models import MODELS, batch_of, loss_of, optimizer_of
from benchmarks.grids.recorded import BUDGETS_BYTES, recorded_plans
from benchmarks.traces.recorded import RecordedTraining, recorded_trainings
from benchmarks.traces.trainings import TRAININGS, tf32

LIBRARY_SCRATCH = ("resnet", "unet", "lstm")
"""Trainings with convolutions or RNNs, whose scratch memory cuDNN chooses."""
RECORDED_STEPS, LIMITED_STEPS, UNTIMED_STEPS, PLAN_STEPS = 3, 4, 2, 6
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PLAN = "workload", "micro_batch", "precision", "checkpointed", "channels_last"

Found = dict[str, Any]


def clean() -> None:
    """Give all memory back, and start the peaks anew."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # as it was recorded
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def within(limit_bytes: float) -> Iterator[None]:
    """Cap the allocator, and begin and end without anything cached."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    clean()
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def run(name: str, steps: int) -> list[int]:
    """Run a recorded training, and return the allocator's retries by the end of each step."""
    torch.manual_seed(0)
    training = TRAININGS[name].steps("cuda")
    retries = []
    try:
        for _ in range(steps):
            next(training)
            retries.append(int(torch.cuda.memory_stats()["num_alloc_retries"]))
    finally:
        training.close()  # type: ignore[attr-defined]  # a generator
    return retries


def peaks(name: str) -> tuple[int, int]:
    """Return peak allocated and peak reserved bytes of a recorded training."""
    clean()
    run(name, RECORDED_STEPS)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def smallest_limit(name: str, allocated_bytes: int, reserved_bytes: int) -> float:
    """Return the smallest limit under which its later steps run without a retry, to 1 %."""

    def runs_under(limit_bytes: float) -> bool:
        try:
            with within(limit_bytes):
                retries = run(name, LIMITED_STEPS)
        except torch.OutOfMemoryError:
            return False
        return retries[-1] == retries[UNTIMED_STEPS - 1]

    low, high = allocated_bytes * 0.97, reserved_bytes * 1.02
    while not runs_under(high):
        low, high = high, high * 1.02
    while high / low > 1.01:
        middle = (low + high) / 2
        low, high = (low, middle) if runs_under(middle) else (middle, high)
    return high


def compared(recorded: RecordedTraining) -> Found:
    """Run one training; return its errors, as shares of the recorded values."""
    allocated, reserved = peaks(recorded.name)
    required = smallest_limit(recorded.name, allocated, reserved)
    return {
        "name": recorded.name,
        "allocated_error": allocated / recorded.peak_allocated_bytes - 1,
        "reserved_error": reserved / recorded.peak_reserved_bytes - 1,
        "required_error": required / recorded.smallest_limit_bytes - 1,
    }


def trainings() -> Iterator[Found]:
    """Yield what each training shows: a process that freed memory gives other addresses than a
    new one.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        yield from pool.map(compared, recorded_trainings())


def of_trainings(found: Sequence[Found]) -> Found:
    """Return what all trainings come to."""
    scratch = [one for one in found if one["name"].startswith(LIBRARY_SCRATCH)]
    plain = [one for one in found if one not in scratch]
    reserved, required = errors(scratch, "reserved_error"), errors(found, "required_error")
    return {
        "exact_share_without_cudnn": statistics.mean(not one["reserved_error"] for one in plain),
        "reserved_median_with_cudnn": statistics.median(reserved),
        "reserved_90th_with_cudnn": ninetieth(reserved),
        "required_median": statistics.median(required),
        "required_90th": ninetieth(required),
    }


def errors(found: Sequence[Found], kind: str) -> list[float]:
    """Return the sizes of errors that are known."""
    return [abs(one[kind]) for one in found if one[kind] is not None]


def ninetieth(sizes: Sequence[float]) -> float:
    """Return the interpolated 90th percentile."""
    return statistics.quantiles(sizes, n=10, method="inclusive")[-1]


def trained(
    workload: str, micro_batch: int, precision: str, checkpointed: float, channels_last: bool
) -> None:
    """Train a plan of the grids, as it was recorded."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[workload]().to("cuda")
    model.share = checkpointed  # type: ignore[assignment]  # of Decoder and ResNet50
    batch = batch_of(workload, micro_batch, "cuda")
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks it
        batch = batch.to(memory_format=torch.channels_last)
    optimizer = optimizer_of(workload, model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    dtype = AUTOCAST.get(precision)

    def step() -> None:
        with torch.autocast("cuda", dtype=dtype) if dtype else nullcontext():
            loss = loss_of(workload, model(batch), batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch left it so
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(PLAN_STEPS):
        step()
    torch.cuda.synchronize()


def answered(row: Found) -> Found:
    """Run one recorded plan; return its answer, and the errors of peaks where both ran."""
    found = {key: row[key] for key in PLAN} | {"recorded": row["outcome"], "emulated": "ok"}
    with within(BUDGETS_BYTES[row["workload"]]), tf32(row["precision"] != "fp32"):
        try:
            trained(**{key: row[key] for key in PLAN})
        except torch.OutOfMemoryError:
            found["emulated"] = "oom"
    ran = found["recorded"] == found["emulated"] == "ok"
    for kind in ("allocated", "reserved"):
        peak: Callable[[], int] = getattr(torch.cuda, f"max_memory_{kind}")
        found[f"{kind}_error"] = peak() / (row[f"{kind}_gib"] * GIB) - 1 if ran else None
    return found


def of_plans(found: Sequence[Found]) -> Found:
    """Return what all plans come to, and those of each workload."""
    groups = {name: [one for one in found if one["workload"] == name] for name in MODELS}
    return {
        name: {
            "plans": len(its),
            "as_recorded": sum(one["recorded"] == one["emulated"] for one in its),
            "wrongly_fits": sum(one["recorded"] == "oom" != one["emulated"] for one in its),
            "reserved_error_median": statistics.median(errors(its, "reserved_error")),
            "reserved_error_90th": ninetieth(errors(its, "reserved_error")),
        }
        for name, its in {**groups, "all": found}.items()
    }


def main() -> None:
    """Run either, and print what it comes to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("trainings", "plans"))
    parser.add_argument("--json", type=Path, help="write all of it to this file")
    given = parser.parse_args()
    found: list[Found] = []
    for one in trainings() if given.what == "trainings" else map(answered, recorded_plans()):
        found.append(one)
        print(json.dumps(one), flush=True)
    summary = of_trainings(found) if given.what == "trainings" else of_plans(found)
    print(json.dumps(summary, indent=1))
    if given.json:
        told = {"torch": torch.__version__, "summary": summary, given.what: found}
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
