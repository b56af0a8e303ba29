"""Accuracy and cost of predictions by emulation, against trainings recorded on an H200.

Each of the 30 trainings of `benchmarks/traces` is a workload whose train_step is the recorded loop.
`predict(method="emulate")` needs for it what is measured here: a worker on an emulated H200, and
looks at the plan under lower and lower limits. Required bytes are compared with the smallest limit
under which the training was recorded to run (bisected to 1 %; non-torch bytes are outside both).
Verdicts are taken for budgets of 1 % less and 1 % more than that.

    python -m benchmarks.emulated_predictions [--json FILE] [TRAINING ...]

Where torch cannot be imported without NVIDIA's libraries, run it under `python -m autofit.emulation
--no-values --`. Exits with 1 if a bound of `PROMISES` is exceeded.

The intervals are as wide as the errors of these very trainings. What they are worth for another
one is told by `--held-out`: it takes the file of an earlier run, and that of
`benchmarks.emulation_accuracy --required`, and gives each training the bounds that the others show,
without those of its own architecture where its kind of estimate has another one.

    python -m benchmarks.emulated_predictions --held-out PREDICTIONS.json ACCURACY.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit import Plan, Training, Workload
from autofit.devices.gpus import find_gpu
from autofit.plan import ResolvedPlan
from autofit.prediction.emulate import Emulation
from benchmarks.traces.recorded import RecordedTraining, recorded_trainings
from benchmarks.traces.trainings import TRAININGS

GPU = "H200"
PROMISES = {
    "required_median": 0.01,
    "required_90th": 0.04,
    "wrongly_fits": 0,
    "largest_cpu_s": 5.0,
    "largest_host_gib": 2.0,
}


class Recorded(nn.Module):
    """Holds the loop of a recorded training, which builds its model itself."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.unused = nn.Parameter(torch.zeros(1))
        self.steps: Iterator[None] | None = None


def one_step(training: Training, batch: Any) -> torch.Tensor:
    """Run the next step of the recorded loop."""
    model: Any = training.model
    if model.steps is None:
        model.steps = TRAININGS[model.name].steps("cuda")
    next(model.steps)
    return torch.zeros(())


def workload_of(name: str) -> Workload:
    """Return a workload that is the recorded training."""
    return Workload(Recorded(name), (torch.zeros(1),), train_step=one_step)


@dataclass(frozen=True)
class Comparison:
    """One training, predicted and recorded; errors are shares of the recorded values.

    Attributes:
        name: the case.
        reserved_error: of peak reserved.
        required_error: of required bytes.
        low_error, high_error: of the ends of the interval around required bytes.
        fits_with_less, fits_with_more: the verdict for 1 % less, and 1 % more, than was recorded to
            be needed.
        looks: how many were made.
        cpu_s: seconds of the worker's processor for them.
        seconds: their duration.
        start_cpu_s: seconds of the processor for the start of the worker.
        host_gib: the most memory that the worker held, in GiB.
        estimates: which sizes were estimated.
    """

    name: str
    reserved_error: float
    required_error: float
    low_error: float
    high_error: float
    fits_with_less: bool | None
    fits_with_more: bool | None
    looks: int
    cpu_s: float
    seconds: float
    start_cpu_s: float
    host_gib: float
    estimates: tuple[str, ...]


def compared(recorded: RecordedTraining) -> Comparison:
    """Predict one training and compare it with its recording."""
    needed = recorded.smallest_limit_bytes
    with Emulation(workload_of(recorded.name), (), find_gpu(GPU)) as emulation:
        pid = emulation.worker().worker_pid
        assert pid is not None  # it has just been started
        started, start_cpu_s = time.perf_counter(), cpu_seconds(pid)
        told = emulation.need(ResolvedPlan(Plan(1)))
        seconds, cpu_s = time.perf_counter() - started, cpu_seconds(pid) - start_cpu_s
        host_gib = most_resident_bytes(pid) / 2**30
        looks = emulation.looks
    low, high = (end - told.ample.non_torch_bytes for end in told.interval)

    def fits(budget: float) -> bool | None:
        return None if low <= budget < high else high <= budget

    return Comparison(
        recorded.name,
        told.ample.peak_reserved_bytes / recorded.peak_reserved_bytes - 1,
        told.limit_bytes / needed - 1,
        low / needed - 1,
        high / needed - 1,
        fits(0.99 * needed),
        fits(1.01 * needed),
        looks,
        cpu_s,
        seconds,
        start_cpu_s,
        host_gib,
        told.ample.estimates,
    )


