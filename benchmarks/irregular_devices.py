"""Simulated devices whose step time is not a line of the micro-batch.

Each is a device of `benchmarks.simulated_devices` with what real devices add: a step time that
cannot fall below a floor (launches), a size beyond which speed drops (a cache, another kernel),
sizes that are slower than their neighbours (not a multiple of what a kernel likes), and noise
between probes that more steps do not average away.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autofit.plan import Plan, VariantKey
from autofit.planning.search_spec import SearchSpec
from autofit.space import Space
from autofit.testing import SimulatedProber
from benchmarks.simulated_devices import (
    FORMAT,
    LARGEST_MICRO_BATCH,
    PRECISION,
    Device,
    draw_device,
)

_MEMORY_NOISE = 0.002


@dataclass(frozen=True)
class Shape:
    """How the step time of one variant departs from its line.

    Attributes:
        floor_seconds: no micro-batch takes less than this.
        drop_at: from this micro-batch on, every sample takes `drop` times as long.
        drop: 1 for none.
        multiple: micro-batches that are not a multiple of this take `penalty` times as long.
        penalty: 1 for none.
    """

    floor_seconds: float = 0.0
    drop_at: int = LARGEST_MICRO_BATCH + 1
    drop: float = 1.0
    multiple: int = 1
    penalty: float = 1.0


@dataclass(frozen=True)
class IrregularDevice:
    """One device with a shape for each variant.

    Attributes:
        device: bytes, budget, limits and the lines that the shapes depart from.
        shapes: by variant.
        noise: standard deviation of log step times from one probe to the next.
        step_noise: likewise from one step of a probe to the next.
    """

    device: Device
    shapes: dict[VariantKey, Shape]
    noise: float
    step_noise: float

    @property
    def space(self) -> Space:
        """The search space."""
        return self.device.space

    def step_time(self, plan: Plan) -> float:
        """Return the seconds of a plan's optimizer step, without noise."""
        sizes = np.array(plan.micro_batch_sizes)
        return float(self._seconds(plan.variant, sizes).sum())

    def speed(self, plan: Plan) -> float:
        """Return samples per second, without noise."""
        return plan.samples_per_step / self.step_time(plan)

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan fits, without noise."""
        return self.device.fits(plan)

    def optimum(self) -> float:
        """Return samples per second of the best plan of the whole space that fits."""
        return max(self._best_of(variant) for variant in self.shapes)

    def spec(self) -> SearchSpec:
        """Return the specification of a search on this device."""
        return self.device.spec()

    def prober(self) -> SimulatedProber:
        """Return a new prober of this device."""
        return SimulatedProber(
            self.device.budget_bytes,
            self.device.memory,
            self.step_time,
            memory_noise=_MEMORY_NOISE,
            time_noise=self.noise,
            step_noise=self.step_noise,
            size_limit=self.device.size_limit,
            seed=self.device.seed,
        )

    def _seconds(self, variant: VariantKey, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        line, shape = self.device.lines[variant], self.shapes[variant]
        seconds = line.fixed_seconds + line.sample_seconds * sizes * np.where(
            sizes >= shape.drop_at, shape.drop, 1.0
        )
        seconds = np.maximum(seconds, shape.floor_seconds)
        uneven = np.where(sizes % shape.multiple == 0, 1.0, shape.penalty)
        return np.asarray(seconds * uneven)

    def _best_of(self, variant: VariantKey) -> float:
        sizes = self._sizes
        line = self.device.lines[variant]
        held = line.fixed_bytes + line.sample_bytes * sizes
        settings = dict(variant)
        rates = np.where(held <= self.device.budget_bytes, sizes / self._seconds(variant, sizes), 0)
        for index in np.argsort(-rates):
            if rates[index] == 0:
                return 0.0
            plan = self.space.plan(int(sizes[index]), settings)
            if self.device.fits(plan):
                return float(rates[index])
        return 0.0

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        return np.arange(1, LARGEST_MICRO_BATCH + 1)


def draw_irregular_device(seed: int, *, noise: float, cliffs: str) -> IrregularDevice:
    """Return the irregular device of a seed.

    Args:
        seed: determines everything.
        noise: between probes, of log step times.
        cliffs: which variants a cliff has that not all have: "variants", a random third of them, or
            "settings", those that share a value of precision or layout. Kernels are chosen by such
            values, so the second is how devices are; the first is how the benchmark began.
    """
    device = draw_device(seed)
    draw = random.Random(f"irregular/{seed}")
    variants = list(device.lines)
    plain = device.lines[variants[0]]
    shapes = _draw_shapes(draw, variants, plain.fixed_seconds, plain.sample_seconds, device, cliffs)
    return IrregularDevice(device, shapes, noise, noise * draw.choice((0.2, 1.0)))


def _draw_shapes(
    draw: random.Random,
    variants: Sequence[VariantKey],
    overhead: float,
    sample_seconds: float,
    device: Device,
    cliffs: str,
) -> dict[VariantKey, Shape]:
    floor = overhead * draw.uniform(2, 20) if draw.random() < 0.3 else 0.0
    cliff = draw.random() < 0.5
    drop = math.exp(draw.uniform(math.log(1.1), math.log(7.0)))
    share = draw.uniform(0.05, 0.9)  # of the budget's largest micro-batch
    some = draw.choice((0.3, 1.0))  # whether the cliff is of all variants or of a few
    multiple, penalty = 1, 1.0
    if draw.random() < 0.3:
        multiple, penalty = draw.choice((2, 4, 8)), draw.uniform(1.02, 1.3)
    by_setting = random.Random(f"cliffs/{device.seed}")
    kernels = [
        (name, value)
        for name in (PRECISION, FORMAT)
        for value in device.space.dimensions[name].values
    ]
    of_kernel = by_setting.choice(kernels)
    shapes = {}
    for variant in variants:
        line = device.lines[variant]
        reach = max(1.0, (device.budget_bytes - line.fixed_bytes) / line.sample_bytes)
        has_cliff = cliff and draw.random() < some
        if cliffs == "settings" and some < 1:
            has_cliff = cliff and of_kernel in variant
        shapes[variant] = Shape(
            floor_seconds=floor,
            drop_at=max(2, round(reach * share)) if has_cliff else LARGEST_MICRO_BATCH + 1,
            drop=drop if has_cliff else 1.0,
            multiple=multiple,
            penalty=penalty,
        )
    return shapes
