"""Looks at a step: run without its update, what it calls of torch, and what it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from autofit.strategy import TrainingView, undone


class Calls(TorchFunctionMode):
    """Tells of every call of a function of torch, with what it returned, while this is entered.

    But of none within code that is compiled, which would take this in.

    Args:
        on_call: called with the function and its result.
    """

    def __init__(self, on_call: Callable[[Callable[..., Any], Any], object]) -> None:
        super().__init__()
        self._on_call = on_call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run what was called, and tell of it."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            self._on_call(func, result)
        return result


def run_step(training: TrainingView, batch: Any) -> None:
    """Run a step without the update: a training_step of the user's own has no other way."""
    with undone(training.wrap_optimizer_step(lambda update: None)):
        training.step(batch)


def saved_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes that `run()` saves for the backward, without those of the model's own.

    Raises:
        RuntimeError: what is saved may not be watched, as within a transform of torch.func.
    """
    own = {None, *map(storage_of, chain(model.parameters(), model.buffers()))}
    saved: dict[StorageWeakRef | None, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := storage_of(tensor)) not in own:
            saved[storage] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that is saved as it is would hold itself for good

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(saved.values())


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a key of a tensor's storage that no later one has; None: it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's
    except (NotImplementedError, RuntimeError):  # sparse tensors and such
        return None
