"""What a user would pick instead, replayed on the grids that were recorded on an H200.

Each peer's rule (as its source states it) picks a micro-batch on the recorded device, twice: at the
user's float32, and in the precision that is fastest in the grid, chosen by hand. The rules are
re-expressed here, not run: a recorded grid has no processes, so survival of a longer training and
what a peer leaves altered are for a device. Where a peer's first guess is the user's, it is the
largest recorded micro-batch; an answer that no peer ran is looked up all the same.

    python -m benchmarks.versus_grids                       (a minute)

Speeds are fractions of the fastest recorded plan of the whole grid. Between recorded micro-batches
they are interpolated, so an answer can be above 1. Optuna and autofit are means over seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import optuna

from autofit.measurement import probes_of
from autofit.plan import Plan, Settings
from autofit.searching.engine import run_search
from benchmarks.grids.recorded import WORKLOADS, GridWorld, grid_world

PLAIN: Settings = {
    "precision.dtype": "as_is",
    "memory_format.layout": "as_is",
    "checkpointing.level": 0,
}
BEST_INFORMED = "predicted lines and times"
LIGHTNING_MAX = 8192
ULTRALYTICS_SIZES = (1, 2, 4, 8, 16, 32, 64)
ULTRALYTICS_SHARE = 0.6


@dataclass
class Runs:
    """One variant of a recorded device, as a batch-size finder meets it.

    Attributes:
        probes, ooms: runs so far, and those that ran out of memory.
    """

    world: GridWorld
    settings: Settings
    probes: int = 0
    ooms: int = 0
    seen: dict[int, bool] = field(default_factory=dict)

    def plan(self, micro_batch: int) -> Plan:
        """Return the plan with this micro-batch."""
        own = {name: v for name, v in self.settings.items() if name in self.world.space.dimensions}
        return Plan(micro_batch, settings=own)

    def fits(self, micro_batch: int) -> bool:
        """Run it; return whether it fits."""
        self.probes += 1
        self.seen[micro_batch] = fits = self.world.fits(self.plan(micro_batch))
        self.ooms += not fits
        return fits

    def speed(self, micro_batch: int) -> float:
        """Return samples per second; 0 where it does not fit."""
        plan = self.plan(micro_batch)
        return self.world.speed(plan) if micro_batch > 0 and self.world.fits(plan) else 0.0


Rule = Callable[[Runs, int], int]
"""(device, the first guess) -> the answer, in samples."""


def decay(runs: Runs, first: int, *, factor: float) -> int:
    """Shrink until it fits: accelerate's find_executable_batch_size by 0.9, Composer by 0.5."""
    size = first
    while size > 0 and not runs.fits(size):
        size = int(size * factor)
    return size


def power(runs: Runs, first: int) -> int:
    """Lightning's Tuner.scale_batch_size(mode="power"): double from 2, halve after the failure."""
    size = 2
    while size <= LIGHTNING_MAX and runs.fits(size):
        size *= 2
    return size // 2


def binsearch(runs: Runs, first: int, *, margin: float = 0.05) -> int:
    """Lightning's mode="binsearch": double, then bisect, less a margin of 5 %."""
    low, size = 1, 2
    while size <= LIGHTNING_MAX and runs.fits(size):
        low, size = size, size * 2
    high = size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs.fits(middle) else (low, middle)
    return max(int(low * (1 - margin)), 1)


def ultralytics(runs: Runs, first: int) -> int:
    """Ultralytics' AutoBatch: a line through small sizes, solved for 60 % of the memory.

    It looks at forward and backward of raw outputs alone; here it is given the whole step's bytes.
    """
    sizes = [size for size in ULTRALYTICS_SIZES if runs.fits(size)]
    if len(sizes) < 2:
        return 1
    logs = [(math.log(size), math.log(runs.world.memory(runs.plan(size)))) for size in sizes]
    slope, intercept = statistics.linear_regression(*zip(*logs, strict=True))
    wanted = math.log(ULTRALYTICS_SHARE * runs.world.budget_bytes)
    answer = int(math.exp((wanted - intercept) / slope))
    return answer if 1 <= answer <= 1024 else 16


