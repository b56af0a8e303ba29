"""Record the results of a training step, and compare two steps over the same samples.

Agreement is judged by the roundings that the data types explain, or, given a `NoiseFloor`, name by
name and no more strictly than two runs of the same step agree with each other.

Two plans of one workload are compared on the same samples. Random numbers would hide the
difference, so the model runs in eval mode, except for the modules that normalize over the batch:
those keep their mode, because they are what often makes a split batch differ from a whole one.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch

from autofit.errors import InvalidArgument, release_exception
from autofit.plan import ResolvedPlan
from autofit.strategy import Comparison, attributes_kept, calls_watched
from autofit.torch_private import InstanceNorm, NormBase
from autofit.training.batch import Batch, tensors_of
from autofit.training.builder import TrainingBuilder
from autofit.training.evaluation import modes_kept
from autofit.training.training import Training

LOSS, GRADIENT = "the loss", "the gradient of "
"""Names in `StepTrace.values`; those of gradients begin with GRADIENT."""

ROOM = 10
"""How many times the difference of two equal steps is still explained by the device's noise."""

MOST_NOISE = 0.05
"""Largest relative difference that kernels which add in any order explain, also in bfloat16."""

MOST_ROUNDINGS = 8
"""Largest relative difference, in roundings of the data types, between two equal steps on a device
that repeats to the bit: some kernels round by where in memory their operands lie."""

ROUNDED = 2
"""How many times the effect of rounded weights is still one of roundings: activations and their
gradients are rounded too. Of bfloat16 in residual networks, 0.7 to 1.2 were seen."""

WIDENED = 2**20
"""Numbers that are compared in float64 at a time: no more memory than a few of them, 8 MiB each."""


class NotRepeatable(Exception):
    """Two runs of the same step from the same state differ by more than the device's noise."""


@dataclass(frozen=True)
class StepTrace:
    """Results of a training step.

    Attributes:
        loss: the detached mean loss, or a number.
        gradients: of each parameter that has one, by name; strided and real.
        state: other tensors and plain values after the step, by a readable name.
        tolerance: relative difference that roundings in the types of this step explain.
        rounding: relative size of one rounding in the coarsest of those types.
        normalizing: names of the modules that normalized over the batch.
        ran: names of the modules whose forward ran.
    """

    loss: torch.Tensor | float
    gradients: Mapping[str, torch.Tensor]
    tolerance: float = 0.0
    rounding: float = 0.0
    normalizing: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    ran: frozenset[str] = frozenset()

    @property
    def most_by_rounding(self) -> float:
        """The relative difference that a few roundings make in the types of the gradients."""
        types = {gradient.dtype for gradient in self.gradients.values()}
        widths = [torch.finfo(each).eps for each in types if each.is_floating_point]
        return min(MOST_NOISE, MOST_ROUNDINGS * max(widths, default=0.0))

    def values(self) -> dict[str, Any]:
        """Return all that the step left, by name."""
        gradients = {f"{GRADIENT}{name}": value for name, value in self.gradients.items()}
        return {LOSS: torch.as_tensor(self.loss), **gradients, **self.state}


