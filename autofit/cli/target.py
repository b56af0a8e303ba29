"""TARGET on the command line: `path/to/file.py:name` or `package.module:name` -> a Workload."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidArgument, users_code
from autofit.units import kind_of

if TYPE_CHECKING:
    from autofit.training.workload import Workload

_ASKED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@users_code()
def load_target(target: str) -> Workload:
    """Return the workload that a target names.

    A file is imported as a script beside it would import it: its folder comes first on the path.

    Args:
        target: as above.

    Raises:
        InvalidArgument: the file, module or name does not exist, or it is not a workload.
        Exception: whatever the user's module raises when it is imported or called; it is marked as
            the user's.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InvalidArgument(
            f"{target!r} is not a target: use path/to/file.py:name or package.module:name"
        )
    try:
        os.getcwd()
    except FileNotFoundError:  # in which oneMKL ends the process
        raise InvalidArgument(
            "the current folder was deleted: change to one that exists, with cd"
        ) from None
    gc.disable()  # importing torch leaves nothing to collect, and looking takes a tenth of it
    try:
        module = _import(place)
    finally:
        gc.enable()
    try:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise InvalidArgument(f"{place} has no {name!r}; it has: {_offers(module)}") from None
    import torch  # late, as what follows: a mistyped target does not need it

    from autofit.training.workload import Workload

    is_model = isinstance(found, torch.nn.Module)  # callable, but not to make a workload
    made = _call(found, target) if callable(found) and not is_model else found
    if not isinstance(made, Workload):
        raise InvalidArgument(
            f"{target} must be a Workload or a function that returns one, got {kind_of(made)}"
        )
    return made


def _call(function: Callable[..., Any], target: str) -> Any:
    wanted = [p.name for p in _parameters(function) if p.default is p.empty and p.kind in _ASKED]
    if wanted:
        raise InvalidArgument(
            f"{target} takes arguments ({', '.join(wanted)}): name a function that "
            "takes none and returns a Workload"
        )
    return function()


def _parameters(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return ()


def _import(place: str) -> ModuleType:
    if not place.endswith(".py"):
        if not all(part.isidentifier() for part in place.split(".")):
            raise InvalidArgument(f"{place!r} is neither a .py file nor the name of a module")
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and place.startswith(error.name):
                raise InvalidArgument(f"module {place!r} is not on the path") from None
            raise
    path = Path(os.path.realpath(place))
    if not os.path.isfile(path):  # unlike a Path's own, it takes any name
        raise InvalidArgument(f"file {place} does not exist")
    sys.path.insert(0, str(path.parent))
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        raise InvalidArgument(
            f"{place} has the name of a module that is in use ({path.stem!r}): rename the file"
        )
    return importlib.import_module(path.stem) if "." not in path.stem else _import_file(path)


def _import_file(path: Path) -> ModuleType:
    """Import a file whose name contains a dot, which would otherwise mean a package."""
    name = path.stem.replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _offers(module: ModuleType) -> str:
    from autofit.training.workload import Workload

    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, Workload) or getattr(value, "__module__", None) == module.__name__)
    ]
    return ", ".join(names) or "nothing of its own"
