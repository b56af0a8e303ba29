"""What a user would pick instead, replayed on the grids that were recorded on an H200.

Each peer's rule (as its source states it) picks a micro-batch on the recorded device, twice: at the
user's float32, and in the precision that is fastest in the grid, chosen by hand. The rules are
re-expressed here, not run: a recorded grid has no processes, so survival of a longer training and
what a peer leaves altered are for a device. Where a peer's first guess is the user's, it is the
largest recorded micro-batch; an answer that no peer ran is looked up all the same.

    python -m benchmarks.versus_grids --json FILE                   (some minutes)
    python -m benchmarks.versus_grids --json FILE --cards 200       (half an hour)

The second replays them on cards that are simulated: the grids, resampled by data sheets
(`benchmarks.grids.cards`). Then the 10th percentile over the cards is printed as well. Optuna takes
most of the time: `--optuna-cards 20` lets it search on the first 20 of them alone.

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
from benchmarks.grids.cards import card_world
from benchmarks.grids.recorded import WORKLOADS, GridWorld, grid_world

PLAIN: Settings = {
    "precision.dtype": "default",
    "memory_format.layout": "default",
    "checkpointing.level": 0,
}
BEST_INFORMED = "predicted lines and times"
EXACT = "exact arithmetic"
FLOAT32 = "float32"
BY_HAND = "the best precision by hand"


@dataclass(frozen=True)
class Row:
    """A peer on a grid: its answer's speed over the grid's best, and what finding it took."""

    peer: str
    speed: float
    fits: float
    probes: float
    ooms: float
    speed_tenth: float | None = None

    def __str__(self) -> str:
        fits = "yes" if self.fits == 1 else "no" if self.fits == 0 else f"{self.fits:.0%}"
        speed = f"{self.speed:.3f}"
        if self.speed_tenth is not None:
            speed += f" ({self.speed_tenth:.3f})"
        return f"| {self.peer} | {speed} | {fits} | {self.probes:.1f} | {self.ooms:.2f} |"

    @classmethod
    def pooled(cls, rows: Sequence[Row]) -> Row:
        """Return the mean of a peer's rows on many cards, and the 10th percentile of its speed."""
        means = {
            name: statistics.mean(getattr(row, name) for row in rows)
            for name in ("speed", "fits", "probes", "ooms")
        }
        tenth = None
        if len(rows) > 1:
            tenth = statistics.quantiles((row.speed for row in rows), n=10, method="inclusive")[0]
        return cls(rows[0].peer, **means, speed_tenth=tenth)


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


def autofit_row(worlds: Sequence[GridWorld], how: str, best: float, **told: bool) -> Row:
    """Search with autofit, one world a seed.

    Args:
        worlds: to search.
        how: what is said of the search.
        best: samples per second that are a speed of 1.
        told: what is predicted: `lines`, `times`.
    """
    speeds, fits, probes, ooms = [], [], [], []
    for world in worlds:
        result = run_search(world.prober(), world.spec(**told))
        ran, plan = probes_of(result.trials), result.best.plan
        speeds.append(world.speed(plan) / best)
        fits.append(world.fits(plan))
        probes.append(len(ran))
        ooms.append(sum(not t.ok and t.measurement.outcome.about_memory for t in ran))
    mean = statistics.mean
    return Row(f"autofit, {how}", mean(speeds), mean(fits), mean(probes), mean(ooms))


def by_hand(world: GridWorld) -> str:
    """Return the precision that a user would choose by hand."""
    return str(best_precision(world)["precision.dtype"])


def finder_rows(world: GridWorld, named: str) -> Iterator[Row]:
    """Yield the rows of tools that look for a batch size; named: the precision chosen by hand."""
    for settings, how in ((PLAIN, FLOAT32), (best_precision(world), named)):
        for peer, rule in FINDERS.items():
            yield finder_row(world, peer, rule, settings, how)
    runs, size = autovram_precisions(world, PLAIN)
    speed = runs.speed(size) / world.optimum()
    yield Row("autovram, all of its precisions", speed, float(speed > 0), runs.probes, runs.ooms)


