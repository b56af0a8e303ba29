"""Compare loss and gradients of two plans of one workload on the same samples.

Random numbers would hide the difference, so the model runs in eval mode, except for the modules
that normalize over the batch: those keep their mode, because they are what often makes a split
batch differ from a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.modules.module import register_module_forward_hook

from autofit.equivalence.comparison import StepTrace, compare
from autofit.equivalence.steps import seed_everything
from autofit.errors import InvalidArgument, release_exception
from autofit.plan import ResolvedPlan
from autofit.strategy import Comparison
from autofit.torch_private import InstanceNorm, NormBase
from autofit.training.batch import Batch, tensors_of
from autofit.training.builder import TrainingBuilder
from autofit.training.training import Training

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

    Raises:
        InvalidArgument: the workload has a training_step, whose gradients cannot be looked at.
        Exception: whatever the model or the device raises.
    """
    if builder.fresh_workload().training_step is not None:
        raise InvalidArgument("training_step hides its gradients, so plans cannot be compared")
    batch = builder.fresh_workload().batch(samples)  # once: a function may make another each time
    return compare_passes(builder, ((first, builder.seed), (second, builder.seed)), batch)


def compare_passes(
    builder: TrainingBuilder, passes: tuple[Pass, Pass], batch: Batch, around: Around = nullcontext
) -> Comparison:
    """Return how two passes over the same batch differ; raises as `compare_plans` does."""
    first, second = run_passes(builder, passes, batch, around)
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
    with _calm(model) if calm else nullcontext(), _types_of_outputs() as types:
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
    return StepTrace(loss, by_name, _tolerance(eps), eps, normalizing)


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
    """Have modules draw no random numbers, also where the loss calls `model.train()` first."""
    modes = {module: module.training for module in model.modules()}
    recurrent = {m: m.dropout for m in modes if isinstance(m, torch.nn.RNNBase)}
    for module in modes:
        # cuDNN runs the backward of a recurrent layer in training mode only
        module.training = _normalizes_over_batch(module) or module in recurrent
    for module in recurrent:
        module.dropout = 0.0
    shadowed = [(module, name) for module in modes for name in ("train", "eval")]
    before = [vars(module).get(name) for module, name in shadowed]
    for module, name in shadowed:
        vars(module)[name] = partial(_as_it_is, module)
    try:
        yield
    finally:
        for (module, name), own in zip(shadowed, before, strict=True):
            del vars(module)[name]
            if own is not None:
                vars(module)[name] = own
        for module, mode in modes.items():
            module.training = mode
        for module, dropout in recurrent.items():
            module.dropout = dropout


def _as_it_is(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    return module


@contextmanager
def _types_of_outputs() -> Iterator[set[torch.dtype]]:
    """Collect the types that modules return: under the user's autocast not the parameters' own."""
    types: set[torch.dtype] = set()

    def note(module: Any, inputs: Any, output: Any) -> None:
        types.update(tensor.dtype for tensor in tensors_of(output))

    handle = register_module_forward_hook(note)
    try:
        yield types
    finally:
        handle.remove()


def _rounding(dtype: torch.dtype, device_type: str) -> float:
    """Return the relative size of a rounding; 0 for whole numbers.

    On a GPU float32 counts as TF32, in which cuDNN convolves by default.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    if device_type == "cuda" and dtype in (torch.float32, torch.complex64):
        dtype = torch.float16
    return torch.finfo(dtype).eps


def _tolerance(eps: float) -> float:
    """Return the sum of roundings: some thousand units in the last place, or a few coarse ones."""
    return min(eps * 8192, max(eps * 4, 1e-3))


def _on_host(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient dense and real, in host memory; a sharded one whole, on every rank."""
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    dense = gradient.detach().to("cpu").to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
