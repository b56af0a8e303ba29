"""Memory lines of variants before anything is run: where a search's ladder may start.

The plain variant is rehearsed at three micro-batches, the last one where the budget seems to end,
and the line goes through what the larger two require: near the budget it must be right. Then every
other value of a setting is rehearsed at these two, beside plain values, as far as time allows; the
lines of their combinations are composed of these (`autofit.planning.curves`). A line is a hint: a
search corrects it by what it measures, so a wrong one costs probes, never the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

MOST_SECONDS = 30.0
_Required = Callable[[Settings, int], int]
"""Required bytes of a variant at a micro-batch."""


@dataclass(frozen=True)
class PredictedLines:
    """What was found out.

    Attributes:
        lines: variant -> (bytes whatever the micro-batch, bytes for each sample of it).
        notes: why others have none.
    """

    lines: Mapping[VariantKey, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _OutOfTime(Exception):
    """Another rehearsal as long as the longest so far would take too long."""


def memory_lines(
    workload: Workload,
    space: Space,
    gpu: Gpu,
    vram_budget_bytes: int,
    *,
    strategies: Sequence[Strategy] = (),
    timeout_s: float = MOST_SECONDS,
) -> PredictedLines:
    """Memory lines of the plain variant and of each setting's values, as far as time allows.

    What cannot be rehearsed has no line and a note; nothing is raised for it, since a search goes
    on without lines. Values that are costly to try are left out.
    """
    required = _within(timeout_s, _rehearsals(workload, space, gpu, strategies))
    lines: dict[VariantKey, tuple[float, float]] = {}
    notes: dict[str, None] = {}
    sizes: Sequence[int] = ()
    for settings in _most_useful_first(space):
        try:
            sizes = sizes or _sizes(required, space, vram_budget_bytes)
            lines[variant_key(settings)] = _line(required, settings, sizes)
        except _OutOfTime:
            notes[_TOO_LONG] = None
            break
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


def _most_useful_first(space: Space) -> Iterator[Settings]:
    """The plain variant, and those with one other value; what has no hint before what has one.

    The settings take turns. Of each the last value comes first, then those that halve the gaps:
    where values have an order, those tell most of the others.
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
    """All but the first: the last, then those whose place is a multiple of most powers of two."""
    last = len(values) - 1
    places = sorted(range(1, len(values)), key=lambda place: (place != last, -(place & -place)))
    return [values[place] for place in places]


def _is_hinted(dimensions: Mapping[str, Dimension], name: str, value: Scalar) -> bool:
    hint = dimensions[name].hints.get(value)
    return hint is not None and hint.bytes_per_sample is not None


def _sizes(required: _Required, space: Space, budget: int) -> tuple[int, ...]:
    """Two micro-batches to draw a line through, the larger one where the plain variant may end.

    One where the space has no other.
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
    """Through what the sizes require; where there is one, half of it is said to be its samples'."""
    needs = [required(settings, size) for size in sizes]
    if len(sizes) == 1:
        return needs[0] / 2, needs[0] / 2 / sizes[0]
    slope = max((needs[1] - needs[0]) / (sizes[1] - sizes[0]), 1.0)
    return max(needs[1] - slope * sizes[1], 1.0), slope


def _rehearsals(
    workload: Workload, space: Space, gpu: Gpu, strategies: Sequence[Strategy]
) -> _Required:
    steps = 1 if space.global_batch is None else min(space.baseline.accumulation_steps, 2)

    def required(settings: Settings, micro_batch: int) -> int:
        plan = Plan(micro_batch, accumulation_steps=steps, settings=settings)
        return predict_resolved(workload, resolve(plan, space, strategies), gpu).required_bytes

    return required


def _within(timeout_s: float, required: _Required) -> _Required:
    """The same, each asked for once, as long as there is time for one more."""
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


_TOO_LONG = "memory of further settings was not predicted: it would have taken too long"


def _note(error: Exception) -> str:
    return f"memory was not predicted before the first probe: {error}"
