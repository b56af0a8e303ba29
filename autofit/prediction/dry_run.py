"""Dry run: two optimizer steps of the `Training` of a probe, on the meta device.

Optimizer state appears in the first step, and the peak is often in the second; further steps
repeat it. A training of several ranks may take one more step to settle, see `sharded`. Gradients
are resident from the second micro-batch on, so two stand for any number. Where the workload has an
evaluation, one follows.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from autofit.devices.base import Device
from autofit.devices.gpu_catalogue import Gpu, find_gpu
from autofit.equivalence.steps import StrategyContext
from autofit.errors import (
    AutofitError,
    InvalidArgument,
    PredictionUnavailable,
    mark_users,
    note_tried,
    raised_here,
)
from autofit.memory.replay import Recording, replay
from autofit.plan import (
    MICRO_BATCHES_OF_A_SEARCH,
    Dimension,
    Plan,
    ResolvedPlan,
    Settings,
)
from autofit.prediction.breakdown import Labels
from autofit.prediction.cuda.fake_cuda import fake_cuda, uncompiled
from autofit.prediction.cuda.roofline import Cost, Operation, cost_on
from autofit.prediction.cuda.scratch import GpuSized, recording_on
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.cuda.values import (
    MAX_ELEMENTS,
    Obstacle,
    is_number,
    is_obstacle,
)
from autofit.prediction.sharded import one_of_ranks, ranks_unlike_the_first
from autofit.probing.serialization import live_objects
from autofit.registry import collect_dimensions
from autofit.snapshot.snapshot import attributes_of, preserved, walk
from autofit.space import Space
from autofit.strategy import Capabilities, Strategy, World
from autofit.torch_private import gone_in
from autofit.training.batch import Batch, map_tensors, tensors_of
from autofit.training.builder import TrainingBuilder
from autofit.training.evaluation import evaluate, unchanged
from autofit.training.lengths import Lengths
from autofit.training.loss import LossSource
from autofit.training.training import Training
from autofit.training.workload import Workload, compiled_part
from autofit.units import GIB

STEPS = 2
# Batches larger than this are made without values if possible, so that they cost no memory.
LARGE_BYTES = GIB
_COPIED = ("model", "optimizer", "loss_fn", "criterion")
_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, Mapping)
_Made = TypeVar("_Made")
_TWO_DEVICES = re.compile(r"on device (cpu|meta) is not on the expected device (cpu|meta)")


@dataclass(frozen=True)
class DryRun:
    """The allocations of the optimizer steps of a plan, and the work of the last one.

    A dry run asks its GPU few questions: one that would have answered them alike has the same run,
    but for the sizes that the GPU decides.

    Attributes:
        micro_batch: samples of the first micro-batch of a step.
        micro_batches: how many of a step's micro-batches ran.
        allocations: every allocation and release, in order; see `recording_on`.
        gpu_sized: the allocations whose size the GPU decides, by number.
        work: the operators of the last step.
        answers: what the GPU was asked, and its answers.
        labels: the kinds of the allocations.
        evaluation: the allocations, and after the last step those of an evaluation; None: the
            workload has none.
        has_stand_in_loss: whether the mean of the model's outputs stood in for a loss.
        parameters: elements of the model's parameters; None of several ranks.
        uncompiled: the lines that call compiled functions, which ran as they are written.
    """

    micro_batch: int
    micro_batches: int
    allocations: Recording
    gpu_sized: Mapping[int, GpuSized]
    work: Sequence[Operation]
    answers: Mapping[str, object] = field(compare=False)
    labels: Labels = field(compare=False)
    evaluation: Recording | None = None
    has_stand_in_loss: bool = False
    parameters: int | None = None
    uncompiled: tuple[str, ...] = ()

    def recording_on(self, gpu: Gpu) -> Recording:
        """Return the allocations on a GPU."""
        return recording_on(gpu, self.allocations, self.gpu_sized)

    def evaluation_on(self, gpu: Gpu) -> Recording | None:
        """Return the allocations on a GPU, and after the last step those of an evaluation."""
        run = self.evaluation
        return None if run is None else recording_on(gpu, run, self.gpu_sized)

    def micro_batch_cost_on(self, gpu: Gpu) -> Cost | None:
        """Return the cost of a micro-batch with its share of the update; None: unknown rates."""
        return cost_on(gpu, self.work, self.micro_batches)


def dry_run(
    workload: Workload, resolved: ResolvedPlan, gpu: Gpu, *, by_module: bool = False
) -> DryRun:
    """Run two optimizer steps of a plan on the meta device in place of that GPU.

    Of a plan of several ranks, those that differ are run one by one, and the run of the one that
    needs most is returned. The user's objects, random states and flags are restored afterwards.

    Args:
        workload, resolved, gpu: what is trained, how, and on what.
        by_module: whether labels note also which module runs when.

    Raises:
        InvalidArgument: the batch is larger than a tensor can be.
        PredictionUnavailable: the user's step needs values; the message names the line.
        Exception: raised by the user's own code.
    """
    size = resolved.plan.ranks
    run = partial(_run, workload, resolved, gpu, by_module)
    first, others = run(World(size=size))
    runs = [first, *(run(World(rank=rank, size=size))[0] for rank in dict.fromkeys(others))]
    if not others:
        return first
    return max(runs, key=lambda each: replay(each.recording_on(gpu)).peak_allocated_bytes)


def _run(
    workload: Workload,
    resolved: ResolvedPlan,
    gpu: Gpu,
    by_module: bool,
    world: World,
) -> tuple[DryRun, list[int]]:
    """Run as one rank; return also those that may need more, for the first rank."""
    tracer = CudaTracer(gpu)
    plan, labels = resolved.plan, Labels(tracer)
    others: list[int] = []
    with ExitStack() as stack:
        stack.enter_context(one_of_ranks(world, note_sent=labels.note_sent))
        stack.enter_context(stage(tracer, not_copied(workload)))
        stack.enter_context(_explained(plan, tracer))
        copied = meta_copy(workload, tracer)
        builder = TrainingBuilder(lambda: copied, MetaDevice(tracer), seed=0, world=world)
        with (
            builder.training(copied, resolved) as training,
            labels.watching(training, by_module=by_module),
        ):
            refuse_compiled(training.model)
            if world.size > 1 and world.rank == 0:
                others = ranks_unlike_the_first(training)
            sizes = traced_sizes(plan, copied)
            _run_steps(training, meta_step(copied, sizes, tracer), tracer, labels)
            allocations, work = tracer.allocations, tuple(tracer.operations or ())
            evaluation = _run_evaluation(training, copied, tracer)
    parameters = training.plain_model.parameters()
    run = DryRun(
        micro_batch=sizes[0],
        micro_batches=len(sizes),
        allocations=allocations,
        gpu_sized=dict(tracer.gpu_sized),
        work=work,
        answers=dict(tracer.queries.answers),
        labels=labels,
        evaluation=evaluation,
        has_stand_in_loss=training.loss_source is LossSource.STAND_IN,
        parameters=None if world.size > 1 else sum(each.numel() for each in parameters),
        uncompiled=tuple(sorted(tracer.uncompiled)),
    )
    return run, others


def _run_steps(training: Training, batch: Batch, tracer: CudaTracer, labels: Labels) -> None:
    steps = STEPS
    if isinstance(training.model, torch.nn.parallel.DistributedDataParallel):
        steps += 1  # the second lays out the buckets of gradients in the order of the first
    for step in range(steps):
        if step == steps - 1:
            tracer.operations = []
        training.step(batch)
        labels.note_state(training)
        tracer.end_step()


def _run_evaluation(training: Training, workload: Workload, tracer: CudaTracer) -> Recording | None:
    """Evaluate beside the training; return all allocations, None where there is no evaluation."""
    samples, eval_step = workload.eval_samples, workload.eval_step
    if samples is None or eval_step is None:
        return None
    tracer.operations = None
    batch = _small_or_without_values(workload, samples, Workload.evaluation_batch, tracer)
    with unchanged(training):
        evaluate(training, eval_step, training.placed(batch), samples)
    return tracer.allocations


def traced_sizes(plan: Plan, workload: Workload) -> tuple[int, ...]:
    """Return the samples of each micro-batch that a dry run of a plan makes."""
    sizes = plan.micro_batch_sizes
    return sizes if workload.training_step is not None else sizes[:MICRO_BATCHES_OF_A_SEARCH]


@contextmanager
def stage(tracer: CudaTracer, live: Mapping[str, object] = MappingProxyType({})) -> Iterator[None]:
    """Run code on the meta device as on the tracer's GPU; restore live objects and the process."""
    with ExitStack() as stack:
        stack.enter_context(preserved(live))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the user gets them when the step runs for real
        stack.enter_context(fake_cuda(tracer.gpu, tracer.note, tracer.is_on_gpu))
        stack.enter_context(uncompiled(tracer.uncompiled.add))
        stack.enter_context(tracer)
        yield


