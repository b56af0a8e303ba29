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
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.errors import release_exception, with_type
from autofit.strategy import Context, TrainingView, undone


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


class ModeBesideCompiledCode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """A mode that is off while code is compiled, and on while that code runs.

    Else torch would run the user's compiled functions as they are written.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return the same for torch 2.8, which has only this method."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")


class Operators(ModeBesideCompiledCode):  # type: ignore[no-untyped-call]  # torch
    """Tells of every operator before it runs, while this is entered; compiled code stays compiled.

    Args:
        on_operator: called with the operator and its arguments that have no name.
    """

    def __init__(self, on_operator: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self._on_operator = on_operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._on_operator(func, args)
        return func(*args, **(kwargs or {}))


def run_step(training: TrainingView, batch: Any) -> None:
    """Run a step without the update: a training_step of the user's own has no other way."""
    with undone(training.wrap_optimizer_step(lambda update: None)):
        training.step(batch)


def look(
    context: Context, setting: str, run: Callable[[TrainingView, Any], Any], samples: int
) -> Any:
    """Return `run(training, batch)`; None, and a note, where it raises and a plain step does not.

    Such as a transform of torch.func that takes no hooks.

    Raises:
        Exception: what a plain step raises.
    """
    try:
        return context.with_training(run, samples)
    except RuntimeError as error:
        release_exception(error)
        context.with_training(run_step, samples)
        context.note(f"{setting} skipped: a step with it raised {with_type(error)}")
        return None


def saved_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes that `run()` saves for the backward, without those of the model's own.

    Raises:
        RuntimeError: what is saved may not be watched, as within a transform of torch.func.
    """
    of_model = {None, *map(storage_of, chain(model.parameters(), model.buffers()))}
    saved: dict[StorageWeakRef | None, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := storage_of(tensor)) not in of_model:
            saved[storage] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that is saved as it is would hold itself for good

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(saved.values())


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a key of a tensor's storage that no later one has, or None if it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's
    except (NotImplementedError, RuntimeError):  # sparse tensors and such
        return None