def cpu_seconds(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def most_resident_bytes(pid: int) -> int:
    """Return the most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def summary(results: Sequence[Comparison]) -> dict[str, float]:
    """Return the figures that `PROMISES` bounds, and how many verdicts were no answer."""
    errors = [abs(result.required_error) for result in results]
    return {
        "required_median": statistics.median(errors),
        "required_90th": statistics.quantiles(errors, n=10, method="inclusive")[-1],
        "wrongly_fits": sum(result.fits_with_less is True for result in results),
        "fits_with_more": sum(result.fits_with_more is True for result in results),
        "cannot_tell_with_more": sum(result.fits_with_more is None for result in results),
        "median_looks": statistics.median(result.looks for result in results),
        "median_cpu_s": statistics.median(result.cpu_s for result in results),
        "largest_cpu_s": max(result.cpu_s for result in results),
        "median_start_cpu_s": statistics.median(result.start_cpu_s for result in results),
        "largest_host_gib": max(result.host_gib for result in results),
    }


@dataclass(frozen=True)
class HeldOut:
    """One training under bounds that its own recording, and those of its architecture, are not in.

    Attributes:
        name: the case.
        kind: of estimate, the least exact of the training.
        error: of required bytes, as a share of the recorded ones.
        least, most: the errors that the other trainings of the kind show.
    """

    name: str
    kind: str
    error: float
    least: float
    most: float

    @property
    def fits_with_less(self) -> bool:
        """Whether it would be said to fit into 1 % less than was recorded to be needed."""
        return (1 + self.error) / (1 + self.least) <= 0.99

    @property
    def is_inside(self) -> bool:
        """Whether the recorded bytes lie in its interval, but for the 1 % of their bisection."""
        return self.least - 0.01 <= self.error <= self.most + 0.01


def held_out(
    predicted: Sequence[Mapping[str, Any]], bisected: Sequence[Mapping[str, Any]]
) -> Iterator[HeldOut]:
    """Yield the trainings whose kind of estimate others have, too.

    Args:
        predicted: the trainings of a file of this benchmark.
        bisected: those of a file of `benchmarks.emulation_accuracy`, whose required bytes were
            bisected as the recorded ones were.
    """
    alike = {each["name"]: float(each["required_error"]) for each in bisected}
    errors = {each["name"]: float(each["required_error"]) for each in predicted}
    kinds = {each["name"]: kind_of(each["estimates"]) for each in predicted}
    for name, kind in kinds.items():
        known = [other for other in kinds if kinds[other] == kind and other != name]
        others = [other for other in known if architecture(other) != architecture(name)] or known
        seen = [alike[other] for other in others]
        if kind != NO_ESTIMATE:  # else the bisection is all that differs
            seen += [errors[other] for other in others]
        if seen:
            yield HeldOut(name, kind, errors[name], min(0.0, *seen), max(0.0, *seen))


NO_ESTIMATE = "nothing, or cuDNN's attention"
KINDS = {
    "cuDNN: workspaces and reserves of recurrent layers": "recurrent layers",
    "cuDNN: workspaces of convolutions in float32": "convolutions in float32, TF32",
    "cuDNN: workspaces of convolutions in half precision": "convolutions in half precision",
}


def kind_of(estimates: Sequence[str]) -> str:
    """Return the least exact of what was estimated."""
    return next((kind for name, kind in KINDS.items() if name in estimates), NO_ESTIMATE)


def architecture(name: str) -> str:
    """Return what was trained: "resnet" of "resnet_fp32_cl"; LoRA's is a GPT, too."""
    return name.partition("_")[0].replace("lora", "gpt")


def held_out_table(results: Sequence[HeldOut]) -> Iterator[str]:
    """Yield what the bounds of others are worth, by kind of estimate."""
    yield "| estimated | trainings | inside the interval of others | said to fit into 1 % less |"
    yield "|---|---:|---:|---|"
    for kind in (NO_ESTIMATE, *KINDS.values()):
        its = [result for result in results if result.kind == kind]
        wrong = ", ".join(result.name for result in its if result.fits_with_less) or "none"
        yield f"| {kind} | {len(its)} | {sum(r.is_inside for r in its)} | {wrong} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trainings", nargs="*", help="names of some; default: all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--held-out",
        type=Path,
        nargs=2,
        help="files of results: judge bounds of others, run nothing",
    )
    options = parser.parse_args(arguments)
    if options.held_out:
        files = (json.loads(path.read_text())["trainings"] for path in options.held_out)
        print("\n".join(held_out_table(list(held_out(*files)))))
        return 0
    results = []
    print(f"{'training':22}{'required':>10}{'low':>9}{'high':>9}  -1 %   +1 %   looks  cpu s   GiB")
    for recorded in recorded_trainings():
        if options.trainings and recorded.name not in options.trainings:
            continue
        result = compared(recorded)
        results.append(result)
        print(
            f"{result.name:22}{result.required_error:>+10.2%}{result.low_error:>+9.2%}"
            f"{result.high_error:>+9.2%}  {result.fits_with_less!s:6} {result.fits_with_more!s:6}"
            f"{result.looks:>6}{result.cpu_s:>7.2f}{result.host_gib:>6.2f}",
            flush=True,
        )
    figures = summary(results) if len(results) > 1 else {}
    for name, value in figures.items():
        promised = f"  promised {PROMISES[name]}" if name in PROMISES else ""
        print(f"{name:24}{value:>9.4f}{promised}")
    if options.json:
        found = {"torch": torch.__version__, "gpu": GPU, "summary": figures}
        trainings = [asdict(result) for result in results]
        options.json.write_text(json.dumps(found | {"trainings": trainings}, indent=1) + "\n")
    return 1 if any(figures.get(name, 0) > bound for name, bound in PROMISES.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
