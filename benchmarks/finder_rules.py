"""The rules of tools that find a batch size, as their sources state them, on a recorded device.

A rule asks whether a micro-batch fits, what it holds and how fast it is, and returns the size that
its tool would tell its user. The tools themselves are run by `benchmarks.versus`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from autofit.plan import Plan, Settings
from benchmarks.grids.recorded import GridWorld

LIGHTNING_MAX = 8192
ULTRALYTICS_SIZES = (1, 2, 4, 8, 16, 32, 64)
ULTRALYTICS_SHARE = 0.6
AUTOVRAM_PRECISIONS = ("float16", "bfloat16", "default")
AUTOVRAM_TRIALS = 25
BATCH_FINDER_FIRST = 512
BATCH_FINDER_TRIALS = 50
BATCH_FINDER_SHARE = 0.88
BATCHTUNE_STEP = 64
BATCHTUNE_SHARE = 0.9


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
        """Return samples per second; 0 where it does not fit, or there is no answer."""
        if micro_batch < 1 or not self.world.fits(plan := self.plan(micro_batch)):
            return 0.0
        return self.world.speed(plan)


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
    return fastest(runs)


def autovram(runs: Runs, first: int) -> int:
    """autovram's search in one precision: double from 1, bisect, keep the fastest that ran.

    It ends after 25 trials, of which each is a process.
    """
    low, size = 0, 1
    while runs.probes < AUTOVRAM_TRIALS and runs.fits(size):
        low, size = size, size * 2
    high = size
    while low and runs.probes < AUTOVRAM_TRIALS and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs.fits(middle) else (low, middle)
    return fastest(runs)


def autovram_precisions(world: GridWorld, settings: Settings) -> tuple[Runs, int]:
    """Let autovram choose among its three precisions; return the runs of its choice, with all
    probes and OOMs, and the size.
    """
    own = [Runs(world, {**settings, "precision.dtype": each}) for each in AUTOVRAM_PRECISIONS]
    sizes = [autovram(runs, 0) for runs in own]
    best, size = max(zip(own, sizes, strict=True), key=lambda found: found[0].speed(found[1]))
    probes, ooms = sum(runs.probes for runs in own), sum(runs.ooms for runs in own)
    return replace(best, probes=probes, ooms=ooms), size


def batch_finder(runs: Runs, first: int) -> int:
    """batch-finder: from 512 halve until it fits, grow towards 88 % of the memory, then bisect.

    It runs no optimizer step and looks at the whole card; here it is given the whole step's bytes
    and the budget.
    """
    size, good, bad = BATCH_FINDER_FIRST, 0, 0
    for _ in range(BATCH_FINDER_TRIALS):
        if runs.fits(size):
            good = max(good, size)
        else:
            bad = min(bad or size, size)
        if bad == 1 or (good and bad and bad - good <= 1):
            break
        if good and bad:
            size = (good + bad) // 2
        elif good:
            share = runs.world.memory(runs.plan(size)) / runs.world.budget_bytes
            size = max(size + 1, int(size * min(6.0, max(1.05, BATCH_FINDER_SHARE / share))))
        else:
            size //= 2
    return good


def batchtune(runs: Runs, first: int) -> int:
    """batchtune's find_max_batch_size: double from 2 while a line through the bytes stays below
    90 %, solve the line for that, go down to a multiple of 64, and further until it runs.

    An OOM while it doubles ends it, as it ends the tool; below 64 it has no answer.
    """
    limit = BATCHTUNE_SHARE * runs.world.budget_bytes
    points: list[tuple[float, float]] = []
    size, slope, intercept = 2, 0.0, 0.0
    while intercept + slope * size < limit:
        if not runs.fits(size):
            return 0
        points.append((size, runs.world.memory(runs.plan(size))))
        if len(points) > 1:
            slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
        size *= 2
    answer = int((limit - intercept) / slope) // BATCHTUNE_STEP * BATCHTUNE_STEP
    while answer > 0:
        if runs.fits(answer) and runs.world.memory(runs.plan(answer)) < limit:
            break
        answer -= BATCHTUNE_STEP
    return answer


def fastest(runs: Runs) -> int:
    """Return the fastest that ran; 0: none did."""
    return max((size for size, fits in runs.seen.items() if fits), key=runs.speed, default=0)


FINDERS: Mapping[str, Rule] = {
    "accelerate find_executable_batch_size": partial(decay, factor=0.9),
    "Composer, halving": partial(decay, factor=0.5),
    "Lightning scale_batch_size, power": power,
    "Lightning scale_batch_size, binsearch": binsearch,
    "Ultralytics AutoBatch": ultralytics,
    "rf-detr auto batch": doubled_and_bisected,
    "fastest doubling": fastest_doubling,
    "autovram": autovram,
    "batch-finder": batch_finder,
    "batchtune": batchtune,
}