class NoiseFloor:
    """The relative difference, by name, that two equal steps may have.

    Args:
        tolerance: allowed from the start.
        most: largest relative difference of loss or gradients that counts as noise, beside a few
            roundings; 0 where the device's kernels repeat to the bit.
    """

    def __init__(self, tolerance: float = 0.0, most: float = 0.0) -> None:
        self.tolerance = tolerance
        """Allowed for the loss, and for all gradients together."""
        self._at_first = tolerance
        self._most = most
        self._learned: dict[str, float] = {}
        self._unstable: set[str] = set()

    def learn(self, first: StepTrace, second: StepTrace) -> None:
        """Take in the differences between two runs of the same step.

        Raises:
            NotRepeatable: loss or gradients differ by more than `most` and roundings.
        """
        most = max(self._most, first.most_by_rounding)
        for what, names in (("loss", [LOSS]), ("gradients", None)):
            # All gradients together: one that is zero but for roundings never repeats.
            difference = _total_difference(first.values(), second.values(), names)
            if not difference <= most:
                raise NotRepeatable(
                    f"two identical steps from the same state differ: their {what} by "
                    f"{difference:.2g} (relative)"
                )
            self.tolerance = max(self.tolerance, ROOM * difference)
        ours, theirs = first.values(), second.values()
        for name in self.differences(first, second):
            if _are_comparable(ours.get(name), theirs.get(name)):
                difference = _relative(_distance(ours[name], theirs[name]), _norm(ours[name]))
                self._learned[name] = max(difference, self._learned.get(name, 0.0))
            else:  # the time of day, for example
                self._unstable.add(name)

    def allowed(self, name: str) -> float:
        """Return the relative difference that noise may explain in this value.

        A tensor that happened to repeat exactly still gets the noise of loss and gradients, for
        kernels that add in any order affect all tensors.
        """
        trained = [
            difference
            for of, difference in self._learned.items()
            if of == LOSS or of.startswith(GRADIENT)
        ]
        noise = max(self._learned.get(name, 0.0), median(trained) if trained else 0.0)
        return max(self._at_first, ROOM * noise)

    def differences(self, first: StepTrace, second: StepTrace) -> Iterator[str]:
        """Yield the names of the values that differ by more than noise."""
        ours, theirs = first.values(), second.values()
        for name in ours | theirs:
            if name in self._unstable:
                continue
            both = name in ours and name in theirs
            if not both or not alike(ours[name], theirs[name], self.allowed(name)):
                yield name


def compare(first: StepTrace, second: StepTrace, noise: NoiseFloor | None = None) -> Comparison:
    """Return whether the second step agrees with the first, by how much, and where it does not.

    Args:
        first: the reference step.
        second: a step over the same samples.
        noise: judge each value by it, and the states too; None: judge the loss and the norm of
            all gradients by the roundings of both steps.
    """
    distances = {
        name: _distance(first.gradients.get(name), second.gradients.get(name))
        for name in {**first.gradients, **second.gradients}
    }
    size = math.hypot(*(_norm(gradient) for gradient in first.gradients.values()))
    found = Comparison(
        loss=_loss_difference(float(first.loss), float(second.loss)),
        gradient=_relative(math.hypot(*distances.values()), size),
        tolerance=max(first.tolerance, second.tolerance),
        ran=first.ran | second.ran,
    )
    if noise is not None:
        differences = tuple(noise.differences(first, second))
        explained = 0.0 if differences else max(found.loss, found.gradient)
        tolerance = max(noise.tolerance, explained)
        found = replace(found, tolerance=tolerance, differences=differences)
    if found.equal:
        return found
    if first.normalizing:
        return replace(found, modules=first.normalizing, normalizes_over_batch=True)
    largest = sorted(filter(distances.get, distances), key=lambda name: -distances[name])[:3]
    return replace(found, modules=owners_of(largest))


def parameters_apart(
    whole: StepTrace, other: StepTrace, repeated: Iterable[StepTrace] = ()
) -> dict[str, float]:
    """Return the parameters whose gradients differ by more than roundings, each with how far.

    One of them may hide in the norm of all: that of a router, or of a gate, is often a thousandth
    of it. Its own tolerance is that of all gradients together, relative to its own size, and what
    is left of the difference must be more than noise, for a gradient that is zero but for roundings
    (of a bias before a normalization) differs from itself by as much as it is large. So it is not
    less than ROOM times the difference that any of `repeated` shows, nor than ROOM roundings of its
    type in the norm of all gradients: each element is a sum of terms as large as those.

    Args:
        whole, other: compared.
        repeated: steps that differ from `whole` by noise alone.
    """
    sizes = {name: _norm(gradient) for name, gradient in whole.gradients.items()}
    tolerance, total = max(whole.tolerance, other.tolerance), math.hypot(*sizes.values())
    others, apart = [each.gradients for each in repeated], {}
    for name, gradient in {**whole.gradients, **other.gradients}.items():
        distance = _distance(whole.gradients.get(name), other.gradients.get(name))
        eps = torch.finfo(gradient.dtype).eps if gradient.dtype.is_floating_point else 0.0
        noise = [_distance(whole.gradients.get(name), each.get(name)) for each in others]
        size = sizes.get(name, 0.0)
        if distance > max(tolerance * size, ROOM * max(noise, default=0.0), ROOM * eps * total):
            apart[name] = _relative(distance, size)
    return apart


