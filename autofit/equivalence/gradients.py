"""Two plans on the same samples: how far do loss and gradients differ?

Randomness would hide what is looked for, so the model runs in eval mode, except for the modules
that normalize over the batch: those keep the mode they are in, because they are what often makes
a split batch differ from a whole one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.nn.modules.batchnorm import _NormBase  # the one class behind all batch normalizations
from torch.nn.modules.module import register_module_forward_hook

from autofit.errors import InvalidRequest, release_exception
from autofit.plan import ResolvedPlan
from autofit.training.batch import Batch, tensors_of
from autofit.training.builder import TrainingBuilder
from autofit.training.training import Training

SAMPLES_OF_A_COMPARISON = 5
"""An odd number in two micro-batches: their sizes differ, and neither is a single sample."""


@dataclass(frozen=True)
class Gradients:
    """One pass over some samples, kept on the host: the model behind it may be gone.

    Attributes:
        loss: the mean loss.
        by_name: the gradient of each parameter that got one, in its own type.
        tolerance: the most that roundings explain, in the types of parameters and activations.
        normalizing: the modules that normalized over the batch.
    """

    loss: float
    by_name: dict[str, torch.Tensor]
    tolerance: float
    normalizing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """How far a second pass is from a first, as fractions.

    Attributes:
        loss: |loss2 - loss1| / |loss1|.
        gradient: norm of the difference of all gradients over the norm of the first's.
        tolerance: the most that roundings of these dtypes explain.
        modules: the modules behind it: those that normalize over the batch, else the owners of
            the parameters whose gradients differ most.
        normalizes_over_batch: whether `modules` are those that normalize over the batch: no
            weighting of losses makes a split batch equal to a whole one there.
    """

    loss: float
    gradient: float
    tolerance: float
    modules: tuple[str, ...] = ()
    normalizes_over_batch: bool = False

    @property
    def equal(self) -> bool:
        """Equal up to rounding."""
        return self.gradient <= self.tolerance and self.loss <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self) | {"modules": list(self.modules)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Comparison:
        """The comparison that `to_dict` wrote."""
        return cls(**(data | {"modules": tuple(data["modules"])}))


def gradients(training: Training, batch: Batch, *, seed: int, calm: bool = True) -> Gradients:
    """Loss and gradients of one accumulation over the batch; the training is not stepped.

    `calm=False` leaves every module in its mode, for models whose loss exists in training only.
    """
    model = training.model
    with _calm(model) if calm else nullcontext(), _types_of_outputs() as types:
        loss = _accumulate_in_range(training, batch, seed)
        normalizing = tuple(batch_normalizing(model))
    scale = 1.0 if training.scaler is None else float(training.scaler.get_scale())
    by_name = {
        name: _on_host(parameter.grad) / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    training.zero_grad()
    types.update(parameter.dtype for parameter in model.parameters())
    tolerance = max((_tolerance(dtype, training.device.type) for dtype in types), default=0.0)
    return Gradients(loss, by_name, tolerance, normalizing)


def compare(first: Gradients, second: Gradients) -> Comparison:
    """How far the second pass is from the first."""
    differences = {
        name: _distance(first.by_name.get(name), second.by_name.get(name))
        for name in first.by_name | second.by_name
    }
    whole = math.hypot(*(_distance(value, None) for value in first.by_name.values()))
    comparison = Comparison(
        loss=_relative(abs(second.loss - first.loss), abs(first.loss)),
        gradient=_relative(math.hypot(*differences.values()), whole),
        tolerance=max(first.tolerance, second.tolerance),
    )
    if comparison.equal:
        return comparison
    if first.normalizing:
        return replace(comparison, modules=first.normalizing, normalizes_over_batch=True)
    return replace(comparison, modules=_owners_of_largest(differences))


def batch_normalizing(model: torch.nn.Module) -> list[str]:
    """Names of the modules that normalize over the batch as they stand."""
    return [name for name, module in model.named_modules() if _normalizes_over_batch(module)]


def _normalizes_over_batch(module: torch.nn.Module) -> bool:
    instance = isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)
    return isinstance(module, _NormBase) and module.training and not instance


def _owners_of_largest(differences: dict[str, float]) -> tuple[str, ...]:
    """Modules by name; a parameter of the model's own stands for itself."""
    largest = sorted(differences, key=lambda name: -differences[name])[:3]
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in largest))


