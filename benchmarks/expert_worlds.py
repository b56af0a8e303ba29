"""Searches beside what people pick by hand, on simulated worlds: no card is measured here.

    python -m benchmarks.expert_worlds run --json rows.jsonl            (some twenty minutes)
    python -m benchmarks.expert_worlds run --json rows.jsonl --groups recorded card
    python -m benchmarks.expert_worlds table before.jsonl after.jsonl

The worlds are trainings of two formulas (`formula_worlds`), two grids that were recorded on an
H200, and the same two on simulated cards (`grids`), with and without compilation. Of the grids
nothing, memory lines, or lines and times are told. The planner is the product's, and so is the
number of planned steps, unless `--planned-steps` says another. Each search is written down as it
ends, and those that the file has are not run again.

A share is the true speed of an answer over that of the best plan of the whole space; where a
compilation can be chosen, its cost counts over 10,000 steps. On grids, plans between two recorded
ones are interpolated and may be faster than the best recorded one. Three people are told without
noise what fits. All take the largest micro-batch that does: `finder` in the plain settings, `by
hand` in the fastest precision, and the expert the better of that and of bfloat16 with every free
lever on (fused, channels_last), compiled or not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import optuna

from autofit.measurement import probes_of
from autofit.plan import Dimension, NoFeasiblePlan, Scalar, Settings
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.searching.options import SearchArguments
from benchmarks import formula_worlds as formulas
from benchmarks.formula_worlds import FormulaWorld
from benchmarks.grids.cards import card_world, compiled_card_world
from benchmarks.grids.recorded import WORKLOADS, GridWorld, Told, grid_world

FIRST_SEED = 970_000
"""Nothing was tuned on seeds from here on."""
LEVERS = ("memory_format.layout", "optimizer.implementation")
BEST_PRECISIONS = ("bfloat16", "float16", "tf32")
LARGEST_SIZE = 4096
_DEFAULT = SearchArguments.planned_steps
_START_S, _PROBE_S = 5.0, 1.5  # about what a worker's start and a probe take on a GPU

World = FormulaWorld | GridWorld


@dataclass(frozen=True)
class Row:
    """One search.

    Attributes:
        group, seed: the world.
        share: speed of the answer over that of the best plan; 0 where nothing was found.
        finder, by_hand, expert: the same of what people pick; 0 where nothing fits.
        probes, ooms: counts.
        seconds: that it would take, with what the space says of costly values.
        planning_s: processor time.
        plan: the answer.
    """

    group: str
    seed: int
    share: float
    finder: float
    by_hand: float
    expert: float
    probes: int
    ooms: int
    seconds: float
    planning_s: float
    plan: str

    @property
    def ahead(self) -> float:
        """Speed of the answer over the expert's."""
        return self.share / self.expert if self.expert else 1.0

    def __str__(self) -> str:
        return (
            f"{self.group} {self.seed}: {self.share:.3f} of the best, {self.ahead:.3f} of the "
            f"expert, {self.probes} probes, {self.ooms} OOM, {self.planning_s:.1f} s, {self.plan}"
        )


KINDS: Mapping[str, Mapping[str, Callable[[int], World]]] = {
    "formulas": {
        "cpu_cast": formulas.cpu_cast,
        "nonmonotone": formulas.nonmonotone,
        "h100": formulas.h100,
    },
    "grids": {
        f"{kind}, {told}, {name}": partial(make, name, told=told)
        for kind, make in (
            ("recorded", grid_world),
            ("card", card_world),
            ("compiling card", compiled_card_world),
        )
        for told in Told
        for name in WORKLOADS
    },
}
GROUPS = {name: make for kind in KINDS.values() for name, make in kind.items()}


def search(group: str, seed: int, planned_steps: int | None) -> Row:
    """Search one world, and judge the answer."""
    world = GROUPS[group](seed)
    spec, prober, best = asked(world, planned_steps), world.prober(), world.optimum()
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
    people = {name: round(speed / best, 5) if best else 0.0 for name, speed in picked(world)}
    return Row(
        group,
        seed,
        share=round(share, 5),
        **people,
        probes=len(ran),
        ooms=sum(not trial.ok and trial.measurement.outcome.about_memory for trial in ran),
        seconds=round(_START_S * (1 + prober.renewals) + _PROBE_S * len(ran) + costs, 1),
        planning_s=round(planning_s, 3),
        plan=plan,
    )


