"""`autofit.predict`: what a plan would need on a GPU, told on a machine without one."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from autofit.errors import CannotTell, InvalidRequest
from autofit.measurement import Measurement
from autofit.memory.blocks import ROUNDING_BYTES, round_up
from autofit.memory.replay import Recording, replay, required_bytes
from autofit.plan import Dimension, Plan, ResolvedPlan, settings_of
from autofit.prediction.dry_run import meta_dimensions, rehearse
from autofit.prediction.gpus import Gpu, find_gpu
from autofit.registry import load_strategies, resolve, strategies_of
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.training.workload import Workload, check_arguments
from autofit.units import KIB


@dataclass(frozen=True)
class Calibration:
    """Measured constants of a GPU, its driver and torch.

    The context is all that a probe teaches: adding the error of one plan's predicted peak to the
    predictions of others makes them no better (benchmarks/results/prediction-ablation).

    Attributes:
        non_torch_bytes: what a process holds outside the allocator.
    """

    non_torch_bytes: int

    @classmethod
    def learn(cls, measurement: Measurement) -> Calibration:
        """Return what the measurement of any plan teaches.

        Raises:
            InvalidRequest: it has no non-torch bytes, as after an out-of-memory error.
        """
        if measurement.non_torch_bytes is None:
            raise InvalidRequest(
                f"nothing can be learned from a probe that ended as {measurement.outcome}: "
                "it measured no memory"
            )
        return cls(measurement.non_torch_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, for the report's "calibration"."""
        return asdict(self)

    @classmethod
    def of(cls, given: Calibration | Mapping[str, Any] | None) -> Calibration | None:
        """Return the calibration given, or that of a report; None where it is empty.

        Keys of other versions are ignored.

        Raises:
            InvalidRequest: it is neither.
        """
        if given is None or isinstance(given, Calibration):
            return given
        if isinstance(given, Mapping) and (not given or "non_torch_bytes" in given):
            return cls(given["non_torch_bytes"]) if given else None
        raise InvalidRequest(
            f"calibration must be a report's, or what Calibration.learn returned, got {given!r}"
        )


# The largest micro-batch within a budget, by few looks at what a micro-batch needs.

MOST = 2**36
"""More samples than any GPU has bytes for."""
MOST_LOOKS = 24
_STRIDE = 16
_FINE = 1000  # nobody trains with 123,457 samples rather than 123,400


