"""Snapshots: put live objects and the process back as they were, or tell what has changed.

`Snapshot` before, its `restore` after, whatever happened in between: for probes in the user's own
process, dry runs, and steps that are compared. `digest` and `differences` compare two moments;
tests use them, the conformance suite of strategies among them.

Initialize CUDA before a snapshot if it is going to be used: otherwise the random states of its
devices are not part of it. Attributes of objects of the user's own classes never are.

`live_objects` finds what a training may change from a workload, through functions too; `walk`
visits everything with a state below one of them, each once; `record` keeps the state of one object.
Objects of classes that `walk` does not know (a user's own helper behind an attribute) are kept as
they are, not entered.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch

from autofit.errors import is_users_class
from autofit.interrupts import interrupts_deferred
from autofit.snapshot import process

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Name of each thing that must not change -> a text that stands for its state.
Digest: TypeAlias = dict[str, str]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Snapshot:
    """The state of some live objects and of this process, as far as a training may change it.

    Tensor values are copied to the host: a snapshot takes no device memory.

    Args:
        objects: by name, model and optimizer, for example; all that they hold is recorded.
        but: those of the objects in them that are not.
    """

    def __init__(self, objects: Mapping[str, object], *, but: Iterable[object] = ()) -> None:
        known = set(map(id, but))
        nodes = {id(node): node for name, root in objects.items() for _, node in walk(root, name)}
        self._records = [record(node) for key, node in nodes.items() if key not in known]
        self._process = process.take()

    def restore(self) -> None:
        """Put everything back in place; a Ctrl-C that comes meanwhile is handled afterwards.

        Raises:
            ExceptionGroup: parts that could not be put back; all others were.
        """
        failures: list[Exception] = []
        with interrupts_deferred():
            for each in self._records:
                try:
                    each()
                except Exception as error:  # whatever it is, the others must still be put back
                    failures.append(error)
            try:
                process.restore(self._process)
            except ExceptionGroup as group:
                failures.append(group)
        if failures:
            raise ExceptionGroup("some of the state could not be put back", failures)


@contextmanager
def preserved(objects: Mapping[str, object]) -> Iterator[None]:
    """Leave `objects` and the process as they were, however the body ends."""
    snapshot = Snapshot(objects)
    try:
        yield
    finally:
        snapshot.restore()


def digest(objects: Mapping[str, object]) -> Digest:
    """Return the present state of `objects`, by name, and of the process as texts to compare."""
    facts: Digest = {}
    for name, root in objects.items():
        for place, node in walk(root, name):
            facts.update(_facts(place, node))
    for name, value in process.take().items():
        facts.update(_dict_facts(name, value) if is_dict(value) else [(name, _summary(value))])
    return facts


def differences(before: Digest, after: Digest) -> list[str]:
    """Return one line for each thing that has changed."""
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {before.get(name, 'absent')} became {after.get(name, 'absent')}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _facts(place: str, node: object) -> Iterator[tuple[str, str]]:
    if isinstance(node, torch.Tensor):
        yield from _tensor_facts(place, node)
    elif is_dict(node):
        yield from _dict_facts(place, node)
    elif is_collection(node):
        yield place, ", ".join(_summary(each) for each in node)
    elif (access := generator_access(node)) is not None:
        state = access[0]()  # a tensor, or what holds arrays
        is_tensor = isinstance(state, torch.Tensor)
        text = hash_of(state) if is_tensor else _short(repr(pickle.dumps(state)))
        yield f"{place} state", text
    else:
        yield f"{place} class", _summary(type(node))
        yield from _dict_facts(place, vars(node))


def _dict_facts(place: str, node: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    yield f"{place} keys", _summary(tuple(node))
    yield from ((f"{place}[{_summary(key)}]", _summary(value)) for key, value in node.items())


def _tensor_facts(place: str, tensor: torch.Tensor) -> Iterator[tuple[str, str]]:
    yield f"{place} identity", f"{type(tensor).__name__} at {id(tensor):#x}"
    yield f"{place} placement", str(placement(tensor))
    yield f"{place} requires_grad", str(tensor.requires_grad)
    yield f"{place} gradient", _summary(gradient_of(tensor))
    yield f"{place} values", hash_of(tensor)


def hash_of(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's values, equal for equal bits."""
    if not has_values(tensor.data):
        return "no values"
    flat = tensor.data.to("cpu")
    if flat.layout != torch.strided:
        stream = io.BytesIO()
        torch.save(flat, stream)
        return hashlib.blake2b(stream.getvalue(), digest_size=16).hexdigest()
    data = flat.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _summary(value: object) -> str:
    """Return plain values as text, sequences by members, other objects by identity."""
    if type(value) in _PLAIN or isinstance(value, (torch.dtype, torch.device)):
        return _short(repr(value))
    if isinstance(value, (tuple, list)):
        return _short(f"({', '.join(_summary(each) for each in value)})")
    return f"{type(value).__name__} at {id(value):#x}"


