"""Predicted memory lines of variants, from which a search chooses its first micro-batches.

The plain variant is predicted at three micro-batches, the last where the budget seems to end; its
line goes through the larger two, since it must be right near the budget. Every other value of a
setting is then predicted at these two with all else plain, as far as time allows; the lines of
combinations are composed of these (`autofit.planning.curves`). A line is a hint that measurements
correct: a wrong one costs probes and changes no result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from autofit.devices.base import Environment
from autofit.errors import AutofitError
from autofit.plan import Dimension, Plan, Scalar, Settings, VariantKey, variant_key
from autofit.prediction.gpus import Gpu, find_gpu
from autofit.prediction.predict import predict_resolved
from autofit.registry import resolve
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.training.workload import Workload

MemoryLines = Mapping[VariantKey, tuple[float, float]]
"""By variant: fixed bytes, and bytes for each sample of the micro-batch."""
_Required = Callable[[Settings, int], int]
"""(settings of a variant, micro-batch) -> required bytes."""


class _OutOfTime(Exception):
    """There is no time for another dry run as long as the longest so far."""


def memory_lines(
    workload: Workload,
    space: Space,
    gpu: Gpu,
    vram_budget_bytes: int,
    *,
    strategies: Sequence[Strategy] = (),
    timeout_s: float = 30.0,
) -> tuple[MemoryLines, tuple[str, ...]]:
    """Return memory lines of the plain variant and of each setting's values, and notes.

    Nothing is raised: a variant that cannot be predicted has no line, and a note says why. Values
    that are costly to try are left out, and so are the last ones if `timeout_s` is too short.
    """
    required = _within(timeout_s, _dry_runs(workload, space, gpu, strategies))
    lines: dict[VariantKey, tuple[float, float]] = {}
    notes: dict[str, None] = {}
    sizes: Sequence[int] = ()
    for settings in _most_useful_first(space):
        try:
            sizes = sizes or _sizes(required, space, vram_budget_bytes)
            lines[variant_key(settings)] = _line(required, settings, sizes)
        except _OutOfTime:
            notes["memory of further settings was not predicted: it would take too long"] = None
            break
        except Exception as error:  # also the user's own: the baseline's probe will report it
            notes[f"memory was not predicted before the first probe: {error}"] = None
            if not lines:  # if the plain variant cannot be predicted, no other can
                break
    return lines, tuple(notes)


def gpu_of(environment: Environment) -> Gpu | None:
    """Return the GPU of an environment; None if it has none."""
    if environment.gpu is None or environment.capability is None:
        return None
    major, _, minor = environment.capability.partition(".")
    try:
        known = find_gpu(environment.gpu)
    except AutofitError:
        known = replace(find_gpu(environment.total_bytes), name=environment.gpu)
    return replace(known, total_bytes=environment.total_bytes, capability=(int(major), int(minor)))


def _most_useful_first(space: Space) -> Iterator[Settings]:
    """Yield the plain settings, then those with one other value; values without a hint first.

    The settings take turns. Each begins with its last value and then halves the gaps: where values
    have an order, these predict the others best.
    """
    plain = space.plain_settings
    yield plain
    turns = [
        [(name, value) for value in _halving(dimension.values)]
        for name, dimension in space.dimensions.items()
        if not dimension.trial_cost_s
    ]
    changes = [change for turn in zip_longest(*turns) for change in turn if change is not None]
    for name, value in sorted(changes, key=lambda each: _is_hinted(space.dimensions, *each)):
        if space.allows({**plain, name: value}):
            yield {**plain, name: value}


def _halving(values: Sequence[Scalar]) -> list[Scalar]:
    """Return all values but the first: the last one, then those that halve the largest gaps."""
    last = len(values) - 1
    places = sorted(range(1, len(values)), key=lambda place: (place != last, -(place & -place)))
    return [values[place] for place in places]


def _is_hinted(dimensions: Mapping[str, Dimension], name: str, value: Scalar) -> bool:
    hint = dimensions[name].hints.get(value)
    return hint is not None and hint.bytes_per_sample is not None


def _sizes(required: _Required, space: Space, budget: int) -> tuple[int, ...]:
    """Return two micro-batches to predict at, the larger one near the budget of the plain variant.

    Only one if the space has no other.
    """
    plain, largest = space.plain_settings, space.largest_micro_batch
    if largest == 1 or space.only_micro_batch is not None:
        return (largest,)
    first = min(space.sample_batch_size, largest)
    second = min(8 * first, largest)
    if second == first:
        return (first // 2, first)
    here, there = (required(plain, size) for size in (first, second))
    per_sample = max(there - here, 1) / (second - first)
    third = int(min(max((budget - here) / per_sample, 2 * second), largest))
    return (first, second) if third == second else (second, third)


def _line(required: _Required, settings: Settings, sizes: Sequence[int]) -> tuple[float, float]:
    """Return the line through the required bytes; with one size, half of them are per sample."""
    needs = [required(settings, size) for size in sizes]
    if len(sizes) == 1:
        return needs[0] / 2, needs[0] / 2 / sizes[0]
    slope = max((needs[1] - needs[0]) / (sizes[1] - sizes[0]), 1.0)
    return max(needs[1] - slope * sizes[1], 1.0), slope


def _dry_runs(
    workload: Workload, space: Space, gpu: Gpu, strategies: Sequence[Strategy]
) -> _Required:
    steps = 1 if space.global_batch is None else min(space.baseline.accumulation_steps, 2)

    def required(settings: Settings, micro_batch: int) -> int:
        plan = Plan(micro_batch, accumulation_steps=steps, settings=settings)
        return predict_resolved(workload, resolve(plan, space, strategies), gpu).required_bytes

    return required


def _within(timeout_s: float, required: _Required) -> _Required:
    """Return the function with a cache, raising `_OutOfTime` if a call would take too long."""
    began = time.monotonic()
    longest = 0.0
    known: dict[tuple[VariantKey, int], int] = {}

    def timed(settings: Settings, micro_batch: int) -> int:
        nonlocal longest
        asked = variant_key(settings), micro_batch
        if asked not in known:
            start = time.monotonic()
            if start - began + longest > timeout_s:
                raise _OutOfTime
            known[asked] = required(settings, micro_batch)
            longest = max(longest, time.monotonic() - start)
        return known[asked]

    return timed
