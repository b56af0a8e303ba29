"""What a user would pick instead, replayed on the grids that were recorded on an H200.

Each peer's rule (as its source states it) picks a micro-batch on the recorded device, twice: at the
user's float32, and in the precision that is fastest in the grid, chosen by hand. The rules are
re-expressed here, not run: a recorded grid has no processes, so survival of a longer training and
what a peer leaves altered are for a device. Where a peer's first guess is the user's, it is the
largest recorded micro-batch; an answer that no peer ran is looked up all the same.

    python -m benchmarks.versus_grids --json FILE           (some minutes)

autofit searches as it does by default, and once in exact arithmetic (`numerics="exact"`), where
checkpointing alone varies: that is its answer beside finders that stay at float32. Speeds are
fractions of the fastest recorded plan of the whole grid. Between recorded micro-batches they are
interpolated, so an answer can be above 1. Optuna and autofit are means over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import optuna

from autofit.measurement import probes_of
from autofit.plan import Dimension, Settings
from autofit.searching.engine import run_search
from benchmarks.finder_rules import FINDERS, Rule, Runs, autovram_precisions
from benchmarks.grids.recorded import WORKLOADS, GridWorld, grid_world

PLAIN: Settings = {
    "precision.dtype": "default",
    "memory_format.layout": "default",
    "checkpointing.level": 0,
}
BEST_INFORMED = "predicted lines and times"
EXACT = "exact arithmetic"


@dataclass(frozen=True)
class Row:
    """A peer on a grid: its answer's speed over the grid's best, and what finding it took."""

    peer: str
    speed: float
    fits: float
    probes: float
    ooms: float

    def __str__(self) -> str:
        fits = "yes" if self.fits == 1 else "no" if self.fits == 0 else f"{self.fits:.0%}"
        return f"| {self.peer} | {self.speed:.3f} | {fits} | {self.probes:.1f} | {self.ooms:.2f} |"


def finder_row(world: GridWorld, name: str, rule: Rule, settings: Settings, how: str) -> Row:
    """Let a batch-size finder look."""
    runs = Runs(world, settings)
    answer = rule(runs, world.space.max_micro_batch or 0)
    speed = runs.speed(answer) / world.optimum()
    return Row(f"{name}, {how}", speed, float(speed > 0), runs.probes, runs.ooms)


def best_precision(world: GridWorld) -> Settings:
    """Return the plain settings with the precision of the fastest plan that has no others."""
    sizes = range(1, (world.space.max_micro_batch or 1) + 1)
    precisions = world.space.dimensions["precision.dtype"].values
    candidates: list[Settings] = [{**PLAIN, "precision.dtype": value} for value in precisions]
    return max(
        candidates,
        key=lambda settings: max(map(Runs(world, settings).speed, sizes)),
    )


def optuna_row(world: GridWorld, sampler: str, trials: int, seeds: int) -> Row:
    """Search with raw Optuna: all settings and a logarithmic micro-batch; an OOM fails."""
    answers = []
    for seed in range(seeds):
        runs = Runs(world, PLAIN)

        def objective(trial: optuna.Trial, runs: Runs = runs) -> float:
            chosen: dict[str, Any] = {
                name: trial.suggest_categorical(name, list(dimension.values))
                for name, dimension in world.space.dimensions.items()
            }
            runs.settings = chosen
            size = trial.suggest_int("micro_batch", 1, world.space.max_micro_batch or 1, log=True)
            if not runs.fits(size):
                raise MemoryError
            return runs.speed(size)

        study = optuna.create_study(
            direction="maximize", sampler=getattr(optuna.samplers, sampler)(seed=seed)
        )
        study.optimize(objective, n_trials=trials, catch=(MemoryError,))
        answers.append((study.best_value / world.optimum(), runs.ooms))
    return Row(
        f"Optuna {sampler} over all settings, {trials} trials",
        statistics.mean(speed for speed, _ in answers),
        1.0,
        trials,
        statistics.mean(ooms for _, ooms in answers),
    )


def exact(world: GridWorld) -> GridWorld:
    """Return the part of a device that `numerics="exact"` may choose: checkpointing varies."""
    dimensions = {
        name: each if name.startswith("checkpointing.") else Dimension(each.values[:1])
        for name, each in world.space.dimensions.items()
    }
    kept = {
        variant: its
        for variant, its in world.rows.items()
        if all(value in dimensions[name].values for name, value in variant)
    }
    return replace(world, space=replace(world.space, dimensions=dimensions), rows=kept)


def autofit_row(worlds: Sequence[GridWorld], how: str, lines: bool, times: bool) -> Row:
    """Search with autofit, one world a seed."""
    speeds, fits, probes, ooms = [], [], [], []
    for world in worlds:
        result = run_search(world.prober(), world.spec(lines=lines, times=times))
        ran, best = probes_of(result.trials), result.best.plan
        speeds.append(world.speed(best) / grid_world(world.name).optimum())
        fits.append(world.fits(best))
        probes.append(len(ran))
        ooms.append(sum(not t.ok and t.measurement.outcome.about_memory for t in ran))
    mean = statistics.mean
    return Row(f"autofit, {how}", mean(speeds), mean(fits), mean(probes), mean(ooms))


def rows(name: str, seeds: int) -> Iterator[Row]:
    """Yield every peer's row on a grid."""
    world = grid_world(name)
    by_hand = best_precision(world)
    for settings, how in ((PLAIN, "float32"), (by_hand, str(by_hand["precision.dtype"]))):
        for peer, rule in FINDERS.items():
            yield finder_row(world, peer, rule, settings, how)
    runs, size = autovram_precisions(world, PLAIN)
    speed = runs.speed(size) / world.optimum()
    yield Row("autovram, all of its precisions", speed, float(speed > 0), runs.probes, runs.ooms)
    for sampler in ("TPESampler", "GPSampler"):
        for trials in (16, 50):
            yield optuna_row(world, sampler, trials, seeds)
    worlds = [grid_world(name, seed=seed) for seed in range(seeds)]
    yield autofit_row(worlds, "no GPU known", False, False)
    yield autofit_row(worlds, "predicted lines", True, False)
    yield autofit_row(worlds, BEST_INFORMED, True, True)
    yield autofit_row([exact(each) for each in worlds], EXACT, True, True)
    recorded = sum(len(its) for its in world.rows.values())
    ran_out = sum(row.seconds is None for its in world.rows.values() for row in its)
    yield Row("the exhaustive grid", 1.0, 1.0, recorded, ran_out)


