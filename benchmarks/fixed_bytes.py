"""Trainings whose weights, gradients and optimizer fill most of the budget: the answer and a grid.

    python -m benchmarks.fixed_bytes --json FILE        (about twelve minutes, two cores)
    python -m benchmarks.fixed_bytes --json FILE --trainings 0 4 --turns 1

Each of ten real trainings on the CPU is searched over micro-batch, up to 512, precision and
checkpointing. The allocator's segments are expandable, since budgets are a few segments of 20 MiB.
A budget is what weights, gradients and moments take over their share; if that leaves too little, a
tenth more than one sample needs, or two where BatchNorm refuses one.

Then every plan of a grid is probed: micro-batches that are powers of two, all precisions, no
checkpointing, half of it and all. The fastest of the grid that fit and the answer are probed again
in turns, in random order; the ratio is the median over the turns of the answer's speed over the
fastest plan's, of which the one with the highest median counts. Trainings that the file has are not
run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import autofit
from autofit.plan import Dimension, Plan, ResolvedPlan, thinned
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.registry import load_strategies, resolve
from autofit.report.report import Report
from autofit.report.summary import describe
from autofit.space import Space
from autofit.training.workload import Workload
from autofit.units import format_bytes
from benchmarks.traces.models import LSTM, UNet
from benchmarks.workload_models import GPT, mixture_of_experts, resnet
from benchmarks.workloads import images, language, narrow, tokens_and_targets

STRATEGIES = ("precision", "checkpointing")
BYTES_PER_PARAMETER = 16
"""A weight, its gradient and both moments of AdamW, in float32."""
UNLIMITED = "4GiB"
MIN_ROOM = 1.1
"""Times what the smallest micro-batch that runs holds."""
LARGEST_SIZE = 512
LEVELS = 3
FINALISTS = 3
TIMED_S = 0.5
"""Of one probe. Steps take 10 to 50 ms."""


@dataclass(frozen=True)
class Training:
    """A training, and which share of the budget its weights, gradients and moments take."""

    name: str
    share: float
    make: Callable[[], Workload]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of weights, gradients and moments."""
        with torch.device("meta"):
            model = self.make().build_model()
        return BYTES_PER_PARAMETER * sum(each.numel() for each in model.parameters())

    def budget_bytes(self) -> int:
        """Return the bytes of the budget: enough for the smallest micro-batch that runs."""
        workload = self.make()
        batch = workload.global_batch  # with accumulation gradients stay from one to the next
        with open_prober(workload, (), Target("cpu", UNLIMITED)) as prober:
            for size in (1, 2):  # BatchNorm may refuse one sample
                smallest = Plan(size) if batch is None else Plan.split(batch, size)
                ran = prober.probe(ProbeRequest(ResolvedPlan(smallest))).measurement
                if ran.ok:
                    break
        return round(max(self.fixed_bytes / self.share, MIN_ROOM * (ran.held_bytes or 0)))


def _unet() -> Workload:
    batch = (torch.randn(2, 3, 16, 16), torch.randn(2, 1, 16, 16))
    return Workload(lambda: UNet((48, 128, 256)), batch)


def _classifier(widths: tuple[int, ...], size: int, global_batch: int | None) -> Workload:
    loss = torch.nn.CrossEntropyLoss()
    build = lambda: resnet(widths, 2, 10)  # noqa: E731 - as short
    return images(build, size, 10, 8, criterion=loss, global_batch=global_batch)


TRAININGS: Sequence[Training] = (
    Training("gpt, global batch 64", 0.7, lambda: _gpt(4096, 192, 4, 64)),
    Training("gpt of six layers", 0.8, lambda: _gpt(4096, 256, 6, None)),
    Training("gpt, wide, global batch 32", 0.85, lambda: _gpt(1024, 384, 4, 32)),
    Training("experts", 0.9, lambda: _experts(None)),
    Training("experts, global batch 32", 0.75, lambda: _experts(32)),
    Training("mlp", 0.9, lambda: narrow(6, 1024)),
    Training("lstm", 0.8, lambda: tokens_and_targets(lambda: LSTM(8192, 256), 8192, 16, 4)),
    Training("resnet", 0.85, lambda: _classifier((96, 128, 192, 256), 8, None)),
    Training("resnet, global batch 128", 0.75, lambda: _classifier((96, 128, 192, 256), 8, 128)),
    Training("unet", 0.8, _unet),
)


def _gpt(vocabulary: int, width: int, layers: int, global_batch: int | None) -> Workload:
    build = lambda: GPT(vocabulary, 16, width, layers, 4)  # noqa: E731 - as short
    return language(build, vocabulary, 16, 4, global_batch=global_batch)


def _experts(global_batch: int | None) -> Workload:
    build = lambda: mixture_of_experts(1024, 16, 128, 10, 4, 4)  # noqa: E731 - as short
    return language(build, 1024, 16, 4, global_batch=global_batch)


