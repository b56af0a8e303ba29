"""One plan, stepped on a device: warm-up, timed steps, and what was seen of them.

How many steps are timed is said in `autofit.probing.prober`. Peaks are over warm-up and timed
steps together, since the optimizer's state appears in the first step and the peak often in the
second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from autofit.devices.base import Device, Mark, MemoryReading
from autofit.errors import collect_garbage
from autofit.measurement import Measurement, Outcome
from autofit.probing.leak import Growth, bytes_per_step, growth
from autofit.probing.prober import ProbeRequest, enough_steps
from autofit.training.batch import Batch, map_tensors
from autofit.training.training import Training
from autofit.training.workload import Workload
from autofit.units import format_bytes

WARM_UP_STEPS = 2
MOST_WARM_UP_STEPS = 24
"""float16 starts with a loss scale of 2**16 and halves it at each step that overflows."""
STEPS_PER_BLOCK = 3
"""Steps between two looks at the clock: looking synchronizes the device."""
MICRO_BATCHES_OF_A_SEARCH = 2
"""From the second micro-batch on gradients are resident, so two show every peak."""


@dataclass
class _Window:
    """What the timed steps have shown so far."""

    step_times_s: list[float] = field(default_factory=list)
    boundary_bytes: list[int] = field(default_factory=list)
    loss: float = math.nan


def measure(
    workload: Workload,
    device: Device,
    request: ProbeRequest,
    make_training: Callable[[Workload], Training],
    vram_budget_bytes: int,
) -> Measurement:
    """Run a plan for a few optimizer steps.

    Args:
        workload: a copy that is this probe's own.
        device: limited to the budget already.
        request: the plan, the rate to beat and whether to accumulate in full.
        make_training: builds the training; called under the device's accounting.
        vram_budget_bytes: what the peaks are held against.

    Raises:
        Whatever the device or the user's code raises.
    """
    plan = request.plan
    micro_batches = _micro_batches_to_run(workload, request)
    samples = sum(plan.micro_batch_sizes[:micro_batches])
    batch = map_tensors(device.stage, workload.batch(samples))
    scale = plan.accumulation_steps / micro_batches
    window = _Window()
    with ExitStack() as applied:
        with device.accounting():
            training = applied.enter_context(make_training(workload))
            _warm_up(training, device, batch, window)
            before = device.read()
            _steps(training, device, batch, device.tracked_steps, window)
        _time_steps(training, device, batch, scale, request, window)
        after = device.read()
        grown = _growth(device, window)
        run = micro_batches if training.has_split else 1  # a train_step may take all at once
        return _seen(window, before, after, grown, vram_budget_bytes, run)


def _micro_batches_to_run(workload: Workload, request: ProbeRequest) -> int:
    whole = request.plan.accumulation_steps
    if request.full_accumulation or workload.train_step is not None:
        return whole
    return min(whole, MICRO_BATCHES_OF_A_SEARCH)


def _warm_up(training: Training, device: Device, batch: Batch, window: _Window) -> None:
    """Steps until two have updated: those that overflowed float16 made no optimizer state."""
    updates = 0
    for _ in range(MOST_WARM_UP_STEPS):
        scale_before = _scale(training)
        _steps(training, device, batch, 1, window)
        updates += _scale(training) >= scale_before
        if updates == WARM_UP_STEPS:
            break
    del window.boundary_bytes[:-WARM_UP_STEPS]


def _scale(training: Training) -> float:
    return 1.0 if training.scaler is None else float(training.scaler.get_scale())


def _steps(training: Training, device: Device, batch: Batch, count: int, window: _Window) -> None:
    for _ in range(count):
        window.loss = float(_step(training, device, batch)[0])
        window.boundary_bytes.append(device.allocated_bytes())


def _step(training: Training, device: Device, batch: Batch) -> tuple[torch.Tensor, list[Mark]]:
    """One optimizer step; the marks are start, end of the micro-batches, end of the update."""
    start = device.mark()
    if training.recipe.train_step is not None:
        loss = training.step(batch)
        return loss, [start, device.mark(), device.mark()]
    training.zero_grad()
    loss = training.accumulate(batch)
    middle = device.mark()
    training.optimizer_step()
    return loss, [start, middle, device.mark()]


def _time_steps(
    training: Training,
    device: Device,
    batch: Batch,
    scale: float,
    request: ProbeRequest,
    window: _Window,
) -> None:
    while not enough_steps(window.step_times_s, request):
        block = []
        for _ in range(STEPS_PER_BLOCK):
            loss, marks = _step(training, device, batch)
            block.append(marks)
            if not device.tracked_steps:
                window.boundary_bytes.append(device.allocated_bytes())
        device.synchronize()
        window.loss = float(loss)
        for start, middle, end in block:
            accumulating = middle.seconds_since(start)
            window.step_times_s.append(accumulating * scale + end.seconds_since(middle))
        if not math.isfinite(window.loss):
            return


def _growth(device: Device, window: _Window) -> Growth | None:
    """What every step added, as far as the device accounted for steps alike."""
    first = 0 if device.tracked_steps else WARM_UP_STEPS
    boundaries = window.boundary_bytes[first:]
    if bytes_per_step(boundaries) is None:
        return None
    collect_garbage()
    return growth(boundaries, device.allocated_bytes())


def _seen(
    window: _Window,
    before: MemoryReading,
    after: MemoryReading,
    grown: Growth | None,
    vram_budget_bytes: int,
    micro_batches_run: int,
) -> Measurement:
    retries = after.allocator_retries - before.allocator_retries
    held = after.peak_reserved_bytes + after.non_torch_bytes
    headroom = vram_budget_bytes - held
    outcome, detail = Outcome.OK, grown.words(headroom) if grown and grown.collectable else None
    if not math.isfinite(window.loss):
        outcome, detail = Outcome.NONFINITE, f"the loss became {window.loss}"
    elif grown is not None and grown.is_leak(headroom):
        outcome, detail = Outcome.LEAK, grown.words(headroom)
    elif held > vram_budget_bytes:
        outcome = Outcome.OVER_BUDGET
        detail = f"held {format_bytes(held)} of {format_bytes(vram_budget_bytes)} allowed"
    elif retries > 0:
        outcome = Outcome.RETRIES
        detail = f"the allocator flushed its cache {retries} times in the timed steps"
    return Measurement(
        outcome,
        detail,
        step_times_s=window.step_times_s,
        peak_allocated_bytes=after.peak_allocated_bytes,
        peak_reserved_bytes=after.peak_reserved_bytes,
        non_torch_bytes=after.non_torch_bytes,
        allocator_retries=retries,
        loss=window.loss if math.isfinite(window.loss) else None,
        micro_batches_run=micro_batches_run,
    )
