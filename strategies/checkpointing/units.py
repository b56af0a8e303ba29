"""Names of the parts of a model that can be checkpointed.

A unit is a module, by its dotted name ("encoder.layers.3"), or a run of consecutive children of a
flat `nn.Sequential` ("features[4:8]" is its children 4 to 7).
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from autofit.errors import InvalidRequest

_SEGMENT = re.compile(r"(?P<module>.*)\[(?P<start>\d+):(?P<stop>\d+)\]")


@dataclass(frozen=True)
class Unit:
    """One part of a model.

    Attributes:
        module: dotted name of the module, or of the Sequential that holds the run.
        start, stop: the run of children; both None: the module itself.
    """

    module: str
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, name: str) -> Unit:
        """The unit that `str` named."""
        match = _SEGMENT.fullmatch(name)
        if match is None:
            return cls(name)
        return cls(match["module"], int(match["start"]), int(match["stop"]))

    @property
    def run(self) -> tuple[int, int] | None:
        """The children of a Sequential that the unit is made of; None: a whole module."""
        return None if self.start is None or self.stop is None else (self.start, self.stop)

    def find(self, model: nn.Module) -> nn.Module:
        """The module, or the Sequential that holds the run.

        Raises:
            InvalidRequest: the model has no such module, or it is no Sequential of that length.
        """
        try:
            found = model.get_submodule(self.module)
        except AttributeError:
            raise InvalidRequest(
                f"the model has no module {self.module!r} to checkpoint: the plan was made for "
                f"another model; search again"
            ) from None
        if self.run is not None and not (
            is_plain_sequential(found) and self.run[1] <= len(found._modules)
        ):
            raise InvalidRequest(
                f"{self.module!r} is no nn.Sequential with children {self.start} to "
                f"{self.run[1] - 1}: the plan was made for another model; search again"
            )
        return found

    def parts(self, model: nn.Module) -> list[str]:
        """Names of the modules that the unit runs, outermost ones only, in their order."""
        if self.run is None:
            return [self.module]
        return names_of_children(self.module, self.find(model))[slice(*self.run)]

    def __str__(self) -> str:
        return self.module if self.run is None else f"{self.module}[{self.start}:{self.stop}]"


def make_of(unit: str, model: nn.Module) -> Hashable:
    """Equal for units of one make: alike in all their modules, with weights of the same shapes."""
    parts = map(model.get_submodule, Unit.parse(unit).parts(model))
    return tuple(tuple(map(_make_of_module, part.modules())) for part in parts)


def _make_of_module(module: nn.Module) -> Hashable:
    """Without its children; a parametrized module has a class of its own, which says nothing."""
    named = module._parameters.items()
    weights = tuple((name, p.shape, p.dtype) for name, p in named if p is not None)
    children = tuple(module._modules)
    return type_before_parametrizations(module), children, weights, module.extra_repr()


def names_of_children(name: str, module: nn.Module) -> list[str]:
    """Dotted names of the children of the module with this name, in their order."""
    return [f"{name}.{child}" if name else child for child in module._modules]


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether the module runs its children one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
