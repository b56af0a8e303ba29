"""Predictions of peak memory by others, against recorded trainings and an emulated card.

The first truth is 30 trainings recorded on an H200; the second is what PyTorch's allocator took on
an emulated H200 in the newest results of `emulation_models`, for models of torchvision, timm,
transformers and diffusers. That card is autofit's own, so its rows there are of the rehearsal only.

    emulated-gpu run --no-values -- python -m benchmarks.versus_predictions GUESSES.jsonl

A guess that GUESSES.jsonl has is not made again; `--table` prints what it has. Models come in an
order that is shuffled once, so that a run that is ended has a sample of them. Rows of autofit are
those of `prediction_accuracy` and `emulation_models`, from their results.
Seconds are of processor time. The estimators are those of `benchmarks.estimators`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.emulated_models import MODELS
from benchmarks.emulation_cases import OPTIMIZERS, Case, build
from benchmarks.emulation_models import Result, read
from benchmarks.estimators import ESTIMATORS, Subject, to
from benchmarks.traces.recorded import recorded_trainings
from benchmarks.traces.trainings import TRAININGS, Training

RESULTS = Path(__file__).with_name("results")
RECORDED, CARD = "recorded on an H200", "models on the emulated card"


@dataclass(frozen=True)
class Guess:
    """One estimator on one training.

    Attributes:
        truth: `RECORDED` or `CARD`.
        estimator, training: names.
        allocated_error: of peak allocated, as a share of the true one; None: it refused.
        required_error: of the smallest limit under which the training ran.
        seconds: of processor time.
        refused: why there is no number.
    """

    truth: str
    estimator: str
    training: str
    allocated_error: float | None
    required_error: float | None
    seconds: float
    refused: str | None = None


@dataclass(frozen=True)
class Task:
    """A training with the bytes that it took."""

    truth: str
    name: str
    subject: Subject
    allocated_bytes: int
    required_bytes: int


def recorded_subject(training: Training) -> Subject:
    """Return a recorded training as a plain loop."""

    def make() -> nn.Module:
        with torch.device("meta"):
            model = training.make()
        model.to(training.pure)
        if training.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks it
        return model

    def batch(device: str) -> Any:
        its = training.batch(device)
        if not training.channels_last:
            return its
        return [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in its]

    return Subject(
        make,
        batch,
        lambda model, batch: model(*batch),
        training._optimizer,
        training.autocast,
        training.clipped,
        training.accumulation_steps,
    )


def card_subject(case: Case) -> Subject:
    """Return a training of `emulation_models` as a plain loop."""
    model = MODELS[case.model]
    autocast = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(case.precision)
    return Subject(
        partial(build, case),
        lambda device: to(model.batch(), device),
        model.loss_fn or (lambda model, batch: model(**batch).loss),
        OPTIMIZERS[case.optimizer],
        autocast,
    )


def on_card() -> list[Result]:
    """Return the cases that trained on the emulated card, from the newest results."""
    found = [
        each for each in read(max(RESULTS.glob("*-emulation-models-again.jsonl"))) if each.emulated
    ]
    random.Random(0).shuffle(found)
    return found


def tasks() -> Iterator[Task]:
    """Yield what is estimated."""
    for each in recorded_trainings():
        subject = recorded_subject(TRAININGS[each.name])
        yield Task(
            RECORDED, each.name, subject, each.peak_allocated_bytes, each.smallest_limit_bytes
        )
    for result in on_card():
        assert result.emulated is not None  # on_card leaves those out
        taken = result.emulated.allocated, result.emulated.required
        yield Task(CARD, result.case.name, card_subject(result.case), *taken)


def guessed(name: str, task: Task) -> Guess:
    """Ask one estimator about one training."""
    torch.manual_seed(0)
    began = time.process_time()
    told, why = None, None
    try:
        told = ESTIMATORS[name](task.subject)
    except Exception as error:  # of any kind: it is what its user would meet
        why = f"{type(error).__name__}: {error}"[:160]
    seconds = time.process_time() - began
    if told is None:
        return Guess(task.truth, name, task.name, None, None, seconds, why)
    errors = told / task.allocated_bytes - 1, told / task.required_bytes - 1
    return Guess(task.truth, name, task.name, *errors, seconds)


def own() -> Iterator[Guess]:
    """Yield what benchmarks of autofit's own predictions found."""
    for row in json.loads(max(RESULTS.glob("*prediction-accuracy.json")).read_text())["trainings"]:
        errors = row["allocated_error"], row["required_error"]
        yield Guess(RECORDED, "autofit", row["name"], *errors, row["seconds"])
    for each in on_card():
        yield Guess(
            CARD,
            "autofit",
            each.case.name,
            each.error("allocated"),
            each.error("required"),
            each.rehearsal_s,
            each.refused or (None if each.rehearsed else each.failed),
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


def table(guesses: Sequence[Guess]) -> Iterator[str]:
    """Yield a table for each truth, of the trainings that every estimator was asked about."""
    for truth in (RECORDED, CARD):
        its = [guess for guess in guesses if guess.truth == truth]
        asked: dict[str, set[str]] = {}
        for guess in its:
            asked.setdefault(guess.estimator, set()).add(guess.training)
        if not set(ESTIMATORS) <= set(asked):
            continue
        common = set.intersection(*asked.values())
        yield f"{truth[0].upper()}{truth[1:]}:"
        yield ""
        yield (
            "| estimator | trainings | refused | allocated: median | 90th | "
            "required: median | 90th | seconds |"
        )
        yield "|" + "---|" * 8
        names = sorted(asked, key=lambda name: (not name.startswith("autofit"), name))
        for name in names:
            yield line(name, [g for g in its if g.estimator == name and g.training in common])
        yield ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write guesses to a file, and print tables of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("guesses", type=Path, help="a file of one JSON object a line")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    given = parser.parse_args(arguments)
    if not given.table and not torch.cuda.is_available():
        parser.error("no GPU: run it under `emulated-gpu run --no-values --`")
    lines = given.guesses.read_text().splitlines() if given.guesses.exists() else []
    found = [Guess(**json.loads(line)) for line in lines]
    done = {(guess.truth, guess.estimator, guess.training) for guess in found}
    if not given.table:
        with given.guesses.open("a") as file:
            for task in tasks():
                for name in ESTIMATORS:
                    if (task.truth, name, task.name) not in done:
                        found.append(guessed(name, task))
                        print(json.dumps(asdict(found[-1])), file=file, flush=True)
    print("\n".join(table([*own(), *found])))


if __name__ == "__main__":
    main()