def rows(worlds: Sequence[GridWorld]) -> Iterator[Row]:
    """Yield every peer's row on a grid, given once a seed."""
    world, best = worlds[0], worlds[0].optimum()
    yield from finder_rows(world, by_hand(world))
    for sampler in ("TPESampler", "GPSampler"):
        for trials in (16, 50):
            yield optuna_row(world, sampler, trials, len(worlds))
    yield autofit_row(worlds, "no GPU known", best)
    yield autofit_row(worlds, "predicted lines", best, lines=True)
    yield autofit_row(worlds, BEST_INFORMED, best, lines=True, times=True)
    yield autofit_row([exact(each) for each in worlds], EXACT, best, lines=True, times=True)
    recorded = sum(len(its) for its in world.rows.values())
    ran_out = sum(row.seconds is None for its in world.rows.values() for row in its)
    yield Row("the exhaustive grid", 1.0, 1.0, recorded, ran_out)


def card_rows(world: GridWorld, *, with_optuna: bool) -> Iterator[Row]:
    """Yield the rows of a simulated card."""
    yield from finder_rows(world, BY_HAND)
    if with_optuna:
        yield optuna_row(world, "TPESampler", 50, 1)
    yield autofit_row([world], BEST_INFORMED, world.optimum(), lines=True, times=True)
    yield every_size(world)


def every_size(world: GridWorld) -> Row:
    """Return the row of the fastest plan of any micro-batch, recorded or between two of them.

    Times are powers of the size between two recorded ones, so it is one of these or the largest.
    """
    speeds: list[float] = []
    for variant, its in world.rows.items():
        runs = Runs(world, dict(variant))
        largest = next(filter(runs.speed, range(world.space.max_micro_batch or 1, 0, -1)), 0)
        speeds += map(runs.speed, [largest, *(row.micro_batch for row in its)])
    return Row("the best of every micro-batch", max(speeds) / world.optimum(), 1.0, 0, 0)


def rows_on_cards(name: str, cards: int, optuna_cards: int, written: Path | None) -> Iterator[Row]:
    """Yield every peer's row, pooled over simulated cards; those that the file has are kept."""
    lines = written.read_text().splitlines() if written and written.exists() else []
    known = {(told["workload"], told["seed"]): told["rows"] for told in map(json.loads, lines)}
    found: dict[str, list[Row]] = {}
    for seed in range(cards):
        its = known.get((name, seed)) or [
            asdict(row)
            for row in card_rows(card_world(name, seed), with_optuna=seed < optuna_cards)
        ]
        for row in its:
            found.setdefault(row["peer"], []).append(Row(**row))
        if written and (name, seed) not in known:
            with written.open("a") as file:
                file.write(json.dumps({"workload": name, "seed": seed, "rows": its}) + "\n")
    yield from map(Row.pooled, found.values())


def ahead(found: Sequence[Row], ours: str, how: str) -> list[float]:
    """Return how many times as fast autofit's answer is as each finder's that fits."""
    mine = next(row.speed for row in found if row.peer == f"autofit, {ours}")
    return [mine / row.speed for row in found if row.peer.endswith(f", {how}") and row.fits]


def main() -> None:
    """Print a table a grid, and how far autofit is ahead."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6, help="of the searches of a recorded grid")
    parser.add_argument("--cards", type=int, help="simulate so many instead")
    parser.add_argument("--optuna-cards", type=int, help="on how many of them Optuna searches")
    parser.add_argument("--rows", type=Path, help="each card's rows, where it goes on")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tables: dict[str, list[Row]] = {}
    for name in WORKLOADS:
        title = name
        if given.cards:
            title = f"{name} on {given.cards} simulated cards: means (10th percentile of the speed)"
            with_optuna = given.cards if given.optuna_cards is None else given.optuna_cards
            found = rows_on_cards(name, given.cards, with_optuna, given.rows)
        else:
            found = rows([grid_world(name, seed=seed) for seed in range(given.seeds)])
        print(f"\n## {title}\n\n| peer | speed | fits | probes | OOM |\n|---|---|---|---|---|")
        tables[name] = []
        for row in found:
            print(row, flush=True)
            tables[name].append(row)
    print()
    ratios = {}
    for ours in (BEST_INFORMED,) if given.cards else (BEST_INFORMED, EXACT):
        for how in (FLOAT32, BY_HAND):
            its: list[float] = []
            for name, table in tables.items():
                named = how if given.cards or how == FLOAT32 else by_hand(grid_world(name))
                its += ahead(table, ours, named)
            ratios[f"autofit, {ours}, over the finders at {how}"] = statistics.geometric_mean(its)
    for words, mean in ratios.items():
        print(f"{words}: {mean:.2f} times (geometric mean)")
    if given.json:
        told = {name: [asdict(row) for row in found] for name, found in tables.items()}
        given.json.write_text(json.dumps(told | {"ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