@contextmanager
def _explained(plan: Plan, tracer: CudaTracer) -> Iterator[None]:
    """Raise PredictionUnavailable for an unsupported operation, even if user code caught it."""
    try:
        yield
    except Exception as error:
        obstacle = tracer.obstacle
        if obstacle is None and not isinstance(error, AutofitError) and is_obstacle(error):
            obstacle = Obstacle.caught(error)
        if obstacle is not None:
            raise _unavailable(obstacle) from error
        if plan.micro_batch >= 2**62 or "Storage size calculation overflowed" in str(error):
            raise InvalidArgument(
                f"{plan} makes tensors of more than 2**63 bytes: give a smaller micro-batch"
            ) from error
        if not isinstance(error, AutofitError):
            note_tried(error, f"predicting {plan}, in a dry run on the meta device")
            if not raised_here(error):
                mark_users(error)
        raise
    if tracer.obstacle is not None:
        raise _unavailable(tracer.obstacle)


def _unavailable(obstacle: Obstacle) -> PredictionUnavailable:
    way_out = "Run it with autofit.probe on a machine with the GPU"
    if _TWO_DEVICES.search(obstacle.reason):
        way_out = (
            "A tensor on the CPU is combined with one of the batch or the model. If your code "
            "creates it, create it on the device of the batch (device=batch.device): it would fail "
            "on a GPU too. If a library chose the CPU because there is no GPU here, as Keras does, "
            f"it may train on one. {way_out}"
        )
    reason = f"{obstacle.reason} ({obstacle.line})"
    return PredictionUnavailable(f"memory cannot be predicted: {reason}. {way_out}")