def _accumulate_in_range(training: Training, batch: Batch, seed: int) -> float:
    """Accumulate, again with a smaller scale for as long as float16 overflows, as training does."""
    while True:
        torch.manual_seed(seed)
        training.zero_grad()
        loss = float(training.accumulate(batch))
        scaler = training.scaler
        if scaler is None or scaler.get_scale() <= 1 or _are_finite(training.model):
            return loss
        scaler.update(scaler.get_scale() / 16)


def _are_finite(model: torch.nn.Module) -> bool:
    return all(
        bool(_on_host(parameter.grad).isfinite().all())
        for parameter in model.parameters()
        if parameter.grad is not None
    )


@contextmanager
def _calm(model: torch.nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    recurrent = {m: m.dropout for m in modes if isinstance(m, torch.nn.RNNBase)}
    for module in modes:
        # cuDNN runs the backward of a recurrent layer in training mode only
        module.training = _normalizes_over_batch(module) or module in recurrent
    for module in recurrent:
        module.dropout = 0.0
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, dropout in recurrent.items():
            module.dropout = dropout


@contextmanager
def _types_of_outputs() -> Iterator[set[torch.dtype]]:
    """The types that modules return: under the user's own autocast they are not the parameters'."""
    types: set[torch.dtype] = set()

    def note(module: Any, inputs: Any, output: Any) -> None:
        types.update(tensor.dtype for tensor in tensors_of(output))

    handle = register_module_forward_hook(note)
    try:
        yield types
    finally:
        handle.remove()


def _tolerance(dtype: torch.dtype, device_type: str) -> float:
    """Roundings add up: a few thousand units in the last place, but a few where those are coarse.

    On a GPU float32 counts as TF32, in which cuDNN convolves unless told otherwise.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps = torch.finfo(dtype).eps
    if device_type == "cuda" and dtype in (torch.float32, torch.complex64):
        eps = torch.finfo(torch.float16).eps
    return min(eps * 8192, max(eps * 4, 1e-3))


def _on_host(gradient: torch.Tensor) -> torch.Tensor:
    """Dense and real, in host memory."""
    dense = gradient.detach().to("cpu").to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _distance(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """The norm of the difference; None is all zeros."""
    values = [value.double() for value in (first, second) if value is not None]
    difference = values[0] if len(values) == 1 else values[0] - values[1]
    return float(torch.linalg.vector_norm(difference))


def _relative(difference: float, reference: float) -> float:
    return difference / reference if reference else (0.0 if difference == 0 else math.inf)


# Two plans of one workload, run on the same samples on its device, one after the other.

Pass: TypeAlias = tuple[ResolvedPlan, int]
"""A plan and a seed."""


def compare_plans(
    bench: TrainingBuilder, first: ResolvedPlan, second: ResolvedPlan, samples: int
) -> Comparison:
    """Loss and gradients of two plans on the same samples.

    Raises:
        InvalidRequest: the workload has a train_step, whose gradients cannot be looked at.
        Exception: whatever the model or the device raises.
    """
    if bench.fresh_workload().train_step is not None:
        raise InvalidRequest("train_step hides its gradients: plans cannot be compared")
    return compare_passes(bench, [(plan, bench.seed) for plan in (first, second)], samples)


def compare_passes(bench: TrainingBuilder, passes: Sequence[Pass], samples: int) -> Comparison:
    """Loss and gradients of two passes over the same samples; raises as `compare_plans` does."""
    batch = bench.fresh_workload().batch(samples)  # once: a function may make another each time
    try:
        return compare(*(_pass(bench, *each, batch, calm=True) for each in passes))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # some models have a loss in training mode only
        release_exception(error)
    return compare(*(_pass(bench, *each, batch, calm=False) for each in passes))


def _pass(
    bench: TrainingBuilder, resolved: ResolvedPlan, seed: int, batch: Batch, *, calm: bool
) -> Gradients:
    bench.reclaim()
    with bench.training(bench.fresh_workload(), resolved) as training:
        return gradients(training, batch, seed=seed, calm=calm)
