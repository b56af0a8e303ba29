"""How good a search's answer is: an exhaustive grid over the same space on the same device.

    python -m benchmarks.grid benchmarks/workloads.py:tiny_gpt --device cpu --vram-budget 64MiB
    python -m benchmarks.grid benchmarks/workloads.py:gpt2_small --device cuda --vram-budget 24GiB

The grid runs every variant at every micro-batch up to its first that does not fit. Then the grid's
best plans and the search's answer are measured again in turns, at their full accumulation, so that
a drift of the machine's speed favours none of them. Prints Markdown.

Where there are only minutes, a part of the grid says something too, and what was left out is
printed: some values of a setting, no small micro-batches, an end by the clock.

    ... --only checkpointing.level=0,4,8 --only precision.dtype=default,bfloat16 --smallest 4 \\
        --seconds 300
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date

from autofit import Plan, Report, Workload, search
from autofit.cli.target import load_target
from autofit.measurement import Measurement
from autofit.plan import Settings, unlike
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Prober, Target, open_prober
from autofit.registry import load_strategies, resolve
from autofit.searching.events import Event, ProbeFinished, ProbeStarted
from autofit.space import Space
from autofit.units import format_bytes, format_seconds

FINALISTS = 8


@dataclass
class Stopwatch:
    """How long a search took outside its probes; the `progress` of a search."""

    began: float = field(default_factory=time.monotonic)
    first_probe_s: float | None = None
    probes_s: float = 0.0

    def __call__(self, event: Event) -> None:
        """Note one event."""
        if isinstance(event, ProbeStarted) and self.first_probe_s is None:
            self.first_probe_s = time.monotonic() - self.began
        if isinstance(event, ProbeFinished):
            self.probes_s += event.trial.measurement.seconds or 0.0


def micro_batches(space: Space) -> list[int]:
    """The micro-batches of the grid: every split of the global batch, or steps of about 1.4."""
    if space.global_batch is not None:
        whole = space.global_batch
        return sorted({-(-whole // count) for count in range(1, whole + 1)})
    steps = {round(2 ** (exponent / 2)) for exponent in range(2 * 20)}
    return sorted(step for step in steps if step <= space.largest_micro_batch)


@dataclass(frozen=True)
class Part:
    """The part of a grid that is run.

    Attributes:
        only: setting -> the values that are tried, as text; all where it is not named.
        smallest: no micro-batch below it, in samples.
        seconds: no new plan is begun after so many.
        turns: of the finalists, when they are measured again.
    """

    only: Mapping[str, frozenset[str]]
    smallest: int
    seconds: float
    turns: int

    def check(self, space: Space) -> None:
        """Refuse settings and values that the space has not, before minutes are spent on them."""
        for name, values in self.only.items():
            dimension = space.dimensions.get(name)
            known = {str(value) for value in dimension.values} if dimension else set()
            if not values <= known:
                raise SystemExit(f"--only {name}: {sorted(values - known)} not in {sorted(known)}")

    def has(self, settings: Settings) -> bool:
        """Whether the variant belongs to it."""
        return all(str(settings[name]) in values for name, values in self.only.items())

    def __str__(self) -> str:
        values = [f"{name} in {', '.join(sorted(each))}" for name, each in self.only.items()]
        sizes = [f"micro-batches from {self.smallest}"] if self.smallest > 1 else []
        return "; ".join(values + sizes) or "all of it"


def grid(prober: Prober, space: Space, part: Part) -> Iterator[tuple[Plan, Measurement]]:
    """Every plan of that part of the grid that may fit, and what came of it."""
    end = time.monotonic() + part.seconds
    sizes = [size for size in micro_batches(space) if size >= part.smallest]
    for settings in filter(part.has, space.variants()):
        for micro_batch in sizes:
            if time.monotonic() > end:
                return
            plan = space.plan(micro_batch, settings)
            request = ProbeRequest(resolve(plan, space, prober.strategies))
            measured = prober.probe(request).measurement
            yield plan, measured
            if not measured.ok:
                break


def in_turns(prober: Prober, space: Space, plans: list[Plan], turns: int) -> dict[Plan, float]:
    """Median samples per second of each plan over so many turns in a fresh worker."""
    rates: dict[Plan, list[float]] = {plan: [] for plan in plans}
    prober.renew()
    for _ in range(turns):
        for plan in plans:
            resolved = resolve(plan, space, prober.strategies)
            request = ProbeRequest(resolved, full_accumulation=True)
            step_time_s = prober.probe(request).measurement.step_time_s
            if step_time_s is not None:
                rates[plan].append(plan.samples_per_step / step_time_s)
    return {plan: statistics.median(seen) for plan, seen in rates.items() if seen}


def compare(
    workload: Workload, report: Report, device: str, seed: int, part: Part
) -> Iterator[str]:
    """Run that part of the grid and compare, line by line."""
    space = Space(
        report.record.dimensions,
        report.record.workload["sample_batch_size"],
        global_batch=workload.global_batch,
        may_change_accumulation=report.record.workload["may_change_accumulation"],
    )
    budget = report.record.vram_budget_bytes
    with open_prober(workload, load_strategies(), Target(device, budget, seed)) as prober:
        began = time.monotonic()
        part.check(space)
        measured = list(grid(prober, space, part))
        took = time.monotonic() - began
        fits = [(plan, m.step_time_s) for plan, m in measured if m.ok and m.step_time_s]
        ranked = sorted(fits, key=lambda each: -(each[0].samples_per_step / each[1]))
        plans = [plan for plan, _ in ranked[:FINALISTS]]
        rates = in_turns(prober, space, list(dict.fromkeys([report.best.plan, *plans])), part.turns)
    cut = ", cut off by the clock" if took > part.seconds else ""
    yield f"| grid | {part}: {len(measured)} plans, {format_seconds(took)}{cut} |"
    yield from standing(report.best.plan, plans, rates, space)


def standing(
    answer: Plan, plans: list[Plan], rates: Mapping[Plan, float], space: Space
) -> Iterator[str]:
    """How the search's answer stands beside the grid's best plans; those that failed are named.

    Args:
        answer: of the search.
        plans: the grid's finalists.
        rates: samples per second of those that ran when they took turns.
        space: of both.
    """

    def words(plan: Plan) -> str:
        rate = f"{rates[plan]:.4g} samples/s" if plan in rates else "failed in every turn"
        return f"{_words(plan, space)}: {rate}"

    for plan in plans:
        if plan not in rates:
            yield f"| a finalist of the grid | {words(plan)} |"
    best = max(rates.keys() & plans, key=rates.__getitem__, default=None)
    if best is not None:
        yield f"| grid's best | {words(best)} |"
    yield f"| search's answer | {words(answer)} |"
    if best is not None and answer in rates:
        yield f"| fraction of the grid's best | {rates[answer] / rates[best]:.3f} |"


def _words(plan: Plan, space: Space) -> str:
    changed = [f"{k}={v}" for k, v in unlike(plan.settings, space.plain_settings).items()]
    return ", ".join([f"micro-batch {plan.micro_batch} x {plan.accumulation_steps}", *changed])


def main() -> None:
    """Search, run the grid, print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--device", default=None)
    parser.add_argument("--vram-budget", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="SETTING=VALUE,VALUE")
    parser.add_argument("--smallest", type=int, default=1, help="micro-batch of the grid")
    parser.add_argument("--seconds", type=float, default=math.inf, help="the grid's end")
    parser.add_argument("--turns", type=int, default=5, help="of the finalists, at the end")
    given = parser.parse_args()
    only = {
        name: frozenset(values.split(","))
        for name, _, values in (each.partition("=") for each in given.only)
    }
    part = Part(only, given.smallest, given.seconds, given.turns)
    workload = load_target(given.target)
    # Built once: a function that builds the model anew for every probe would be most of the grid.
    workload = replace(workload, model=workload.build_model())
    stopwatch = Stopwatch()
    report = search(
        workload,
        device=given.device,
        vram_budget=given.vram_budget,
        seed=given.seed,
        progress=stopwatch,
    )
    found, environment = report.record.search, report.record.environment
    outside = found.seconds - (stopwatch.first_probe_s or 0.0) - stopwatch.probes_s
    where = environment["gpu"] or f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"### {given.target.rpartition(':')[2]}, {date.today()}, {where}, torch", end=" ")
    print(f"{environment['torch']}\n\n| what | measured |\n|---|---|")
    print(f"| VRAM budget | {format_bytes(report.record.vram_budget_bytes)} |")
    print(f"| search | {found.probes} probes, {found.oom_probes} OOM, {found.seconds:.1f} s |")
    print(f"| of these: start and look-over | {stopwatch.first_probe_s or 0.0:.1f} s |")
    print(f"| in probes | {stopwatch.probes_s:.1f} s |")
    print(f"| beyond both, a second worker's start included | {outside:.1f} s |")
    sys.stdout.flush()
    for line in compare(workload, report, environment["device"], given.seed, part):
        print(line, flush=True)


if __name__ == "__main__":
    main()