# The meta device as a device to train on: it has a GPU's memory and no values.


class WorkClock:
    """The seconds of the operators that a tracer has seen, by a roofline.

    Args:
        tracer: notes its operators, on a GPU whose rates are known.
    """

    def __init__(self, tracer: CudaTracer) -> None:
        self._tracer = tracer
        self._seconds, self._counted = 0.0, 0

    def __call__(self) -> float:
        """Return the seconds so far."""
        gpu, operations = self._tracer.gpu, self._tracer.operations or []
        assert gpu.rates is not None
        new = operations[self._counted :]
        self._seconds += sum(operation.seconds_on(gpu, gpu.rates) for operation in new)
        self._counted = len(operations)
        return self._seconds


class MetaDevice(Device):
    """Stands for the tracer's GPU in a dry run, of which nothing is measured."""

    def __init__(self, tracer: CudaTracer) -> None:
        self.torch_device = torch.device("meta")
        self.clock = None if tracer.operations is None else WorkClock(tracer)
        self._tracer, self._gpu, self._known_values = tracer, tracer.gpu, tracer.known_values

    @property
    def capabilities(self) -> Capabilities:
        """The native features of the GPU."""
        return Capabilities(
            device_type="meta",
            bfloat16=self._gpu.native_bfloat16,
            float16=self._gpu.tensor_cores,
            tf32=self._gpu.tf32,
            compute_capability=self._gpu.capability,
        )

    def in_host_memory(self) -> AbstractContextManager[None]:
        """Leave what is made inside out of the traced allocations."""
        return self._tracer.untracked()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of that shape which counts; the tensor itself if it counts already."""
        if self._tracer.number_of(tensor) is not None:
            return tensor
        return self._known_values.meta_copy(tensor).requires_grad_(tensor.requires_grad)

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the parameters and buffers of a module to the device, and return that module."""
        model._apply(self.place)  # type: ignore[no-untyped-call]  # torch: what .to(device) is made of
        return model


# The meta copy of a workload: the same modules and optimizers, with tensors that have no values.


