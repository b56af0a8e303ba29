"""Record the results of a training step, and compare two steps over the same samples.

Where values are judged name by name, one `Tolerance` says what is equal; else loss and the norm of
all gradients are judged by the roundings that the data types explain.

Two plans of one workload are compared on the same samples. Random numbers would hide the
difference, so the model runs in eval mode, except for the modules that normalize over the batch:
those keep their mode, because they are what often makes a split batch differ from a whole one.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from autofit.errors import InvalidArgument, release_exception
from autofit.plan import Plan, ResolvedPlan
from autofit.strategy import Comparison, attributes_kept, calls_watched, undone
from autofit.torch_private import InstanceNorm, NormBase
from autofit.training.batch import Batch, tensors_of
from autofit.training.builder import TrainingBuilder
from autofit.training.evaluation import modes_kept
from autofit.training.training import Training

LOSS, GRADIENT = "the loss", "the gradient of "
"""Names in `StepTrace.values`; those of gradients begin with GRADIENT."""

ROOM = 10
"""How many times the difference of two equal steps is still explained by the device's noise."""

MAX_NOISE = 0.05
"""Largest relative difference that kernels which add in any order explain, also in bfloat16."""

MAX_ROUNDINGS = 8
"""Largest relative difference, in roundings of the data types, between two equal steps on a device
that repeats to the bit: some kernels round by where in memory their operands lie."""

ROUNDED = 2
"""How many times the effect of rounded weights is still one of roundings: activations and their
gradients are rounded too. Of bfloat16 in residual networks, 0.7 to 1.2 were seen."""

WIDENED = 2**20
"""Numbers that are compared in float64 at a time: no more memory than a few of them, 8 MiB each."""

_NOTHING = 1e-12
"""The norm of what is zero but for roundings, where these are explained."""


class NotRepeatable(Exception):
    """Two runs of the same step from the same state differ by more than the device's noise."""


@dataclass(frozen=True)
class StepTrace:
    """Results of a training step.

    Attributes:
        loss: the detached mean loss, or a number.
        gradients: of each parameter that has one, by name; strided.
        state: other tensors and plain values after the step, by a readable name.
        tolerance: relative difference that roundings in the types of this step explain.
        rounding: relative size of one rounding in the coarsest of those types.
        normalizing: names of the modules that normalized over the batch.
        ran: names of the modules whose forward ran.
        calm: whether its modules drew no random numbers; see `step_without_update`.
    """

    loss: torch.Tensor | float
    gradients: Mapping[str, torch.Tensor]
    tolerance: float = 0.0
    rounding: float = 0.0
    normalizing: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    ran: frozenset[str] = frozenset()
    calm: bool = False

    def values(self) -> dict[str, Any]:
        """Return all that the step left, by name."""
        gradients = {f"{GRADIENT}{name}": value for name, value in self.gradients.items()}
        is_tensor = isinstance(self.loss, torch.Tensor)
        loss = self.loss if is_tensor else torch.tensor(self.loss, dtype=torch.float64)
        return {LOSS: loss, **gradients, **self.state}


