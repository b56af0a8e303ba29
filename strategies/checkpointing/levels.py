"""The levels of a model: the frontier of checkpoint placements, from measurements of its steps."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn

from autofit.errors import release_exception, with_type
from autofit.plan import CostHint, Dimension, Scalar, thinned
from autofit.strategy import NUMPY, PYTHON, Comparison, Context, Strategy

from ..calls import run_step
from .parity import SEEDS, Parity, find_parity
from .placement import Placement, frontier, spread
from .profile import StepProfile, Times, brought_by_samples, profile_step, time_modules
from .saved_tensors import NeedsSavedTensors
from .timeline import Timeline
from .units import KEEPING, Unit, find_candidates, layers, make_of

_SETTING = "checkpointing.level"

# Micro-batches to profile; batch normalization refuses a batch of one.
SMALL, LARGE = 2, (8, 32, 128)

# From this duration on, kernels rather than their launches determine the times of a step.
LONG_ENOUGH_S = 0.03

# The least time of a unit: a coarse clock may measure none, and the unit would seem free.
MIN_SHARE_OF_A_STEP = 1e-6

# Levels that a search may try; where there are more placements, they are spread evenly.
MAX_LEVELS = 24

# Units named in a note.
MAX_NAMED = 8

# What reasons of one kind differ in: shapes, and words with a number in them.
_DETAILS = re.compile(r"\[[^\]]*\]?|[\w.]*\d[\w.]*")

_NOTHING_WORTH_IT = (
    "no checkpoint levels: no part of the model would free much of the memory "
    "it keeps for the backward pass; memory kept by the loss or by code "
    "outside of submodules cannot be recomputed"
)
_NOTHING_LOWERS_THE_PEAK = (
    "no checkpoint levels: recomputation would not lower the peak, which is "
    "in a part that cannot be recomputed piece by piece"
)

_PLAIN = Dimension([0])

# Modules whose children are blocks of a model.
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_levels(context: Context, strategy: Strategy) -> Dimension:
    """Return the levels that a strategy of checkpointing may set; 0 alone where none is worth it.

    Raises:
        Exception: what a plain step of the user's code raises.
    """
    skipped = "checkpointing skipped: "
    try:
        small = profile_step(context, SMALL)
    except (torch.OutOfMemoryError, NeedsSavedTensors):
        context.note(f"{skipped}a step of {SMALL} samples does not fit into memory")
        return _PLAIN
    except Exception as error:  # of the user's code, or of watching it
        release_exception(error)
        context.with_training(run_step, SMALL)  # raises what the user's code raises by itself
        context.note(f"{skipped}a step cannot be traced ({with_type(error).splitlines()[0]})")
        return _PLAIN
    large, timed_micro_batch = _long_enough(context, small)
    candidates, left_out = find_candidates(context.model, brought_by_samples(small, large))
    try:
        seeds = SEEDS if small.draws else SEEDS[:1]
        parity = check_parity(strategy, context, layers(candidates), seeds)
    except torch.OutOfMemoryError:
        context.note(f"{skipped}there is not enough memory to compare a step with it")
        return _PLAIN
    left_out |= parity.left_out
    for note in _notes(left_out):
        context.note(note)
    timeline = candidates.of(candidates.calls_of.keys() - parity.left_out.keys())
    if not timeline.calls:
        if not left_out and candidates.saved_bytes:
            context.note(_NOTHING_WORTH_IT)
        return _PLAIN
    times = _times(context, timeline, timed_micro_batch)
    levels = make_dimension(context.model, timeline, times, sorted(parity.state))
    if len(levels.values) == 1:
        context.note(_NOTHING_LOWERS_THE_PEAK)
    return levels


def predict_levels(context: Context) -> Dimension:
    """Return the levels by the bytes and the computed times of steps that run on the meta device.

    Whether a part trains alike when it is recomputed cannot be seen there: all count as such.

    Raises:
        Exception: what a step of the user's code raises.
    """
    small, large = (profile_step(context, samples) for samples in (SMALL, 2 * SMALL))
    timeline, left_out = find_candidates(context.model, brought_by_samples(small, large))
    for note in _notes(left_out):
        context.note(note)
    if not timeline.calls:
        context.note(_NOTHING_WORTH_IT)
        return _PLAIN
    return make_dimension(context.model, timeline, _times(context, timeline, 2 * SMALL), ())


def _times(context: Context, timeline: Timeline, micro_batch: int) -> Times:
    parsed = [Unit.parse(unit) for unit in timeline.calls_of]
    names = {name for unit in parsed for name in unit.modules(context.model)}
    keeping = {unit.module for unit in parsed if unit.keeps_products}
    return time_modules(context, micro_batch, names, keeping)


def check_parity(
    strategy: Strategy,
    context: Context,
    layers: Sequence[Sequence[str]],
    seeds: Sequence[int] = SEEDS,
) -> Parity:
    """Compare each unit of these lists with and without checkpointing; none has nested ones.

    Raises:
        torch.OutOfMemoryError: no step of a few samples fits into memory.
    """

    def compare(
        units: Collection[str], reference: Collection[str], state: Collection[str], seed: int
    ) -> Comparison:
        return context.compare(
            *_placed(units, state),
            strategy,
            reference=_placed(reference, state),
            micro_batch=SMALL,
            seed=seed,
        )

    return find_parity(context.model, compare, layers, seeds)


def make_dimension(
    model: nn.Module, timeline: Timeline, times: Times, state: Sequence[str]
) -> Dimension:
    """Return the levels, from none to least memory, with payloads and hints.

    Args:
        timeline: bytes that grow with the samples; its units train alike when checkpointed.
        times: of the modules of the units.
        state: names of what a forward pass changes, for `checkpointed`.
    """
    placements = thinned(find_placements(model, timeline, times), MAX_LEVELS)
    payloads: dict[Scalar, Any] = {}
    hints: dict[Scalar, CostHint] = {}
    labels: dict[Scalar, str] = {}
    for level, placement in enumerate(placements):
        hints[level] = _hint(placement, placements[0], times.step_s)
        if placement.units:
            payloads[level] = {
                "units": list(placement.units),
                "state": _within(state, placement.units, model),
            }
            labels[level] = label_of(placement.units, model)
    return Dimension(range(len(placements)), payloads=payloads, hints=hints, labels=labels)


def label_of(units: Sequence[str], model: nn.Module) -> str:
    """Return what recomputing these units means in words: "recompute 6 of 12 blocks".

    Blocks are the children of one list of modules; all else, such as a segment, is a part.
    """
    parsed = [Unit.parse(unit) for unit in units]
    kept = sum(unit.keeps_products for unit in parsed)
    parents = {unit.module.rpartition(".")[0] for unit in parsed if unit.segment is None}
    lists = [model.get_submodule(name) for name in parents]
    whole = len(lists) == 1 and not any(unit.segment for unit in parsed)
    if whole and isinstance(lists[0], _LISTS):
        count, what = f"{len(units)} of {len(lists[0])}", "block" + "s" * (len(lists[0]) > 1)
    else:
        count, what = str(len(units)), "part" + "s" * (len(units) > 1)
    whose = "" if kept == len(units) else f" of {kept}"
    return f"recompute {count} {what}" + (f" except matrix products{whose}" if kept else "")


def find_placements(model: nn.Module, timeline: Timeline, times: Times) -> list[Placement]:
    """Return the best placements of a timeline's units, possibly more than become levels."""
    least_s = MIN_SHARE_OF_A_STEP * times.step_s
    seconds = {unit: max(times.of(unit, model), least_s) for unit in timeline.calls_of}
    return spread(frontier(timeline, _evened(model, timeline, seconds)))


