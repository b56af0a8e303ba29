"""Record which tensors autograd saves in a step, and during which module's call.

Saved tensors are seen through `torch.autograd.graph.saved_tensors_hooks`, module calls through
forward hooks. Tensors that a model saves under hooks of its own (its own checkpointing) are not
seen; the modules around such places are noted, so that they are left alone. Hooks that other
strategies put around the forward are not the model's: the recorder's replace them.

A timeline is a list of storages in the order they were first saved, and of calls of units over
stretches of that list. From it follows what any set of checkpointed units would hold at every
point of the backward pass: the model of a chain (activations pile up in the forward, and are let
go from the end), with units whose activations come back one unit at a time. It orders placements
well and says little about absolute bytes: what a plan needs is measured when it is probed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autofit.errors import is_users_class
from autofit.strategy import TrainingView, calls_watched, undone

from ..calls import storage_of
from .products import around_products


@dataclass(frozen=True)
class Storage:
    """Memory kept for the backward pass.

    Attributes:
        nbytes: its size.
        first, last: when it was saved first and last, as positions among all savings; equal
            positions with `saved` False mark memory that only a checkpointed unit would keep.
        saved: whether training without checkpointing keeps it.
    """

    nbytes: int
    first: int
    last: int
    saved: bool = True


@dataclass(frozen=True)
class Call:
    """One run of a unit.

    Attributes:
        unit: its name.
        start, end: the savings made during the call, as a half-open range of positions.
        inputs: indices of the storages that are kept where it is checkpointed: what it was given.
        products: those that its matrix products and attention made.
    """

    unit: str
    start: int
    end: int
    inputs: tuple[int, ...]
    products: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """The savings of one forward pass and the calls of units in it.

    Attributes:
        storages: sorted by `first`.
        calls: of every unit, in the order they began, outer ones first.
    """

    storages: Sequence[Storage]
    calls: Sequence[Call]

    def of(self, units: Collection[str]) -> Timeline:
        """Return the same savings with the calls of these units alone."""
        return replace(self, calls=[call for call in self.calls if call.unit in units])

    @cached_property
    def calls_of(self) -> Mapping[str, Sequence[Call]]:
        """Unit -> its calls, units in the order of their first calls."""
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.unit, []).append(call)
        return found

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that training without checkpointing keeps for the backward pass."""
        return sum(storage.nbytes for storage in self.storages if storage.saved)

    @cached_property
    def end(self) -> int:
        """One past the last position."""
        return 1 + max((storage.last for storage in self.storages), default=-1)

    def released(self, call: Call) -> torch.Tensor:
        """Return indices of the storages that are kept for this call alone, its inputs left out."""
        stretch = self._stretch(call.start, call.end)
        inside = [
            index
            for index in range(stretch.start, stretch.stop)
            if self.storages[index].last < call.end
            and self.storages[index].saved
            and index not in call.inputs
        ]
        return torch.tensor(inside, dtype=torch.int64)

    def gain(self, unit: str) -> int:
        """Return the bytes that training keeps unless it checkpoints this one unit."""
        calls = self.calls_of[unit]
        given = (self.storages[index] for call in calls for index in call.inputs)
        newly_kept = sum(storage.nbytes for storage in given if not storage.saved)
        return sum(self._released_bytes[call] for call in calls) - newly_kept

    def held_until(self, position: int) -> int:
        """Return the bytes that training without checkpointing has saved before this position."""
        index = self._index_of(position)
        return int(self._plain_held[index - 1]) if index else 0

    def bytes_of(self, indices: Collection[int], calls: Collection[Call]) -> int:
        """Return the bytes of those storages that training first saves during these calls."""
        firsts = [storage for index in indices if (storage := self.storages[index]).saved]
        inside = [s for s in firsts if any(call.start <= s.first < call.end for call in calls)]
        return sum(storage.nbytes for storage in inside)

    def most_within(self, start: int, end: int) -> int:
        """Return the most bytes without checkpointing while its backward is at these positions."""
        stretch = self._stretch(start, end)
        held = self._plain_held[stretch] + self._in_flight[stretch]
        return int(held.max()) if len(held) else 0

    def are_apart(self, units: Collection[str]) -> bool:
        """Return whether no call of these units lies within another one of them."""
        calls = [call for call in self.calls if call.unit in units and call.start < call.end]
        return all(one.end <= other.start for one, other in pairwise(calls))

    def peak(self, units: Collection[str]) -> int:
        """Return the most bytes of activations and gradients, with these units checkpointed."""
        if not self.storages:
            return 0
        held, returned = self._saved.clone(), torch.zeros_like(self._bytes)
        calls = [call for unit in units for call in self.calls_of.get(unit, ())]
        for call in calls:
            held[self._released[call]] = 0
        for call in calls:
            held[list(call.inputs)] = 1
            stretch, back = self._returned[call]
            returned[stretch] += back
        return int((torch.cumsum(held * self._bytes, 0) + returned + self._in_flight).max())

    def _stretch(self, start: int, end: int) -> slice:
        return slice(self._index_of(start), self._index_of(end))

    def _index_of(self, position: int) -> int:
        return int(torch.searchsorted(self._firsts, position))

    @cached_property
    def _firsts(self) -> torch.Tensor:
        return torch.tensor([storage.first for storage in self.storages], dtype=torch.int64)

    @cached_property
    def _bytes(self) -> torch.Tensor:
        return torch.tensor([storage.nbytes for storage in self.storages], dtype=torch.int64)

    @cached_property
    def _saved(self) -> torch.Tensor:
        return torch.tensor([storage.saved for storage in self.storages], dtype=torch.int64)

    @cached_property
    def _plain_held(self) -> torch.Tensor:
        return torch.cumsum(self._saved * self._bytes, 0)

    @cached_property
    def _in_flight(self) -> torch.Tensor:
        """Bytes of the gradients of what an operator was given and of what it returned.

        What it returned is about as large as what the next operator keeps.
        """
        return self._bytes + torch.cat([self._bytes[1:], self._bytes[-1:]])

    @cached_property
    def _released(self) -> Mapping[Call, torch.Tensor]:
        return {call: self.released(call) for call in self.calls}

    @cached_property
    def _returned(self) -> Mapping[Call, tuple[slice, torch.Tensor]]:
        """Bytes that a call's recomputation has restored, up to each position of its stretch."""
        return {call: self._returned_by(call) for call in self.calls}

    def _returned_by(self, call: Call) -> tuple[slice, torch.Tensor]:
        stretch, released = self._stretch(call.start, call.end), self._released[call]
        back = torch.zeros(stretch.stop - stretch.start, dtype=torch.int64)
        back[released - stretch.start] = self._bytes[released]
        return stretch, torch.cumsum(back, 0)

    @cached_property
    def _released_bytes(self) -> Mapping[Call, int]:
        return {call: int(self._bytes[index].sum()) for call, index in self._released.items()}


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
        self._products: list[int] = []
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
        with (
            saving_by(self._training, self._pack, self._unpack),
            around_products(lambda op, run: self._note_product(run())),
            calls_watched(self._training.model, self._names, self._enter, self._leave),
        ):
            yield

    def timeline(self) -> Timeline:
        """Return the recorded savings and calls."""
        order = sorted(range(len(self._entries)), key=lambda i: self._entries[i].first)
        place = {old: new for new, old in enumerate(order)}
        storages = [self._entries[old].storage() for old in order]
        calls = [
            replace(
                call,
                inputs=tuple(place[i] for i in call.inputs),
                products=tuple(place[i] for i in call.products),
            )
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
        self._stack.append(_Open(name, self._position, known, observed, len(self._products)))

    def _leave(self, module: nn.Module, output: Any) -> None:
        if not self._stack:
            return
        if self._is_new_from_checkpoint(take_tensors(output)[0]):
            self._note_checkpoint()
        call = self._stack.pop()
        nested = any(outer.unit == call.unit for outer in self._stack)
        if call.observed and not nested:
            products = sorted(set(self._products[call.products :]))
            inputs = tuple(call.inputs)
            self._calls.append(Call(call.unit, call.start, self._position, inputs, tuple(products)))
        if not self._stack:  # all inputs that are not what they were
            self.overwritten.update(n for n, counter, was in self._given if counter._version != was)

    def _note_product(self, made: Any) -> Any:
        """Note what a matrix product or attention made, and return it."""
        if self._stack and torch.is_grad_enabled():
            indices = map(self._entry_of, take_tensors(made)[0])
            self._products += [index for index in indices if index is not None]
        return made

    def _is_new_from_checkpoint(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether reentrant checkpointing made one of them, first seen now."""
        by_checkpoints = (t for t in tensors if "CheckpointFunction" in type(t.grad_fn).__name__)
        made = {self._entry_of(tensor) for tensor in by_checkpoints}
        new = made - self._from_checkpoints
        self._from_checkpoints |= new
        return bool(new)

    def _note_checkpoint(self) -> None:
        observed = [call.unit for call in self._stack if call.observed]
        self.checkpointing.update(observed[-1:])
        self.around_checkpoints.update(observed)

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
        if (reference := storage_of(tensor)) is None:
            return set()
        self._references.append(reference)
        return {reference.cdata}


@contextmanager
def saving_by(
    training: TrainingView, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]
) -> Iterator[None]:
    """Save tensors in the training's forward passes by these functions, and by no others."""
    hooks = partial(torch.autograd.graph.saved_tensors_hooks, pack, unpack)
    with undone(training.wrap_forward(hooks, also_recomputation=False)):
        yield


@dataclass
class _Open:
    """A call under way."""

    unit: str
    start: int
    inputs: list[int]
    observed: bool = True
    products: int = 0


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


# Tensors out of the arguments of a call: `torch.utils.checkpoint` looks after positional tensors
# alone, notices when they are changed in place, and keeps the random state of their devices. So
# whatever a module is called with (keyword arguments, tuples, lists, dicts, dataclasses, objects of
# the user's own such as key-value caches), its tensors are handed over positionally.

_Leaf = Callable[[Any], Any]

# By id: an object that was copied, which keeps its id while it is held here, and its copy.
_Known = dict[int, tuple[Any, Any]]


# Where the first items of a container are this many without a tensor, the others are data (a
# vocabulary, an index): copying them, at each call of each unit, would take longer than to train.
MANY = 64


@dataclass(frozen=True)
class _Slot:
    index: int


def take_tensors(value: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors in a nest of containers and objects, and a copy with a mark for each."""
    tensors: list[torch.Tensor] = []

    def out(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return tensors, _rebuilt(value, out, {})


def put_tensors(nest: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return what `take_tensors` took apart, with these tensors and containers of its own."""

    def back(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, _Slot) else leaf

    return _rebuilt(nest, back, {})


def is_helper(value: Any) -> bool:
    """Whether this is an object of the user's own, with attributes that a forward may change."""
    has_attributes = hasattr(value, "__dict__") and not callable(value)
    return has_attributes and is_users_class(type(value))


def _rebuilt(value: Any, leaf: _Leaf, known: _Known) -> Any:
    """Return a copy; a part that occurs twice, or within itself, is copied once."""
    if isinstance(value, torch.Tensor | _Slot):
        return leaf(value)
    if value is None or isinstance(value, int | float | str):  # most of what there is
        return value
    if id(value) not in known:
        try:
            rebuilt = _copied(value, leaf, known)
        except Exception:  # whatever a class does to refuse, its object is shared
            rebuilt = value
        known[id(value)] = value, rebuilt
    return known[id(value)][1]


def _copied(value: Any, leaf: _Leaf, known: _Known) -> Any:
    if hasattr(type(value), "__del__"):  # which would run for the copy, too
        return value
    if isinstance(value, tuple | list | dict) and _is_data(value):
        return value if isinstance(value, tuple) else copy.copy(value)
    if isinstance(value, tuple):
        each = [_rebuilt(item, leaf, known) for item in value]
        return value._make(each) if hasattr(value, "_make") else type(value)(each)
    if type(value) is list:
        items: list[Any] = []
        known[id(value)] = value, items
        items += [_rebuilt(item, leaf, known) for item in value]
        return items
    if isinstance(value, dict):
        named = copy.copy(value)
        known[id(value)] = value, named
        for key, item in value.items():
            named[key] = _rebuilt(item, leaf, known)
        return named
    if isinstance(value, type) or not (dataclasses.is_dataclass(value) or is_helper(value)):
        return value
    return _copied_object(value, leaf, known)


def _is_data(value: Any) -> bool:
    """Return whether this holds many items, and no tensor among the first of them."""
    if len(value) <= MANY:
        return False
    found: list[Any] = []
    items = value.values() if isinstance(value, dict) else value
    for item in islice(items, MANY):
        _rebuilt(item, found.append, {})
        if found:
            break
    return not found


def _copied_object(value: Any, leaf: _Leaf, known: _Known) -> Any:
    """Copy attributes where they are kept, past properties and frozen classes."""
    rebuilt = copy.copy(value)
    kept = getattr(value, "__dict__", {})
    if rebuilt is value or getattr(rebuilt, "__dict__", None) is kept:  # an enumeration's member
        return value
    known[id(value)] = value, rebuilt
    for name, item in list(kept.items()):
        vars(rebuilt)[name] = _rebuilt(item, leaf, known)
    for name in _fields(value):
        if name not in kept:  # but in a slot
            object.__setattr__(rebuilt, name, _rebuilt(getattr(value, name), leaf, known))
    return rebuilt


def _fields(value: Any) -> list[str]:
    """Return the names of the fields of a dataclass that are set."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [field.name for field in fields if hasattr(value, field.name)]
