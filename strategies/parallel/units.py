"""Which modules are gathered and freed on their own when a model is sharded."""

from __future__ import annotations

from collections import Counter

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
"""Containers without a forward: torch shards none of them."""


def units_of(model: nn.Module) -> list[str]:
    """Return the names of the modules to shard beside the model itself.

    They are the children of lists and sequences that hold two or more of one class. A module that
    shares a parameter with others is left to the model: sharded in two places, the parameter would
    be two.
    """
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(parameter) for parameter in module._parameters.values())
    units: list[str] = []
    _collect(model, "", uses, units)
    return units


def _collect(module: nn.Module, name: str, uses: Counter[int], units: list[str]) -> None:
    classes = Counter(type(child) for child in module.children())
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        repeats = isinstance(module, _LISTS) and classes[type(child)] > 1
        if repeats and not isinstance(child, _NEVER_CALLED) and _is_whole(child, uses):
            units.append(path)
        else:
            _collect(child, path, uses, units)


def _is_whole(module: nn.Module, uses: Counter[int]) -> bool:
    """Return whether a module has parameters, and shares none with modules beside it."""
    own = Counter(
        id(parameter) for part in module.modules() for parameter in part._parameters.values()
    )
    has_any = next(module.parameters(), None) is not None
    none = id(None)
    return has_any and all(count == uses[each] for each, count in own.items() if each != none)