def largest_that_fits(need: Callable[[int], int], budget: int, *, start: int) -> int | None:
    """The largest micro-batch whose need is within the budget, or very near it.

    Needs grow almost on a line, in steps (an allocator's segments) that may be long. So the next
    look is where the line through the nearest looks meets the budget; where two looks in a row fell
    on the same side of it, the middle between the bounds, of their logarithms where they lie far
    apart. What is returned was itself looked at; after 24 looks it is the best so far.

    Args:
        need: bytes of a micro-batch.
        budget: bytes.
        start: where to look first.

    Returns:
        None where one sample does not fit.
    """
    looked = {start: need(start)}
    if looked[start] > budget and start > 1:
        looked[1] = need(1)
    sides: list[bool] = []
    while len(looked) < MOST_LOOKS:
        fits = max((at for at, needed in looked.items() if needed <= budget), default=0)
        fails = min((at for at, needed in looked.items() if needed > budget), default=MOST + 1)
        if fits == 0 or fails - fits <= max(1, fits // _FINE):
            break
        at = _crossing(looked, budget)
        if fails > MOST:
            at = min(max(at, 2 * fits), _STRIDE * fits)
        elif sides[-2:] in ([True, True], [False, False]):
            at = _middle(fits, fails)
        at = min(max(at, fits + 1), fails - 1)
        looked[at] = need(at)
        sides.append(looked[at] <= budget)
    return max((at for at, needed in looked.items() if needed <= budget), default=None)


def _crossing(looked: dict[int, int], budget: int) -> int:
    """Where the line through the two looks nearest the budget meets it."""
    if len(looked) == 1:
        return 2 * next(iter(looked))
    (one, here), (other, there) = sorted(looked.items(), key=lambda look: abs(look[1] - budget))[:2]
    if here == there:
        return _STRIDE * max(one, other)
    return int(one + (budget - here) * (other - one) / (there - here))


def _middle(fits: int, fails: int) -> int:
    return math.isqrt(fits * fails) if fails > 4 * fits else (fits + fails) // 2


MARGIN = 0.05
"""How far required bytes may lie above the prediction, as a share of it."""
WORKSPACE_MARGIN = 0.1
"""And beyond that, at most: the largest workspace that is cuDNN's own choice, up to this share."""


@dataclass(frozen=True)
class Prediction:
    """What a plan would need.

    Attributes:
        plan: with every setting of the strategies that it names.
        gpu: the GPU, as asked for.
        peak_allocated_bytes: most bytes in live tensors.
        peak_reserved_bytes: most bytes held by the caching allocator where memory is free.
        required_bytes: the smallest VRAM budget under which the plan runs, non-torch bytes
            included.
        breakdown: bytes by kind at the moment of peak allocated: weights, gradients,
            optimizer_state, activations, temporaries, which add up to it; and non_torch beside
            them.
        interval: (low, high) around required_bytes; what fits is told from the high end.
    """

    plan: Plan
    gpu: Gpu
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    required_bytes: int
    breakdown: Mapping[str, int]
    interval: tuple[int, int]
    _at: Callable[[int], Prediction] = field(repr=False, compare=False)

    def fits(self, vram_budget_bytes: int) -> bool:
        """Whether the plan runs within a VRAM budget, as surely as the margin makes it."""
        return self.interval[1] <= vram_budget_bytes

    @cached_property
    def largest_micro_batch(self) -> int | None:
        """The largest micro-batch that fits the GPU's memory, accumulation as it is; None: none.

        Rehearses further plans, the returned one among them.
        """
        return self.largest_micro_batch_within(self.gpu.total_bytes)

    def largest_micro_batch_within(self, vram_budget_bytes: int) -> int | None:
        """The largest micro-batch that fits a VRAM budget; None: not even one sample.

        One that cannot be rehearsed, as where the model looks at values of a batch too large to
        keep them, counts as one that does not fit.
        """
        known = {self.plan.micro_batch: self.interval[1]}

        def need(micro_batch: int) -> int:
            if micro_batch not in known:
                with suppress(CannotTell):
                    known[micro_batch] = self._at(micro_batch).interval[1]
            return known.get(micro_batch, sys.maxsize)

        return largest_that_fits(need, vram_budget_bytes, start=self.plan.micro_batch)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "plan": self.plan.to_dict(),
            "gpu": self.gpu.name,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "required_bytes": self.required_bytes,
            "required_bytes_low": self.interval[0],
            "required_bytes_high": self.interval[1],
            "breakdown": dict(self.breakdown),
        }


def predict(
    workload: Workload,
    *,
    plan: Plan | None = None,
    gpu: str | int | Gpu | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    payloads: Mapping[str, Any] | None = None,
    calibration: Calibration | Mapping[str, Any] | None = None,
) -> Prediction:
    """Tell what a plan would need, without running it and without a GPU.

    After a search on that GPU, `calibration=report.calibration` tells it more exactly.

    Args:
        workload: what is trained.
        plan: what to rehearse; None: the baseline, every setting plain.
        gpu: a name such as "L4" or "A100-80GB", a size such as "24GiB", or bytes; None: H200.
        strategies: names or Strategy objects that may have settings in the plan; None: those
            installed under the names that the plan's settings begin with.
        payloads: what settings mean to their strategies, as in a report's dimensions.
        calibration: what an earlier probe taught about the GPU, its driver and torch, as a report
            of a search on it has it; an empty one is none.

    Raises:
        InvalidRequest: no such GPU, setting or value, or an argument of another kind.
        CannotTell: the training cannot be run without values; the message names the user's line.
        Exception: what the user's own code raised, as it was raised.
    """
    check_arguments(workload, plan, payloads)
    found = find_gpu(gpu)
    learned = Calibration.of(calibration)
    if learned is not None:
        found = replace(found, context_bytes=learned.non_torch_bytes)
    chosen = plan or Space({}, workload.sample_batch_size, workload.global_batch).baseline
    own = strategies_of(chosen) if strategies is None else load_strategies(strategies)
    return predict_resolved(workload, _resolve(chosen, workload, found, own, payloads or {}), found)


