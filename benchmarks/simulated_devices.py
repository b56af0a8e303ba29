"""Simulated devices for the planner's benchmark, drawn by seed.

A device is two formulas. Speed and bytes per sample of a variant are products of one factor per
setting, with 5 % log-normal interaction per variant; a fixed overhead is added to each step, and
fixed bytes to each peak. The seed determines everything about a device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from autofit.plan import Plan, Scalar, VariantKey, variant_key
from autofit.planning.search_spec import SearchSpec
from autofit.space import Space
from benchmarks.levers import dimension_of

PRECISION, FORMAT, PLACEMENT = "precision.dtype", "memory_format.format", "checkpointing.level"
LARGEST_MICRO_BATCH = 4096
_PRECISIONS = ("default", "tf32", "bfloat16", "float16")
_FORMATS = ("contiguous", "channels_last")
_BYTES = 2**20
_SECONDS = 1e-3
_INTERACTION = 0.05


@dataclass(frozen=True)
class Factors:
    """The effect of a value on seconds per sample and on bytes per sample."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Line:
    """The true coefficients of a variant."""

    fixed_bytes: float
    sample_bytes: float
    fixed_seconds: float
    sample_seconds: float


@dataclass(frozen=True)
class Device:
    """A simulated device, and the space that is searched on it."""

    seed: int
    space: Space
    budget_bytes: int
    lines: dict[VariantKey, Line]
    bumps: Callable[[Plan], float]
    limited: VariantKey | None
    limit: int

    def memory(self, plan: Plan) -> float:
        """Return the bytes that a plan holds, without noise."""
        line = self.lines[plan.variant]
        return (line.fixed_bytes + line.sample_bytes * plan.micro_batch) * self.bumps(plan)

    def size_limit(self, plan: Plan) -> int | None:
        """Return the largest micro-batch of one variant's kernels."""
        return self.limit if plan.variant == self.limited else None

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan fits, without noise."""
        limit = self.size_limit(plan)
        within = limit is None or plan.micro_batch <= limit
        return within and self.memory(plan) <= self.budget_bytes

    def spec(self) -> SearchSpec:
        """Return the specification of a search on this device."""
        return SearchSpec(self.space, self.budget_bytes, seed=self.seed)


def draw_device(seed: int) -> Device:
    """Return the device of a seed."""
    draw = random.Random(f"device/{seed}")
    factors = _draw_factors(draw)
    dimensions = {name: dimension_of(tuple(values)) for name, values in factors.items()}
    space = Space(dimensions, sample_batch_size=1, max_micro_batch=LARGEST_MICRO_BATCH)
    lines = _draw_lines(draw, space, factors)
    budget = _draw_budget(draw, list(lines.values()))
    plain = lines[variant_key(space.default_settings)]
    size = draw.choice((1, 2, 4, 8))
    while size > 1 and plain.fixed_bytes + plain.sample_bytes * size > budget:
        size //= 2  # a user's sample batch usually runs, if any plain plan does
    space = replace(space, sample_batch_size=size)
    limited, limit = None, LARGEST_MICRO_BATCH
    if draw.random() < 0.1:
        limited = draw.choice(list(lines))
        limit = round(2 ** draw.uniform(1, 8))
    bumps = _bumps(seed) if draw.random() < 0.1 else lambda plan: 1.0
    return Device(seed, space, budget, lines, bumps, limited, limit)


def _draw_factors(draw: random.Random) -> dict[str, dict[Scalar, Factors]]:
    """Return setting -> value -> factors; those of the first value are 1."""
    plain = Factors(1.0, 1.0)
    precisions: dict[Scalar, Factors] = {_PRECISIONS[0]: plain}
    for name in _PRECISIONS[1 : draw.randint(2, 4)]:
        precisions[name] = Factors(1 / _log_uniform(draw, 1, 5), 1 / _log_uniform(draw, 1, 5))
    formats: dict[Scalar, Factors] = {_FORMATS[0]: plain}
    if draw.randint(1, 2) == 2:
        formats[_FORMATS[1]] = Factors(
            1 / _log_uniform(draw, 0.9, 2), 1 / _log_uniform(draw, 0.9, 2)
        )
    levels = draw.randint(3, 12)
    saving, slowdown, bend = draw.uniform(0, 0.8), draw.uniform(0, 0.4), draw.uniform(0.5, 4)
    placements: dict[Scalar, Factors] = {
        level: Factors(
            1 + slowdown * level / (levels - 1),
            1 - saving * _saturating(level / (levels - 1), bend),
        )
        for level in range(levels)
    }
    return {PRECISION: precisions, FORMAT: formats, PLACEMENT: placements}


def _draw_lines(
    draw: random.Random, space: Space, factors: dict[str, dict[Scalar, Factors]]
) -> dict[VariantKey, Line]:
    overhead = _log_uniform(draw, 0.2, 50)
    fixed = _log_uniform(draw, 0.5, 50)
    lines = {}
    for settings in space.variants():
        seconds = math.prod(factors[name][value].seconds for name, value in settings.items())
        held = math.prod(factors[name][value].bytes for name, value in settings.items())
        lines[variant_key(settings)] = Line(
            fixed * _BYTES,
            held * math.exp(draw.gauss(0, _INTERACTION)) * _BYTES,
            overhead * _SECONDS,
            seconds * math.exp(draw.gauss(0, _INTERACTION)) * _SECONDS,
        )
    return lines


def _draw_budget(draw: random.Random, lines: list[Line]) -> int:
    """Return a budget between the least that any variant needs and more than the fastest uses."""
    least = 1.2 * min(line.fixed_bytes + line.sample_bytes for line in lines)
    fastest = min(lines, key=lambda line: line.sample_seconds)
    saturated = max(1.0, 19 * fastest.fixed_seconds / fastest.sample_seconds)  # 95 % of its limit
    most = 1.5 * (fastest.fixed_bytes + fastest.sample_bytes * saturated)
    return round(_log_uniform(draw, least, max(least, most)))


def _bumps(seed: int) -> Callable[[Plan], float]:
    """Return a factor on bytes: 1.1 at a random fifth of the micro-batches of each variant."""

    def bump(plan: Plan) -> float:
        chance = random.Random(f"bump/{seed}/{plan.variant}/{plan.micro_batch}").random()
        return 1.1 if chance < 0.2 else 1.0

    return bump


def _saturating(position: float, bend: float) -> float:
    """Return a concave curve from 0 at 0 to 1 at 1."""
    return (1 - math.exp(-bend * position)) / (1 - math.exp(-bend))


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))
