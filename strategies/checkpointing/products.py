"""The operators whose results are worth keeping where all else is recomputed.

Matrix products, convolutions and attention take most of a forward's time, and what lies between
them (normalization, activation functions, dropout, sums) most of its memory.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2023,
section 5, where the opposite choice within attention is made, before fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from ..calls import ModeBesideCompiledCode

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "convolution"})
ATTENTION = "_scaled_dot_product_"

# An operator with its arguments
OperatorCall: TypeAlias = "partial[Any]"


def is_product(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator of torch is a product or attention, and draws no numbers.

    One that draws has to be recomputed: what follows it draws the next numbers.
    """
    name = op.overloadpacket.__name__
    if name in PRODUCTS:
        return not op._schema.is_mutable
    if not name.startswith(ATTENTION) or name.endswith("_backward"):
        return False
    return not _named(op, args, kwargs).get("dropout_p")


class ProductsWatch(ModeBesideCompiledCode):  # type: ignore[no-untyped-call]  # torch
    """Have `on_product(operator, call)` in place of each product, for as long as entered.

    Not of those in a backward pass that begins meanwhile, nor of those that are run without
    gradients: among these are all of compiled code, which reuses memory untold.

    Args:
        on_product: runs a product.
        on_other: called with each other call, and what it returned.
    """

    def __init__(
        self,
        on_product: Callable[[Any, OperatorCall], Any],
        on_other: Callable[[OperatorCall, Any], object] = lambda call, made: None,
    ) -> None:
        super().__init__()
        self._on_product, self._on_other = on_product, on_other
        self._pass_under_way = torch._C._current_graph_task_id()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(op, *args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != self._pass_under_way:
            return call()
        is_operator = hasattr(op, "overloadpacket")  # and not of higher order
        if is_operator and torch.is_grad_enabled() and is_product(op, args, kwargs or {}):
            return self._on_product(op, call)
        made = call()
        self._on_other(call, made)
        return made


class _Product:
    """A product of the first run.

    Args:
        call: its operator, and the shapes that it was given.
        results: what it made.
    """

    def __init__(self, call: tuple[Any, ...], results: Any) -> None:
        self.call = call
        self.results = results
        # Tensors over the memory of the results that count their changes by themselves, and how
        # many there were
        self._counted: list[tuple[torch.Tensor, int]] = []
        self.watch(results)

    def watch(self, value: Any) -> None:
        self._counted += ((tensor, tensor._version) for tensor in _tensors(value))

    @property
    def is_unchanged(self) -> bool:
        return all(tensor._version == changes for tensor, changes in self._counted)


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
        self._products: list[_Product | None] = []
        self._place_of: dict[int, int] = {}  # memory -> the place of the product that made it

    def first(self) -> ProductsWatch:
        """Return the context of the first run."""
        return ProductsWatch(self._keep, self._note)

    def again(self) -> ProductsWatch:
        """Return the context of a second run, from its start."""
        products = iter(self._products)

        def found(op: Any, call: OperatorCall) -> Any:
            product = next(products, None)
            if product and product.call == (op, *_shapes(call)) and product.is_unchanged:
                return pytree.tree_map_only(torch.Tensor, _alias, product.results)
            return call()

        return ProductsWatch(found)

    def _keep(self, op: Any, call: OperatorCall) -> Any:
        made = call()
        results = pytree.tree_map_only(torch.Tensor, _alias, made)
        self._place_of |= dict.fromkeys(_memory(results), len(self._products))
        self._products.append(_Product((op, *_shapes(call)), results))
        return made

    def _note(self, call: OperatorCall, made: Any) -> None:
        """Note what another operator of the first run does to the memory of results."""
        for memory in _memory(_written(call)):
            if memory in self._place_of:
                self._products[self._place_of.pop(memory)] = None
        for tensor in _tensors(made):
            for memory in _memory(tensor):
                place = self._place_of.get(memory)
                if place is not None and (product := self._products[place]) is not None:
                    product.watch(_alias(tensor))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor over the same memory that shares its count of in-place changes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _shapes(call: OperatorCall) -> list[torch.Size]:
    return [each.shape for each in _tensors((call.args, call.keywords))]


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


def _named(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operator of torch by their names."""
    names = (argument.name for argument in op._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _written(call: OperatorCall) -> list[Any]:
    """Return the arguments that an operator writes to."""
    schema = getattr(call.func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = _named(call.func, call.args, call.keywords)
    return [named[each.name] for each in schema.arguments if each.is_write and each.name in named]