def _short(text: str) -> str:
    """Return text that fits a line, with a hash for the rest of a long one."""
    if len(text) <= 120:
        return text
    return f"{text[:80]}… ({hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})"


_ENTERED = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
_PLUMBING = ("._parameters", "._buffers", "._modules")

# The attributes of a tensor that hold the hooks registered on it.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def live_objects(holder: DataclassInstance, *, but: Container[str] = ()) -> dict[str, object]:
    """Return the objects that a training may change, by a name that says where each was found.

    Args:
        holder: a dataclass whose fields are searched, such as a `Workload`.
        but: fields of it to leave out.
    """
    objects: dict[str, object] = {}
    for field in fields(holder):
        if field.name not in but:
            objects |= reachable(getattr(holder, field.name), field.name)
    return objects


def reachable(root: object, name: str) -> dict[str, object]:
    """Return the modules, optimizers, tensors and random generators that `root` is or reaches.

    A function reaches what its closure, its defaults, `functools.partial` or its `self` hold, and
    the modules, optimizers, trained tensors and functions among the globals that it names. Of
    containers only such members are returned: the containers themselves, counters and the like are
    the user's data, and stay as the training leaves them.

    Args:
        root: anything.
        name: how to call it in the keys of the answer.
    """
    found: dict[str, object] = {}
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([(name, root)])
    home = getattr(root, "__module__", None)
    while waiting:
        place, node = waiting.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if is_dict(node) or is_collection(node):
            waiting.extend(_children(place, node))
        elif has_state(node):
            found[place] = node
        else:
            waiting.extend(_parts(place, node, home))
    return found


def _parts(place: str, node: object, home: str | None) -> Iterator[tuple[str, object]]:
    if isinstance(node, partial):
        yield f"{place}.func", node.func
        yield from _numbered(place, (*node.args, *node.keywords.values()))
    elif isinstance(node, MethodType):
        yield f"{place}.__self__", node.__self__
        yield f"{place}.__func__", node.__func__
    elif isinstance(node, FunctionType):
        yield from _parts_of_function(place, node, home)
    elif callable(node) and not isinstance(node, type) and is_users_class(type(node)):
        yield from (
            (f"{place}.{key}", value) for key, value in getattr(node, "__dict__", {}).items()
        )
        yield f"{place}.__call__", type(node).__call__