@dataclass
class Tolerance:
    """What counts as equal, value by value.

    A value may differ by the largest of `of_own` times its norm, `roundings` of its type in the
    norm of all gradients, and ROOM times what it differs by between runs of the same step:

    | compared | of_own | roundings | runs of the same step |
    | --- | --- | --- | --- |
    | a step under settings | ROOM times what loss and gradients differ by | 0 | if it differs |
    | one of a strategy that rounds | and 1e-4 at least | 0 | with weights one rounding larger |
    | split and whole gradients | what their types explain | ROOM | another seed, moved weights |

    Other values than tensors have to be the same, unless they differ between those runs.

    Attributes:
        of_own: relative difference.
        roundings: of a gradient in the norm of all: each element is a sum of terms as large as
            those, and one that is zero but for roundings (of a bias before a normalization) differs
            from itself by as much as it is large.
        most: largest relative difference of loss or gradients that counts as noise, beside a few
            roundings; 0 where the device's kernels repeat to the bit.
    """

    of_own: float = 0.0
    roundings: float = 0.0
    most: float = 0.0
    _spread: dict[str, float] = field(default_factory=dict, init=False)

    def most_explained(self, step: StepTrace) -> float:
        """Return the largest relative difference of loss or gradients that noise explains."""
        rounding = max((_eps(each.dtype) for each in step.gradients.values()), default=0.0)
        return max(self.most, min(MAX_NOISE, MAX_ROUNDINGS * rounding))

    def learn(self, first: StepTrace, again: StepTrace) -> None:
        """Take in the differences between two runs of the same step.

        A value that happened to repeat exactly still gets the noise of loss and gradients, for
        kernels that add in any order affect all.

        Raises:
            NotRepeatable: loss or gradients differ by more than `most` and roundings.
        """
        found, most = compare(first, again), self.most_explained(first)
        for what, difference in (("loss", found.loss), ("gradients", found.gradient)):
            if not difference <= most:
                raise NotRepeatable(
                    f"two identical steps from the same state differ: their {what} by "
                    f"{difference:.2g} (relative)"
                )
            self.of_own = max(self.of_own, ROOM * difference)
        self.widen(first, again)

    def widen(self, first: StepTrace, again: StepTrace) -> None:
        """Take in by how much each value differs alone."""
        ours, theirs = first.values(), again.values()
        for name in ours | theirs:
            apart = distance(ours.get(name), theirs.get(name))
            self._spread[name] = max(apart, self._spread.get(name, 0.0))

    def differences(self, first: StepTrace, second: StepTrace) -> dict[str, float]:
        """Return the names of the values that differ by more, each with its relative difference."""
        ours, theirs, found = first.values(), second.values(), dict[str, float]()
        by_roundings = self.roundings and self.roundings * _size(first)
        for name in ours | theirs:
            one, apart = ours.get(name), distance(ours.get(name), theirs.get(name))
            if not apart:
                continue
            size = _norm(one) if isinstance(one, torch.Tensor) else 0.0
            allowed = [self.of_own * size, ROOM * self._spread.get(name, 0.0)]
            if name.startswith(GRADIENT) and name in ours:
                allowed.append(by_roundings * _eps(ours[name].dtype))
            if not apart <= max(*allowed, _NOTHING if self.of_own else 0.0):
                found[name] = _relative(apart, size)
        return found


def compare(first: StepTrace, second: StepTrace, tolerance: Tolerance | None = None) -> Comparison:
    """Return whether the second step agrees with the first, by how much, and where it does not.

    Args:
        first: the reference step.
        second: a step over the same samples.
        tolerance: judge each value by it, and the states too; None: judge the loss and the norm of
            all gradients by the roundings of both steps.
    """
    distances = {
        name: _distance(first.gradients.get(name), second.gradients.get(name))
        for name in {**first.gradients, **second.gradients}
    }
    losses = [torch.tensor(float(each.loss), dtype=torch.float64) for each in (first, second)]
    found = Comparison(
        loss=_relative(_distance(*losses), _norm(losses[0])),
        gradient=_relative(math.hypot(*distances.values()), _size(first)),
        tolerance=max(first.tolerance, second.tolerance),
        ran=first.ran | second.ran,
    )
    if tolerance is not None:
        differences = tuple(tolerance.differences(first, second))
        explained = 0.0 if differences else max(found.loss, found.gradient)
        most = max(tolerance.of_own, explained)
        found = replace(found, tolerance=most, differences=differences)
    if found.equal:
        return found
    if first.normalizing:
        return replace(found, modules=first.normalizing, normalizes_over_batch=True)
    largest = sorted(filter(distances.get, distances), key=lambda name: -distances[name])[:3]
    return replace(found, modules=owners_of(largest))


