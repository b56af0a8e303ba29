"""Searches beside what a person picks who knows the device: "bfloat16, fused, as large as fits".

    python -m benchmarks.expert_worlds run --json rows.jsonl          (about four minutes)
    python -m benchmarks.expert_worlds table before.jsonl after.jsonl

The worlds are devices of two kinds (`irregular_devices`, and such whose step times are lines),
trainings of two formulas (`formula_worlds`), two grids that were recorded on an H200, and the same
two on simulated cards (`grids`), where nothing, memory lines, or lines and times are predicted. The
planner is the product's, and so is the number of planned steps, unless `--planned-steps` says
another. Each search is written down as it ends, and those that the file has are not run again.

Two rules of a person's, both told without noise what fits: the best precision at the largest
micro-batch that fits, and the same with every free lever on (fused, channels_last) in bfloat16. A
share is the true speed of an answer over that of the best plan of the whole space; where a
compilation can be chosen, its cost counts over 10,000 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import optuna

from autofit.measurement import probes_of
from autofit.plan import Dimension, NoFeasiblePlan, Plan, Scalar, Settings
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.searching.options import SearchArguments
from autofit.space import Space
from autofit.testing import SimulatedProber
from benchmarks import formula_worlds as formulas
from benchmarks.grids.cards import card_world
from benchmarks.grids.recorded import WORKLOADS, GridWorld, grid_world
from benchmarks.irregular_devices import IrregularDevice, Shape, draw_irregular_device
from benchmarks.simulated_devices import FORMAT, draw_device

FIRST_SEED = 970_000
"""Nothing was tuned on seeds from here on."""
NOISES = (0.002, 0.005, 0.02, 0.05, 0.1, 0.2)
MIN_HIDING_NOISE = 0.05
"""Between probes of a device: 5 % cannot be seen there, so no shortfall is counted."""
LEVERS = (FORMAT, formulas.LAYOUT, formulas.FUSED)
BEST_PRECISIONS = ("bfloat16", "float16", "tf32")
LARGEST_SIZE = 4096
BLIND, LINES, BOTH = "blind", "lines", "both"
_DEFAULT = SearchArguments.planned_steps
_START_S, _PROBE_S = 5.0, 1.5  # about what a worker's start and a probe take on a GPU


class World(Protocol):
    """What can be searched, and what is true of each of its plans."""

    @property
    def space(self) -> Space:
        """The search space."""

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan fits, without noise."""

    def speed(self, plan: Plan) -> float:
        """Return samples per second, without noise."""

    def optimum(self) -> float:
        """Return samples per second of the best plan."""

    def prober(self) -> SimulatedProber:
        """Return a new prober."""

    def spec(self) -> SearchSpec:
        """Return the specification of a search."""


