"""The operators whose results are worth keeping where all else is recomputed.

Matrix products, convolutions and attention take most of a forward's time, and what lies between
them (normalization, activation functions, dropout, sums) most of its memory.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2023,
section 5, where the opposite choice within attention is made, before fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "convolution"})
ATTENTION = "_scaled_dot_product_"


def is_product(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator of torch is a product or attention, and draws no numbers.

    One that draws has to be recomputed: what follows it draws the next numbers.
    """
    name = op.overloadpacket.__name__
    if name in PRODUCTS:
        return True
    if not name.startswith(ATTENTION) or name.endswith("_backward"):
        return False
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)
    return not given.get("dropout_p")


class Products:
    """What the products of a first run made, found again by a second one.

    A product is found by its place among those of the run. One whose result has changed in place
    since, or whose place another operator or other shapes have, is run again.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, Any, list[int]]] = []
        self._place = 0

    def keep(self, op: Any, run: partial[Any]) -> Any:
        """Run a product of the first run, and keep what it makes."""
        made = run()
        aliases = pytree.tree_map_only(torch.Tensor, _alias, made)
        self._kept.append(((op, *_shapes(run)), aliases, _versions(aliases)))
        return made

    def begin(self) -> AbstractContextManager[Any]:
        """Return the context of a second run, from its start."""
        self._place = 0
        return around_products(self._find)

    def _find(self, op: Any, run: partial[Any]) -> Any:
        place, self._place = self._place, self._place + 1
        kept, aliases, versions = self._kept[place] if place < len(self._kept) else (None, (), [])
        if kept != (op, *_shapes(run)) or _versions(aliases) != versions:
            return run()
        return pytree.tree_map_only(torch.Tensor, _alias, aliases)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own over the same memory, which counts changes in place with it."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _shapes(run: partial[Any]) -> list[torch.Size]:
    given = pytree.tree_leaves((run.args, run.keywords))
    return [each.shape for each in given if isinstance(each, torch.Tensor)]


def _versions(made: Any) -> list[int]:
    return [each._version for each in pytree.tree_leaves(made) if isinstance(each, torch.Tensor)]


def around_products(
    run: Callable[[Any, partial[Any]], Any],
) -> AbstractContextManager[Any]:
    """Have `run(operator, call)` in place of each product, for as long as entered.

    Not of those in a backward pass that begins meanwhile.
    """
    return _Watching(run)


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    def __init__(self, run: Callable[[Any, partial[Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._run, self._pass_under_way = run, torch._C._current_graph_task_id()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(op, *args, **(kwargs or {}))
        is_meant = torch._C._current_graph_task_id() == self._pass_under_way
        if is_meant and is_product(op, args, kwargs or {}):
            return self._run(op, call)
        return call()
