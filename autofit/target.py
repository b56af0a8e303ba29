"""TARGET on the command line: `path/to/file.py:name` or `package.module:name` -> a Workload."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from autofit.errors import InvalidRequest
from autofit.workload import Workload


def load_target(target: str) -> Workload:
    """The workload that a target names.

    A file is imported as a script beside it would import it: its folder comes first on the path.

    Raises:
        InvalidRequest: there is no such file, module or name, or it is no workload.
        Exception: whatever the user's module raises when it is imported or called.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InvalidRequest(
            f"{target!r} is no target: write path/to/file.py:name or package.module:name"
        )
    module = _import(place)
    try:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise InvalidRequest(f"{place} has no {name!r}; it has: {_offers(module)}") from None
    made = found() if callable(found) and not isinstance(found, Workload) else found
    if not isinstance(made, Workload):
        raise InvalidRequest(
            f"{target} is neither a Workload nor a function that returns one, "
            f"but a {type(made).__name__}"
        )
    return made


def _import(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and place.startswith(error.name):
                raise InvalidRequest(f"there is no module {place!r} on the path") from None
            raise
    path = Path(place).resolve()
    if not path.is_file():
        raise InvalidRequest(f"there is no file {place}")
    sys.path.insert(0, str(path.parent))
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        raise InvalidRequest(
            f"{place} has the name of a module in use ({path.stem!r}): rename the file"
        )
    return importlib.import_module(path.stem)


def _offers(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, Workload) or getattr(value, "__module__", None) == module.__name__)
    ]
    return ", ".join(names) or "nothing of its own"