def meta_copy(workload: Workload, tracer: CudaTracer) -> Workload:
    """Return the workload with a built model and all tensors on the meta device.

    A live model is copied with its tensors replaced. A model function is called with the meta
    device as the default device, and again on the CPU only if it needs values (`.item()`), so a
    model of any size costs no memory. The tensors stand for host memory: they count once they are
    moved to the device. Call it inside `fake_cuda` and the tracer.
    """
    with tracer.untracked():
        if not isinstance(workload.model, torch.nn.Module):
            workload = replace(workload, model=_without_values(workload.build_model, tracer))
        refuse_compiled(workload.build_model())
        parts = _stateful_parts(workload)
        try:
            copies = copy.deepcopy(parts, _memo(parts))
        except Exception as error:
            raise PredictionUnavailable(
                f"memory cannot be predicted: the model cannot be copied ({type(error).__name__}: "
                f"{error}); pass a function that builds it, or probe"
            ) from error
        return replace(_with_batches(workload, tracer.known_values.meta_copy), **copies)


def not_copied(workload: Workload) -> dict[str, object]:
    """Return the live objects that a dry run may change because it does not copy them."""
    return live_objects(workload, but=[*_stateful_parts(workload), "loader"])


def refuse_compiled(model: torch.nn.Module) -> None:
    """Refuse compiled models: a trace of operators does not show fused ones and reused buffers.

    Raises:
        PredictionUnavailable: a part of the model is compiled.
    """
    if (part := compiled_part(model)) is not None:
        raise PredictionUnavailable(
            f"memory cannot be predicted: {part}, which fuses operators and reuses buffers. Leave "
            "compilation out, or run it with autofit.probe on a machine with the GPU"
        )


def meta_step(workload: Workload, sizes: Sequence[int], tracer: CudaTracer) -> Any:
    """Return the batch of a step in those micro-batches, outside the traced allocations."""

    def make(workload: Workload, samples: int) -> Any:
        return workload.step_of(*(sizes if samples == sum(sizes) else (samples,)))

    return _small_or_without_values(workload, sum(sizes), make, tracer)


def _small_or_without_values(
    workload: Workload, samples: int, make: Callable[[Workload, int], Any], tracer: CudaTracer
) -> Any:
    """Return what is made of this many samples; a large one without values, if possible.

    A user's function that makes batches may need values (lengths of packed sequences).
    """
    with tracer.untracked():
        if not _makes_values(workload):
            return make(workload, samples)
        fewest = workload.described_size
        sample_bytes = sum(t.nbytes for t in tensors_of(make(workload, fewest))) / fewest
        if sample_bytes * samples <= LARGE_BYTES:
            return make(workload, samples)
        light = workload
        if workload.collate_fn is not None and not isinstance(workload.sample_batch, Lengths):
            listed: Any = workload.sample_batch
            light = replace(
                workload, sample_batch=map_tensors(tracer.known_values.meta_copy, [*listed])
            )
        return _without_values(
            lambda: make(light, samples), tracer, lambda: make(workload, samples)
        )


def _without_values(
    make: Callable[[], _Made], tracer: CudaTracer, with_values: Callable[[], _Made] | None = None
) -> _Made:
    state, obstacle = torch.get_rng_state(), tracer.obstacle
    with suppress(Exception), torch.device("meta"):
        result = make()
        if tracer.obstacle is obstacle:
            return result
    # With values it may work; if not, the error is the user's.
    tracer.obstacle = obstacle
    torch.set_rng_state(state)
    return (with_values or make)()


def _memo(parts: Mapping[str, Any]) -> dict[int, Any]:
    """Return the memo of `deepcopy` that replaces each tensor."""
    memo: dict[int, Any] = {}
    kept: list[torch.nn.Parameter] = []
    for name, part in parts.items():
        for _, node in walk(part, name):
            if not isinstance(node, torch.Tensor):
                continue
            # Step counts of optimizers stay numbers on the host
            if node.dim() > 0 or node.device.type != "cpu" or node.requires_grad:
                memo[id(node)] = _without_data(node)
                kept += [node] if isinstance(node, torch.nn.Parameter) else []
    for parameter in kept:
        of_copy = vars(memo[id(parameter)])
        for name, value in attributes_of(parameter).items():
            of_copy[name] = copy.deepcopy(value, memo)
    return memo


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    data = torch.empty_like(tensor.detach(), device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)


