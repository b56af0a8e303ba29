"""How far are the checkpoint levels from the best placement there is?

    python -m benchmarks.placement_quality [--out benchmarks/results/placement_quality-DATE.md]

Two networks of nine blocks are small enough to run all 512 subsets of their blocks: convolutions
of very different sizes, and a GPT. For 20 VRAM budgets between the least that any subset needs
and what plain training needs, each rule's cheapest placement that really fits is set against the
cheapest subset that really fits: extra recompute, in percent of one forward pass. Peaks are
the live bytes of a real forward and backward pass; costs are measured forward times of the parts.
The levels are those a search is offered; they may also split blocks, and then beat every subset.

Last, the time to compute the frontier of 1,000 candidates.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit.memory.tracer import MemoryTracer
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.testing import PlainContext
from autofit.training.training import Training
from autofit.training.workload import Workload
from benchmarks.workload_models import GPT

BUDGETS = 20
REPEATS = 40
Units = tuple[str, ...]

_STRATEGY = load_strategies(["checkpointing"])[0]
_PACKAGE = type(_STRATEGY).__module__.rpartition(".")[0]


def _part(name: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{name}")


class Uneven(nn.Module):
    """A block of some convolutions with batch normalization, and a coarser image after it."""

    def __init__(self, inputs: int, outputs: int, layers: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(outputs if i else inputs, outputs, 3, 1 if i else stride, 1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            )
            for i in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Convolutions(nn.Module):
    """Nine blocks from 8 channels at 32x32 to 96 channels at 4x4."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [
            (3, 8, 3, 1),
            (8, 16, 1, 1),
            (16, 16, 4, 2),
            (16, 24, 2, 1),
            (24, 48, 1, 1),
            (48, 48, 3, 2),
            (48, 32, 2, 1),
            (32, 96, 1, 2),
            (96, 64, 3, 1),
        ]
        self.blocks = nn.ModuleList(Uneven(*shape) for shape in shapes)
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            images = block(images)
        logits = self.head(images.mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def convolutions() -> Workload:
    """The heterogeneous network, 32 images of 32x32."""
    torch.manual_seed(0)
    batch = {"images": torch.randn(32, 3, 32, 32), "labels": torch.randint(0, 10, (32,))}
    return Workload(Convolutions(), batch)


def gpt() -> Workload:
    """Nine equal blocks of width 48 over 64 tokens, 8 texts."""
    torch.manual_seed(0)
    model = GPT(vocabulary=64, tokens=64, width=48, layers=9, heads=4)
    return Workload(model, {"ids": torch.randint(0, 64, (8, 64))})


@dataclass(frozen=True)
class Point:
    """A placement that was run."""

    units: Units
    peak_bytes: int
    seconds: float


class Bench:
    """Runs placements of one network."""

    def __init__(self, build: Callable[[], Workload]) -> None:
        self._build = build
        self._seconds: dict[str, float] = {}
        self.forward_s = 0.0

    def time_parts(self, units: Sequence[str]) -> None:
        """Measure the forward time of all these units, and of the whole."""
        model = self._build().build_model()
        batch: Any = self._build().sample_batch
        parse = _part("units").Unit.parse
        parts = {unit: parse(unit).parts(model) for unit in units}
        names = {"", *(name for names in parts.values() for name in names)}
        runs = []
        for _ in range(REPEATS):
            stopwatch = _part("profile").Stopwatch(model, names, torch.device("cpu"))
            with stopwatch.running():
                model(**batch)
            runs.append(stopwatch.seconds())
        self.forward_s = min(run[""] for run in runs)
        shares = {name: statistics.median(run[name] / run[""] for run in runs) for name in names}
        self._seconds = {
            unit: self.forward_s * sum(shares[name] for name in names)
            for unit, names in parts.items()
        }

    def run(self, units: Units, state: Sequence[str]) -> Point:
        """Peak bytes of one real step with these units checkpointed, and its recompute time."""
        workload = self._build()
        model, plan = workload.build_model(), Plan(workload.sample_batch_size)
        training = Training(
            model,
            workload.build_optimizer(model),
            workload.recipe,
            ResolvedPlan(plan),
            device=torch.device("cpu"),
        )
        batch = workload.sample_batch
        tracer = MemoryTracer(record=True)
        tracer.register_foreign([dict(model.state_dict()), batch])
        with _part("checkpointed").checkpointed(model, units, state), tracer:
            training.accumulate(batch)
        seconds = sum(self._seconds[unit] for unit in units)
        return Point(units, _most_live_bytes(tracer.events), seconds)


def _most_live_bytes(events: Sequence[tuple[int, int]]) -> int:
    """The most bytes in tensors at once; no allocator's rounding blurs the comparison."""
    live: dict[int, int] = {}
    now = most = 0
    for number, nbytes in events:
        if number > 0:
            live[number] = nbytes
            now += nbytes
            most = max(most, now)
        else:
            now -= live.pop(-number)
    return most


def subsets(blocks: Sequence[str]) -> Iterator[Units]:
    """All of them."""
    for count in range(len(blocks) + 1):
        yield from combinations(blocks, count)


def rules(blocks: Sequence[str]) -> dict[str, list[Units]]:
    """Placements that need no measurement; each rule may also leave all as it is."""
    every = [tuple(blocks[::k]) for k in range(1, len(blocks) + 1)]
    prefixes = [tuple(blocks[:count]) for count in range(1, len(blocks) + 1)]
    return {
        "every k-th block": [(), *every],
        "prefix": [(), *prefixes],
        "all or none": [(), tuple(blocks)],
    }


def regrets(points: Sequence[Point], best: Sequence[Point], forward_s: float) -> list[float]:
    """Extra recompute for each budget, in percent of one forward; infinite where nothing fits."""
    lowest, plain = min(p.peak_bytes for p in best), best[0].peak_bytes
    found = []
    for number in range(BUDGETS):
        budget = lowest + (plain - lowest) * (number + 0.5) / BUDGETS
        own = _cheapest(points, budget)
        found.append(100 * (own - _cheapest(best, budget)) / forward_s)
    return found


def _cheapest(points: Sequence[Point], budget: float) -> float:
    return min((p.seconds for p in points if p.peak_bytes <= budget), default=float("inf"))


def measure(name: str, build: Callable[[], Workload]) -> Iterator[str]:
    """The table of one network, as lines."""
    blocks = [f"blocks.{index}" for index in range(9)]
    context = PlainContext(build)
    began = time.perf_counter()
    (dimension,) = _STRATEGY.dimensions(context).values()
    took_s = time.perf_counter() - began
    levels = {level: dimension.payloads.get(level, {"units": []}) for level in dimension.values}
    state = sorted({b for payload in levels.values() for b in payload.get("state", ())})
    whole, everything = _placements(build, blocks), _placements(build, None)
    bench = Bench(build)
    named: set[str] = {unit for payload in levels.values() for unit in payload["units"]}
    bench.time_parts(sorted({*named, *blocks, *(u for units in everything for u in units)}))
    run = {units: bench.run(units, state) for units in subsets(blocks)}
    candidates: Mapping[str, list[Point]] = {
        f"levels ({len(levels)})": [bench.run(tuple(p["units"]), state) for p in levels.values()],
        f"all placements found ({len(everything)})": [bench.run(u, state) for u in everything],
        f"those of whole blocks ({len(whole)})": [run[units] for units in whole],
        **{rule: [run[units] for units in places] for rule, places in rules(blocks).items()},
    }
    best = list(run.values())
    yield f"### {name}"
    yield ""
    yield (
        f"forward {1000 * bench.forward_s:.1f} ms; peaks of the 512 subsets from "
        f"{min(p.peak_bytes for p in best)} to {best[0].peak_bytes} bytes; "
        f"levels found in {took_s:.2f} s"
    )
    yield ""
    yield "| rule | mean extra % of a forward | worst | budgets not reached |"
    yield "|---|---|---|---|"
    for rule, points in candidates.items():
        yield _row(rule, regrets(points, best, bench.forward_s))
    yield ""


def _row(rule: str, extra: Sequence[float]) -> str:
    reached = [value for value in extra if value != float("inf")]
    mean = f"{statistics.fmean(reached):.2f}" if reached else "-"
    worst = f"{max(reached):.2f}" if reached else "-"
    return f"| {rule} | {mean} | {worst} | {len(extra) - len(reached)} |"


def _placements(build: Callable[[], Workload], units: Sequence[str] | None) -> list[Units]:
    """All placements found before they are thinned to levels; None: of all candidates."""
    context = PlainContext(build)
    looks, find = _part("profile"), _part("units").find_candidates
    small, large = (looks.profile_step(context, micro_batch) for micro_batch in (2, 32))
    timeline = looks.brought_by_samples(small, large)
    found = find(context.model, timeline).timeline if units is None else timeline.of(units)
    parse = _part("units").Unit.parse
    names = {part for unit in found.calls_of for part in parse(unit).parts(context.model)}
    times = looks.time_parts(context, 32, names)
    return [p.units for p in _part("strategy").find_placements(context.model, found, times)]


def frontier_of_a_thousand() -> Iterator[str]:
    """Seconds to find the levels of a model with 1,000 candidates."""
    timeline, frontier = _part("timeline"), _part("placement")
    generator = random.Random(0)
    storages: list[Any] = []
    calls: list[Any] = []
    for index in range(1000):
        start = len(storages)
        for _ in range(generator.randint(4, 12)):
            position = len(storages)
            nbytes = generator.randint(10_000, 1_000_000)
            storages.append(timeline.Storage(nbytes, position, position))
        calls.append(timeline.Call(f"unit{index}", start, len(storages), (start,)))
    seconds = {call.unit: generator.uniform(0.001, 0.01) for call in calls}
    began, began_cpu = time.perf_counter(), time.process_time()
    whole = frontier.frontier(timeline.Timeline(storages, calls), seconds)
    levels = frontier.thinned(frontier.spread(whole))
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    yield (
        f"1,000 candidates: {len(whole)} placements, {len(levels)} levels, in {took_s:.2f} s "
        f"({cpu_s:.2f} s of the processor)"
    )


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    out: Path | None = parser.parse_args().out
    torch.set_num_threads(1)
    lines = [
        f"# Placement quality, {date.today()}",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, 1 thread",
        "",
        *measure("Heterogeneous convolutions", convolutions),
        *measure("GPT", gpt),
        *frontier_of_a_thousand(),
    ]
    text = "\n".join(lines)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
