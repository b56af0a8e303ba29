"""What two moments of live objects and of the process differ in, in words: what tests look at.

A `digest` before and one after; `differences` names what has changed in between.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from autofit.snapshot import process
from autofit.snapshot.snapshot import generator_access, has_values, placement, walk

# Name of each thing that must not change -> a text that stands for its state.
Digest: TypeAlias = dict[str, str]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def digest(objects: Mapping[str, object]) -> Digest:
    """Return the present state of `objects`, by name, and of the process as texts to compare."""
    facts: Digest = {}
    for name, root in objects.items():
        for place, node in walk(root, name):
            facts.update(_facts(place, node))
    for name, value in process.take().items():
        facts.update(_facts(name, value) if isinstance(value, dict) else {name: _summary(value)})
    return facts


def differences(before: Digest, after: Digest) -> list[str]:
    """Return one line for each thing that has changed."""
    return [
        f"{name}: {before.get(name, 'absent')} became {after.get(name, 'absent')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def _facts(place: str, node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, torch.Tensor):
        yield f"{place} identity", f"{type(node).__name__} at {id(node):#x}"
        yield f"{place} placement", str(placement(node))
        yield f"{place} requires_grad", str(node.requires_grad)
        yield f"{place} gradient", _summary(node.grad if node.is_leaf else None)
        yield f"{place} values", hash_of(node)
    elif isinstance(node, dict):
        yield f"{place} keys", _summary(tuple(node))
        yield from ((f"{place}[{_summary(key)}]", _summary(value)) for key, value in node.items())
    elif isinstance(node, list | tuple | set | deque):
        yield place, ", ".join(map(_summary, node))
    elif (access := generator_access(node)) is not None:
        state = access[0]()  # a tensor, or what holds arrays
        is_tensor = isinstance(state, torch.Tensor)
        yield f"{place} state", hash_of(state) if is_tensor else _short(repr(pickle.dumps(state)))
    else:
        yield f"{place} class", _summary(type(node))


def hash_of(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's values, equal for equal bits."""
    if not has_values(tensor.data):
        return "no values"
    held, stream = tensor.data.to("cpu"), io.BytesIO()
    if held.layout == torch.strided:
        stream.write(held.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        torch.save(held, stream)
    return hashlib.blake2b(stream.getvalue(), digest_size=16).hexdigest()


def _summary(value: object) -> str:
    """Return plain values as text, sequences by members, other objects by identity."""
    if type(value) in _PLAIN:
        return _short(repr(value))
    if isinstance(value, tuple | list):
        return _short(f"({', '.join(map(_summary, value))})")
    return f"{type(value).__name__} at {id(value):#x}"


def _short(text: str) -> str:
    """Return text that fits a line, with a hash for the rest of a long one."""
    if len(text) <= 120:
        return text
    return f"{text[:80]}… ({hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})"
