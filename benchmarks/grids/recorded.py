"""Worlds made of an exhaustive grid that was recorded on a real GPU.

`h200.jsonl` has one line a plan: a GPT-2-small-shaped decoder (1024 tokens, AdamW, peak reserved
capped at 24 GiB) and a ResNet-50 (224 x 224, SGD with momentum, capped at 12 GiB), on an H200 with
torch 2.11, 2026-11-20. Between recorded micro-batches, step times are interpolated in logarithms
and bytes linearly, so a plan between two recorded ones can be faster than the grid's best.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from autofit.devices.gpu_catalogue import Gpu
from autofit.plan import Plan, Scalar, Settings, VariantKey, variant_key
from autofit.planning.search_spec import MemoryLine, SearchSpec, TimeLine
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB, LARGE_SEGMENT_BYTES
from benchmarks.grids.kernels import RECORDED, time_lines
from benchmarks.levers import JUDGED_STEPS, dimension_of

WORKLOADS = ("gpt2_small", "resnet50")
STEP_SAMPLES = {"gpt2_small": 64, "resnet50": 256}
"""Samples of an optimizer step as these are trained."""
BUDGETS_BYTES = {"gpt2_small": 24 * GIB, "resnet50": 12 * GIB}

_PRECISIONS = {"fp32": "default", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}
LEVELS = {0.0: 0, 0.5: 1, 1.0: 2}
"""Share of the blocks that recompute -> value of the setting."""
_LAYOUTS = {False: "default", True: "channels_last"}
_JUST_TOO_MUCH = 1.02  # times the budget, held by a plan that was recorded to run out of memory
_PROBE_NOISE = 0.002  # GPU-bound plans of an H200 repeat within 0.2 %


class Told(StrEnum):
    """What a search knows before its first probe: nothing, memory lines, or lines and times."""

    NOTHING = "blind"
    LINES = "lines"
    BOTH = "both"


@dataclass(frozen=True)
class Row:
    """One recorded plan of a variant; no times and bytes where it ran out of memory."""

    micro_batch: int
    seconds: float | None
    reserved_bytes: float
    allocated_bytes: float
    scatter: float


@dataclass(frozen=True)
class GridWorld:
    """One recorded workload as a device to search.

    Attributes:
        name: the workload.
        space: precision, layout and checkpointing as they were recorded, up to the largest
            micro-batch that was tried.
        budget_bytes: the cap it was recorded under.
        rows: by variant, in order of micro-batch.
        seed: of a prober's noise, and of the error of predicted lines.
        told: what a search is told of it before the first probe.
        gpu: whose data sheet the predicted times are of.
    """

    name: str
    space: Space
    budget_bytes: int
    rows: Mapping[VariantKey, Sequence[Row]]
    seed: int
    told: Told = Told.BOTH
    gpu: Gpu = RECORDED

    @property
    def step_samples(self) -> int:
        """Samples of a step, by which planned steps are counted."""
        return STEP_SAMPLES[self.name]

    def memory(self, plan: Plan) -> float:
        """Return the bytes a plan holds, above the budget where it was recorded to run out."""
        return self._bytes(self.rows[plan.variant], plan.micro_batch)

    def allocated(self, plan: Plan) -> float:
        """Return the bytes in live tensors of a plan that fits, interpolated."""
        rows = [row for row in self.rows[plan.variant] if row.seconds is not None]
        return _between([(row.micro_batch, row.allocated_bytes) for row in rows], plan.micro_batch)

    def _bytes(self, rows: Sequence[Row], micro_batch: float) -> float:
        """Return reserved bytes; beyond the last plan that fits they grow as before it.

        They reach the budget at the latest where a plan was recorded to run out of memory.
        """
        points = [(row.micro_batch, row.reserved_bytes) for row in rows if row.seconds is not None]
        ran_out = [row.micro_batch for row in rows if row.seconds is None]
        (last, held) = points[-1]
        if micro_batch <= last or not ran_out:
            return _between(points, micro_batch)
        to_budget = (_JUST_TOO_MUCH * self.budget_bytes - held) / (min(ran_out) - last)
        grown = _between(points, micro_batch)
        return max(grown, held + to_budget * (micro_batch - last))

    def step_time(self, plan: Plan) -> float:
        """Return the seconds of a plan's optimizer step, interpolated."""
        points = [
            (math.log(row.micro_batch), math.log(row.seconds))
            for row in self.rows[plan.variant]
            if row.seconds is not None
        ]
        return sum(math.exp(_between(points, math.log(size))) for size in plan.micro_batch_sizes)

    def time_noise(self, plan: Plan) -> float:
        """Return the scatter of the recorded steps of the nearest micro-batch."""
        rows = [row for row in self.rows[plan.variant] if row.seconds is not None]
        return min(rows, key=lambda row: abs(row.micro_batch - plan.micro_batch)).scatter

    def speed(self, plan: Plan) -> float:
        """Return samples per second over `JUDGED_STEPS`, the start of costly values counted."""
        start_s = self.space.trial_cost_s(plan.settings) / (JUDGED_STEPS * self.step_samples)
        return 1 / (self.step_time(plan) / plan.samples_per_step + start_s)

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan stays within the budget, without noise."""
        return self.memory(plan) <= self.budget_bytes

    def optimum(self) -> float:
        """Return samples per second of the fastest recorded plan that fits."""
        plans = (
            self.space.plan(row.micro_batch, dict(variant))
            for variant, rows in self.rows.items()
            for row in rows
            if row.seconds is not None and row.reserved_bytes <= self.budget_bytes
        )
        return max(map(self.speed, plans))

    def prober(self) -> SimulatedProber:
        """Return a new prober of this world."""
        return SimulatedProber(
            self.budget_bytes,
            self.memory,
            self.step_time,
            allocated=self.allocated,
            time_noise=self.time_noise,
            seed=self.seed,
        )

    def spec(self) -> SearchSpec:
        """Return the specification of a search: with memory lines within 2 %, and the time lines
        that dry runs of the same models predict.
        """
        return SearchSpec(
            self.space,
            self.budget_bytes,
            seed=self.seed,
            predicted_lines=self._lines() if self.told is not Told.NOTHING else {},
            predicted_times=self._times() if self.told is Told.BOTH else {},
            segment_bytes=LARGE_SEGMENT_BYTES,
        )

    def _times(self) -> dict[VariantKey, TimeLine]:
        found = {}
        for variant, line in time_lines(self.name, self.gpu).items():
            own = variant_key({**self.space.default_settings, **dict(variant)})
            if own in self.rows:
                found[own] = line
        return found

    def _lines(self) -> dict[VariantKey, MemoryLine]:
        draw = random.Random(f"lines/{self.seed}")
        found = {}
        for variant, rows in self.rows.items():
            if self.space.is_costly(dict(variant)):
                continue  # a compiled step can only be measured
            fitting = [row.micro_batch for row in rows if row.seconds is not None]
            first, last = min(fitting), max(fitting)
            slope = (self._bytes(rows, last) - self._bytes(rows, first)) / (last - first)
            fixed = self._bytes(rows, last) - slope * last
            off = math.exp(draw.gauss(0, 0.02))
            found[variant] = (max(fixed, 0.02 * self.budget_bytes) * off, slope * off)
        return found


def grid_world(name: str, seed: int = 0, told: Told = Told.BOTH) -> GridWorld:
    """Return the recorded workload of that name as a world."""
    recorded = [row for row in recorded_plans() if row["workload"] == name]
    rows: dict[VariantKey, list[Row]] = {}
    values: dict[str, dict[Any, None]] = {}
    for row in recorded:
        settings = _settings_of(row)
        for setting, value in settings.items():
            values.setdefault(setting, {})[value] = None
        rows.setdefault(variant_key(settings), []).append(_row_of(row))
    sizes = [int(row["micro_batch"]) for row in recorded]
    space = Space(
        {setting: dimension_of(tuple(them)) for setting, them in values.items() if len(them) > 1},
        sample_batch_size=min(sizes),
        max_micro_batch=max(sizes),
    )
    by_variant = {
        variant_key({k: v for k, v in dict(key).items() if k in space.dimensions}): sorted(
            its, key=lambda row: row.micro_batch
        )
        for key, its in rows.items()
    }
    return GridWorld(name, space, BUDGETS_BYTES[name], by_variant, seed, told)


@cache
def recorded_plans() -> list[dict[str, Any]]:
    text = (Path(__file__).parent / "h200.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _settings_of(row: dict[str, Any]) -> Settings:
    settings: dict[str, Scalar] = {
        "precision.dtype": _PRECISIONS[row["precision"]],
        "memory_format.layout": _LAYOUTS[row["channels_last"]],
        "checkpointing.level": LEVELS[row["checkpointed"]],
    }
    return settings


def _row_of(row: dict[str, Any]) -> Row:
    if row["outcome"] != "ok":
        return Row(row["micro_batch"], None, 0.0, 0.0, 0.0)
    scatter = math.log(row["step_ms_max"] / row["step_ms_min"]) / 4
    return Row(
        row["micro_batch"],
        row["step_ms"] / 1e3,
        row["reserved_gib"] * GIB,
        row["allocated_gib"] * GIB,
        max(_PROBE_NOISE, scatter),
    )


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly; beyond the ends, extend the first or last segment."""
    pairs = list(pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