def doubled_and_bisected(runs: Runs, first: int) -> int:
    """Double from 1, bisect, take nine tenths: rf-detr's batch_size="auto" (to 128)."""
    low, size = 0, 1
    while size <= 128 and runs.fits(size):
        low, size = size, size * 2
    high = size
    while low and size <= 128 and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs.fits(middle) else (low, middle)
    return max(int(0.9 * low), 1)


def fastest_doubling(runs: Runs, first: int) -> int:
    """Double until it fails and take the fastest that ran: timing finders such as Ludwig's."""
    size = 1
    while runs.fits(size):
        size *= 2
    return max((s for s, fits in runs.seen.items() if fits), key=runs.speed, default=0)


FINDERS: dict[str, Rule] = {
    "accelerate find_executable_batch_size": partial(decay, factor=0.9),
    "Composer, halving": partial(decay, factor=0.5),
    "Lightning scale_batch_size, power": power,
    "Lightning scale_batch_size, binsearch": binsearch,
    "Ultralytics AutoBatch": ultralytics,
    "rf-detr auto batch": doubled_and_bisected,
    "fastest doubling": fastest_doubling,
}


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


def optuna_row(world: GridWorld, trials: int, seeds: int) -> Row:
    """Search with raw Optuna: TPE over all settings and a logarithmic micro-batch; OOM fails."""
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
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed)
        )
        study.optimize(objective, n_trials=trials, catch=(MemoryError,))
        answers.append((study.best_value / world.optimum(), runs.ooms))
    return Row(
        f"Optuna TPE over all settings, {trials} trials",
        statistics.mean(speed for speed, _ in answers),
        1.0,
        trials,
        statistics.mean(ooms for _, ooms in answers),
    )


def autofit_row(name: str, how: str, lines: bool, times: bool, seeds: int) -> Row:
    """Search with autofit."""
    speeds, probes, ooms = [], [], []
    for seed in range(seeds):
        world = grid_world(name, seed=seed)
        result = run_search(world.prober(), world.spec(lines=lines, times=times))
        ran = probes_of(result.trials)
        speeds.append(world.speed(result.best.plan) / world.optimum())
        probes.append(len(ran))
        ooms.append(sum(not t.ok and t.measurement.outcome.about_memory for t in ran))
    mean = statistics.mean
    return Row(f"autofit, {how}", mean(speeds), 1.0, mean(probes), mean(ooms))


def rows(name: str, seeds: int) -> Iterator[Row]:
    """Yield every peer's row on a grid."""
    world = grid_world(name)
    by_hand = best_precision(world)
    for settings, how in ((PLAIN, "float32"), (by_hand, str(by_hand["precision.dtype"]))):
        for peer, rule in FINDERS.items():
            yield finder_row(world, peer, rule, settings, how)
    for trials in (16, 50):
        yield optuna_row(world, trials, seeds)
    yield autofit_row(name, "no GPU known", False, False, seeds)
    yield autofit_row(name, "predicted lines", True, False, seeds)
    yield autofit_row(name, BEST_INFORMED, True, True, seeds)
    recorded = sum(len(its) for its in world.rows.values())
    ran_out = sum(row.seconds is None for its in world.rows.values() for row in its)
    yield Row("the exhaustive grid", 1.0, 1.0, recorded, ran_out)


def main() -> None:
    """Print a table a grid, and how far autofit is ahead."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    seeds = parser.parse_args().seeds
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    ahead: dict[str, list[float]] = {"float32": [], "the best precision by hand": []}
    for name in WORKLOADS:
        print(f"\n## {name}\n\n| peer | speed | fits | probes | OOM |\n|---|---|---|---|---|")
        found = []
        for row in rows(name, seeds):
            print(row, flush=True)
            found.append(row)
        ours = next(row.speed for row in found if row.peer == f"autofit, {BEST_INFORMED}")
        by_hand = best_precision(grid_world(name))["precision.dtype"]
        for kind, how in zip(ahead, ("float32", by_hand), strict=True):
            theirs = [row for row in found if row.peer.endswith(f", {how}") and row.fits]
            ahead[kind] += [ours / row.speed for row in theirs]
    print()
    for kind, ratios in ahead.items():
        mean = statistics.geometric_mean(ratios)
        print(f"autofit over the finders at {kind}: {mean:.2f} times (geometric mean)")


if __name__ == "__main__":
    main()
