"""How the user's objects are pickled: what a worker cannot import by name travels by value.

cloudpickle does most of it; here is what it leaves out. What is written is read by plain pickle.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

_ALWAYS_REACHABLE = {"__main__", "__mp_main__", "autofit", *sys.builtin_module_names}
_HOOKS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}


@contextmanager
def unreachable_by_value() -> Iterator[None]:
    """Have what is defined in modules that a worker could not import travel by value."""
    already = set(cloudpickle.list_registry_pickle_by_value())
    added = [module for module in _unreachable_modules() if module.__name__ not in already]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _unreachable_modules() -> list[ModuleType]:
    """Loaded modules that a worker could not import by name (loaded from a file, say)."""
    reachable: dict[str, bool] = {}
    unreachable = []
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top not in reachable:
            reachable[top] = top in _ALWAYS_REACHABLE or _can_be_found(top)
        if not reachable[top] and getattr(module, "__file__", None):
            unreachable.append(module)
    return unreachable


def _can_be_found(top: str) -> bool:
    finders = [getattr(finder, "find_spec", None) for finder in sys.meta_path]
    return any(find is not None and find(top, None) is not None for find in finders)


def _rebuild_parametrized(
    base: type[torch.nn.Module], state: dict[str, Any], names: tuple[str, ...]
) -> torch.nn.Module:
    """A module some of whose tensors are computed by parametrizations.

    torch refuses to pickle one because its class is made at run time: so the class is made again.
    """
    module = base.__new__(base)
    module.__setstate__(state)  # type: ignore[no-untyped-call]  # torch
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _hooks_of(parameter: torch.nn.Parameter) -> dict[str, list[Any]]:
    """What was registered on a parameter itself; torch leaves it out when it pickles one."""
    hooks = {name: getattr(parameter, attribute, None) for name, attribute in _HOOKS.items()}
    return {name: list(given.values()) for name, given in hooks.items() if given}


def _register(parameter: torch.nn.Parameter, hooks: dict[str, list[Any]]) -> None:
    for name, given in hooks.items():
        for hook in given:
            getattr(parameter, name)(hook)


def _is_special_module(obj: Any) -> bool:
    """Such as torch.backends.cudnn: a module of a class of its own; cloudpickle knows the plain."""
    if not isinstance(obj, ModuleType) or type(obj) is ModuleType:
        return False
    return sys.modules.get(obj.__name__) is obj


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.nn.Module) and parametrize.is_parametrized(obj):
            names = tuple(obj.parametrizations)  # type: ignore[arg-type]  # a ModuleDict: its keys
            base: Any = type(obj).__bases__[0]
            return _rebuild_parametrized, (base, base.__getstate__(obj), names)
        if isinstance(obj, torch.nn.Parameter) and (hooks := _hooks_of(obj)):
            rebuild, arguments = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:2]  # type: ignore[no-untyped-call]  # torch
            # As a state, hooks are pickled once the parameter is known: they may well reach it
            return rebuild, arguments, hooks, None, None, _register
        if _is_special_module(obj):
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


class _HostPickler(_Pickler):
    """Tensors on a device arrive on the host: reading them makes no context there."""

    def reducer_override(self, obj: Any) -> Any:
        holds_memory = isinstance(obj, torch.Tensor | torch.UntypedStorage)
        if holds_memory and obj.device.type not in ("cpu", "meta"):
            obj = obj.detach() if isinstance(obj, torch.Tensor) else obj
            return obj.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """A small object (an exception, say) by value, its tensors on the host."""
    buffer = io.BytesIO()
    _HostPickler(buffer).dump(value)
    return buffer.getvalue()


PICKLE = SimpleNamespace(__name__="cloudpickle", Pickler=_Pickler, dumps=dumps, loads=pickle.loads)
"""What `torch.save` takes for a pickle module."""
