"""Record which tensors autograd saves in a step, and during which module's call.

Saved tensors are seen through `torch.autograd.graph.saved_tensors_hooks`, module calls through
forward hooks. Tensors that a model saves under hooks of its own (its own checkpointing) are not
seen; the modules around such places are noted, so that they are left alone. Hooks that other
strategies put around the forward are not the model's: the recorder's replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autofit.strategy import TrainingView

from .tensor_tree import take_tensors
from .timeline import Call, Storage, Timeline


class NeedsSavedTensors(Exception):
    """The forward pass itself runs a backward pass, so what it saves cannot be dropped."""


class Recorder:
    """Record the forward passes of a training that run inside `watching`.

    Args:
        training: its model's modules are watched, each by its first dotted name.
        batch: its tensors are not counted, like parameters and buffers.
        keep: keep what is saved, so that a backward pass can follow; without it a forward pass
            needs no more memory than its largest operator.

    Attributes:
        checkpointing: names of the modules whose own code checkpoints something.
        around_checkpoints: names of these and of all modules that run them.
        overwritten: names of the modules of which an input was changed in place, by themselves or
            by what ran after them: it is lost to a recomputation.
    """

    def __init__(self, training: TrainingView, batch: Any, *, keep: bool = True) -> None:
        self.checkpointing: set[str] = set()
        self.around_checkpoints: set[str] = set()
        self.overwritten: set[str] = set()
        self._training = training
        self._keep = keep
        self._from_checkpoints: set[int | None] = set()
        self._position = 0
        self._stack: list[_Open] = []
        self._calls: list[Call] = []
        self._given: list[tuple[str, torch.Tensor, int]] = []
        model, foreign = training.model, take_tensors(batch)[0]
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
        with saving_by(self._training, self._pack, self._unpack):
            try:
                for module in self._names:
                    handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                    handles.append(module.register_forward_hook(self._leave, always_call=True))
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def timeline(self) -> Timeline:
        """Return the recorded savings and calls."""
        order = sorted(range(len(self._entries)), key=lambda i: self._entries[i].first)
        place = {old: new for new, old in enumerate(order)}
        storages = [self._entries[old].storage() for old in order]
        calls = [
            Call(call.unit, call.start, call.end, tuple(place[i] for i in call.inputs))
            for call in sorted(self._calls, key=lambda call: (call.start, -call.end))
        ]
        return Timeline(storages, calls)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors, _ = take_tensors((args, kwargs))
        observed = self._is_observed()
        if not observed or self._is_new_from_checkpoint(tensors):
            self._note_checkpoint()
        inputs = [self._entry_of(tensor) for tensor in tensors] if observed else []
        known = sorted({index for index in inputs if index is not None})
        name = self._names[module]
        if observed and torch.is_grad_enabled():
            counters = [c for t in tensors if (c := version_counter(t)) is not None]
            self._given += ((name, counter, counter._version) for counter in counters)
        self._stack.append(_Open(name, self._position, known, observed))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack:
            return
        if self._is_new_from_checkpoint(take_tensors(output)[0]):
            self._note_checkpoint()
        call = self._stack.pop()
        nested = any(outer.unit == call.unit for outer in self._stack)
        if call.observed and not nested:
            self._calls.append(Call(call.unit, call.start, self._position, tuple(call.inputs)))
        if not self._stack:
            self._compare_versions()

    def _is_new_from_checkpoint(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether reentrant checkpointing made one of them, first seen now."""
        made = {self._entry_of(tensor) for tensor in tensors if _comes_from_checkpoint(tensor)}
        new = made - self._from_checkpoints
        self._from_checkpoints |= new
        return bool(new)

    def _note_checkpoint(self) -> None:
        observed = [call.unit for call in self._stack if call.observed]
        self.checkpointing.update(observed[-1:])
        self.around_checkpoints.update(observed)

    def _compare_versions(self) -> None:
        """Note whose inputs are not what they were."""
        changed = (name for name, counter, version in self._given if counter._version != version)
        self.overwritten.update(changed)

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
        """Return whether what is saved here comes to this recorder, in a forward pass.

        It does not where the model has put saved-tensor hooks of its own on top: then a saving
        made on purpose does not arrive. Nor in the backward pass, where only a recomputation
        calls modules; it must find as much saved as in the forward pass, so the saving is made
        there too. Without gradients nothing is saved.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        if not torch.is_grad_enabled():
            return not in_backward
        self._sign_was_seen = False
        self._sign.square()
        return self._sign_was_seen and not in_backward

    def _entry_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of this tensor's storage; None for one that is not counted."""
        (key,) = self._reference(tensor) or (None,)
        if key is None or key in self._foreign:
            return None
        if key not in self._keys:
            self._keys[key] = len(self._entries)
            nbytes = tensor.untyped_storage().nbytes()
            self._entries.append(_Entry(nbytes, self._position, self._position))
        return self._keys[key]

    def _reference(self, tensor: torch.Tensor) -> set[int]:
        """Return the identity of a tensor's storage, which stays its own; {} where it has none."""
        try:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch does not annotate it
        except (NotImplementedError, RuntimeError):  # sparse tensors and such have no storage
            return set()
        self._references.append(reference)
        return {reference.cdata}


@contextmanager
def saving_by(
    training: TrainingView, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> Iterator[None]:
    """Save tensors in the training's forward passes by these functions, and by no others."""
    undo = training.wrap_forward(
        lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack), also_recomputation=False
    )
    try:
        yield
    finally:
        undo()


@dataclass
class _Open:
    """A call under way."""

    unit: str
    start: int
    inputs: list[int]
    observed: bool = True


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


def version_counter(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return an empty tensor whose `_version` is this tensor's; None where none is counted."""
    try:
        counter = tensor.detach()
        counter.data = tensor.new_empty(0)  # which leaves it the counter, not the memory
        return counter if counter._version >= 0 else None
    except RuntimeError:  # made under inference_mode, or sparse
        return None


def _comes_from_checkpoint(tensor: torch.Tensor) -> bool:
    """Return whether reentrant checkpointing (of any library) made this tensor."""
    return "CheckpointFunction" in type(tensor.grad_fn).__name__