def _long_enough(context: Context, small: StepProfile) -> tuple[StepProfile, int]:
    """Return a larger profile, if one fits, and the micro-batch to time modules at.

    That is the first whose step takes long enough, or the last one that fits. Bytes that grow with
    the samples take two sizes in any case.
    """
    if small.step_s >= LONG_ENOUGH_S:
        return _profile_if_it_runs(context, 2 * SMALL) or small, SMALL
    found = small
    for micro_batch in LARGE:
        larger = _profile_if_it_runs(context, micro_batch)
        if larger is None:
            break
        found = larger
        if found.step_s >= LONG_ENOUGH_S:
            break
    return found, found.micro_batch


def _profile_if_it_runs(context: Context, micro_batch: int) -> StepProfile | None:
    try:
        return profile_step(context, micro_batch)
    except Exception as error:  # it does not fit, or the user's code takes no so large a batch
        release_exception(error)
        return None


def _notes(left_out: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for reasons that differ in names and numbers alone, with all their units."""
    alike: dict[str, list[str]] = {}
    for unit, why in left_out.items():
        if unit.endswith(KEEPING) and unit.removesuffix(KEEPING) in left_out:
            continue
        alike.setdefault(_DETAILS.sub("", why), []).append(unit)
    for units in alike.values():
        named = [repr(unit) if unit else "the model itself" for unit in units[:MAX_NAMED]]
        more = f" and {len(units) - MAX_NAMED} more" if len(units) > MAX_NAMED else ""
        are = "is" if len(units) == 1 else "are"
        reasons = dict.fromkeys(left_out[unit] for unit in units)
        example = "" if len(reasons) == 1 else "for example, "
        yield f"{', '.join(named)}{more} {are} not checkpointed: {example}{next(iter(reasons))}"


def _placed(
    units: Collection[str], state: Collection[str]
) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """Return settings and payloads that checkpoint these units."""
    if not units:
        return {}, {}
    return {_SETTING: 1}, {_SETTING: {"units": sorted(units), "state": sorted(state)}}


def _evened(model: nn.Module, timeline: Timeline, seconds: dict[str, float]) -> dict[str, float]:
    """Return, for each unit, the mean seconds of all units of its make, to reduce noise."""
    kinds: dict[Any, list[str]] = {}
    for unit in seconds:
        kinds.setdefault((make_of(unit, model), timeline.gain(unit)), []).append(unit)
    means = {tuple(alike): fmean(seconds[unit] for unit in alike) for alike in kinds.values()}
    return {unit: mean for alike, mean in means.items() for unit in alike}


def _hint(placement: Placement, without: Placement, step_s: float) -> CostHint:
    return CostHint(
        bytes_per_sample=placement.peak_bytes / without.peak_bytes if without.peak_bytes else None,
        seconds_per_sample=(step_s + placement.recompute_s) / step_s if step_s > 0 else None,
    )


def _within(state: Collection[str], units: Sequence[str], model: nn.Module) -> list[str]:
    """Return the names of random states, and of buffers within these units."""
    modules = tuple(f"{name}." for unit in units for name in Unit.parse(unit).modules(model))
    return [name for name in state if name in (PYTHON, NUMPY) or name.startswith(modules)]
