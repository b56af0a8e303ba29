"""A simulated device that the tests of planning and searching share, and fixtures that make it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

import pytest

from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Dimension, Plan, Scalar, variant_key
from autofit.planning.search_spec import SearchSpec
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB

BUDGET = 8 * GIB
IDENTITY = {"workload": "simulated"}
LEVEL = "checkpointing.level"
PLAIN: dict[str, Scalar] = {"precision.dtype": "default", LEVEL: 0}
HALF: dict[str, Scalar] = {"precision.dtype": "bfloat16", LEVEL: 0}
DIMENSIONS = {
    "precision.dtype": Dimension(("default", "bfloat16"), lever="bfloat16"),
    "checkpointing.level": Dimension((0, 1, 2, 3, 4)),
}
FEW_DIMENSIONS = {**DIMENSIONS, LEVEL: Dimension((0, 1, 4))}
"""For tests of what is around the decisions: a search takes half the time."""


@dataclass(frozen=True)
class SimulatedDevice:
    """Formulas of bytes and seconds for two precisions, five levels and two optimizer states."""

    space: Space
    budget: int = BUDGET
    fixed: int = GIB

    def memory(self, plan: Plan) -> float:
        level: Any = plan.settings.get("checkpointing.level", 0)
        half = plan.settings.get("precision.dtype") == "bfloat16"
        per_sample = GIB * 0.25 * (0.6 if half else 1.0) * (1 - 0.15 * level)
        fixed = self.fixed * (0.5 if plan.settings.get("optimizer.state") == "8bit" else 1.0)
        return fixed + per_sample * plan.micro_batch

    def step_time(self, plan: Plan) -> float:
        level: Any = plan.settings.get("checkpointing.level", 0)
        half = plan.settings.get("precision.dtype") == "bfloat16"
        per_sample = 0.010 * (0.5 if half else 1.0) * (1 + 0.08 * level)
        return plan.accumulation_steps * 0.06 + per_sample * plan.samples_per_step

    def speed(self, plan: Plan) -> float:
        return plan.samples_per_step / self.step_time(plan)

    def optimum(self) -> float:
        plans = (
            self.space.plan(size, settings)
            for settings in self.space.variants()
            for size in range(1, min(self.space.largest_micro_batch, 512) + 1)
        )
        return max(self.speed(plan) for plan in plans if self.memory(plan) <= self.budget)

    def spec(self) -> SearchSpec:
        return SearchSpec(self.space, self.budget, seed=3, identity=IDENTITY)

    def prober(
        self,
        fault: Callable[[Plan], Measurement | None] | None = None,
        size_limit: Callable[[Plan], int | None] | None = None,
        slowdown: Callable[[float], float] | None = None,
        seed: int = 0,
    ) -> SimulatedProber:
        return SimulatedProber(
            self.budget,
            self.memory,
            self.step_time,
            memory_noise=0.005,
            time_noise=0.003,
            step_noise=0.0 if slowdown is None else 0.015,
            slowdown=slowdown,
            fault=fault,
            size_limit=size_limit,
            seed=seed,
        )


class Bursts:
    """How others slow a machine down: in bursts of 0.1 to 5 s, by a factor of 1.5 to 2.5 each.

    Args:
        seed: of the bursts.
        busy: the share of the time that they take: about 0.45 beside one busy loop on two cores,
            and 0.7 beside two.
    """

    def __init__(self, seed: int, busy: float) -> None:
        self._random, self._busy = Random(f"bursts {seed}"), busy
        self._ends: list[tuple[float, float]] = []  # when a burst or a pause ends, its factor
        self._end = 0.0

    def __call__(self, seconds: float) -> float:
        draw = self._random
        while self._end <= seconds:
            burst_s = math.exp(draw.uniform(math.log(0.1), math.log(5)))
            pause_s = burst_s * (1 - self._busy) / self._busy * math.exp(draw.uniform(-0.7, 0.7))
            for length_s, factor in ((burst_s, draw.uniform(1.5, 2.5)), (pause_s, 1.0)):
                self._end += length_s
                self._ends.append((self._end, factor))
        return next(factor for end, factor in self._ends if seconds < end)


def make_trial(number: int, plan: Plan, outcome: Outcome = Outcome.OK, **measured: Any) -> Trial:
    kind = TrialKind.BASELINE if number == 0 else TrialKind.SEARCH
    return Trial(number, kind, plan, Measurement(outcome, **measured))


def measured(device: SimulatedDevice, plans: list[Plan]) -> tuple[Trial, ...]:
    """Trials of plans, without noise; the first is the baseline."""
    return tuple(
        make_trial(
            number,
            plan,
            step_times_s=[device.step_time(plan)] * 3,
            peak_allocated_bytes=round(device.memory(plan)),
            peak_reserved_bytes=round(device.memory(plan)),
            non_torch_bytes=0,
        )
        for number, plan in enumerate(plans)
    )


def with_predicted_lines(device: SimulatedDevice, *, most_changed: int = 1) -> Any:
    """The specification with predicted lines of variants with at most so many changed settings."""
    lines = {}
    for settings in device.space.variants():
        changed = sum(value != PLAIN[name] for name, value in settings.items())
        if changed <= most_changed:
            at_1, at_2 = (device.memory(Plan(n, settings=settings)) for n in (1, 2))
            lines[variant_key(settings)] = (2 * at_1 - at_2, at_2 - at_1)
    return replace(device.spec(), predicted_lines=lines)


class MakeDevice(Protocol):
    def __call__(
        self, *, budget: int = BUDGET, fixed: int = GIB, **space: object
    ) -> SimulatedDevice: ...


@pytest.fixture
def make_device() -> MakeDevice:
    """Make a simulated device; other arguments than its own are the space's."""

    def make(*, budget: int = BUDGET, fixed: int = GIB, **space: object) -> SimulatedDevice:
        arguments = {"dimensions": DIMENSIONS, "sample_batch_size": 4} | space
        return SimulatedDevice(Space(**arguments), budget, fixed)  # type: ignore[arg-type]  # as the test wrote them

    return make


@pytest.fixture
def device(make_device: MakeDevice) -> SimulatedDevice:
    """Ten variants, free micro-batch."""
    return make_device()
