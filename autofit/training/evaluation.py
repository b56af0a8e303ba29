"""An evaluation step beside a live training, which must leave the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from autofit.errors import InvalidArgument
from autofit.measurement import IN_EVALUATION
from autofit.training.batch import Batch
from autofit.units import counted, quoted

if TYPE_CHECKING:
    from autofit.training.training import Training

# (model, batch on the device) -> anything, which is dropped.
EvalStep: TypeAlias = Callable[[torch.nn.Module, Batch], Any]

# Bytes of an element -> the whole numbers that it is read as. A larger one is read as several of 4
# bytes: the sum has 64 bits, which hold the high bits of such a number times its place.
_NUMBERS = {1: torch.int8, 2: torch.int16}
_SUMMED_AT_ONCE = 2**20  # elements: a checksum holds two 8-byte copies of this many


def check_evaluation(eval_step: object, eval_batch: object) -> None:
    """Refuse one without the other.

    Raises:
        InvalidArgument: only one is given, or the step is no function.
    """
    if (eval_step is None) != (eval_batch is None):
        given, missing = ("eval_step", "eval_batch")[:: 1 if eval_batch is None else -1]
        raise InvalidArgument(
            f"{given} was given without {missing}: an evaluation takes both, "
            "eval_step=(model, batch) -> anything and eval_batch= a batch, or its samples"
        )
    if eval_step is not None and not callable(eval_step):
        raise InvalidArgument(f"eval_step must be a function, got {eval_step!r}")


def evaluate(training: Training, eval_step: EvalStep, batch: Batch, samples: int) -> None:
    """Run an evaluation step as between two training steps: without gradients, in eval mode.

    It runs under the contexts of the plan's forward passes, such as autocast.

    Args:
        training: that has stepped; it is left in the mode it was in.
        eval_step: of the user.
        batch: on the device.
        samples: of the batch, for messages.

    Raises:
        InvalidArgument: it left modules in another mode.
        Exception: what the user's code or the device raised.
    """
    model = training.model
    with _in_eval_mode(model), torch.no_grad(), training.context(), _named(samples):
        eval_step(model, batch)


@contextmanager
def unchanged(training: Training) -> Iterator[None]:
    """Refuse what changes the model inside.

    Summing the model's bits takes memory of the device, so an evaluation is measured inside.

    Raises:
        InvalidArgument: values or requires_grad differ at the end.
    """
    model = training.model
    with training.in_host_memory():
        values = _checksums(model)
    requires_grad = {name: each.requires_grad for name, each in model.named_parameters()}
    yield
    now = {name: each.requires_grad for name, each in model.named_parameters()}
    _refuse("the requires_grad", requires_grad, now)
    with training.in_host_memory():
        _refuse("the values", values, _checksums(model))


@contextmanager
def modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Give each module its mode again, training or evaluation, and nothing else."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Have a model in eval mode, and then in the mode of each module again.

    Raises:
        InvalidArgument: the code inside left another mode than one of these two.
    """
    training = {name: module.training for name, module in model.named_modules()}
    with modes_kept(model):
        model.eval()
        yield
        now = {name: module.training for name, module in model.named_modules()}
        if any(now.values()):  # an eval_step that calls model.train() at its end
            _refuse("the mode (model.train(), model.eval())", training, now)


def _refuse(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        raise InvalidArgument(
            f"eval_step changed {what} of {quoted(changed)}: an evaluation must leave "
            "parameters, buffers and modes as they were"
        )


@contextmanager
def _named(samples: int) -> Iterator[None]:
    """Say of an out-of-memory error that it is one of the evaluation."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.args = (f"{IN_EVALUATION}{counted(samples, 'sample')}: {error}",)
        raise


def _checksums(model: torch.nn.Module) -> dict[str, int]:
    """Return a sum over the bits of each tensor that a checkpoint of the model would hold.

    Buffers that it would not hold are caches. On meta there are no values to compare.
    """
    sums = {name: _sum_of_bits(each) for name, each in model.state_dict().items()}
    return {name: found for name, found in sums.items() if found is not None}


def _sum_of_bits(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.is_meta or not value.numel():
        return None
    try:
        return checksum(value.to_local() if hasattr(value, "to_local") else value)  # of a shard
    except (RuntimeError, NotImplementedError, KeyError):  # a format of another library
        return None


def checksum(tensor: torch.Tensor) -> int:
    """Return a sum of a tensor's bits by their places: it changes with values and their order.

    It is read from the device once, as a GPU finishes its work before the host reads.
    """
    # View of a quantized tensor as another type ends the process
    values = tensor.detach().int_repr() if tensor.is_quantized else tensor.detach()
    bits = values.contiguous().reshape(-1).view(_NUMBERS.get(values.element_size(), torch.int32))
    # Odd weights lose no bit: each has an inverse modulo 2**64, at which the sums wrap.
    weights = 2 * torch.arange(min(len(bits), _SUMMED_AT_ONCE), device=bits.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in torch.split(bits, _SUMMED_AT_ONCE):
        total = 31 * total + (piece * weights[: len(piece)]).sum()
    return int(total)
