"""The operators whose results are worth keeping where all else is recomputed.

Matrix products, convolutions and attention take most of a forward's time, and what lies between
them (normalization, activation functions, dropout, sums) most of its memory.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2023,
section 5, where the opposite choice within attention is made, before fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "convolution"})
ATTENTION = "_scaled_dot_product_"

Run = Callable[[Any, "partial[Any]"], Any]
Seen = Callable[["partial[Any]", Any], object]


def is_product(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator of torch is a product or attention, and draws no numbers.

    One that draws has to be recomputed: what follows it draws the next numbers.
    """
    name = op.overloadpacket.__name__
    if name in PRODUCTS:
        return not op._schema.is_mutable
    if not name.startswith(ATTENTION) or name.endswith("_backward"):
        return False
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)
    return not given.get("dropout_p")


@dataclass
class _Kept:
    """What a product of the first run made.

    Attributes:
        call: its operator, and the shapes that it was given.
        made: its results.
        seen: each tensor over their memory that counts its changes in place by itself, with the
            number of its changes then.
    """

    call: tuple[Any, ...]
    made: Any
    seen: list[tuple[torch.Tensor, int]]

    def see(self, made: Any) -> None:
        self.seen += ((each, each._version) for each in _tensors(made))

    @property
    def is_unchanged(self) -> bool:
        return all(tensor._version == was for tensor, was in self.seen)


class Products:
    """What the products of a first run made, found again by a second one.

    A product is found by its place among those of the run. One whose result has changed in place
    since, or whose place another operator or other shapes have, is run again.

    `torch.utils.checkpoint.create_selective_checkpoint_contexts` raises where this runs again, and
    in a second backward pass. Like this it asks the result for its changes; but what
    `_unsafe_view` makes of a result, as matrix products and (from torch 2.15 on) `linear` do
    at their end, counts its own, and so does `.data`. So operators that share memory with a result
    or write to it are watched as well.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept | None] = []
        self._over: dict[int, int] = {}  # memory -> the place of what was kept in it
        self._place = 0

    def first(self) -> AbstractContextManager[Any]:
        """Return the context of the first run."""
        return around_products(self._keep, self._note)

    def again(self) -> AbstractContextManager[Any]:
        """Return the context of a second run, from its start."""
        self._place = 0
        return around_products(self._find)

    def _keep(self, op: Any, run: partial[Any]) -> Any:
        made = run()
        aliases = pytree.tree_map_only(torch.Tensor, _alias, made)
        kept = _Kept((op, *_shapes(run)), aliases, [])
        kept.see(aliases)
        self._over |= dict.fromkeys(_memory(aliases), len(self._kept))
        self._kept.append(kept)
        return made

    def _note(self, run: partial[Any], made: Any) -> None:
        """Note what another operator of the first run does to the memory of results."""
        for memory in _memory(_written(run)):
            if memory in self._over:
                self._kept[self._over.pop(memory)] = None
        for tensor in _tensors(made):
            for memory in _memory(tensor):
                place = self._over.get(memory)
                if place is not None and (kept := self._kept[place]) is not None:
                    kept.see(_alias(tensor))

    def _find(self, op: Any, run: partial[Any]) -> Any:
        place, self._place = self._place, self._place + 1
        kept = self._kept[place] if place < len(self._kept) else None
        if kept is None or kept.call != (op, *_shapes(run)) or not kept.is_unchanged:
            return run()
        return pytree.tree_map_only(torch.Tensor, _alias, kept.made)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own over the same memory, which counts changes in place with it."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _shapes(run: partial[Any]) -> list[torch.Size]:
    return [each.shape for each in _tensors((run.args, run.keywords))]


def _memory(value: Any) -> Iterator[int]:
    """Yield what identifies the memory of these tensors while they live."""
    for tensor in _tensors(value):
        if hasattr(tensor, "__tensor_flatten__"):  # a tensor that is made of others
            names, _ = tensor.__tensor_flatten__()
            yield from _memory([getattr(tensor, name) for name in names])
            continue
        try:
            yield tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors and such have no storage
            continue


def _written(run: partial[Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    schema = getattr(run.func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = dict(zip((each.name for each in schema.arguments), run.args, strict=False))
    named |= run.keywords
    writes = (each.name for each in schema.arguments if each.is_write)
    return [named[name] for name in writes if name in named]


def around_products(run: Run, seen: Seen | None = None) -> AbstractContextManager[Any]:
    """Have `run(operator, call)` in place of each product, for as long as entered.

    Not of those in a backward pass that begins meanwhile, nor of those that are run without
    gradients: among these are all of compiled code, which reuses memory untold.

    Args:
        run: runs a product.
        seen: called with each other call, and what it returned.
    """
    return _Watching(run, seen)


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    supports_higher_order_operators = True

    def __init__(self, run: Run, seen: Seen | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._run, self._seen = run, seen
        self._pass_under_way = torch._C._current_graph_task_id()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: it is left while code is compiled, and in force while that runs."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return the same for torch 2.8, which knows no other way to say so."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(op, *args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != self._pass_under_way:
            return call()
        is_operator = hasattr(op, "overloadpacket")  # and not of higher order
        if is_operator and torch.is_grad_enabled() and is_product(op, args, kwargs or {}):
            return self._run(op, call)
        made = call()
        if self._seen is not None:
            self._seen(call, made)
        return made
