"""Memory lines of variants before anything is run: where a search's ladder may start.

Each variant is rehearsed at three micro-batches, the last one where the budget seems to end, and
the line goes through what the larger two require: near the budget it must be right. A line is a
hint: a search corrects it by what it measures, so a wrong one costs probes, never the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autofit.devices.base import Environment
from autofit.errors import AutofitError
from autofit.plan import Plan, Settings, VariantKey, variant_key
from autofit.prediction.engine import predict
from autofit.prediction.gpus import Gpu, find_gpu
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.workload import Workload

MOST_SECONDS = 30.0
LARGEST = 2**16


@dataclass(frozen=True)
class PredictedLines:
    """What was found out.

    Attributes:
        lines: variant -> (bytes whatever the micro-batch, bytes for each sample of it).
        notes: why others have none.
    """

    lines: Mapping[VariantKey, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def memory_lines(
    workload: Workload,
    space: Space,
    gpu: Gpu,
    vram_budget_bytes: int,
    *,
    strategies: Sequence[Strategy] = (),
    timeout_s: float = MOST_SECONDS,
) -> PredictedLines:
    """Memory lines of the space's variants, the plain one first, as far as time allows.

    What cannot be rehearsed has no line and a note; nothing is raised for it, since a search goes
    on without lines.
    """
    started = time.monotonic()

    def required(settings: Settings) -> Callable[[int], int]:
        return lambda micro_batch: _required(
            workload, space, settings, gpu, strategies, micro_batch
        )

    lines: dict[VariantKey, tuple[float, float]] = {}
    notes: dict[str, None] = {}
    for settings in space.variants():
        if time.monotonic() - started > timeout_s:
            notes["memory of further variants was not predicted: it would have taken too long"] = (
                None
            )
            break
        if space.is_costly(settings):
            continue
        try:
            lines[variant_key(settings)] = _line(required(settings), space, vram_budget_bytes)
        except Exception as error:  # also the user's own: the baseline's probe will report it
            notes[_note(error)] = None
            if not lines:  # what the plain variant cannot do, no other can
                break
    return PredictedLines(lines, tuple(notes))


def gpu_of(environment: Environment) -> Gpu | None:
    """The GPU that a search runs on; None where it is none."""
    if environment.gpu is None or environment.capability is None:
        return None
    major, _, minor = environment.capability.partition(".")
    try:
        known = find_gpu(environment.gpu)
    except AutofitError:
        known = replace(find_gpu(environment.total_bytes), name=environment.gpu)
    return replace(known, total_bytes=environment.total_bytes, capability=(int(major), int(minor)))


def _line(required: Callable[[int], int], space: Space, budget: int) -> tuple[float, float]:
    first, second = space.sample_batch_size, 8 * space.sample_batch_size
    looked = {first: required(first), second: required(second)}
    per_sample = max(looked[second] - looked[first], 1) / (second - first)
    third = int(min(max((budget - looked[first]) / per_sample, 2 * second), LARGEST))
    looked[third] = required(third)
    slope = max((looked[third] - looked[second]) / (third - second), 1.0)
    return max(looked[third] - slope * third, 1.0), slope


def _required(
    workload: Workload,
    space: Space,
    settings: Settings,
    gpu: Gpu,
    strategies: Sequence[Strategy],
    micro_batch: int,
) -> int:
    steps = 1 if space.global_batch is None else min(space.baseline.accumulation_steps, 2)
    return predict(
        workload,
        plan=Plan(micro_batch, accumulation_steps=steps, settings=settings),
        gpu=gpu,
        strategies=strategies,
        payloads=space.payloads(settings),
    ).required_bytes


def _note(error: Exception) -> str:
    return f"memory was not predicted before the first probe: {error}"