def owners_of(parameters: Iterable[str]) -> tuple[str, ...]:
    """Return modules by name; a parameter of the model's own stands for itself."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in parameters))


def _loss_difference(first: float, second: float) -> float:
    """Return the relative difference; NaN and infinity equal themselves."""
    same = first == second or (math.isnan(first) and math.isnan(second))
    return 0.0 if same else _relative(abs(second - first), abs(first))


def _total_difference(
    first: Mapping[str, Any], second: Mapping[str, Any], names: Collection[str] | None
) -> float:
    """Return the relative difference of these values together; None: of all gradients."""
    names = [n for n in first if n.startswith(GRADIENT)] if names is None else names
    distances = (
        _distance(first[name], second[name])
        if _are_comparable(first[name], second.get(name))
        else _norm(first[name])
        for name in names
    )
    return _relative(math.hypot(*distances), math.hypot(*(_norm(first[name]) for name in names)))


def alike(one: Any, other: Any, allowed: float) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other or one != one)  # NaN is not itself
    if not _are_comparable(one, other):
        return False
    distance = _distance(one, other)
    if not allowed or not distance:
        return distance == 0.0
    return distance <= 1e-12 or _relative(distance, _norm(one)) <= allowed  # 1e-12: of nothing


def _are_comparable(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape and one.dtype == other.dtype


def _relative(difference: float, reference: float) -> float:
    return difference / reference if reference else (0.0 if difference == 0 else math.inf)


def _distance(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """Return the norm of the difference; None is all zeros, NaN and infinity equal themselves."""
    if first is None or second is None:
        given = second if first is None else first
        return 0.0 if given is None else _norm(given)
    if first.shape != second.shape:
        return math.inf
    if first.dtype == second.dtype and torch.equal(first, second):
        return 0.0
    pairs = zip(_parts(first), _parts(second), strict=True)
    return math.hypot(*(_part_distance(one, other) for one, other in pairs))


def _part_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    one, other = _wide(first), _wide(second)
    difference = one - other
    if not math.isfinite(norm := float(torch.linalg.vector_norm(difference))):
        same = (one == other) | (one.isnan() & other.isnan())
        norm = float(torch.linalg.vector_norm(difference.masked_fill(same, 0)))
    return norm


def _norm(tensor: torch.Tensor) -> float:
    """Return the norm of the finite values."""
    return math.hypot(*map(_part_norm, _parts(tensor)))


def _part_norm(tensor: torch.Tensor) -> float:
    wide = _wide(tensor)
    if not math.isfinite(norm := float(torch.linalg.vector_norm(wide))):
        norm = float(torch.linalg.vector_norm(wide.masked_fill(~wide.isfinite(), 0)))
    return norm


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of a tensor that may be widened at little cost in memory."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dim()
    if not is_plain or tensor.layout is not torch.strided:
        return [tensor]
    longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    rows = max(1, WIDENED * tensor.shape[longest] // max(1, tensor.numel()))
    return torch.split(tensor, rows, longest)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


SAMPLES_OF_A_COMPARISON = 5
"""An odd number in two micro-batches: their sizes differ, and neither is a single sample."""

Pass: TypeAlias = tuple[ResolvedPlan, int]
"""A plan and a seed."""

Around: TypeAlias = Callable[[Training], AbstractContextManager[object]]
"""What is entered around the training of a pass."""


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
    if builder.fresh_workload().training_step is not None:
        raise InvalidArgument("training_step hides its gradients, so plans cannot be compared")
    batch = builder.fresh_workload().batch(samples)  # once: a function may make another each time
    passes = (first, builder.seed), (second, builder.seed)
    one, other = run_passes(builder, passes, batch)
    found = compare(one, other)
    if found.equal or builder.world.size > 1:  # ranks that differ would wait for each other
        return found
    moved = partial(perturbed, by=max(one.rounding, other.rounding) / 2)
    try:
        (third,) = run_passes(builder, passes[:1], batch, moved)
    except Exception as error:  # a weight that cannot be written, or no memory for another pass
        release_exception(error)
        return found
    explained = max(other.tolerance, ROUNDED * compare(one, third).gradient)
    return compare(one, replace(other, tolerance=explained))


@contextmanager
def perturbed(
    training: Training, *, by: float, seed: int = 0, around: Around = nullcontext
) -> Iterator[None]:
    """Train weights each of which is moved at random by up to this share of it, as by rounding.

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
    with around(training):
        yield


