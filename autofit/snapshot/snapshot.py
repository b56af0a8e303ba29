"""Snapshots: put live objects and the process back as they were, or tell what has changed.

`Snapshot` before, its `restore` after, whatever happened in between: for probes in the user's own
process, dry runs, and steps that are compared. `digest` and `differences` compare two moments;
tests use them, the conformance suite of strategies among them.

Initialize CUDA before a snapshot if it is going to be used: otherwise the random states of its
devices are not part of it. Attributes of objects of the user's own classes never are.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from autofit.interrupts import interrupts_deferred
from autofit.snapshot import process
from autofit.snapshot.objects import (
    generator_access,
    gradient_of,
    has_values,
    is_collection,
    is_dict,
    placement,
    record,
    walk,
)

Digest: TypeAlias = dict[str, str]
"""Name of each thing that must not change -> a text that stands for its state."""

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
                    each.restore()
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
        yield f"{place} state", _state_summary(access[0]())
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
    flat = flat.contiguous()
    size = flat.numel() * flat.element_size()
    data = (ctypes.c_char * size).from_address(flat.data_ptr()) if size else b""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _state_summary(state: Any) -> str:
    """Return a random generator's state, which may be a tensor or hold arrays, as text."""
    return hash_of(state) if isinstance(state, torch.Tensor) else _short(repr(pickle.dumps(state)))


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
