"""Predicted memory and time lines of variants, from which a search chooses its first plans.

The plain variant is predicted at growing micro-batches until one needs about the budget; its lines
go through the larger two, since they must be right near the budget. Every other value of a
setting is then predicted at these two with all else plain, as far as time allows; the lines of
combinations are composed of these (`autofit.planning.curves`). Values without a hint and without
an order have lines together or not at all: a search that knew float16 to be fast, and nothing of
bfloat16, did not try it.

A line is a hint that measurements correct: a wrong one costs probes and changes no result. Times
are good for ratios between variants alone (`autofit.prediction.cuda.roofline`); there are none
where the rates of the GPU are unknown, nor for several ranks, whose memory lines are those of the
rank that needs most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import TypeAlias

from autofit.devices.gpu_catalogue import Gpu
from autofit.plan import Dimension, Plan, Scalar, Settings, VariantKey, variant_key
from autofit.prediction.predict import Prediction, predict_resolved
from autofit.registry import resolve
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.training.workload import Workload

# What is fixed (bytes, or seconds of a micro-batch), and what each sample of it adds.
Line: TypeAlias = tuple[float, float]
Lines: TypeAlias = Mapping[VariantKey, Line]
_MIN_SECONDS = 1e-12
_TOO_LONG = "memory of the other settings was not predicted: it would take too long"
_MAX_CORRECTIONS = 2
# The share by which what is needed may differ from the budget at the larger size of a line.
_NEAR = 0.03
# (settings of a variant, micro-batch) -> the prediction of that plan.
_Predict = Callable[[Settings, int], Prediction]


class _OutOfTime(Exception):
    """There is no time for another dry run as long as the longest so far."""


def prior_lines(
    workload: Workload,
    space: Space,
    gpu: Gpu,
    vram_budget_bytes: int,
    *,
    strategies: Sequence[Strategy] = (),
    timeout_s: float = 30.0,
) -> tuple[Lines, Lines, tuple[str, ...]]:
    """Return memory and time lines of the plain variant and of each setting's values, and notes.

    Nothing is raised: a variant that cannot be predicted has no line, and a note says why. Values
    that are costly to try are left out, and so are the last ones if `timeout_s` is too short.
    """
    trained = replace(workload, eval_step=None, eval_batch=None)  # its memory is no line
    predict = _dry_runs(trained, space, gpu, strategies, timeout_s)
    memory: dict[VariantKey, Line] = {}
    times: dict[VariantKey, Line] = {}
    notes: dict[str, None] = {}
    sizes: Sequence[int] = ()
    for together in _most_useful_first(space):
        predictions_of: dict[VariantKey, Sequence[Prediction]] = {}
        for settings in together:
            try:
                sizes = sizes or _sizes(predict, space, vram_budget_bytes)
                predictions_of[variant_key(settings)] = [predict(settings, size) for size in sizes]
            except _OutOfTime:
                notes[_TOO_LONG] = None
                return memory, times, tuple(notes)
            except Exception as error:  # also the user's own: the baseline's probe will report it
                notes[f"memory was not predicted before the first probe: {error}"] = None
        if not memory and not predictions_of:  # where plain cannot be predicted, no other can
            break
        if len(predictions_of) < len(together):
            continue
        memory |= {
            variant: _memory_line(predictions) for variant, predictions in predictions_of.items()
        }
        if space.ranks == 1:  # what ranks send to one another takes time that no rate tells
            lines = {
                variant: time_line(predictions) for variant, predictions in predictions_of.items()
            }
            times |= {variant: line for variant, line in lines.items() if line is not None}
    return memory, times, tuple(notes)


def _most_useful_first(space: Space) -> Iterator[Sequence[Settings]]:
    """Yield the plain settings, then groups with one other value, whose lines are kept together.

    First come, setting by setting, all values without a hint of a setting without an order; then,
    one at a time and the settings in turn, the other values without a hint, then those with one. Of
    a setting the last value comes first, then those that halve the gaps: where values have an
    order, these predict the others best.
    """
    plain = space.default_settings
    yield [plain]
    unknown_in_turn, hinted_in_turn = list[Sequence[Settings]](), list[Sequence[Settings]]()
    for name, dimension in space.dimensions.items():
        values = [] if dimension.is_costly else _halving(dimension.values)
        changes = {v: {**plain, name: v} for v in values if space.allows({**plain, name: v})}
        unknown = [each for v, each in changes.items() if not _is_hinted(dimension, v)]
        if dimension.is_ordered:
            unknown_in_turn.append(unknown)
        elif unknown:
            yield unknown
        hinted_in_turn.append([each for v, each in changes.items() if _is_hinted(dimension, v)])
    for turns in (zip_longest(*unknown_in_turn), zip_longest(*hinted_in_turn)):
        yield from ([each] for turn in turns for each in turn if each is not None)


def _halving(values: Sequence[Scalar]) -> list[Scalar]:
    """Return all values but the first: the last one, then those that halve the largest gaps."""
    last = len(values) - 1
    places = sorted(range(1, len(values)), key=lambda place: (place != last, -(place & -place)))
    return [values[place] for place in places]


def _is_hinted(dimension: Dimension, value: Scalar) -> bool:
    hint = dimension.hints.get(value)
    return hint is not None and hint.bytes_per_sample is not None


def _sizes(predict: _Predict, space: Space, budget: int) -> tuple[int, ...]:
    """Return two micro-batches to predict at, the larger near what plain fits, or beyond it.

    Only one if the space has no other.
    """
    plain, largest = space.default_settings, space.largest_micro_batch
    if largest == 1 or space.only_micro_batch is not None:
        return (largest,)
    first = min(space.sample_batch_size, largest)
    second = min(8 * first, largest)
    if second == first:
        return (first // 2, first)
    if predict(plain, second).required_bytes > budget:
        return (first, second)
    bounds = min(2 * second, largest), largest
    third = _size_at(budget, predict, plain, (first, second), bounds)
    with suppress(_OutOfTime):
        # A peak that moves from the update to the backward bends the line on the way.
        for _ in range(_MAX_CORRECTIONS):
            if abs(predict(plain, third).required_bytes / budget - 1) > _NEAR and third > second:
                third = _size_at(budget, predict, plain, (second, third), bounds)
    return (first, second) if third == second else (second, third)


def _size_at(
    budget: int,
    predict: _Predict,
    plain: Settings,
    sizes: tuple[int, int],
    bounds: tuple[int, int],
) -> int:
    """Return the micro-batch within bounds that needs the budget by the line through two others."""
    here, there = (predict(plain, size).required_bytes for size in sizes)
    per_sample = max(there - here, 1) / (sizes[1] - sizes[0])
    return int(min(max((budget - here) / per_sample, bounds[0]), bounds[1]))


def _memory_line(predictions: Sequence[Prediction]) -> Line:
    """Return the line through the required bytes; with one size, half of them are per sample."""
    needs = [prediction.required_bytes for prediction in predictions]
    sizes = [prediction.plan.micro_batch for prediction in predictions]
    if len(sizes) == 1:
        return needs[0] / 2, needs[0] / 2 / sizes[0]
    slope = max((needs[1] - needs[0]) / (sizes[1] - sizes[0]), 1.0)
    return max(needs[1] - slope * sizes[1], 1.0), slope


def time_line(predictions: Sequence[Prediction]) -> Line | None:
    """Return seconds of a micro-batch as a line in its size; None where they are unknown.

    What a sample adds is what it adds to the kernels. The fixed part makes the line meet the larger
    prediction, where launches may take longer than kernels. With one size, half is per sample. Both
    are positive.
    """
    costs = [prediction.micro_batch_cost for prediction in predictions]
    sizes = [prediction.plan.micro_batch for prediction in predictions]
    first, last = costs[0], costs[-1]
    if first is None or last is None:
        return None
    slope = last.seconds / 2 / sizes[-1]
    if len(costs) > 1:
        slope = (last.kernel_seconds - first.kernel_seconds) / (sizes[1] - sizes[0])
    slope = max(slope, _MIN_SECONDS)
    return max(last.seconds - slope * sizes[-1], _MIN_SECONDS), slope


def _dry_runs(
    workload: Workload, space: Space, gpu: Gpu, strategies: Sequence[Strategy], timeout_s: float
) -> _Predict:
    """Return a function with a cache, which raises `_OutOfTime` if a call would take too long."""
    steps = 1 if space.global_batch is None else min(space.baseline.accumulation_steps, 2)
    began, longest = time.monotonic(), 0.0
    cache: dict[tuple[VariantKey, int], Prediction] = {}

    def predict(settings: Settings, micro_batch: int) -> Prediction:
        nonlocal longest
        key = variant_key(settings), micro_batch
        if key not in cache:
            start = time.monotonic()
            if start - began + longest > timeout_s:
                raise _OutOfTime
            plan = Plan(
                micro_batch,
                accumulation_steps=steps if space.smallest_micro_batch_of(settings) == 1 else 1,
                settings=settings,
                ranks=space.ranks,
            )
            cache[key] = predict_resolved(workload, resolve(plan, space, strategies), gpu)
            longest = max(longest, time.monotonic() - start)
        return cache[key]

    return predict