@dataclass(frozen=True)
class Found:
    """What one training gave.

    Attributes:
        training: its name.
        filled: share of the budget that weights, gradients and moments take.
        budget_bytes: of the search and of every probe.
        probes, ooms, seconds: of the search.
        answer, best: plans, of the search and of the grid.
        grid: plans of the grid, and how many of them fit.
        ratio: speed of the answer over that of the best plan; 0 where it did not fit.
        step_s: of the best plan.
    """

    training: str
    filled: float
    budget_bytes: int
    probes: int
    ooms: int
    seconds: float
    answer: str
    best: str
    grid: tuple[int, int]
    ratio: float
    step_s: float

    def __str__(self) -> str:
        return (
            f"| {self.training} | {format_bytes(self.budget_bytes)} | {self.filled:.0%} "
            f"| {self.ratio:.3f} | {self.probes} | {self.ooms} | {self.seconds:.0f} "
            f"| {self.answer} | {self.best} | {self.grid[1]} of {self.grid[0]} | "
            f"{1e3 * self.step_s:.0f} |"
        )


@dataclass(frozen=True)
class Judge:
    """Probes any plan of a training under its budget."""

    prober: Prober
    space: Space

    def speed(self, plan: Plan) -> float:
        """Return samples per second; 0 where it does not fit."""
        resolved = resolve(plan, self.space, load_strategies(STRATEGIES))
        request = ProbeRequest(resolved, full_accumulation=True, most_timed_seconds=TIMED_S)
        measured = self.prober.probe(request).measurement
        step_s = measured.step_time_s
        return plan.samples_per_step / step_s if measured.ok and step_s else 0.0

    def grid(self) -> dict[Plan, float]:
        """Return the speed of each plan of the grid."""
        return {plan: self.speed(plan) for plan in self._plans()}

    def in_turns(self, plans: Sequence[Plan], turns: int) -> dict[Plan, list[float]]:
        """Return each plan's speeds."""
        draw, found = random.Random(0), {plan: list[float]() for plan in plans}
        for _ in range(turns):
            for plan in draw.sample(plans, len(plans)):
                found[plan].append(self.speed(plan))
        return found

    def _plans(self) -> Iterator[Plan]:
        dimensions = self.space.dimensions.items()
        values = {name: thinned(each.values, LEVELS) for name, each in dimensions}
        space = Space(
            {name: Dimension(each) for name, each in values.items()},
            self.space.sample_batch_size,
            self.space.global_batch,
        )
        most = min(self.space.largest_micro_batch, LARGEST_SIZE)
        sizes = [size for size in (2**power for power in range(most.bit_length())) if size <= most]
        plans = (space.plan(size, settings) for settings in space.variants() for size in sizes)
        yield from dict.fromkeys(plans)


def searched(training: Training, budget_bytes: int) -> Report:
    """Search as a user does, over the settings of the grid."""
    return autofit.search(
        training.make(),
        device="cpu",
        vram_budget=budget_bytes,
        strategies=STRATEGIES,
        progress=False,
        options=autofit.SearchOptions(max_micro_batch=LARGEST_SIZE, allow_accumulation_change=True),
    )


def judged(training: Training, turns: int) -> Found:
    """Search a training, and hold the answer against the grid."""
    budget_bytes = training.budget_bytes()
    began = time.monotonic()
    report = searched(training, budget_bytes)
    seconds = time.monotonic() - began
    say(f"{training.name}: {describe(report.plan, report.record)}, {seconds:.0f} s")
    workload, answer = training.make(), report.plan
    space = Space(report.record.dimensions, workload.sample_batch_size, workload.global_batch)
    target = Target("cpu", budget_bytes)
    with open_prober(workload, load_strategies(STRATEGIES), target) as prober:
        judge = Judge(prober, space)
        grid = judge.grid()
        fastest = sorted(grid, key=lambda plan: -grid[plan])[:FINALISTS]
        speeds = judge.in_turns(list(dict.fromkeys([answer, *fastest])), turns)
    best = max(fastest, key=lambda plan: statistics.median(speeds[plan]))
    ratio = statistics.median(
        mine / its for mine, its in zip(speeds[answer], speeds[best], strict=True) if its
    )
    trials = report.trials
    return Found(
        training.name,
        training.fixed_bytes / budget_bytes,
        budget_bytes,
        report.record.search.probes,
        sum(not trial.ok and trial.measurement.outcome.about_memory for trial in trials),
        round(seconds, 1),
        describe(answer, report.record),
        describe(best, report.record),
        (len(grid), sum(speed > 0 for speed in grid.values())),
        round(ratio, 4),
        best.samples_per_step / statistics.median(speeds[best]),
    )


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run the trainings that the file does not have, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="JSON lines")
    parser.add_argument("--trainings", type=int, nargs="+", default=range(len(TRAININGS)))
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    lines = given.json.read_text().splitlines() if given.json.exists() else []
    found = {each["training"]: Found(**each) for each in map(json.loads, lines)}
    for number in given.trainings:
        training = TRAININGS[number]
        if training.name not in found:
            found[training.name] = judged(training, given.turns)
            say(str(found[training.name]))
            with given.json.open("a") as file:
                file.write(json.dumps(asdict(found[training.name])) + "\n")
    print(
        "| training | budget | filled | answer over the grid | probes | OOM | s | answer ", end=""
    )
    print("| best of the grid | fit | ms |\n|---|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(map(str, found.values())))


if __name__ == "__main__":
    main()