@dataclass(frozen=True)
class Grid:
    """A recorded grid, or one on a simulated card, with what is predicted of it."""

    grid: GridWorld
    told: str

    @property
    def space(self) -> Space:
        """The search space."""
        return self.grid.space

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan fits, without noise."""
        return self.grid.fits(plan)

    def speed(self, plan: Plan) -> float:
        """Return samples per second, without noise."""
        return self.grid.speed(plan)

    def optimum(self) -> float:
        """Return samples per second of the fastest recorded plan that fits."""
        return self.grid.optimum()

    def prober(self) -> SimulatedProber:
        """Return a new prober."""
        return self.grid.prober()

    def spec(self) -> SearchSpec:
        """Return the specification of a search."""
        return self.grid.spec(lines=self.told != BLIND, times=self.told == BOTH)


@dataclass(frozen=True)
class Row:
    """One search.

    Attributes:
        group, seed: the world.
        share: speed of the answer over that of the best plan; 0 where nothing was found.
        expert: the same of the better rule of a person's; 0 where nothing fits.
        is_compared: whether the noise lets 5 % be seen.
        probes, ooms: counts.
        seconds: that it would take, with what the space says of costly values.
        planning_s: processor time.
        plan: the answer.
    """

    group: str
    seed: int
    share: float
    expert: float
    is_compared: bool
    probes: int
    ooms: int
    seconds: float
    planning_s: float
    plan: str

    @property
    def ahead(self) -> float:
        """Speed of the answer over that of the better rule."""
        return self.share / self.expert if self.expert else 1.0

    def __str__(self) -> str:
        return (
            f"{self.group} {self.seed}: {self.share:.3f} of the best, {self.ahead:.3f} of the "
            f"expert, {self.probes} probes, {self.ooms} OOM, {self.planning_s:.1f} s, {self.plan}"
        )


def irregular(seed: int) -> IrregularDevice:
    """Return a device whose kernels have cliffs."""
    return draw_irregular_device(seed, noise=NOISES[seed % len(NOISES)], cliffs="settings")


def regular(seed: int) -> IrregularDevice:
    """Return a device whose step time is a line of the micro-batch."""
    device = draw_device(seed)
    return IrregularDevice(device, {variant: Shape() for variant in device.lines}, 0.005, 0.005)


def _grid(make: Callable[[str, int], GridWorld], name: str, told: str) -> Callable[[int], World]:
    return lambda seed: Grid(make(name, seed), told)


DEVICES: Mapping[str, Callable[[int], World]] = {"irregular": irregular, "regular": regular}
FORMULAS: Mapping[str, Callable[[int], World]] = {
    "cpu_cast": formulas.cpu_cast,
    "interaction blind": formulas.interaction,
    "interaction lines": lambda seed: formulas.interaction(seed).with_lines(),
    "compile lines": lambda seed: formulas.compiled(seed).with_lines(),
    "compile blind": formulas.compiled,
    "nonmonotone": formulas.nonmonotone,
    "launch_bound": formulas.launch_bound,
    "saturated": formulas.saturated,
    "h100 lines": lambda seed: formulas.h100(seed).with_lines(),
    "h100 blind": formulas.h100,
}
GRIDS: Mapping[str, Callable[[int], World]] = {
    f"{kind} {told} {name}": _grid(make, name, told)
    for kind, make in (
        ("recorded", lambda name, seed: grid_world(name, seed=seed)),
        ("card", card_world),
    )
    for told in (BLIND, LINES, BOTH)
    for name in WORKLOADS
}
GROUPS = {**DEVICES, **FORMULAS, **GRIDS}


def search(group: str, seed: int, planned_steps: int | None) -> Row:
    """Search one world, and judge the answer."""
    world = GROUPS[group](seed)
    spec, prober, best = _asked(world.spec(), planned_steps), world.prober(), world.optimum()
    began = time.process_time()
    try:
        result = run_search(prober, spec)
    except NoFeasiblePlan:
        share, plan, ran = 0.0 if best else 1.0, "none fits", []
    else:
        ran = probes_of(result.trials)
        share, plan = world.speed(result.best.plan) / best, str(result.best.plan)
    planning_s = time.process_time() - began
    costs = sum(spec.space.trial_cost_s(trial.plan.settings) for trial in ran)
    return Row(
        group,
        seed,
        share=round(share, 5),
        expert=round(expert(world) / best, 5) if best else 0.0,
        is_compared=not (group == "irregular" and irregular(seed).noise >= MIN_HIDING_NOISE),
        probes=len(ran),
        ooms=sum(not trial.ok and trial.measurement.outcome.about_memory for trial in ran),
        seconds=round(_START_S * (1 + prober.renewals) + _PROBE_S * len(ran) + costs, 1),
        planning_s=round(planning_s, 3),
        plan=plan,
    )


def _asked(spec: SearchSpec, planned_steps: int | None) -> SearchSpec:
    """Return the specification that `autofit.search` would make of so many planned steps."""
    if planned_steps:
        return replace(spec, planned_samples=planned_steps * spec.space.baseline.samples_per_step)
    dimensions = {
        name: Dimension(each.values[:1]) if each.is_costly else each
        for name, each in spec.space.dimensions.items()
    }
    return replace(spec, space=replace(spec.space, dimensions=dimensions))


def expert(world: World) -> float:
    """Return the speed of the better rule of a person's; 0 where neither fits."""
    dimensions = world.space.dimensions
    precisions = dimensions[formulas.PRECISION].values
    levers = {name: dimensions[name].values[-1] for name in LEVERS if name in dimensions}
    best = next((each for each in BEST_PRECISIONS if each in precisions), precisions[-1])
    tried: list[dict[str, Scalar]] = [{formulas.PRECISION: each} for each in precisions]
    tried.append({**levers, formulas.PRECISION: best})
    plain = world.space.default_settings
    return max(_largest_speed(world, {**plain, **changed}) for changed in tried)


