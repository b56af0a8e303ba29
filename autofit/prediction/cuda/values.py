"""Values in a dry run: the few that are known, and the refusal of code that needs others.

A dry run computes nothing, yet models look at their batch: is there padding in the attention mask,
how long is the longest sample? Integers and booleans of the sample batch are therefore kept on the
CPU beside their meta tensors, and operators whose arguments are all known or constant also run
there (`KnownValues`). Code that reads any other value, or calls an operator without a shape
function for the meta device, is `Unsupported`.
"""

from __future__ import annotations

import re
import sys
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import lbfgs

from autofit.memory.tracer import tensors_in
from autofit.torch_private import pytree

# Larger tensors are not followed, so that a dry run costs neither time nor memory.
MAX_ELEMENTS = 2**23
# Operators whose result depends on values, and the question that they ask.
NEEDS_VALUES = {
    "_local_scalar_dense": "a tensor is read as a number (by .item(), float(), an if or the like)",
    "nonzero": "how many elements of a tensor are not zero",
    "masked_select": "how many elements a mask selects",
    "equal": "whether two tensors are equal",
    "unique_dim": "how many elements of a tensor differ",
    "_unique2": "how many elements of a tensor differ",
    "unique_consecutive": "how many elements of a tensor differ from those before",
    "bincount": "how large the elements of a tensor are",
    "repeat_interleave": "how often elements are repeated",
}


_META_DEVICE = re.compile(r"\b[mM]eta\b|Tensor\.__format__")  # f"{loss:.3f}"
# Errors that torch never raises because of a device; "metadata" may be a word of the user's.
_USERS_OWN = (LookupError, AttributeError, NameError, ImportError)


class NeedsValues(Exception):
    """The values of a tensor were asked for, and a dry run has none.

    Args:
        question: what was asked of them.
    """

    def __init__(self, question: str) -> None:
        super().__init__(f"{question}, which needs the values of a tensor, and a dry run has none")


@dataclass(frozen=True)
class Obstacle:
    """Something that a dry run cannot do.

    The user's code may catch the exception (`try: ... except Exception`) and go on as it never
    would on a GPU. The first one is therefore noted where it is raised, and a dry run that noted
    one has no result.

    Attributes:
        reason: what cannot be done.
        line: the user's line that asked for it, as "file:number: text"; or the part of the model.
    """

    reason: str
    line: str

    @classmethod
    def raised_here(cls, error: Exception) -> Obstacle:
        """Return the error as it is raised, with the line found among the callers."""
        frames = traceback.extract_stack()
        inside = [at for at, frame in enumerate(frames) if frame.filename.startswith(_OURS)]
        return cls(_first_line(error), users_line(frames[inside[0] :]))

    @classmethod
    def caught(cls, error: Exception) -> Obstacle:
        """Return the error as it is caught, with the line found in the traceback."""
        return cls(_first_line(error), users_line(traceback.extract_tb(error.__traceback__)))


def is_obstacle(error: Exception) -> bool:
    """Return whether the meta device caused an error, and not the user's code."""
    if isinstance(error, (NeedsValues, NotImplementedError)):
        return True
    return not isinstance(error, _USERS_OWN) and bool(_META_DEVICE.search(str(error)))


def asked_by_an_optimizer() -> bool:
    """Return whether an optimizer of torch reads a value now, to scale an update by it.

    The update needs the same memory for any value (`ASGD` copies where mu is 1, which it is for its
    first million steps). LBFGS is left out: it decides by values what to do.
    """
    frame = sys._getframe()
    while frame.f_back is not None and passes_on(frame.f_code.co_filename):
        frame = frame.f_back
    return is_an_optimizer(frame.f_code.co_filename)


def is_an_optimizer(file: str) -> bool:
    """Return whether a file is a torch optimizer that decides nothing by values."""
    return file.startswith(_OPTIMIZERS) and file != lbfgs.__file__


