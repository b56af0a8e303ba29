"""A rehearsal: the very `Training` that a probe runs, on the meta device, two optimizer steps long.

Optimizer state appears in the first step, and the peak is often in the second; further steps are
like it. From the second micro-batch on gradients are resident, so two stand for any number.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from autofit.equivalence.strategy_context import StrategyContext
from autofit.errors import AutofitError, CannotTell, InvalidRequest
from autofit.memory.replay import Recording
from autofit.plan import Dimension, Plan, ResolvedPlan, Settings
from autofit.prediction.breakdown import Labels
from autofit.prediction.cuda.fake_cuda import fake_cuda
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.cuda.values import Unsupported, is_unsupported
from autofit.prediction.gpus import Gpu
from autofit.prediction.meta_copy import batch_of, refuse_compiled, twin_of, without_twin
from autofit.prediction.meta_device import MetaDevice
from autofit.probing.measure import MICRO_BATCHES_OF_A_SEARCH
from autofit.registry import collect_dimensions
from autofit.snapshot.snapshot import preserved
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.training.builder import TrainingBuilder
from autofit.training.training import Training
from autofit.training.workload import Workload

STEPS = 2
_TWO_DEVICES = re.compile(r"on device (cpu|meta) is not on the expected device (cpu|meta)")
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class DryRun:
    """What a rehearsal allocated.

    Attributes:
        recording: every allocation and release.
        labels: what the allocations were for.
    """

    recording: Recording
    labels: Labels


def dry_run(
    workload: Workload,
    resolved: ResolvedPlan,
    gpu: Gpu,
    *,
    expandable_segments: bool = False,
    workspace_bytes: int | None = None,
) -> DryRun:
    """Run two optimizer steps of a plan on the meta device as if it were that GPU.

    The user's objects, random states and flags are the same afterwards as before.

    Raises:
        InvalidRequest: the batch is larger than a tensor can be.
        CannotTell: something in the user's step cannot be run without values; the message names
            the line.
        Exception: whatever else the user's own code raised.
    """
    tracer = CudaTracer(
        gpu, expandable_segments=expandable_segments, workspace_bytes=workspace_bytes
    )
    plan, labels = resolved.plan, Labels(tracer)
    with stage(gpu, tracer, without_twin(workload)), _explained(plan, tracer):
        twin = twin_of(workload, tracer)
        bench = TrainingBuilder(lambda: twin, MetaDevice(gpu, tracer), seed=0)
        with bench.training(twin, resolved) as training, labels.watching(training):
            refuse_compiled(training.model)
            _steps(training, twin, plan, tracer, labels)
            recording = tracer.recording
            kept = Recording(tuple(recording.events), recording.step_ends, dict(recording.optional))
    return DryRun(kept, labels)


def _steps(
    training: Training, workload: Workload, plan: Plan, tracer: CudaTracer, labels: Labels
) -> None:
    samples = plan.samples_per_step
    if workload.train_step is None:
        samples = sum(plan.micro_batch_sizes[:MICRO_BATCHES_OF_A_SEARCH])
    batch = batch_of(workload, samples, tracer)
    for _ in range(STEPS):
        training.step(batch)
        labels.note_state(training)
        tracer.end_step()


@contextmanager
def stage(
    gpu: Gpu, tracer: CudaTracer, live: Mapping[str, object] = MappingProxyType({})
) -> Iterator[None]:
    """Inside it, code runs on the meta device as if it ran on that GPU.

    Live objects and the process are put back.
    """
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)  # fake_cuda patches torch itself
        stack.enter_context(preserved(live))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the user hears them when the step really runs
        stack.enter_context(fake_cuda(gpu, tracer.note))
        stack.enter_context(tracer)
        yield


@contextmanager
def _explained(plan: Plan, tracer: CudaTracer) -> Iterator[None]:
    """What a rehearsal cannot do, as an error that names the user's line, whatever came of it."""
    try:
        yield
    except Exception as error:
        unsupported = tracer.unsupported
        if unsupported is None and not isinstance(error, AutofitError) and is_unsupported(error):
            unsupported = Unsupported.caught(error)
        if unsupported is not None:
            raise _cannot_tell(unsupported) from error
        if plan.micro_batch >= 2**62 or "Storage size calculation overflowed" in str(error):
            raise InvalidRequest(
                f"{plan} makes tensors of more than 2**63 bytes: give a smaller micro-batch"
            ) from error
        if not isinstance(error, AutofitError):
            error.add_note("raised while autofit rehearsed the training on the meta device")
        raise
    if tracer.unsupported is not None:
        raise _cannot_tell(tracer.unsupported)


def _cannot_tell(unsupported: Unsupported) -> CannotTell:
    way_out = 'Run it with autofit.probe, or method="probe", on a machine with the GPU'
    if _TWO_DEVICES.search(unsupported.reason):
        way_out = (
            "A tensor made on the CPU meets one of the batch or the model, which fails on a GPU "
            "too: make it where the batch lies, say with device=batch.device"
        )
    reason = f"{unsupported.reason} ({unsupported.line})"
    return CannotTell(f"memory cannot be predicted: {reason}. {way_out}")


def meta_dimensions(
    strategy: Strategy, settings: Settings, workload: Workload, gpu: Gpu
) -> dict[str, Dimension]:
    """Return the dimensions that a strategy offers on the meta device.

    Values that can only be found by running the model (levels of checkpointing, say) are missing.

    Args:
        strategy: asked for its dimensions.
        settings: its settings in the plan.
        workload: what is trained.
        gpu: the GPU that the meta device stands for.

    Raises:
        InvalidRequest: the strategy has no such setting or value on that GPU.
        CannotTell: the setting or the value can only be found by running the model.
    """
    tracer = CudaTracer(gpu)
    builder = TrainingBuilder(lambda: twin_of(workload, tracer), MetaDevice(gpu, tracer), seed=0)
    context = StrategyContext(builder, [])
    try:
        with stage(gpu, tracer, without_twin(workload)):
            dimensions = collect_dimensions([strategy], context)
    except Exception as error:
        why = str(error) if isinstance(error, CannotTell) else f"{type(error).__name__}: {error}"
        raise _takes_a_run(f"what a setting of {strategy.name!r} means: {why}") from error
    try:
        Space(dimensions, workload.sample_batch_size).complete(settings)
    except InvalidRequest as error:
        if context.notes:
            raise _takes_a_run(f"{error}; {'; '.join(context.notes)}") from error
        raise
    return dimensions


def _takes_a_run(why: str) -> CannotTell:
    return CannotTell(f"{why}. Give payloads= as a report has them, or probe")
