"""How near the README's main job comes to an exhaustive grid of the same space on this machine.

Searches first, then runs every plan of the same space once in the same kind of worker, then
measures the fastest of the grid and the search's answer again, taking turns, because on a CPU that
others use too a single measurement says little. Prints Markdown; "fraction" is the answer's
samples/s over the fastest plan's, both from the turns.

    python -m benchmarks.cpu_grid
    python -m benchmarks.cpu_grid --rounds 9 --save

`--save` writes the text to benchmarks/results/ under today's date.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import autofit
from autofit.measurement import Measurement
from autofit.plan import Plan
from autofit.probing.client import WorkerProber
from autofit.probing.prober import ProbeRequest
from autofit.registry import load_strategies
from autofit.space import Space
from autofit.units import format_bytes, format_rate, format_seconds
from benchmarks.workloads import tiny_gpt

VRAM_BUDGET = "64MiB"
FINALISTS = 8
"""Plans of the grid that are measured in turns with the search's answer."""


@dataclass(frozen=True)
class Grid:
    """Every plan of a space, run once.

    Attributes:
        measured: plan -> what came back.
        seconds: what all of it took.
    """

    measured: dict[Plan, Measurement]
    seconds: float

    @property
    def fitting(self) -> list[Plan]:
        """Those that ran within the budget, the fastest first."""
        fits = [plan for plan, measured in self.measured.items() if measured.ok]
        return sorted(fits, key=lambda plan: -rate(plan, self.measured[plan]))


def rate(plan: Plan, measured: Measurement) -> float:
    """Samples per second at the median step time."""
    assert measured.step_time_s is not None  # it ran
    return plan.samples_per_step / measured.step_time_s


def plans_of(space: Space) -> Iterator[Plan]:
    """Each plan once: every variant at every micro-batch that the global batch splits into."""
    for settings in space.variants():
        seen = set()
        for micro_batch in range(1, space.largest_micro_batch + 1):
            plan = space.plan(micro_batch, settings)
            if plan not in seen:
                seen.add(plan)
                yield plan


def run_grid(prober: WorkerProber, space: Space) -> Grid:
    """Run every plan at its full accumulation."""
    started = time.monotonic()
    measured = {plan: probe(prober, space, plan) for plan in plans_of(space)}
    return Grid(measured, time.monotonic() - started)


def probe(prober: WorkerProber, space: Space, plan: Plan) -> Measurement:
    """Run one plan at its full accumulation."""
    payloads = space.payloads(plan.settings)
    return prober.probe(ProbeRequest(plan, payloads=payloads, full_accumulation=True))


def take_turns(
    prober: WorkerProber, space: Space, plans: list[Plan], rounds: int
) -> dict[Plan, list[float]]:
    """Samples per second of each plan in each round."""
    rates: dict[Plan, list[float]] = {plan: [] for plan in plans}
    for _ in range(rounds):
        for plan in plans:
            measured = probe(prober, space, plan)
            if measured.ok:
                rates[plan].append(rate(plan, measured))
    return rates


def compare(rounds: int) -> Iterator[str]:
    """Search, run the grid, take turns; the lines of the result."""
    load_before = os.getloadavg()
    report = autofit.search(tiny_gpt(), device="cpu", vram_budget=VRAM_BUDGET)
    strategies = load_strategies()
    with WorkerProber(
        tiny_gpt(), strategies, device="cpu", vram_budget=VRAM_BUDGET, seed=0
    ) as prober:
        # The dimensions that the search had: those of a second survey might name other modules.
        space = Space(
            report.record.dimensions,
            prober.survey().sample_batch_size,
            global_batch=prober.survey().global_batch,
            may_resplit=prober.survey().may_resplit,
        )
        grid = run_grid(prober, space)
        finalists = list(dict.fromkeys([report.best.plan, *grid.fitting[:FINALISTS]]))
        turns = take_turns(prober, space, finalists, rounds)
    yield from _heading(load_before)
    yield from _result(report, grid, turns)


def _heading(load_before: tuple[float, float, float]) -> Iterator[str]:
    yield f"# The main job against an exhaustive grid, {datetime.now(UTC):%Y-%m-%d}"
    yield ""
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    yield (
        f"{_processor()}, {os.cpu_count()} cores, OMP_NUM_THREADS {threads}; "
        f"Python {platform.python_version()}, torch {version('torch')}, "
        f"autofit {version('torch-autofit')}."
    )
    yield (
        f"Load average of the last minute {load_before[0]:.1f} before and {os.getloadavg()[0]:.1f} "
        "after; a load above the number of cores means that others were computing."
    )
    yield ""


def _result(report: autofit.Report, grid: Grid, turns: dict[Plan, list[float]]) -> Iterator[str]:
    rates = {plan: statistics.median(seen) for plan, seen in turns.items() if seen}
    fastest = max(rates, key=lambda plan: rates[plan])
    answer, search = report.best.plan, report.record.search
    probing = sum(trial.measurement.seconds or 0.0 for trial in report.trials)
    yield "| | |"
    yield "|---|---|"
    yield f"| fraction of the grid's fastest | {rates.get(answer, 0.0) / rates[fastest]:.3f} |"
    yield f"| the search's answer | {answer} |"
    yield f"| the grid's fastest | {fastest} |"
    yield f"| probes | {search.probes} of a space of {len(grid.measured)} plans |"
    yield f"| OOM probes | {search.oom_probes} |"
    yield f"| plans of the grid that do not fit | {len(grid.measured) - len(grid.fitting)} |"
    yield f"| the search took | {format_seconds(search.seconds)} |"
    yield f"| of that its probes | {format_seconds(probing)} |"
    yield f"| the grid took | {format_seconds(grid.seconds)} |"
    yield ""
    yield "| plan | turns, median samples/s | slowest to fastest turn | first pass | held |"
    yield "|---|---|---|---|---|"
    for plan in sorted(rates, key=lambda plan: -rates[plan]):
        first, seen = grid.measured[plan], turns[plan]
        yield (
            f"| {plan} | {rates[plan]:.1f} | {min(seen):.1f} to {max(seen):.1f} | "
            f"{format_rate(rate(plan, first)) if first.ok else first.outcome.value} | "
            f"{format_bytes(first.held_bytes)} |"
        )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def main() -> None:
    """Print the comparison; write it too where that was asked."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--rounds", type=int, default=5, help="turns that each finalist gets")
    options.add_argument("--save", action="store_true", help="write it to benchmarks/results/")
    chosen = options.parse_args()
    text = "\n".join(compare(chosen.rounds)) + "\n"
    print(text, end="")
    if chosen.save:
        name = f"{datetime.now(UTC):%Y-%m-%d}-cpu-grid.md"
        Path(__file__).with_name("results").joinpath(name).write_text(text)


if __name__ == "__main__":
    main()
