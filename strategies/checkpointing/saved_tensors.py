"""Watches one optimizer step: what autograd saved, and during which module's call.

It sees what any tensor-saving operator keeps, through `torch.autograd.graph.saved_tensors_hooks`,
and module calls through forward hooks. What a model saves under hooks of its own (its own
checkpointing) passes it by; the modules around such places are noted, so that they are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .tensor_tree import take_tensors
from .timeline import Call, Storage, Timeline


@dataclass
class _Open:
    """A call that has begun."""

    unit: str
    start: int
    inputs: list[int]
    observed: bool = True


class Recorder:
    """Records the forward passes that run inside `watching`.

    Args:
        model: whose modules are watched, each by its first dotted name.
        foreign: tensors that are there anyway, such as the batch; parameters and buffers are.
        keep: hold on to what is saved, so that a backward pass can follow; without it a forward
            pass needs no more memory than its largest operator.

    Attributes:
        checkpointed_itself: names of the modules that checkpoint something on their own.
    """

    def __init__(
        self, model: nn.Module, foreign: Iterable[torch.Tensor], *, keep: bool = True
    ) -> None:
        self.checkpointed_itself: set[str] = set()
        self._keep = keep
        self._position = 0
        self._stack: list[_Open] = []
        self._calls: list[Call] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._keys: dict[int, int] = {}
        self._entries: list[_Entry] = []
        self._references: list[StorageWeakRef] = []  # an address is not given out again meanwhile
        self._foreign: set[int] = set()
        for tensor in (*model.parameters(), *model.buffers(), *foreign):
            self._foreign |= self._reference(tensor)
        self._sign = torch.ones((), requires_grad=True)
        self._sign_was_seen = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what runs in the body, and leave no hook behind."""
        handles: list[Any] = []
        try:
            for module in self._names:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def timeline(self) -> Timeline:
        """What was recorded."""
        order = sorted(range(len(self._entries)), key=lambda i: self._entries[i].first)
        place = {old: new for new, old in enumerate(order)}
        storages = [self._entries[old].storage() for old in order]
        calls = [
            Call(call.unit, call.start, call.end, tuple(place[i] for i in call.inputs))
            for call in sorted(self._calls, key=lambda call: (call.start, -call.end))
        ]
        return Timeline(storages, calls)

    # -- hooks ---------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors, _ = take_tensors((args, kwargs))
        observed = self._is_observed()
        if not observed or any(map(_comes_from_checkpoint, tensors)):
            self.checkpointed_itself |= {call.unit for call in self._stack if call.observed}
        inputs = [self._entry_of(tensor) for tensor in tensors] if observed else []
        known = sorted({index for index in inputs if index is not None})
        self._stack.append(_Open(self._names[module], self._position, known, observed))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack:
            return
        call = self._stack.pop()
        if any(map(_comes_from_checkpoint, take_tensors(output)[0])):
            self.checkpointed_itself.add(call.unit)
        nested = any(outer.unit == call.unit for outer in self._stack)
        if call.observed and not nested:
            self._calls.append(Call(call.unit, call.start, self._position, tuple(call.inputs)))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor is self._sign:
            self._sign_was_seen = True
            return tensor
        index = self._entry_of(tensor)
        if index is not None:
            self._entries[index].save(self._position)
            self._position += 1
        return tensor.detach() if self._keep else None

    def _unpack(self, packed: torch.Tensor | None) -> torch.Tensor:
        if packed is None:
            raise NeedsSavedTensors
        return packed

    def _is_observed(self) -> bool:
        """Whether what is saved here comes to this recorder, and belongs to a forward pass.

        It does not where the model has put saved-tensor hooks of its own on top: then a saving
        made on purpose does not arrive. Nor in the backward pass, where only a recomputation
        calls modules; it must find as much saved as in the forward pass, so the saving is made
        there too. Where nothing is differentiated, nothing is saved.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        if not torch.is_grad_enabled():
            return not in_backward
        self._sign_was_seen = False
        self._sign.square()
        return self._sign_was_seen and not in_backward

    # -- storages ------------------------------------------------------------------------------

    def _entry_of(self, tensor: torch.Tensor) -> int | None:
        """The index of this tensor's storage; None where it is there anyway."""
        (key,) = self._reference(tensor) or (None,)
        if key is None or key in self._foreign:
            return None
        if key not in self._keys:
            self._keys[key] = len(self._entries)
            nbytes = tensor.untyped_storage().nbytes()
            self._entries.append(_Entry(nbytes, self._position, self._position))
        return self._keys[key]

    def _reference(self, tensor: torch.Tensor) -> set[int]:
        """The identity of a tensor's storage, which stays its own; {} where it has none."""
        try:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch does not annotate it
        except (NotImplementedError, RuntimeError):  # sparse tensors and such have no storage
            return set()
        self._references.append(reference)
        return {reference.cdata}


class NeedsSavedTensors(Exception):
    """The forward pass itself runs a backward pass, so what it saves cannot be let go."""


@dataclass
class _Entry:
    nbytes: int
    first: int
    last: int
    saved: bool = False

    def save(self, position: int) -> None:
        if not self.saved:
            self.first, self.saved = position, True
        self.last = position

    def storage(self) -> Storage:
        return Storage(self.nbytes, self.first, self.last, self.saved)


def _comes_from_checkpoint(tensor: torch.Tensor) -> bool:
    """Whether reentrant checkpointing (torch's or another library's) made this tensor."""
    return "CheckpointFunction" in type(tensor.grad_fn).__name__