def _resolve(
    plan: Plan,
    workload: Workload,
    gpu: Gpu,
    strategies: Sequence[Strategy],
    payloads: Mapping[str, Any],
) -> ResolvedPlan:
    """Resolve a plan with the dimensions that its strategies offer on the meta device.

    Strategies whose payloads are given are not asked: they may have found them by measuring.

    Raises:
        InvalidRequest: a setting or a value that the GPU does not have.
        CannotTell: the payload of a setting can only be found by running the model.
    """
    dimensions: dict[str, Dimension] = {}
    for strategy in strategies:
        settings = settings_of(strategy.name, plan.settings)
        if settings_of(strategy.name, payloads):
            dimensions |= {name: Dimension([value]) for name, value in settings.items()}
        elif settings:
            dimensions |= meta_dimensions(strategy, settings, workload, gpu)
    return resolve(plan, Space(dimensions, workload.sample_batch_size), strategies, payloads)


def predict_resolved(
    workload: Workload,
    resolved: ResolvedPlan,
    gpu: Gpu,
) -> Prediction:
    """Predict like `predict`, for a plan that is resolved already.

    Raises:
        CannotTell: the training cannot be run without values; the message names the user's line.
        Exception: what the user's own code raised, as it was raised.
    """

    rehearsal = rehearse(
        workload,
        resolved,
        gpu,
        expandable_segments=expandable_segments(),
        workspace_bytes=configured_workspace_bytes(),
    )
    breakdown = rehearsal.labels.at_peak(
        rehearsal.recording, expandable_segments=expandable_segments()
    )

    def at(micro_batch: int) -> Prediction:
        steps, settings = resolved.plan.accumulation_steps, resolved.plan.settings
        scaled = Plan(micro_batch, accumulation_steps=steps, settings=settings)
        return predict_resolved(workload, replace(resolved, plan=scaled), gpu)

    return _prediction(resolved.plan, gpu, rehearsal.recording, breakdown, at)


def expandable_segments() -> bool:
    """Whether the user's environment asks the allocator for them."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in names)


def configured_workspace_bytes() -> int | None:
    """What CUBLAS_WORKSPACE_CONFIG asks for, such as ":4096:2:16:8" in KiB; None: nothing."""
    numbers = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) for size, count in numbers) * KIB or None


def _prediction(
    plan: Plan,
    gpu: Gpu,
    recording: Recording,
    breakdown: Mapping[str, int],
    at: Callable[[int], Prediction],
) -> Prediction:
    expandable = expandable_segments()
    free = replay(recording, expandable_segments=expandable)
    required = required_bytes(recording, expandable_segments=expandable)
    margin = round(margin_bytes(recording, required))
    required += gpu.context_bytes
    return Prediction(
        plan,
        gpu,
        free.peak_allocated_bytes,
        free.peak_reserved_bytes,
        required,
        {**breakdown, "non_torch": gpu.context_bytes},
        (required - margin, required + margin),
        at,
    )


def margin_bytes(recording: Recording, required: int) -> float:
    """How far the truth may lie from the required bytes of a rehearsal.

    A share of them; and, since which algorithm cuDNN takes for a convolution is not known, as much
    as the largest workspace, up to a tenth.
    """
    workspaces = (size for number, size in recording.events if number in recording.optional)
    largest = round_up(max(workspaces, default=0), ROUNDING_BYTES)
    return MARGIN * required + min(WORKSPACE_MARGIN * required, largest)