def ahead(found: Sequence[Row], ours: str, how: str) -> list[float]:
    """Return how many times as fast autofit's answer is as each finder's that fits."""
    mine = next(row.speed for row in found if row.peer == f"autofit, {ours}")
    return [mine / row.speed for row in found if row.peer.endswith(f", {how}") and row.fits]


def main() -> None:
    """Print a table a grid, and how far autofit is ahead."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tables: dict[str, list[Row]] = {}
    for name in WORKLOADS:
        print(f"\n## {name}\n\n| peer | speed | fits | probes | OOM |\n|---|---|---|---|---|")
        tables[name] = []
        for row in rows(name, given.seeds):
            print(row, flush=True)
            tables[name].append(row)
    print()
    ratios = {}
    for ours in (BEST_INFORMED, EXACT):
        for kind in ("float32", "the best precision by hand"):
            its: list[float] = []
            for name, found in tables.items():
                by_hand = str(best_precision(grid_world(name))["precision.dtype"])
                its += ahead(found, ours, "float32" if kind == "float32" else by_hand)
            ratios[f"autofit, {ours}, over the finders at {kind}"] = statistics.geometric_mean(its)
    for words, mean in ratios.items():
        print(f"{words}: {mean:.2f} times (geometric mean)")
    if given.json:
        told = {name: [asdict(row) for row in found] for name, found in tables.items()}
        given.json.write_text(json.dumps(told | {"ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
