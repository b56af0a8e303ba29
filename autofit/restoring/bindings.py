"""What a function may bind anew, and what it may put into a container: kept, and put back.

A `Cell` is a variable of an enclosing function, a `Name` a global; `Members` is a container of
which only the members themselves count, not what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import CellType
from typing import Any

_UNBOUND = object()


@dataclass(frozen=True, eq=False)
class Cell:
    """A variable that closures share."""

    cell: CellType

    @property
    def value(self) -> object:
        """What it is bound to."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return _UNBOUND

    def bind(self, value: object) -> None:
        """Bind it to `value`, or to nothing."""
        if value is _UNBOUND:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


@dataclass(frozen=True, eq=False)
class Name:
    """A global variable."""

    namespace: dict[str, Any]
    name: str

    @property
    def value(self) -> object:
        """What it is bound to."""
        return self.namespace.get(self.name, _UNBOUND)

    def bind(self, value: object) -> None:
        """Bind it to `value`, or to nothing."""
        if value is _UNBOUND:
            del self.namespace[self.name]
        else:
            self.namespace[self.name] = value


@dataclass(frozen=True, eq=False)
class Members:
    """A container whose members are not looked into."""

    container: Any


class BindingRecord:
    """What a cell or a name was bound to."""

    def __init__(self, binding: Cell | Name) -> None:
        self._binding = binding
        self._value = binding.value

    def restore(self) -> None:
        """Bind it as it was."""
        if self._binding.value is not self._value:
            self._binding.bind(self._value)