def compare_passes(builder: TrainingBuilder, passes: tuple[Pass, Pass], batch: Batch) -> Comparison:
    """Return how two passes over the same batch differ; raises as `compare_plans` does."""
    first, second = run_passes(builder, passes, batch)
    return compare(first, second)


def run_passes(
    builder: TrainingBuilder, passes: Sequence[Pass], batch: Batch, around: Around = nullcontext
) -> list[StepTrace]:
    """Return the passes over the same batch, all in the same modes."""
    try:
        return [run_pass(builder, *each, batch, around) for each in passes]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # some models have a loss in training mode only
        release_exception(error)
    return [run_pass(builder, *each, batch, around, calm=False) for each in passes]


def run_pass(
    builder: TrainingBuilder,
    resolved: ResolvedPlan,
    seed: int,
    batch: Batch,
    around: Around = nullcontext,
    *,
    calm: bool = True,
) -> StepTrace:
    """Return loss and gradients of a pass in a training of its own; see `accumulated`."""
    builder.reclaim()
    with builder.training(builder.fresh_workload(), resolved) as training, around(training):
        return accumulated(training, batch, seed=seed, calm=calm)


def accumulated(training: Training, batch: Batch, *, seed: int, calm: bool = True) -> StepTrace:
    """Return loss and gradients of one accumulation over the batch; the training is not stepped.

    They lie on the host, so the model may go. `calm=False` leaves every module in its mode, for
    models whose loss exists in training mode only.
    """
    model = training.model
    within = _calm(model) if calm else nullcontext()
    with modes_kept(model), within, _types_of_outputs(model) as types:
        loss = _accumulate_in_range(training, training.share_of(batch), seed)
        normalizing = tuple(batch_normalizing(model))
    scale = 1.0 if training.scaler is None else float(training.scaler.get_scale())
    by_name = {
        name: _on_host(parameter.grad) / scale
        for name, parameter in training.plain_model.named_parameters()
        if parameter.grad is not None
    }
    training.zero_grad()
    types.update(parameter.dtype for parameter in model.parameters())
    eps = max((_rounding(dtype, training.device.type) for dtype in types), default=0.0)
    # The sum of roundings: some thousand units in the last place, or a few coarse ones.
    return StepTrace(loss, by_name, min(eps * 8192, max(eps * 4, 1e-3)), eps, normalizing)


def batch_normalizing(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that normalize over the batch in their present mode."""
    return [name for name, module in model.named_modules() if _normalizes_over_batch(module)]


def _normalizes_over_batch(module: torch.nn.Module) -> bool:
    instance = isinstance(module, InstanceNorm)
    return isinstance(module, NormBase) and module.training and not instance


def _accumulate_in_range(training: Training, batch: Batch, seed: int) -> float:
    """Accumulate, again with a smaller scale for as long as float16 overflows, as training does."""
    while True:
        seed_everything(seed)
        training.zero_grad()
        loss = float(training.accumulate(batch))
        scaler = training.scaler
        if scaler is None or scaler.get_scale() <= 1:
            return loss
        gradients = (p.grad for p in training.model.parameters() if p.grad is not None)
        if all(bool(_on_host(gradient).isfinite().all()) for gradient in gradients):
            return loss
        scaler.update(scaler.get_scale() / 16)


@contextmanager
def _calm(model: torch.nn.Module) -> Iterator[None]:
    """Have modules draw no random numbers, also where the loss calls `model.train()` first."""
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
    """Return the relative size of a rounding; 0 for whole numbers.

    On a GPU float32 counts as TF32, in which cuDNN convolves by default.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    if device_type == "cuda" and dtype in (torch.float32, torch.complex64):
        dtype = torch.float16
    return torch.finfo(dtype).eps


def _on_host(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient dense and real, in host memory; a sharded one whole, on every rank."""
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    dense = gradient.detach().to("cpu").to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def seed_everything(seed: int) -> None:
    """Start torch's, Python's and (where it is loaded) numpy's generators from a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
