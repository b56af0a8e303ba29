"""Accuracy of the emulated GPU against trainings recorded on an H200.

The 30 trainings of `benchmarks/traces` run on the emulated card as they ran on the real one, each
in a process of its own, and their peaks are compared with the recording: peak allocated, peak
reserved, and with `--required` the smallest limit under which the allocator does not retry
(bisected to 1 %, as it was recorded).

    emulated-gpu run --no-values -- python -m benchmarks.emulation_accuracy [--json FILE]

It runs on a real GPU as well. Exits with 1 if a bound of `PROMISES` is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.traces.recorded import RecordedTraining, recorded_trainings
from benchmarks.traces.trainings import TRAININGS

LIBRARY_SCRATCH = ("resnet", "unet", "lstm")
"""Trainings with convolutions or RNNs, whose scratch memory cuDNN chooses."""
PROMISES = {
    "exact_share_without_cudnn": 0.9,
    "reserved_median_with_cudnn": 0.01,
    "reserved_90th_with_cudnn": 0.05,
    "required_median": 0.01,
    "required_90th": 0.04,
}
RECORDED_STEPS, LIMITED_STEPS, UNTIMED_STEPS = 3, 4, 2


@dataclass(frozen=True)
class Comparison:
    """One training here and as recorded; errors are shares of the recorded values.

    Attributes:
        name: the case.
        allocated_error: of peak allocated.
        reserved_error: of peak reserved.
        required_error: of required bytes; None where they were not asked for.
        seconds: duration of the run that gave the peaks.
        fault: what was raised in place of an answer, if anything.
    """

    name: str
    allocated_error: float | None = None
    reserved_error: float | None = None
    required_error: float | None = None
    seconds: float | None = None
    fault: str | None = None


def clean() -> None:
    """Give all memory back, and start the peaks anew."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # as it was recorded
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def run(name: str, steps: int) -> list[int]:
    """Run the training, and return the allocator's retries by the end of each step."""
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
    """Return peak allocated and peak reserved bytes."""
    clean()
    try:
        run(name, RECORDED_STEPS)
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    finally:
        clean()


def runs_under(name: str, limit_bytes: float) -> bool:
    """Whether the training runs under the limit, with no retry in its later steps."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    clean()
    try:
        retries = run(name, LIMITED_STEPS)
    except torch.OutOfMemoryError:
        return False
    finally:
        clean()
        torch.cuda.set_per_process_memory_fraction(1.0)
    return retries[-1] == retries[UNTIMED_STEPS - 1]


def smallest_limit(name: str, allocated_bytes: int, reserved_bytes: int) -> float:
    """Return the smallest limit under which it runs, to 1 %."""
    low, high = allocated_bytes * 0.97, reserved_bytes * 1.02
    while not runs_under(name, high):
        low, high = high, high * 1.02
    while high / low > 1.01:
        middle = (low + high) / 2
        if runs_under(name, middle):
            high = middle
        else:
            low = middle
    return high


def compared(recorded: RecordedTraining, with_required: bool) -> Comparison:
    """Run one training and compare it with its recording."""
    started = time.perf_counter()
    try:
        allocated, reserved = peaks(recorded.name)
        seconds = time.perf_counter() - started
        required = None
        if with_required:
            limit = smallest_limit(recorded.name, allocated, reserved)
            required = limit / recorded.smallest_limit_bytes - 1
    except RuntimeError as error:
        return Comparison(recorded.name, fault=f"{type(error).__name__}: {error}"[:200])
    return Comparison(
        recorded.name,
        allocated / recorded.peak_allocated_bytes - 1,
        reserved / recorded.peak_reserved_bytes - 1,
        required,
        seconds,
    )


def in_processes_of_their_own(
    chosen: Sequence[RecordedTraining], with_required: bool
) -> Iterator[Comparison]:
    """Yield the comparisons: a process that freed memory gives other addresses than a new one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        yield from pool.map(partial(compared, with_required=with_required), chosen)


def summary(results: Sequence[Comparison]) -> dict[str, float]:
    """Return the figures that `PROMISES` bounds; a training that failed counts as wholly wrong."""
    plain = [one for one in results if not one.name.startswith(LIBRARY_SCRATCH)]
    scratch = [one for one in results if one.name.startswith(LIBRARY_SCRATCH)]
    figures: dict[str, float] = {}
    if plain:
        exact = sum(one.reserved_error == 0 for one in plain)
        figures["exact_share_without_cudnn"] = exact / len(plain)
    if len(scratch) > 1:
        errors = [_size(one.reserved_error) for one in scratch]
        figures["reserved_median_with_cudnn"] = statistics.median(errors)
        figures["reserved_90th_with_cudnn"] = _ninetieth(errors)
    if len(results) > 1 and any(one.required_error is not None for one in results):
        errors = [_size(one.required_error) for one in results]
        figures["required_median"] = statistics.median(errors)
        figures["required_90th"] = _ninetieth(errors)
    return figures


def _size(error: float | None) -> float:
    return 1.0 if error is None else abs(error)


def _ninetieth(errors: Sequence[float]) -> float:
    """Return the interpolated 90th percentile."""
    return statistics.quantiles(errors, n=10, method="inclusive")[-1]


def broken(figures: dict[str, float]) -> Iterator[str]:
    """Yield the promises that the figures do not keep."""
    for name, bound in PROMISES.items():
        if name in figures:
            kept = figures[name] >= bound if "share" in name else figures[name] <= bound
            if not kept:
                yield name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trainings", nargs="*", help="names of some; default: all")
    parser.add_argument("--required", action="store_true", help="bisect the limit, too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU: run it under `emulated-gpu run --no-values --`")
    chosen = [
        recorded
        for recorded in recorded_trainings()
        if recorded.name in options.trainings or not options.trainings
    ]
    results = []
    print(f"{'training':24}{'allocated':>12}{'reserved':>12}{'required':>12}{'seconds':>9}")
    for result in in_processes_of_their_own(chosen, options.required):
        results.append(result)
        errors = (result.allocated_error, result.reserved_error, result.required_error)
        shown = "".join(f"{'-' if e is None else format(e, '+.3%'):>12}" for e in errors)
        print(
            f"{result.name:24}{shown}{result.seconds or 0:>9.2f}  {result.fault or ''}", flush=True
        )
    figures = summary(results)
    for name, value in figures.items():
        print(f"{name:32}{value:>9.4f} promised {PROMISES[name]}")
    if options.json:
        found = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0)}
        trainings = [asdict(result) for result in results]
        options.json.write_text(
            json.dumps(found | {"summary": figures, "trainings": trainings}, indent=1) + "\n"
        )
    return 1 if any(broken(figures)) else 0


if __name__ == "__main__":
    sys.exit(main())