def is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds integers or booleans, which models may look at."""
    return not (tensor.is_floating_point() or tensor.is_complex())


class KnownValues:
    """The values of some meta tensors, by their storages."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}

    def learn(self, tensor: torch.Tensor, values: torch.Tensor | None) -> None:
        """Keep the values of a meta tensor, the first of its storage, unless they are too many."""
        if values is None or values.numel() > MAX_ELEMENTS or not tensor.is_meta:
            return
        real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        key = storage._cdata
        gone = weakref.ref(storage, lambda _: self._values.pop(key, None))
        self._values[key] = gone, real.copy_(values).untyped_storage()

    def meta_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of that shape on meta, with its integers known if they were.

        And the one real number of a tensor on the host, such as a buffer that the model looks at.
        """
        copied = torch.empty_like(tensor.detach(), device="meta")
        if is_number(tensor) or (tensor.dim() == 0 and not tensor.is_meta):
            self.learn(copied, self.of(tensor.detach()))
        return copied

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with values on the CPU; None where a meta tensor's are unknown."""
        if not tensor.is_meta:
            return tensor
        storage = self._values.get(_key(tensor))
        if storage is None:
            return None
        real = torch.empty(0, dtype=tensor.dtype)
        return real.set_(storage[1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return an operator's arguments with values; None where one of them is unknown."""
        name = func._schema.name
        if func.is_view or ("empty" in name and name != _EMPTY_LIKE):
            return None  # shares its argument's storage, and so its values; or has none
        tensors = list(tensors_in((args, kwargs)))
        # Or it makes a constant on the device, or moves a tensor there
        device = kwargs.get("device")
        is_for_meta = device is not None and torch.device(device).type == "meta"
        is_for_meta = is_for_meta and (bool(tensors) or name in _CONSTANTS)
        if not any(tensor.is_meta for tensor in tensors) and not is_for_meta:
            return None  # runs on the host anyway
        if any(self._is_unknown(tensor) for tensor in tensors):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        real: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, self.of, (args, dict(kwargs)))
        if real[1].get("device") is not None:
            real[1]["device"] = torch.device("cpu")
        return real

    def answer(self, func: Any, real: tuple[Any, Any]) -> Any:
        """Return an operator's results as meta tensors whose values are known."""

        def on_device(values: torch.Tensor) -> torch.Tensor:
            tensor = torch.empty_strided(
                values.shape, values.stride(), dtype=values.dtype, device="meta"
            )
            self.learn(tensor, values)
            return tensor

        return pytree.tree_map_only(torch.Tensor, on_device, func(*real[0], **real[1]))

    def follow(
        self, func: Any, real: tuple[Any, Any] | None, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Learn an operator's results, and what it changed, where its arguments were known."""
        if func._schema.is_mutable:
            if real is None:
                self._forget((args, kwargs))
            else:
                func(*real[0], **real[1])
            return
        results = list(tensors_in(result))
        small = all(tensor.numel() <= MAX_ELEMENTS for tensor in results)
        if real is None or not results or not small or not results[0].is_meta:
            return
        with suppress(Exception):  # operators that the CPU lacks leave their results unknown
            for tensor, values in zip(results, tensors_in(func(*real[0], **real[1])), strict=True):
                self.learn(tensor, values.zero_() if func._schema.name == _EMPTY_LIKE else values)

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta:
            return _key(tensor) not in self._values
        # The host's tensors of real numbers may be weights, which are not followed to the device.
        return tensor.dim() > 0 and not is_number(tensor)

    def _forget(self, args: Any) -> None:
        if self._values:
            for tensor in tensors_in(args):
                if tensor.is_meta:
                    self._values.pop(_key(tensor), None)


_CONSTANTS = frozenset({"aten::arange", "aten::full", "aten::zeros", "aten::ones", "aten::eye"})
# Made of known numbers it will be filled with others: a permutation is inverted so.
_EMPTY_LIKE = "aten::empty_like"


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


_TORCH, _OURS = f"{Path(str(torch.__file__)).parent}/", f"{Path(__file__).parents[2]}/"
_OPTIMIZERS = f"{_TORCH}optim/"
_CALLS = "torch/nn/modules/module.py"
_UTILITIES = tuple(
    f"/{name}.py"
    for name in ("_compile", "_contextlib", "_python_dispatch", "contextlib", "eval_frame")
)


def passes_on(file: str) -> bool:
    """Return whether a file's code only passes a request for values on."""
    return file.startswith(_OURS) or file.endswith(_UTILITIES)


def _first_line(error: Exception) -> str:
    if "torch.nonzero()" in str(error):  # torch names a switch of its own, which guesses
        return str(NeedsValues(NEEDS_VALUES["nonzero"]))
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


IN_BACKWARD = "in the backward pass"


def users_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line that is neither torch's nor autofit's; else what torch ran."""
    files = [(frame, frame.filename) for frame in frames]
    others = [frame for frame, file in files if not passes_on(file) and not file.startswith("<")]
    users = [frame for frame in others if not frame.filename.startswith(_TORCH)]
    called = [frame for frame in others if not frame.filename.endswith(_CALLS)]
    for frame in [*reversed(users), *called]:  # else the outermost: the user's module or criterion
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return IN_BACKWARD