def _largest_speed(world: World, settings: Settings) -> float:
    """Return the speed of a variant at the largest micro-batch that fits; 0 where none does."""
    if not world.space.allows(settings):
        return 0.0
    for size in range(min(world.space.largest_micro_batch, LARGEST_SIZE), 0, -1):
        plan = world.space.plan(size, settings)
        if world.fits(plan):
            return world.speed(plan)
    return 0.0


def jobs(groups: Sequence[str], first: int, counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield (group, seed) of the groups whose names begin as asked, or of all."""
    for kind, members in (("devices", DEVICES), ("formulas", FORMULAS), ("grids", GRIDS)):
        for name in members:
            if not groups or name.startswith(tuple(groups)):
                yield from ((name, first + number) for number in range(counts[kind]))


def rows_of(path: Path) -> dict[tuple[str, int], Row]:
    """Return the rows that a file has, by world."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {(row.group, row.seed): row for row in rows}


def run(given: argparse.Namespace) -> None:
    """Search the worlds that the file does not have yet; print a line for each."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    done = rows_of(given.json)
    for group, seed in jobs(given.groups, given.first, vars(given)):
        if (group, seed) in done:
            continue
        row = search(group, seed, given.planned_steps)
        print(row, flush=True)
        with given.json.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
    print_tables([given.json])


def print_tables(paths: Sequence[Path]) -> None:
    """Print what the files say of the worlds that all of them have, and their differences."""
    files = [rows_of(path) for path in paths]
    common = [world for world in files[0] if all(world in file for file in files)]
    columns = {
        str(path.with_suffix("")): [file[world] for world in common]
        for path, file in zip(paths, files, strict=True)
    }
    print_summary(columns)
    print_groups(columns)
    print_behind(columns)
    if len(columns) > 1:
        print_differences(columns)


def print_summary(columns: Mapping[str, Sequence[Row]]) -> None:
    """Print the numbers that a planner is judged by."""
    compared = sum(row.is_compared for row in next(iter(columns.values())))
    lines: dict[str, Callable[[Sequence[Row]], str]] = {
        "compile, share of the best: mean, worst": partial(_shares, start="compile"),
        f"{compared} searches: more than 2 %, 5 % behind the expert": _shortfalls,
        "irregular devices: mean, worst": partial(_shares, start="irregular"),
        "regular devices: mean, worst": partial(_shares, start="regular"),
    }
    for kind in ("recorded", "card"):
        lines[f"{kind}, {BLIND} / {LINES} / {BOTH}: mean"] = partial(_told, kind=kind)
        lines[f"{kind}, {BLIND} / {LINES} / {BOTH}: OOMs"] = partial(_told, kind=kind, of="ooms")
    for of in ("probes", "ooms", "seconds", "planning_s"):
        lines[f"all: {of}, mean"] = partial(lambda rows, of: f"{_mean(rows, of):.2f}", of=of)
    print(f"\n| worlds | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for words, tell in lines.items():
        print(f"| {words} | {' | '.join(tell(rows) for rows in columns.values())} |")


def print_groups(columns: Mapping[str, Sequence[Row]]) -> None:
    """Print a row for each group of worlds and each file."""
    print("\n| group | n | | mean | worst | over the expert | least | probes | OOM | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for group in GROUPS:
        for name, rows in columns.items():
            its = [row for row in rows if row.group == group]
            if its:
                ahead = [row.ahead for row in its]
                geometric = statistics.geometric_mean(max(each, 1e-3) for each in ahead)
                print(
                    f"| {group} | {len(its)} | {name} | {_mean(its, 'share'):.3f} "
                    f"| {min(row.share for row in its):.3f} | {geometric:.3f} | {min(ahead):.3f} "
                    f"| {_mean(its, 'probes'):.1f} | {_mean(its, 'ooms'):.2f} "
                    f"| {_mean(its, 'seconds'):.0f} |"
                )


def print_behind(columns: Mapping[str, Sequence[Row]]) -> None:
    """Print each search that is more than 2 % behind the better rule of a person's."""
    for name, rows in columns.items():
        print(f"\n{name}, more than 2 % behind the expert:")
        for row in rows:
            if row.is_compared and row.ahead < 0.98:
                print(f"- {row}")


def print_differences(columns: Mapping[str, Sequence[Row]]) -> None:
    """Print paired differences from the first file, with standard errors over the worlds."""
    (_, before), *others = columns.items()
    kinds = {"irregular": ("irregular",), "regular": ("regular",), "formulas": tuple(FORMULAS)}
    kinds |= {"recorded": ("recorded",), "card": ("card",), "all": ("",)}
    print("\n| worlds (n) | | share, points | probes | OOM | seconds |\n|---|---|---|---|---|---|")
    for kind, starts in kinds.items():
        for name, after in others:
            pairs = [
                (old, new)
                for old, new in zip(before, after, strict=True)
                if new.group.startswith(starts)
            ]
            if len(pairs) > 1:
                told = " | ".join(
                    _difference(pairs, *each)
                    for each in (("share", 100), ("probes", 1), ("ooms", 1), ("seconds", 1))
                )
                print(f"| {kind} ({len(pairs)}) | {name} | {told} |")


def _difference(pairs: Sequence[tuple[Row, Row]], name: str, times: float) -> str:
    its = [times * (getattr(new, name) - getattr(old, name)) for old, new in pairs]
    error = statistics.stdev(its) / math.sqrt(len(its))
    return f"{statistics.mean(its):+.2f} ± {error:.2f}"


def _of(rows: Sequence[Row], *starts: str) -> list[Row]:
    return [row for row in rows if row.group.startswith(starts)]


def _mean(rows: Sequence[Row], name: str) -> float:
    return statistics.mean(getattr(row, name) for row in rows) if rows else math.nan


def _shares(rows: Sequence[Row], start: str) -> str:
    its = _of(rows, start)
    worst = min((row.share for row in its), default=math.nan)
    return f"{_mean(its, 'share'):.3f}, {worst:.3f}"


def _shortfalls(rows: Sequence[Row]) -> str:
    ahead = [row.ahead for row in rows if row.is_compared]
    return ", ".join(str(sum(each < least for each in ahead)) for least in (0.98, 0.95))


def _told(rows: Sequence[Row], kind: str, of: str = "share") -> str:
    means = (_mean(_of(rows, f"{kind} {told}"), of) for told in (BLIND, LINES, BOTH))
    return " / ".join(f"{mean:.3f}" if of == "share" else f"{mean:.2f}" for mean in means)


def main() -> None:
    """Run searches, or print tables of those that ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="search, and write a line for each search")
    runs.add_argument("--json", type=Path, required=True, help="JSON lines")
    runs.add_argument("--groups", nargs="*", default=[], help="beginnings of names; all")
    runs.add_argument("--first", type=int, default=FIRST_SEED, help="seed")
    runs.add_argument("--devices", type=int, default=60, help="of each kind")
    runs.add_argument("--formulas", type=int, default=20, help="of each group")
    runs.add_argument("--grids", type=int, default=8, help="seeds of each grid")
    runs.add_argument(
        "--planned-steps", type=int, default=_DEFAULT, help=f"0: none; the product's: {_DEFAULT}"
    )
    runs.set_defaults(do=run)
    tables = commands.add_parser("table", help="print what the files say, and differences")
    tables.add_argument("files", type=Path, nargs="+")
    tables.set_defaults(do=lambda given: print_tables(given.files))
    given = parser.parse_args()
    given.do(given)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    main()
