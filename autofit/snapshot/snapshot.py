"""Put live objects and the process back as they were before a training.

`Snapshot` before, its `restore` after, whatever happened in between: for looks at one model, dry
runs, and steps that are compared. It has the tensors and the containers in attributes of modules,
optimizers, schedulers and scalers, and random generators; objects of other classes are kept as they
are, not entered.

Initialize CUDA before a snapshot if it is going to be used: otherwise the random states of its
devices are not part of it.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from autofit.snapshot import process

_ENTERED = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set, tuple)
_PLUMBING = ("._parameters", "._buffers", "._modules")

# The attributes of a tensor that hold the hooks registered on it.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


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
        self._records = [_record(node) for key, node in nodes.items() if key not in known]
        self._process = process.take()

    def restore(self) -> None:
        """Put everything back in place, and the rest where a part cannot be put back.

        Raises:
            Exception: of a part that cannot be put back, as on a device that died.
        """
        with ExitStack() as stack:
            stack.callback(process.restore, self._process)
            for put_back in reversed(self._records):
                stack.callback(put_back)


@contextmanager
def preserved(objects: Mapping[str, object]) -> Iterator[None]:
    """Leave `objects` and the process as they were, however the body ends."""
    snapshot = Snapshot(objects)
    try:
        yield
    finally:
        snapshot.restore()


def walk(root: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield everything with a state below `root`, each once, with a name that says where it is.

    The `__dict__` of an object comes after it, by the same name.
    """
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([(name, root)])
    while waiting:
        place, node = waiting.popleft()
        if id(node) not in seen and (type(node) in _CONTAINERS or is_live(node)):
            seen.add(id(node))
            yield place, node
            waiting.extend(_held(place, node))


def is_live(node: object) -> bool:
    """Return whether an object is a tensor, holds tensors by attributes, or draws numbers."""
    return isinstance(node, (*_ENTERED, torch.Tensor)) or generator_access(node) is not None


def _held(place: str, node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, torch.Tensor):
        names = ("__dict__", *HOOKS, *(("grad",) if node.is_leaf else ()))
        yield from ((f"{place}.{name}", getattr(node, name, None)) for name in names)
    elif isinstance(node, _ENTERED):
        yield place, vars(node)
        if isinstance(node, torch.jit.ScriptModule):  # its tensors are in no attribute
            named = itertools.chain(node.named_parameters(), node.named_buffers())
            yield from ((f"{place}.{key}", value) for key, value in named)
    elif isinstance(node, dict):
        for plumbing in _PLUMBING:  # the user's names are without it
            place = place.removesuffix(plumbing)
        keys = (f".{key}" if isinstance(key, str) else f"[{at}]" for at, key in enumerate(node))
        yield from ((place + key, value) for key, value in zip(keys, node.values(), strict=True))
    elif isinstance(node, list | tuple | deque | set):
        yield from ((f"{place}[{index}]", value) for index, value in enumerate(node))


def _record(node: Any) -> Callable[[], object]:
    """Return what puts the present state of an object that `walk` yielded back in place.

    Identities stay: tensors get their storage, values, gradient and flags back, containers and
    `__dict__`s their entries in their order.
    """
    if isinstance(node, torch.Tensor):
        return _record_of_tensor(node)
    if isinstance(node, _ENTERED):
        return partial(object.__setattr__, node, "__class__", type(node))
    if (access := generator_access(node)) is not None:
        read, write = access
        return partial(write, read())
    return partial(_put_back, node, copy.copy(node))


def _record_of_tensor(tensor: torch.Tensor) -> Callable[[], object]:
    """Record a tensor's storage, in which views that the user holds must stay, and its values."""
    data = tensor.data
    values = _cells(data).to("cpu", copy=True) if has_values(data) else None
    names = ("__class__", *(("requires_grad", "grad") if tensor.is_leaf else ()), *HOOKS)
    attributes = {name: getattr(tensor, name, None) for name in names}
    return partial(_restore_tensor, tensor, data, _storage_bytes(data), values, attributes)


def _restore_tensor(
    tensor: torch.Tensor,
    data: torch.Tensor,
    storage_bytes: int,
    values: torch.Tensor | None,
    attributes: Mapping[str, Any],
) -> None:
    if storage_bytes != _storage_bytes(data):
        data.untyped_storage().resize_(storage_bytes)
    if placement(tensor) != placement(data):
        tensor.data = data
    if values is not None:
        with torch.inference_mode(data.is_inference()), torch.no_grad():
            _cells(data).copy_(values)
    for name, value in attributes.items():
        if (name in HOOKS or tensor.is_leaf) and getattr(tensor, name, None) is not value:
            setattr(tensor, name, value)


def _put_back(live: Any, before: Any) -> None:
    """Give a container its entries back, in their order; do not touch it where it has them."""
    if _ids(live) == _ids(before):
        return
    live.clear()
    (live.extend if isinstance(live, list | deque) else live.update)(before)


def _ids(container: Any) -> list[int]:
    values = container.values() if isinstance(container, dict) else ()
    return [id(each) for each in (*container, *values)]


def generator_access(node: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return how to read and write a random number generator's state; None for other objects."""
    numpy = sys.modules.get("numpy")
    if isinstance(node, torch.Generator) or (numpy and isinstance(node, numpy.random.RandomState)):
        return node.get_state, node.set_state
    if isinstance(node, random.Random):
        return node.getstate, node.setstate
    if numpy and isinstance(node, numpy.random.Generator):
        bits = node.bit_generator
        return (lambda: bits.state), partial(setattr, bits, "state")
    return None


_COPIED = (bool, int, float, str, torch.dtype, torch.device, torch.Size)


def attributes_of(parameter: torch.nn.Parameter) -> dict[str, object]:
    """Return the attributes that a parameter's module may read, as scales of quantised weights.

    For a tensor in the parameter's own memory it has the parameter itself.
    """
    attributes: dict[str, object] = {}
    for name, value in vars(parameter).items():
        if isinstance(value, torch.Tensor):
            is_dense = value.layout == torch.strided and has_values(value)
            is_same = is_dense and placement(value) == placement(parameter)
            attributes[name] = parameter if is_same else value
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
    return tensor[tuple(slice(1 if step == 0 else None) for step in tensor.stride())]


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0
