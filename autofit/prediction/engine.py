"""`autofit.predict`: what a plan would need on a GPU, told on a machine without one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from autofit.errors import CannotTell
from autofit.memory.blocks import ROUNDING_BYTES, round_up
from autofit.memory.replay import Recording, replay, required_bytes
from autofit.plan import Plan
from autofit.prediction.calibration import Calibration
from autofit.prediction.gpus import Gpu, find_gpu
from autofit.prediction.largest import largest_that_fits
from autofit.prediction.rehearsal import rehearse
from autofit.prediction.settings import meaning_of, strategies_of
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.units import KIB
from autofit.workload import Workload, check_arguments

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
    chosen_plan = plan or Space({}, workload.sample_batch_size, workload.global_batch).baseline
    chosen = strategies_of(chosen_plan, strategies)
    learned = Calibration.of(calibration)
    meant = found if learned is None else replace(found, context_bytes=learned.non_torch_bytes)
    complete, meanings = meaning_of(chosen_plan, workload, meant, chosen, payloads)
    return predict_as_meant(
        workload, complete, meant, strategies=chosen, payloads=meanings, calibration=learned
    )


def predict_as_meant(
    workload: Workload,
    plan: Plan,
    gpu: Gpu,
    *,
    strategies: Sequence[Strategy] = (),
    payloads: Mapping[str, Any] = MappingProxyType({}),
    calibration: Calibration | None = None,
) -> Prediction:
    """Like `predict`, where it is known what all the settings mean: as payloads say.

    Raises:
        CannotTell: the training cannot be run without values; the message names the user's line.
        Exception: what the user's own code raised, as it was raised.
    """
    constants = calibration or Calibration(gpu.context_bytes)

    def at(micro_batch: int) -> Prediction:
        steps = plan.accumulation_steps
        scaled = Plan(micro_batch, accumulation_steps=steps, settings=plan.settings)
        return told(scaled if micro_batch != plan.micro_batch else plan)

    def told(plan: Plan) -> Prediction:
        rehearsal = rehearse(
            workload,
            plan,
            gpu,
            strategies=strategies,
            payloads=payloads,
            expandable_segments=expandable_segments(),
            workspace_bytes=configured_workspace_bytes(),
        )
        breakdown = rehearsal.labels.at_peak(
            rehearsal.recording, expandable_segments=expandable_segments()
        )
        return _prediction(plan, gpu, rehearsal.recording, breakdown, constants, at)

    return told(plan)


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
    calibration: Calibration,
    at: Callable[[int], Prediction],
) -> Prediction:
    expandable = expandable_segments()
    free = replay(recording, expandable_segments=expandable)
    required = required_bytes(recording, expandable_segments=expandable)
    required += calibration.residual_bytes
    margin = round(margin_bytes(recording, required))
    required += gpu.context_bytes
    return Prediction(
        plan,
        gpu,
        free.peak_allocated_bytes + calibration.residual_bytes,
        free.peak_reserved_bytes + calibration.residual_bytes,
        required,
        {
            **breakdown,
            "temporaries": breakdown["temporaries"] + calibration.residual_bytes,
            "non_torch": gpu.context_bytes,
        },
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