def owners_of(parameters: Iterable[str]) -> tuple[str, ...]:
    """Return modules by name; a parameter directly on the model stands for itself."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in parameters))


def distance(one: Any, other: Any) -> float:
    """Return how far two values are apart: tensors by a norm, others not at all or infinitely.

    NaN and infinity equal themselves.
    """
    if getattr(one, "dtype", type(one)) != getattr(other, "dtype", type(other)):
        return math.inf
    if isinstance(one, torch.Tensor):
        return _distance(one, other)
    return 0.0 if one == other or one != one else math.inf


def _relative(difference: float, reference: float) -> float:
    return difference / reference if reference else (0.0 if difference == 0 else math.inf)


def _size(step: StepTrace) -> float:
    """Return the norm of all gradients together."""
    return math.hypot(*map(_norm, step.gradients.values()))


def _eps(dtype: torch.dtype) -> float:
    """Return the relative size of a rounding; 0 for whole numbers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _distance(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """Return the norm of the difference; None is all zeros."""
    if first is None or second is None:
        given = second if first is None else first
        return 0.0 if given is None else _norm(given)
    if first.shape != second.shape:
        return math.inf
    is_strided = first.layout == second.layout == torch.strided
    if is_strided and first.dtype == second.dtype and torch.equal(first, second):
        return 0.0
    pairs = zip(_pieces(first), _pieces(second), strict=True)
    return math.hypot(*(_norm_of_difference(one, other) for one, other in pairs))


def _norm_of_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.linalg.vector_norm((one - other).masked_fill(same, 0)))


def _norm(tensor: torch.Tensor) -> float:
    """Return the norm of the finite values."""
    finite = (each.masked_fill(~each.isfinite(), 0) for each in _pieces(tensor))
    return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in finite))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the numbers of a tensor in float64, at little cost in memory."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    yield from (each.to(wide) for each in torch.split(dense.detach().reshape(-1), WIDENED))


SAMPLES_OF_A_COMPARISON = 5
"""An odd number in two micro-batches: their sizes differ, and neither is a single sample."""

Around: TypeAlias = Callable[[Training], AbstractContextManager[object]]
"""What is entered around the training of a plan."""


def compare_plans(
    builder: TrainingBuilder, first: ResolvedPlan, second: ResolvedPlan, samples: int
) -> Comparison:
    """Return how loss and gradients of the second plan differ from the first's.

    Where they are not equal within the roundings of most models, the model itself tells how much
    its gradients change when its weights are rounded.

    Raises:
        InvalidArgument: the workload has a training_step, whose gradients cannot be looked at.
        Exception: whatever the model or the device raises.
    """
    batch = _batch_of(builder, samples)
    plans = (first, builder.seed), (second, builder.seed)
    one, other = traced_plans(builder, plans, batch)
    found = compare(one, other)
    if found.equal or builder.world.size > 1:  # ranks that differ would wait for each other
        return found
    moved = partial(perturbed, by=max(one.rounding, other.rounding) / 2)
    try:
        (third,) = traced_plans(builder, plans[:1], batch, moved)
    except Exception as error:  # a weight that cannot be written, or no memory for another step
        release_exception(error)
        return found
    explained = max(other.tolerance, ROUNDED * compare(one, third).gradient)
    return compare(one, replace(other, tolerance=explained))


def compare_as_trained(
    builder: TrainingBuilder, first: ResolvedPlan, second: ResolvedPlan, samples: int
) -> Comparison | None:
    """Return how the second plan differs from the first with every module in its own mode.

    Both draw from the same seed, so that dropout that is left out shows. None: the first differs
    from itself by as much as roundings do not explain.

    Raises:
        Exception: as of `compare_plans`.
    """
    batch = _batch_of(builder, samples)
    plans = first, first, second
    one, again, other = (traced_plan(builder, p, builder.seed, batch, calm=False) for p in plans)
    return compare(one, other) if compare(one, again).equal else None


def _batch_of(builder: TrainingBuilder, samples: int) -> Batch:
    """Return a batch for all steps of a comparison: a function may make another each time."""
    workload = builder.fresh_workload()
    if workload.training_step is not None:
        raise InvalidArgument("training_step hides its gradients, so plans cannot be compared")
    return workload.batch(samples)


@contextmanager
def perturbed(training: Training, *, by: float, seed: int = 0) -> Iterator[None]:
    """Train from weights that are each changed at random by up to this share, as by rounding.

    Some models move their gradients by half then: a residual network that normalizes over its
    batch, before it is trained.
    """
    for parameter in training.plain_model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            weight = parameter.data
            draw = torch.Generator(weight.device).manual_seed(seed)
            # In float32, since a type of 16 bits has no number between 1 and the next
            factors = torch.empty(weight.shape, device=weight.device)
            weight.copy_(weight * factors.uniform_(1 - by, 1 + by, generator=draw))
    yield


