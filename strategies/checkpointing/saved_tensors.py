"""Record which tensors autograd saves in a step, and during which module's call.

Saved tensors are seen through `torch.autograd.graph.saved_tensors_hooks`, module calls through
forward hooks. Tensors that a model saves under hooks of its own (its own checkpointing) are not
seen; the modules around such places are noted, so that they are left alone. Hooks that other
strategies put around the forward are not the model's: the recorder's replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autofit.strategy import TrainingView, calls_watched, undone

from ..calls import storage_of
from .products import ProductsWatch
from .tensor_tree import tensors_in
from .timeline import Call, Storage, Timeline


class NeedsSavedTensors(Exception):
    """The forward pass itself runs a backward pass, so what it saves cannot be dropped."""


@dataclass(frozen=True)
class _OpenCall:
    """A call under way.

    Attributes:
        call: as it begins.
        observed: whether what is saved in it can be seen.
        earlier_products: number of products before it.
    """

    call: Call
    observed: bool
    earlier_products: int


@dataclass(frozen=True)
class Recording:
    """What a recorder saw.

    Attributes:
        timeline: of the calls of all modules.
        checkpointing: names of the modules whose own code checkpoints something.
        around_checkpoints: names of these and of all modules that run them.
        overwritten: names of the modules of which an input was changed in place, by themselves or
            by what ran after them: it is lost to a recomputation.
    """

    timeline: Timeline
    checkpointing: frozenset[str] = frozenset()
    around_checkpoints: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()


class Recorder:
    """Record the forward passes of a training that run inside `watching`.

    Args:
        training: its model's modules are watched, each by its first dotted name.
        batch: its tensors are not counted, like parameters and buffers.
        keep: keep what is saved, so that a backward pass can follow; without it a forward pass
            needs no more memory than its largest operator.
    """

    def __init__(self, training: TrainingView, batch: Any, *, keep: bool = True) -> None:
        self._training = training
        self._keep = keep
        model = training.model
        self._names = {module: name for name, module in model.named_modules()}
        not_counted = (*model.parameters(), *model.buffers(), *tensors_in(batch))
        self._not_counted = {*map(storage_of, not_counted)}
        # Of each storage: its index, and its bytes and the position when it was first seen
        self._indices: dict[StorageWeakRef, int] = {}
        self._storages: list[tuple[int, int]] = []
        self._savings: list[int] = []  # position -> the index of the storage that was saved
        self._products: list[int] = []
        self._open: list[_OpenCall] = []
        self._calls: list[Call] = []
        self._inputs: list[tuple[str, torch.Tensor, int]] = []
        self._checkpointing: set[str] = set()
        self._around_checkpoints: set[str] = set()
        self._overwritten: set[str] = set()
        self._from_checkpoints: set[int | None] = set()
        self._sign = torch.ones((), requires_grad=True)
        self._sign_was_seen = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what runs in the body, and leave no hook behind."""
        with (
            saving_by(self._training, self._pack, self._unpack),
            ProductsWatch(self._note_product),
            calls_watched(self._training.model, self._names, self._enter, self._leave),
        ):
            yield

    def recording(self) -> Recording:
        """Return what was recorded."""
        return Recording(
            self._timeline(),
            frozenset(self._checkpointing),
            frozenset(self._around_checkpoints),
            frozenset(self._overwritten),
        )

    def _timeline(self) -> Timeline:
        first, last = dict[int, int](), dict[int, int]()
        for position, index in enumerate(self._savings):
            first.setdefault(index, position)
            last[index] = position
        storages = [
            Storage(nbytes, first.get(index, seen), last.get(index, seen), index in first)
            for index, (nbytes, seen) in enumerate(self._storages)
        ]
        order = sorted(range(len(storages)), key=lambda index: storages[index].first)
        place = {old: new for new, old in enumerate(order)}
        calls = [
            replace(
                call,
                inputs=tuple(place[index] for index in call.inputs),
                products=tuple(place[index] for index in call.products),
            )
            for call in sorted(self._calls, key=lambda call: (call.start, -call.end))
        ]
        return Timeline([storages[old] for old in order], calls)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors, name = tensors_in((args, kwargs)), self._names[module]
        observed = self._is_observed()
        if not observed or self._is_new_from_checkpoint(tensors):
            self._note_checkpoint()
        inputs = self._indices_of(tensors) if observed else set()
        if observed and torch.is_grad_enabled():
            counters = [c for t in tensors if (c := _version_counter(t)) is not None]
            self._inputs += ((name, counter, counter._version) for counter in counters)
        call = Call(name, len(self._savings), len(self._savings), tuple(sorted(inputs)))
        self._open.append(_OpenCall(call, observed, len(self._products)))

    def _leave(self, module: nn.Module, output: Any) -> None:
        if not self._open:
            return
        if self._is_new_from_checkpoint(tensors_in(output)):
            self._note_checkpoint()
        ended = self._open.pop()
        nested = any(outer.call.unit == ended.call.unit for outer in self._open)
        if ended.observed and not nested:
            products = tuple(sorted({*self._products[ended.earlier_products :]}))
            self._calls.append(replace(ended.call, end=len(self._savings), products=products))
        if not self._open:  # all inputs that are not what they were
            changed = (name for name, counter, was in self._inputs if counter._version != was)
            self._overwritten.update(changed)

    def _note_product(self, op: Any, run: Callable[[], Any]) -> Any:
        """Run a matrix product or attention, and note what it made."""
        made = run()
        if self._open and torch.is_grad_enabled():
            self._products += self._indices_of(tensors_in(made))
        return made

    def _is_new_from_checkpoint(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether reentrant checkpointing made one of them, first seen now."""
        by_checkpoints = (t for t in tensors if "CheckpointFunction" in type(t.grad_fn).__name__)
        made = set(map(self._index_of, by_checkpoints))
        new = made - self._from_checkpoints
        self._from_checkpoints |= new
        return bool(new)

    def _note_checkpoint(self) -> None:
        observed = [each.call.unit for each in self._open if each.observed]
        self._checkpointing.update(observed[-1:])
        self._around_checkpoints.update(observed)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor is self._sign:
            self._sign_was_seen = True
            return tensor
        self._savings += self._indices_of([tensor])
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

    def _indices_of(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        return {index for each in tensors if (index := self._index_of(each)) is not None}

    def _index_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of this tensor's storage; None for one that is not counted."""
        storage = storage_of(tensor)  # while it is held here, its address is given to no other
        if storage is None or storage in self._not_counted:
            return None
        if storage not in self._indices:
            self._indices[storage] = len(self._storages)
            self._storages.append((tensor.untyped_storage().nbytes(), len(self._savings)))
        return self._indices[storage]


@contextmanager
def saving_by(
    training: TrainingView, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> Iterator[None]:
    """Save tensors in the training's forward passes by these functions, and by no others."""
    hooks = partial(torch.autograd.graph.saved_tensors_hooks, pack, unpack)
    with undone(training.wrap_forward(hooks, also_recomputation=False)):
        yield


def _version_counter(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return an empty tensor whose `_version` is this tensor's; None where none is counted."""
    try:
        counter = tensor.detach()
        counter.data = tensor.new_empty(0)  # which leaves it the counter, not the memory
        return counter if counter._version >= 0 else None
    except RuntimeError:  # made under inference_mode, or sparse
        return None