def asked(world: World, planned_steps: int | None) -> SearchSpec:
    """Return the specification that `autofit.search` would make of so many planned steps."""
    spec = world.spec()
    if planned_steps:
        return replace(spec, planned_samples=planned_steps * world.step_samples)
    dimensions = {
        name: Dimension(each.values[:1]) if each.is_costly else each
        for name, each in spec.space.dimensions.items()
    }
    return replace(spec, space=replace(spec.space, dimensions=dimensions))


def picked(world: World) -> Iterator[tuple[str, float]]:
    """Yield the speeds of what people pick; 0 where nothing fits."""
    dimensions, plain = world.space.dimensions, world.space.default_settings
    precisions = dimensions[formulas.PRECISION].values
    levers = {name: dimensions[name].values[-1] for name in LEVERS if name in dimensions}
    best = next((each for each in BEST_PRECISIONS if each in precisions), precisions[-1])
    all_on: dict[str, Scalar] = {**plain, **levers, formulas.PRECISION: best}
    compiled = {name: d.values[-1] for name, d in dimensions.items() if d.is_costly}
    by_hand = max(_largest_speed(world, {**plain, formulas.PRECISION: p}) for p in precisions)
    experts = (_largest_speed(world, {**all_on, **more}) for more in ({}, compiled))
    yield "finder", _largest_speed(world, plain)
    yield "by_hand", by_hand
    yield "expert", max(by_hand, *experts)


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
    for kind, members in KINDS.items():
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
        if (group, seed) not in done:
            row = search(group, seed, given.planned_steps)
            print(row, flush=True)
            with given.json.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    print_tables([given.json])


def print_tables(paths: Sequence[Path], out: Path | None = None) -> None:
    """Print what the files say of the worlds that all of them have; write it as JSON too."""
    files = {path.stem: rows_of(path) for path in paths}
    common = [world for world in rows_of(paths[0]) if all(world in each for each in files.values())]
    groups = dict.fromkeys(group for group, _ in common)
    kinds = dict.fromkeys(group.rpartition(", ")[0] for group in groups if ", " in group)
    told = {
        f"{start or 'all'}{f': {name}' if paths[1:] else ''}": figures(
            [rows[world] for world in common if world[0].startswith(start)]
        )
        for start, (name, rows) in product((*groups, *kinds, ""), files.items())
    }
    print(f"| worlds | {' | '.join(FIGURES)} |\n|{'---|' * (len(FIGURES) + 1)}")
    for name, its in told.items():
        print(f"| {name} | {' | '.join(format(its[key], form) for key, form in FIGURES.items())} |")
    print("\nMore than 2 % behind the expert:")
    for world, (name, rows) in product(common, files.items()):
        if rows[world].ahead < 0.98:
            print(f"- {name}: {rows[world]}")
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n")


FIGURES = {
    "searches": "d",
    **dict.fromkeys(("mean", "tenth", "worst", "finder", "by_hand", "expert", "over"), ".3f"),
    "behind": "d",
    **dict.fromkeys(("probes", "ooms", "seconds"), ".2f"),
}
"""Of some searches, and their formats. Shares of the best plan: the answers' mean, 10th percentile
and least, and means of what people pick. Then the answers over the expert, geometric mean; how many
are more than 2 % behind; and means."""


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return `FIGURES` of some searches."""
    shares = sorted(row.share for row in rows)
    means = ("finder", "by_hand", "expert", "probes", "ooms", "seconds")
    return {
        "searches": len(rows),
        "mean": statistics.mean(shares),
        "tenth": float(np.quantile(shares, 0.1)),
        "worst": shares[0],
        "over": statistics.geometric_mean(max(row.ahead, 1e-3) for row in rows),
        "behind": sum(row.ahead < 0.98 for row in rows),
        **{name: statistics.mean(getattr(row, name) for row in rows) for name in means},
    }


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
    runs.add_argument("--formulas", type=int, default=20, help="seeds of each group")
    runs.add_argument("--grids", type=int, default=100, help="seeds of each grid")
    runs.add_argument(
        "--planned-steps", type=int, default=_DEFAULT, help=f"0: none; the product's: {_DEFAULT}"
    )
    runs.set_defaults(do=run)
    tables = commands.add_parser("table", help="print what the files say")
    tables.add_argument("files", type=Path, nargs="+")
    tables.add_argument("--json", type=Path, help="write the figures there too")
    tables.set_defaults(do=lambda given: print_tables(given.files, given.json))
    given = parser.parse_args()
    given.do(given)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    main()