def traced_plans(
    builder: TrainingBuilder,
    plans: Sequence[tuple[ResolvedPlan, int]],
    batch: Batch,
    *arounds: Around,
) -> list[StepTrace]:
    """Return a step of each plan, with its seed, over the same batch and in the same modes.

    Raises:
        Exception: as of `compare_plans`.
    """
    try:
        return [traced_plan(builder, *each, batch, *arounds) for each in plans]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # some models have a loss in training mode only
        release_exception(error)
    return [traced_plan(builder, *each, batch, *arounds, calm=False) for each in plans]


def traced_plan(
    builder: TrainingBuilder,
    resolved: ResolvedPlan,
    seed: int,
    batch: Batch,
    *arounds: Around,
    calm: bool = True,
) -> StepTrace:
    """Return a step in a training of its own; see `step_without_update`."""
    builder.reclaim()
    with builder.training(builder.fresh_workload(), resolved) as training, ExitStack() as stack:
        for around in arounds:
            stack.enter_context(around(training))
        return step_without_update(training, batch, seed=seed, calm=calm)


def moved_by_seed(
    builder: TrainingBuilder,
    whole: StepTrace,
    batch: Batch,
    samples: int,
    *arounds: Around,
) -> Comparison:
    """Compare a step of all samples with one that draws other random numbers, in the same modes.

    Raises:
        Exception: whatever the model or the device raises.
    """
    plain, seed = ResolvedPlan(Plan(samples)), builder.seed + 1
    return compare(whole, traced_plan(builder, plain, seed, batch, *arounds, calm=whole.calm))


