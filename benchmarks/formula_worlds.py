"""Trainings of two formulas, bytes and seconds of a plan, in which tools and people go wrong.

Each is of a device or a model that a search once answered worse than a person does who knows it:
casts that make bfloat16 slow in small micro-batches, an allocator
that fails at some sizes and not at larger ones, a space of hundreds of variants. The seed
determines everything about a world.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autofit.plan import CostHint, Dimension, Plan, Scalar, variant_key
from autofit.planning.search_spec import SearchSpec
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB, MIB
from benchmarks.levers import JUDGED_STEPS, dimension_of

PRECISION = "precision.dtype"
FUSED, WHEN = "optimizer.implementation", "optimizer.when"
LEVEL = "checkpointing.level"
HEAD, ATTENTION = "head_loss.rows", "attention.backend"
_HINT_ERROR = 0.05
_BEND = 2.0  # the first levels of recomputation save most
_SAME = CostHint(bytes_per_sample=1.0)
_LATE = replace(_SAME, fixed_bytes=0.85)  # an optimizer that steps within backward
_PRECISIONS = ("default", "tf32", "bfloat16", "float16")

Formula = Callable[[Plan], float]


@dataclass(frozen=True)
class Factors:
    """The effect of a value on seconds per sample and on bytes per sample."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class FormulaWorld:
    """One training on one device.

    Attributes:
        space: what may be searched.
        budget_bytes: the most that a plan may hold.
        memory: plan -> bytes it holds.
        step_time: plan -> seconds of its optimizer step.
        seed: of the noise.
        noise: standard deviation of log step times, between probes and between steps.
        segment_bytes: in which the allocator takes memory.
        allocated: plan -> bytes in live tensors; None: all that it holds.
    """

    space: Space
    budget_bytes: int
    memory: Formula
    step_time: Formula
    seed: int
    noise: float = 0.01
    segment_bytes: int = 0
    allocated: Formula | None = None

    @property
    def step_samples(self) -> int:
        """Samples of a step, by which planned steps are counted."""
        return self.space.baseline.samples_per_step

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan stays within the budget, without noise."""
        return self.memory(plan) <= self.budget_bytes

    def speed(self, plan: Plan) -> float:
        """Return samples per second over `JUDGED_STEPS`, the start of costly values counted."""
        samples = JUDGED_STEPS * self.step_samples
        steps_s = samples / plan.samples_per_step * self.step_time(plan)
        return samples / (steps_s + self.space.trial_cost_s(plan.settings))

    def optimum(self) -> float:
        """Return the speed of the best plan of the whole space that fits."""
        return max(self.speed(plan) for plan in self._plans() if self.fits(plan))

    def spec(self) -> SearchSpec:
        """Return the specification of a search."""
        return SearchSpec(
            self.space,
            self.budget_bytes,
            seed=self.seed,
            segment_bytes=self.segment_bytes,
        )

    def prober(self) -> SimulatedProber:
        """Return a new prober."""
        return SimulatedProber(
            self.budget_bytes,
            self.memory,
            self.step_time,
            allocated=self.allocated,
            memory_noise=0.003,
            time_noise=self.noise,
            step_noise=self.noise,
            seed=self.seed,
        )

    def _plans(self) -> Iterator[Plan]:
        most, batch = self.space.largest_micro_batch, self.space.global_batch
        sizes = (
            {-(-batch // steps) for steps in range(1, batch + 1)} if batch else range(1, most + 1)
        )
        for settings in self.space.variants():
            for size in sizes:
                plan = self.space.plan(size, settings)
                if plan.variant == variant_key(settings):
                    yield plan


def cpu_cast(seed: int) -> FormulaWorld:
    """A CPU: casting weights makes bfloat16 slow in small micro-batches, fast in the whole batch.

    Memory is taken 20 MiB at a time.
    """
    draw = random.Random(f"cpu_cast/{seed}")
    batch, segment = draw.choice((32, 48, 64)), 20 * MIB
    level, by = _levels(draw, 6, saving=(0.3, 0.6), slowdown=(0.15, 0.35))
    dimensions = {
        PRECISION: dimension_of(("default", "bfloat16")),
        FUSED: _fused(),
        WHEN: _when({LEVEL: (0,)}),
        LEVEL: level,
    }
    space = Space(dimensions, sample_batch_size=draw.choice((4, 8)), global_batch=batch)
    sample, gain = draw.uniform(2e-3, 3e-3), draw.uniform(1.25, 1.7)
    fixed, step = draw.uniform(3e-3, 8e-3), draw.uniform(5e-3, 20e-3)
    faster, ahead = draw.uniform(0.3, 0.8), draw.uniform(1.06, 1.3)
    halves = 2 * fixed + sample * batch  # float32 in two micro-batches, which bfloat16 is ahead of
    cast = max(halves / ahead - fixed - sample * batch / gain, 2e-3)
    base, held = 40 * MIB, {"default": 3.2 * MIB, "bfloat16": 2.1 * MIB}
    budget = base * 1.3 + held["bfloat16"] * batch * draw.uniform(1.05, 1.3) + segment

    def allocated(plan: Plan) -> float:
        it = plan.settings
        copies = 1.15 if it[PRECISION] == "bfloat16" else 1.0
        late = 0.85 if it[WHEN] == "backward" else 1.0
        each = held[str(it[PRECISION])] * by[it[LEVEL]].bytes
        return base * copies * late + each * plan.micro_batch

    def memory(plan: Plan) -> float:
        odd = random.Random(f"{seed}/{plan.variant}/{plan.micro_batch}").uniform(0, segment)
        taken = math.ceil((allocated(plan) + odd) / segment) * segment - segment / 2
        return max(allocated(plan), taken)

    def step_time(plan: Plan) -> float:
        it = plan.settings
        half = it[PRECISION] == "bfloat16"
        each = sample * by[it[LEVEL]].seconds / (gain if half else 1)
        late = 1.05 if it[WHEN] == "backward" else 1.0
        update = step * (faster if it[FUSED] == "fused" else 1) * late
        start = fixed + (cast if half else 0)
        return start * plan.accumulation_steps + each * batch + update

    return FormulaWorld(
        space,
        round(budget),
        memory,
        step_time,
        seed,
        noise=0.02,
        segment_bytes=segment,
        allocated=allocated,
    )


def nonmonotone(seed: int) -> FormulaWorld:
    """The allocator fails at some sizes and not at larger ones."""
    draw = random.Random(f"nonmonotone/{seed}")
    level, by = _levels(draw, 8, saving=(0.3, 0.6), slowdown=(0.1, 0.3))
    dimensions = {PRECISION: dimension_of(("default", "bfloat16")), FUSED: _fused(), LEVEL: level}
    space = Space(dimensions, sample_batch_size=8, max_micro_batch=48)
    top, low = draw.choice((19, 20, 21, 22, 24)), draw.randint(12, 14)
    holes = {"bfloat16": range(low, low + 3), "default": range(9, 11)}
    base, held = 24 * MIB, {"bfloat16": 4 * MIB, "default": 6.8 * MIB}
    budget = round(base + held["bfloat16"] * (top + 0.5))
    gain, fixed, fused = draw.uniform(1.6, 2.4), draw.uniform(10e-3, 30e-3), draw.uniform(0.92, 1)

    def memory(plan: Plan) -> float:
        precision, own = str(plan.settings[PRECISION]), plan.settings[LEVEL]
        needed = base + held[precision] * by[own].bytes * plan.micro_batch
        fails = own == 0 and plan.micro_batch in holes[precision]
        return max(needed, 1.05 * budget) if fails else needed

    def step_time(plan: Plan) -> float:
        it = plan.settings
        each = 5e-3 * by[it[LEVEL]].seconds / (gain if it[PRECISION] == "bfloat16" else 1)
        return (fixed + each * plan.micro_batch) * (fused if it[FUSED] == "fused" else 1)

    return FormulaWorld(space, budget, memory, step_time, seed, noise=0.02)


def h100(seed: int) -> FormulaWorld:
    """GPT-2 small in 24 GiB of an H100, in a space of hundreds of variants.

    Figures: results/gpu-h100-2026-11-27.md.
    """
    draw = random.Random(f"h100/{seed}")

    def about(value: float, error: float = 0.03) -> float:
        return value * math.exp(draw.gauss(0, error))

    level, by = _levels(draw, 6, saving=(0.75, 0.75), slowdown=(0.3, 0.3))
    sixteen = ("bfloat16", "float16")
    dimensions = {
        PRECISION: dimension_of(_PRECISIONS),
        HEAD: Dimension((0, 256, 2048)),
        ATTENTION: Dimension(("default", "flash", "efficient"), when={PRECISION: sixteen}),
        FUSED: _fused(),
        WHEN: _when({LEVEL: (0,), PRECISION: _PRECISIONS[:3]}),
        LEVEL: level,
    }
    space = Space(dimensions, sample_batch_size=8, global_batch=64)
    seconds = _by_precision(20e-3, about(8.3e-3), 4.05e-3, about(4.05e-3))
    head = {0: 1.0, 256: about(1.17), 2048: about(1.02, 0.02)}
    attention = {"default": 1.0, "flash": about(1.02, 0.02), "efficient": about(1.1)}
    fixed, update = about(9e-3, 0.3), about(22e-3, 0.3)
    rows_gib = {0: 0.0, 256: 0.3, 2048: 1.7}

    def memory(plan: Plan) -> float:
        it = plan.settings
        half, whole = it[PRECISION] in sixteen, it[HEAD] == 0
        all_gib, logits_gib = (0.86, 0.5) if half else (1.3, 0.6)
        each = (all_gib - logits_gib) * by[it[LEVEL]].bytes + (logits_gib if whole else 0)
        if plan.micro_batch > 1 and whole and half:
            each *= 1.3  # fragmentation, as was seen
        late = 0.85 if it[WHEN] == "backward" else 1.0
        return ((2.3 + rows_gib[int(it[HEAD])]) * late + each * plan.micro_batch) * GIB

    def step_time(plan: Plan) -> float:
        it = plan.settings
        each = seconds[it[PRECISION]] * head[int(it[HEAD])] * attention[str(it[ATTENTION])]
        samples_s = each * by[it[LEVEL]].seconds * plan.samples_per_step
        faster = 0.3 if it[FUSED] == "fused" else 1.0
        return fixed * plan.accumulation_steps + samples_s + update * faster

    return FormulaWorld(space, 24 * GIB, memory, step_time, seed, noise=0.005)


def _by_precision(*values: float) -> Mapping[Scalar, float]:
    return dict(zip(_PRECISIONS, values, strict=False))


def _fused() -> Dimension:
    return dimension_of(("default", "fused"), hints={"fused": _SAME})


def _when(allowed: Mapping[str, tuple[Scalar, ...]]) -> Dimension:
    return Dimension(
        ("step", "backward"),
        hints={"backward": _LATE},
        when=allowed,
        accumulation={"backward": False},
    )


def _levels(
    draw: random.Random, count: int, *, saving: tuple[float, float], slowdown: tuple[float, float]
) -> tuple[Dimension, Mapping[Scalar, Factors]]:
    """Return levels of recomputation with hints within 5 %, and what they truly change."""
    saved, slower = draw.uniform(*saving), draw.uniform(*slowdown)
    by: dict[Scalar, Factors] = {}
    hints: dict[Scalar, CostHint] = {}
    for level in range(count):
        place = level / (count - 1)
        bent = (1 - math.exp(-_BEND * place)) / (1 - math.exp(-_BEND))
        by[level] = it = Factors(seconds=1 + slower * place, bytes=1 - saved * bent)
        if level:
            hints[level] = CostHint(
                bytes_per_sample=it.bytes * math.exp(draw.gauss(0, _HINT_ERROR)),
                seconds_per_sample=it.seconds * math.exp(draw.gauss(0, _HINT_ERROR)),
            )
    return Dimension(tuple(range(count)), hints=hints), by
