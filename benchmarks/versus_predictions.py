"""Predictions of peak memory by others, against the trainings that were recorded on an H200.

torch's MemTracker runs two steps of each recorded loop on fake tensors; the formulas see the model
alone. accelerate's estimator and DeepSpeed's ZeRO-2 formula on one GPU know no activations, as
their sources say (accelerate/commands/estimate.py, deepspeed/runtime/zero/stage_1_and_2.py); "the
usual formula" is 16 bytes a parameter plus twice the bytes of what the leaf modules return, as
torchinfo counts activations. FSDPMemTracker takes models of FSDP alone, and so none of these.

    python -m autofit.emulation --no-values -- python -m benchmarks.versus_predictions [--json FILE]

Rows of autofit are those of `prediction_accuracy` and `emulated_predictions`, from their newest
results. Seconds are of processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves

from benchmarks.traces.recorded import RecordedTraining, recorded_trainings
from benchmarks.traces.trainings import TRAININGS, Training

RESULTS = Path(__file__).with_name("results")
STEPS = 2


@dataclass(frozen=True)
class Guess:
    """One estimator on one training.

    Attributes:
        estimator, training: names.
        allocated_error: of peak allocated, as a share of the recorded one; None: it refused.
        required_error: of the smallest limit under which the training ran.
        seconds: of processor time.
        refused: why there is no number.
    """

    estimator: str
    training: str
    allocated_error: float | None
    required_error: float | None
    seconds: float
    refused: str | None = None


def tracked(training: Training) -> float:
    """Return the peak that torch's MemTracker sees in two steps on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = training.make()
        if training.pure is None and not training.channels_last:
            # Converts nothing, and fake parameters cannot pass through it (torch 2.11).
            vars(model)["to"] = lambda *given, **named: model
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            steps = replace(training, make=lambda: model).steps("cuda")
            for _ in range(STEPS):
                next(steps)
                tracker.reset_mod_stats()
            steps.close()  # type: ignore[attr-defined]  # a generator
        peaks = tracker.get_tracker_snapshot("peak")
    totals = [int(its["Total"]) for device, its in peaks.items() if device.type == "cuda"]
    return float(sum(totals))


def on_meta(training: Training) -> tuple[nn.Module, int]:
    """Return the model on the meta device, and how many parameters it has."""
    with torch.device("meta"):
        model = training.make()
    return model, sum(p.numel() for p in model.parameters())


def accelerate_formula(training: Training) -> float:
    """Return four copies of the weights in float32: weights, gradients and Adam's two states."""
    return 16.0 * on_meta(training)[1]


def deepspeed_formula(training: Training) -> float:
    """Return ZeRO-2's 2 N + 18 N bytes on one GPU."""
    return 20.0 * on_meta(training)[1]


def usual_formula(training: Training) -> float:
    """Return 16 bytes a parameter, and twice what leaf modules return in a forward."""
    model, parameters = on_meta(training)
    returned = 0

    def add(module: nn.Module, given: Any, output: Any) -> None:
        nonlocal returned
        returned += sum(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(add)
    with torch.device("meta"):
        model(*training.batch("meta"))
    return 16.0 * parameters + 2.0 * returned


ESTIMATORS: dict[str, Callable[[Training], float]] = {
    "torch MemTracker, fake tensors": tracked,
    "the usual formula": usual_formula,
    "accelerate estimate-memory": accelerate_formula,
    "DeepSpeed ZeRO-2 formula": deepspeed_formula,
}


def guessed(name: str, recorded: RecordedTraining) -> Guess:
    """Ask one estimator about one training."""
    began = time.process_time()
    try:
        told = ESTIMATORS[name](TRAININGS[recorded.name])
    except Exception as error:  # of any kind: it is what its user would meet
        why = f"{type(error).__name__}: {error}"[:160]
        return Guess(name, recorded.name, None, None, time.process_time() - began, why)
    return Guess(
        name,
        recorded.name,
        told / recorded.peak_allocated_bytes - 1,
        told / recorded.smallest_limit_bytes - 1,
        time.process_time() - began,
    )


def own(results: Path, pattern: str, name: str, seconds: str) -> Iterator[Guess]:
    """Yield what a benchmark of autofit's own predictions found, from its newest file."""
    newest = max(results.glob(pattern))
    for row in json.loads(newest.read_text())["trainings"]:
        yield Guess(
            name, row["name"], row.get("allocated_error"), row["required_error"], row[seconds]
        )


def line(name: str, its: Sequence[Guess]) -> str:
    """Return a row of the table."""
    cells = [name, str(len(its)), str(sum(guess.refused is not None for guess in its))]
    for kind in ("allocated_error", "required_error"):
        errors = [abs(e) for guess in its if (e := getattr(guess, kind)) is not None]
        if len(errors) < 2:
            cells += ["-", "-"]
            continue
        ninetieth = statistics.quantiles(errors, n=10, method="inclusive")[-1]
        cells += [f"{statistics.median(errors):.2%}", f"{ninetieth:.2%}"]
    cells.append(f"{statistics.median(guess.seconds for guess in its):.2f}")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and write every guess to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no GPU: run it under `python -m autofit.emulation --no-values --`")
    rows = {
        "autofit, rehearsal": list(
            own(RESULTS, "*prediction-accuracy.json", "autofit, rehearsal", "seconds")
        ),
        "autofit, emulation": list(
            own(RESULTS, "*emulated-predictions.json", "autofit, emulation", "cpu_s")
        ),
    }
    recorded = list(recorded_trainings())
    print("| estimator | trainings | refused | allocated: median | 90th |", end="")
    print(" required: median | 90th | seconds |\n|" + "---|" * 8, flush=True)
    for name in ESTIMATORS:
        rows[name] = [guessed(name, each) for each in recorded]
    for name, its in rows.items():
        print(line(name, its), flush=True)
    if given.json:
        told = {"date": str(date.today()), "torch": torch.__version__}
        guesses = [asdict(guess) for its in rows.values() for guess in its]
        given.json.write_text(json.dumps(told | {"guesses": guesses}, indent=1) + "\n")


if __name__ == "__main__":
    main()