def traced_step(
    training: Training,
    batch: Any,
    *,
    update: bool,
    copied: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> StepTrace:
    """Run a step; return its loss, and the gradients at each update by the parameters' names.

    Args:
        training, batch: what is stepped.
        update: False: the weights stay as they are.
        copied: how a gradient is kept; None: as it is, strided.
    """
    gradients: dict[str, torch.Tensor] = {}
    updates: Counter[str] = Counter()
    noted: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def is_noted(name: str, gradient: torch.Tensor) -> bool:
        """Return whether a gradient was there before, as in a frozen part that is never updated."""
        known = noted.get(name)
        noted[name] = weakref.ref(gradient), gradient._version
        return known is not None and known[0]() is gradient and known[1] == gradient._version

    def note(step: Callable[[], None]) -> None:
        for name, parameter in training.plain_model.named_parameters():
            if parameter.grad is not None and not is_noted(name, parameter.grad):
                updates[name] += 1
                key = name + (f" at update {updates[name]}" if updates[name] > 1 else "")
                gradients[key] = (copied or _strided)(parameter.grad.detach())
        if update:
            step()

    with undone(training.wrap_optimizer_step(note)):
        loss = training.step(batch).detach().clone()
    return StepTrace(loss, gradients)


def _strided(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy to compare: of a sparse gradient, such as an embedding's, its rows."""
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
        return torch.cat([gradient.values().flatten(), gradient.indices().flatten()])
    return gradient.to_dense() if gradient.layout != torch.strided else gradient.clone()


def step_without_update(
    training: Training, batch: Batch, *, seed: int, calm: bool = True
) -> StepTrace:
    """Return loss and gradients of a step over the batch that leaves the weights as they are.

    Gradients are neither clipped nor shown to `before_step`, from now on: clipped ones hide how far
    they are apart. They lie on the host, so the model may go. `calm=False` leaves every module in
    its mode, for models whose loss exists in training mode only.
    """
    model = training.model
    training.recipe = replace(training.recipe, clip_grad_norm=None, before_step=None)
    within = _calm(model) if calm else nullcontext()
    with modes_kept(model), within, _types_of_outputs(model) as types:
        step = _step_in_range(training, training.share_of(batch), seed)
        normalizing = tuple(batch_normalizing(model))
    types.update(parameter.dtype for parameter in model.parameters())
    eps = max((_rounding(dtype, training.device.type) for dtype in types), default=0.0)
    # The sum of roundings: some thousand units in the last place, or a few coarse ones.
    tolerance = min(eps * 8192, max(eps * 4, 1e-3))
    return StepTrace(float(step.loss), step.gradients, tolerance, eps, normalizing, calm=calm)


def _step_in_range(training: Training, batch: Batch, seed: int) -> StepTrace:
    """Step, and repeat with a smaller scale while float16 overflows, as training does."""
    while True:
        seed_everything(seed)
        scale = 1.0 if training.scaler is None else training.scaler.get_scale()
        copied = partial(_on_host, scale=scale)
        step = traced_step(training, batch, update=False, copied=copied)
        is_finite = all(bool(each.isfinite().all()) for each in step.gradients.values())
        if training.scaler is None or scale <= 1 or is_finite:
            return step
        training.scaler.update(scale / 16)


def batch_normalizing(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that normalize over the batch in their present mode."""
    return [name for name, module in model.named_modules() if _normalizes_over_batch(module)]


def _normalizes_over_batch(module: torch.nn.Module) -> bool:
    instance = isinstance(module, InstanceNorm)
    return isinstance(module, NormBase) and module.training and not instance


@contextmanager
def _calm(model: torch.nn.Module) -> Iterator[None]:
    """Keep modules from drawing random numbers, even if the loss calls `model.train()`."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(attributes_kept(module, "dropout", "train", "eval"))
            module.training = _normalizes_over_batch(module)
            if isinstance(module, torch.nn.RNNBase):
                # cuDNN runs the backward of a recurrent layer in training mode only
                module.training, module.dropout = True, 0.0
            vars(module)["train"] = vars(module)["eval"] = partial(_as_it_is, module)
        yield


def _as_it_is(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    return module


@contextmanager
def _types_of_outputs(model: torch.nn.Module) -> Iterator[set[torch.dtype]]:
    """Collect the types that modules return: under the user's autocast not the parameters' own."""
    types: set[torch.dtype] = set()

    def note(module: torch.nn.Module, output: Any) -> None:
        types.update(tensor.dtype for tensor in tensors_of(output))

    with calls_watched(model, model.modules(), lambda *_: None, note):
        yield types


def _rounding(dtype: torch.dtype, device_type: str) -> float:
    """Return the relative size of a rounding on a device.

    On a GPU float32 counts as TF32, in which cuDNN convolves by default.
    """
    is_tf32 = device_type == "cuda" and dtype in (torch.float32, torch.complex64)
    return _eps(torch.float16 if is_tf32 else dtype)


def _on_host(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a gradient unscaled and dense, in host memory; a sharded one whole, on every rank."""
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().to("cpu").to_dense() / scale


def seed_everything(seed: int) -> None:
    """Start torch's, Python's and (where it is loaded) numpy's generators from a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


# How much a step changes the parameters: a plan that never updates trains nothing, and equal
# gradients say nothing of what a strategy does to the update.

MAX_STEPS = 20
"""Without any change, before none is expected: float16 leaves some out until its scale fits."""


def size_of_update(builder: TrainingBuilder, resolved: ResolvedPlan, samples: int) -> float:
    """Return the norm of the change of all parameters by the first step that changes them.

    0: none of `MAX_STEPS` did.

    Raises:
        Exception: whatever the model or the device raises.
    """
    builder.reclaim()
    workload = builder.fresh_workload()
    batch = workload.batch(samples)
    with builder.training(workload, resolved) as training, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another number of samples than the plan's
        return first_change(training.plain_model, lambda: training.step(batch), MAX_STEPS)


def first_change(model: torch.nn.Module, step: Callable[[], object], max_steps: int) -> float:
    """Return the norm of the change of all parameters by the first step that changes them.

    0: none of `max_steps` did.
    """
    before = _parameters_of(model)
    for _ in range(max_steps):
        step()
        if size := math.hypot(*map(distance, before, _parameters_of(model))):
            return size
    return 0.0


def versions(model: torch.nn.Module) -> list[int]:
    """Return how often each parameter was written, as autograd counts it: not through `.data`."""
    return [getattr(parameter, "_version", 0) for parameter in model.parameters()]


def _parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]