def _parts_of_function(
    place: str, function: FunctionType, home: str | None
) -> Iterator[tuple[str, object]]:
    if not is_users_class(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():  # an empty one: its variable is not bound yet
            yield f"{place}.{name}", cell.cell_contents
    defaults = function.__defaults__ or (), (function.__kwdefaults__ or {}).values()
    yield from _numbered(place, itertools.chain(*defaults))
    if function.__module__ != home:
        return
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        is_trained = isinstance(value, torch.Tensor) and value.requires_grad
        if is_trained or isinstance(value, (*_ENTERED, FunctionType)) or generator_access(value):
            yield f"{place}.{name}", value


def _names(code: CodeType) -> set[str]:
    """Return every name that the code looks up, functions inside it included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names(each) for each in inner))


def _numbered(place: str, values: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"{place}[{index}]", value) for index, value in enumerate(values))


def walk(root: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield everything with a state below `root`, each once, with a name that says where it is."""
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([(name, root)])
    while waiting:
        place, node = waiting.popleft()
        if id(node) in seen or not has_state(node):
            continue
        seen.add(id(node))
        yield place, node
        waiting.extend(_children(place, node))


def is_dict(node: object) -> TypeGuard[dict[Any, Any]]:
    """Return whether `node` is a mapping of a known class; a user's may do anything on `clear`."""
    return type(node) in (dict, OrderedDict, defaultdict)


def is_collection(node: object) -> TypeGuard[list[Any] | deque[Any] | set[Any] | tuple[Any, ...]]:
    """Return whether `node` is a collection of a known class."""
    return type(node) in (list, deque, set, tuple)


def has_state(node: object) -> bool:
    """Return whether `record` can keep this object's state, so that `walk` visits it."""
    return (
        isinstance(node, (*_ENTERED, torch.Tensor))
        or is_dict(node)
        or is_collection(node)
        or generator_access(node) is not None
    )


def _children(place: str, node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, torch.Tensor):
        yield from _tensor_children(place, node)
    elif isinstance(node, _ENTERED):
        yield from ((f"{place}.{key}", value) for key, value in vars(node).items())
        if isinstance(node, torch.jit.ScriptModule):  # its tensors are in no attribute
            named = itertools.chain(node.named_parameters(), node.named_buffers())
            yield from ((f"{place}.{key}", value) for key, value in named)
    elif is_dict(node):
        yield from _dict_children(place, node)
    elif is_collection(node) and not isinstance(node, set):
        yield from ((f"{place}[{index}]", value) for index, value in enumerate(node))


def _dict_children(place: str, node: dict[Any, Any]) -> Iterator[tuple[str, object]]:
    """Name parameters, buffers and submodules as the user names them."""
    for plumbing in _PLUMBING:
        place = place.removesuffix(plumbing)
    for index, (key, value) in enumerate(node.items()):
        yield f"{place}.{key}" if isinstance(key, str) else f"{place}[{index}]", value


def _tensor_children(place: str, tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
    yield f"{place}.grad", gradient_of(tensor)
    yield f"{place}.__dict__", vars(tensor)
    for hooks in HOOKS:
        yield f"{place}.{hooks}", getattr(tensor, hooks, None)


def record(node: object) -> Callable[[], object]:
    """Record the present state of an object that `walk` yielded; return what puts it back in place.

    Identities stay: tensors get their storage, values, gradient and flags back, containers and
    `__dict__`s their entries in their order.
    """
    if isinstance(node, torch.Tensor):
        return TensorRecord(node).restore
    if isinstance(node, _ENTERED):
        return partial(_restore_object, node, type(node), dict(vars(node)))
    if is_dict(node):
        return partial(_put_back, node, dict(node))
    if is_collection(node):
        return partial(_restore_members, node, tuple(node))
    access = generator_access(node)
    if access is None:
        raise TypeError(f"a {type(node).__name__} has no state that could be recorded")
    read, write = access
    return partial(write, read())


def generator_access(node: object) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return how to read and write a random number generator's state; None for other objects."""
    if isinstance(node, torch.Generator):
        return node.get_state, node.set_state
    if isinstance(node, random.Random):
        return node.getstate, node.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(node, numpy.random.RandomState):
        return node.get_state, node.set_state
    if numpy is not None and isinstance(node, numpy.random.Generator):
        bits = node.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    return None


class TensorRecord:
    """Storage, values, gradient, `requires_grad` and hooks of one tensor.

    The values are kept on the host, so that a snapshot takes no device memory; the storage itself
    is kept too, because views of it that the user holds must stay views.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._class = type(tensor)
        self._alias = tensor.data
        self._storage_bytes = _storage_bytes(self._alias)
        self._cells = _cells(self._alias)
        self._values = self._cells.to("cpu", copy=True) if has_values(self._alias) else None
        self._gradient = gradient_of(tensor)
        self._requires_grad = tensor.requires_grad
        self._hooks = {name: getattr(tensor, name, None) for name in HOOKS}

    def restore(self) -> None:
        tensor = self._tensor
        if type(tensor) is not self._class:
            tensor.__class__ = self._class
        if self._storage_bytes != _storage_bytes(self._alias):
            self._alias.untyped_storage().resize_(self._storage_bytes)
        if placement(tensor) != placement(self._alias):
            tensor.data = self._alias
        if self._values is not None:
            with torch.inference_mode(self._alias.is_inference()), torch.no_grad():
                self._cells.copy_(self._values)
        if tensor.is_leaf:
            if tensor.requires_grad != self._requires_grad:
                tensor.requires_grad = self._requires_grad
            if tensor.grad is not self._gradient:
                tensor.grad = self._gradient
        for name, hooks in self._hooks.items():
            if getattr(tensor, name, None) is not hooks:
                setattr(tensor, name, hooks)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf; other tensors have none, and warn when asked."""
    return tensor.grad if tensor.is_leaf else None


_COPIED = (bool, int, float, str, torch.dtype, torch.device, torch.Size)


def attributes_of(parameter: torch.nn.Parameter) -> dict[str, object]:
    """Return the attributes that a parameter's module may read, as scales of quantised weights.

    For a tensor in the parameter's own memory it has the parameter itself.
    """
    attributes: dict[str, object] = {}
    for name, value in vars(parameter).items():
        if isinstance(value, torch.Tensor):
            has_address = value.layout == torch.strided and has_values(value)
            same = has_address and placement(value) == placement(parameter)
            attributes[name] = parameter if same else value
        elif value is None or isinstance(value, _COPIED):
            attributes[name] = value
    return attributes


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has memory: not on meta, nor where its storage was freed."""
    freed = tensor.layout == torch.strided and tensor.numel() > 0 and not _storage_bytes(tensor)
    return not tensor.is_meta and not freed


def placement(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return where and how a tensor's values lie; equal for two views of the same memory."""
    plain = tensor.data  # a lazy module's parameter answers nothing about itself
    if plain.layout != torch.strided:
        return plain.device, plain.dtype, plain.layout, tuple(plain.shape)
    where = plain.data_ptr() if has_values(plain) else 0
    return plain.device, plain.dtype, tuple(plain.shape), plain.stride(), where


def _cells(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with each memory cell once: what `expand` repeats cannot be written to."""
    if tensor.layout != torch.strided:
        return tensor
    for dimension, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0


def _restore_object(node: object, own_class: type, attributes: dict[str, Any]) -> None:
    """Give a module, optimizer, scheduler or scaler its class and `__dict__` back."""
    if type(node) is not own_class:
        node.__class__ = own_class
    _put_back(vars(node), attributes)


def _restore_members(
    node: list[Any] | deque[Any] | set[Any] | tuple[Any, ...], members: tuple[Any, ...]
) -> None:
    """Give a list, deque or set its members back; a tuple cannot change."""
    if isinstance(node, tuple) or _same(tuple(node), members):
        return
    node.clear()
    if isinstance(node, set):
        node.update(members)
    else:
        node.extend(members)


def _put_back(live: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Give `live` exactly those entries, in their order; do not touch it where it has them."""
    if _same(tuple(live), tuple(entries)) and _same(tuple(live.values()), tuple(entries.values())):
        return
    live.clear()
    live.update(entries)


def _same(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    return [id(each) for each in these] == [id(each) for each in those]