def _with_batches(workload: Workload, changed: Callable[[torch.Tensor], Any]) -> Workload:
    """Return the workload, changing each tensor of the batches whose values nobody reads."""
    batches = {}
    if not _reads_values(workload):
        batches["sample_batch"] = map_tensors(changed, workload.sample_batch)
    if workload.collate_fn is None:
        batches["eval_batch"] = map_tensors(changed, workload.eval_batch)
    return replace(workload, **batches)


def _reads_values(workload: Workload) -> bool:
    """Return whether the user's functions get the sample batch, or a batch of theirs, to read."""
    return _makes_values(workload) or workload.loss_weight is not None


def _makes_values(workload: Workload) -> bool:
    """Return whether the user's functions make the batches."""
    return workload.makes_batches or workload.collate_fn is not None


def sendable(workload: Workload) -> tuple[Workload, Mapping[int, torch.Tensor]]:
    """Return what another process needs of a workload for a dry run.

    Returns:
        The workload without its loader and the values that no dry run reads; and by id, for each
        tensor of its model, optimizer and losses, one on meta to send in its place. By id and not
        as a copy, since functions may reach the model too, by their closures.
    """
    sent = _with_batches(replace(workload, loader=None), _numbers_alone)
    return sent, _memo(_stateful_parts(workload))


def _numbers_alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the values that a dry run does not know."""
    if is_number(tensor) and not tensor.is_meta and tensor.numel() <= MAX_ELEMENTS:
        return tensor.detach().cpu().clone()  # a view would take its whole storage along
    return torch.empty_like(tensor, device="meta")


def _stateful_parts(workload: Workload) -> dict[str, Any]:
    parts = {name: getattr(workload, name) for name in _COPIED}
    return {name: part for name, part in parts.items() if isinstance(part, _STATEFUL)}


# What a strategy offers where there is no GPU: its dimensions on the meta device.


def meta_dimensions(
    strategy: Strategy,
    settings: Settings,
    workload: Workload,
    gpu: Gpu,
    ranks: int = 1,
    *,
    known: MutableMapping[Hashable, Mapping[str, Dimension]] | None = None,
) -> Mapping[str, Dimension]:
    """Return the dimensions that a strategy offers on that many GPUs, among them these settings.

    Values that can only be found by running the model are missing. Placements of recomputation are
    computed for one GPU, whichever is asked about: so a value means the same on each.

    Args:
        strategy, settings, workload, gpu, ranks: of a plan.
        known: of earlier calls with this workload, by what decides on them; it is added to.

    Raises:
        InvalidArgument: the strategy has no such setting or value on that GPU.
        PredictionUnavailable: the setting or the value can only be found by running the model.
    """
    key = strategy.name, ranks
    dimensions, notes = (known or {}).get(key), list[str]()
    if dimensions is None:
        dimensions, notes = _offered(strategy, workload, gpu, ranks)
    if known is not None and getattr(strategy, "recomputes", False):
        known[key] = dimensions
    try:
        Space(dimensions, sample_batch_size=1).complete(settings)
    except InvalidArgument as error:
        if notes:
            raise _takes_a_run(f"{error}; {'; '.join(notes)}") from error
        raise
    return dimensions


def _offered(
    strategy: Strategy, workload: Workload, gpu: Gpu, ranks: int
) -> tuple[Mapping[str, Dimension], list[str]]:
    """Return the dimensions of a strategy on the meta device, and its notes."""
    recomputes = getattr(strategy, "recomputes", False)
    tracer = CudaTracer(find_gpu(None) if recomputes else gpu)
    tracer.operations = [] if recomputes else None
    world, device = World(size=ranks), MetaDevice(tracer)
    builder = TrainingBuilder(lambda: meta_copy(workload, tracer), device, seed=0, world=world)
    context = StrategyContext(builder, [])
    try:
        with stage(tracer, not_copied(workload)):
            return collect_dimensions([strategy], context), context.notes
    except Exception as error:
        reason = str(error) if isinstance(error, PredictionUnavailable) else gone_in(error)
        why = reason or f"{type(error).__name__}: {error}"
        raise _takes_a_run(
            f"the meaning of a setting of {strategy.name!r} is unknown: {why}"
        ) from error


def _takes_a_run(why: str) -> PredictionUnavailable:
    return PredictionUnavailable(f"{why}. Pass the report that found them as plan=, or probe")
