"""Accuracy of predictions against trainings recorded on a GPU.

The 30 trainings of `benchmarks/traces` were recorded on an H200. Each one's own loop runs here
unmodified on the meta device, and the result is compared with the recording: peak allocated with
the peak of a plain run, required bytes with the smallest limit under which the training ran without
allocator retries (bisected to 1 %; non-torch bytes are outside both).

    python -m benchmarks.prediction_accuracy [--json FILE]

Exits with 1 if a bound of `PROMISES` is exceeded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from autofit.devices.gpu_catalogue import find_gpu
from autofit.memory.replay import Recording, replay, required_bytes
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import STEPS, stage
from autofit.prediction.needs import margin_bytes
from benchmarks.traces.recorded import RecordedTraining, recorded_trainings
from benchmarks.traces.trainings import TRAININGS

GPU = "H200"
PROMISES = {
    "allocated_median": 0.005,
    "allocated_90th": 0.03,
    "required_median": 0.01,
    "required_90th": 0.04,
    "wrongly_fits": 0,
    "wasted_mean": 0.06,
    "not_held": 0,
    "width_mean": 0.1,
}


@dataclass(frozen=True)
class Comparison:
    """One training, predicted and recorded; errors are shares of the recorded values.

    Attributes:
        name: the case.
        allocated_error: of peak allocated.
        required_error: of required bytes.
        wasted: upper end of the interval over the smallest limit, less 1; below zero, a plan that
            does not fit would be said to fit.
        held: whether the interval holds the smallest limit.
        width: of the interval, as a share of the smallest limit.
    """

    name: str
    allocated_error: float
    required_error: float
    wasted: float
    held: bool
    width: float


def dry_run_of(name: str) -> Recording:
    """Return two steps of a recorded training, run on the meta device."""
    gpu = find_gpu(GPU)
    tracer = CudaTracer(gpu)
    with stage(tracer):
        steps = TRAININGS[name].steps("cuda")
        for _ in range(STEPS):
            next(steps)
            tracer.end_step()
        recording = tracer.recording
        steps.close()  # type: ignore[attr-defined]  # a generator
    return recording


def compared(recorded: RecordedTraining) -> Comparison:
    """Predict one training and compare it with its recording."""
    recording = dry_run_of(recorded.name)
    allocated = replay(recording).peak_allocated_bytes
    required = required_bytes(recording)
    margin = margin_bytes(recording, required, find_gpu(GPU))
    return Comparison(
        recorded.name,
        allocated / recorded.peak_allocated_bytes - 1,
        required / recorded.smallest_limit_bytes - 1,
        (required + margin) / recorded.smallest_limit_bytes - 1,
        abs(required - recorded.smallest_limit_bytes) <= margin,
        2 * margin / recorded.smallest_limit_bytes,
    )


def comparisons() -> Iterator[Comparison]:
    """Yield the comparisons of all 30."""
    yield from map(compared, recorded_trainings())


def summary(results: Sequence[Comparison]) -> dict[str, float]:
    """Return the figures that `PROMISES` bounds."""
    allocated = sorted(abs(result.allocated_error) for result in results)
    required = sorted(abs(result.required_error) for result in results)
    return {
        "allocated_median": statistics.median(allocated),
        "allocated_90th": _ninetieth(allocated),
        "required_median": statistics.median(required),
        "required_90th": _ninetieth(required),
        "wrongly_fits": sum(result.wasted < 0 for result in results),
        "wasted_mean": statistics.mean(result.wasted for result in results),
        "not_held": sum(not result.held for result in results),
        "width_mean": statistics.mean(result.width for result in results),
    }


def _ninetieth(ordered: Sequence[float]) -> float:
    """Return the interpolated 90th percentile."""
    return statistics.quantiles(ordered, n=10, method="inclusive")[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every training and what all come to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    results = []
    for result in comparisons():
        results.append(result)
        print(result, flush=True)
    figures = summary(results)
    for name, bound in PROMISES.items():
        print(f"{name:24}{figures[name]:>11.4f} promised {bound}")
    if options.json:
        trainings = [asdict(result) for result in results]
        found = {"torch": torch.__version__, "summary": figures, "trainings": trainings}
        options.json.write_text(json.dumps(found, indent=1))
    return 1 if any(figures[name] > bound for name, bound in PROMISES.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
