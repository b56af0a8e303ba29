"""The workload as a file: written once by the parent, read anew by the worker for each probe.

Its loader is a file of its own, which is read only where the loader is made: a probe does not wait
for the user's dataset.

Tensors are stored once and read through a memory map, so that a large model is never in host memory
twice. Classes and functions from `__main__`, notebooks and local scopes travel by value, importable
ones by name. cloudpickle writes, with the additions below; plain pickle reads.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.nn.utils import parametrize

from autofit.errors import InvalidArgument, WorkerFailed, chain_of, mark_users
from autofit.probing.fork_server import beyond_standard_streams
from autofit.strategy import Strategy
from autofit.torch_flags import computing
from autofit.training.batch import Batch, map_tensors, tensors_of
from autofit.training.workload import Workload, check_has_values

if TYPE_CHECKING:
    from autofit.training.loader import Loader

_ALWAYS_REACHABLE = {"__main__", "autofit", *sys.builtin_module_names}
_HOOKS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}

# cloudpickle's registry is one for the process, whose threads may each send something.
_REGISTRY = threading.RLock()


@contextmanager
def unreachable_by_value() -> Iterator[None]:
    """Pickle by value whatever is defined in modules that a worker could not import."""
    with _REGISTRY:
        already = set(cloudpickle.list_registry_pickle_by_value())
        # By name, since a module may be loaded under several
        added = {m.__name__: m for m in _unreachable_modules() if m.__name__ not in already}
        for module in added.values():
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in added.values():
                cloudpickle.unregister_pickle_by_value(module)


def _unreachable_modules() -> list[ModuleType]:
    """Return the loaded modules that a worker could not import by name (from a file, say)."""
    finders = [getattr(finder, "find_spec", None) for finder in sys.meta_path]
    reachable: dict[str, bool] = {}
    unreachable = []
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top not in reachable:
            found = (find(top, None) for find in finders if find is not None)
            reachable[top] = top in _ALWAYS_REACHABLE or any(spec is not None for spec in found)
        if not reachable[top] and getattr(module, "__file__", None):
            unreachable.append(module)
    return unreachable


def _rebuild_parametrized(
    base: type[torch.nn.Module], state: dict[str, Any], names: tuple[str, ...]
) -> torch.nn.Module:
    """Return a module some of whose tensors are computed by parametrizations.

    torch refuses to pickle one because its class is made at run time, so make the class again.
    """
    module = base.__new__(base)
    module.__setstate__(state)  # type: ignore[no-untyped-call]  # torch
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _hooks_of(parameter: torch.nn.Parameter) -> dict[str, list[Any]]:
    """Return the hooks of a parameter itself, which torch does not pickle."""
    hooks = {name: getattr(parameter, attribute, None) for name, attribute in _HOOKS.items()}
    return {name: list(given.values()) for name, given in hooks.items() if given}


def _register(parameter: torch.nn.Parameter, hooks: dict[str, list[Any]]) -> None:
    for name, given in hooks.items():
        for hook in given:
            getattr(parameter, name)(hook)


def _compiler_of(function: Any) -> tuple[Any, Any] | None:
    """Return what `torch.compile` made of its options, and the function that it was given.

    None: the object is no compiled function, or this torch keeps them elsewhere.
    """
    plain = getattr(function, "__dict__", {}).get("_torchdynamo_orig_callable")
    if plain is None or not isinstance(function, FunctionType):
        return None
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    compiler = next((cell.cell_contents for name, cell in names if name == "self"), None)
    return None if compiler is None else (compiler, plain)


def _compiled(compiler: Any, plain: Any) -> Any:
    return compiler(plain)


def _is_special_module(obj: Any) -> bool:
    """Return whether it is a module of another class, which cloudpickle does not pickle by name.

    `torch.backends.cudnn` is one.
    """
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
            # As state, hooks are pickled after the parameter is memoized: they may refer to it
            return rebuild, arguments, hooks, None, None, _register
        if _is_special_module(obj):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, FunctionType):
            self._leave_out_name(obj.__globals__)
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and (parts := _compiler_of(obj)) is not None:
            return _compiled, parts  # its wrapper holds the compiler's state of this process
        return reduced

    def _leave_out_name(self, of_module: dict[str, Any]) -> None:
        """Hide a module's name from its functions if the worker cannot import that module.

        By that name Dynamo looks up what an inlined function reads: in a worker it would find
        another `__main__`. Without one it reads the function's own globals.
        """
        name = of_module.get("__name__")
        if name == "__main__" or name in cloudpickle.list_registry_pickle_by_value():
            package = {"__package__": of_module.get("__package__")}
            self.globals_ref.setdefault(id(of_module), package)


def _rebuild_storage(content: bytes) -> torch.UntypedStorage:
    made = torch.empty(len(content), dtype=torch.uint8)
    if content:
        made.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return made.untyped_storage()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a host tensor is no more than a view of its storage.

    Torch's pickle of it has the storage's address in it, so that no two pickles are equal.
    """
    is_dense = tensor.device.type == "cpu" and tensor.layout is torch.strided
    special = tensor.requires_grad or tensor.is_quantized or tensor.dtype.is_complex
    return is_dense and not special and not vars(tensor)


def _rebuild_plain(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class _HostPickler(_Pickler):
    """Sends tensors of a device as host tensors, so that reading them makes no context there.

    Objects whose ids are in `names` are sent as these names, and others first as `reduced` says.
    """

    names: Mapping[int, str]
    reduced: Callable[[Any], Any]

    def persistent_id(self, obj: Any) -> str | None:
        return self.names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if (given := self.reduced(obj)) is not NotImplemented:
            return given
        if type(obj) is torch.Tensor and _is_plain(obj):
            layout = obj.dtype, obj.storage_offset(), obj.shape, obj.stride()
            return _rebuild_plain, (obj.untyped_storage(), *layout)
        if isinstance(obj, torch.UntypedStorage):  # torch cannot load its own pickle of one
            held = torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj)
            return _rebuild_storage, (held.cpu().numpy().tobytes(),)
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]  # torch
        return super().reducer_override(obj)


def dumps(
    value: Any,
    names: Mapping[int, str] = MappingProxyType({}),
    reduced: Callable[[Any], Any] = lambda obj: NotImplemented,
) -> bytes:
    """Pickle a small object (an exception, say), its tensors as host tensors.

    Args:
        value: the object.
        names: by id of an object in it, the name that is written in its place.
        reduced: as `reducer_override` of a Pickler; it is asked first.
    """
    buffer = io.BytesIO()
    pickler = _HostPickler(buffer)
    pickler.names, pickler.reduced = names, reduced
    pickler.dump(value)
    return buffer.getvalue()


def live_objects(workload: Workload, but: Container[str] = ()) -> dict[str, object]:
    """Return, by names, the objects with a state that a copy of the workload would copy.

    A function reaches what it is pickled with: its closure, its defaults, what a method or a
    `functools.partial` holds, and the globals that it names unless it is imported by name. Of
    containers only such members are returned: the containers themselves, counters and the like are
    the user's data, and stay as the training leaves them.

    Args:
        workload: what is searched.
        but: fields of it to leave out.
    """
    from autofit.snapshot.snapshot import is_live  # where trainings run alone

    found: dict[str, object] = {}

    def reduced(obj: Any) -> Any:
        if not is_live(obj):
            return NotImplemented
        found[f"object {len(found)}"] = obj
        return object, ()

    for each in fields(workload):
        pickler = _HostPickler(SimpleNamespace(write=len))  # what it writes is not kept
        pickler.names, pickler.reduced = MappingProxyType({}), reduced
        # What cannot be pickled is not copied either
        with suppress(Exception), unreachable_by_value():
            pickler.dump(None if each.name in but else getattr(workload, each.name))
    return found


# A pickle module for `torch.save`.
PICKLE = SimpleNamespace(__name__="cloudpickle", Pickler=_Pickler, dumps=dumps, loads=pickle.loads)

_WAYS_OUT = {
    "workload": "Pass a function that builds the model instead of the model",
    "loader": "Pass a function that makes the dataset and the DataLoader",
}


@dataclass(frozen=True)
class Payload:
    """The contents of the workload's file.

    Attributes:
        workload: what is trained.
        strategies: those that may have settings in a plan.
        computing: torch's global flags in the parent (default dtype, TF32, determinism).
    """

    workload: Workload
    strategies: Sequence[Strategy]
    computing: Mapping[str, Any] = field(default_factory=computing)


def nameless_file() -> IO[bytes]:
    """Open a file that vanishes with the processes that hold it open, also if they are killed.

    Raises:
        WorkerFailed: there is no folder for temporary files.
    """
    try:
        with beyond_standard_streams():
            return tempfile.TemporaryFile(prefix="autofit-")
    except OSError as error:
        raise _no_room("a temporary folder", error) from error


def _sent_loader(path: str, **settings: Any) -> Iterable[Batch]:
    """Make a loader, as the function of the user's does; the file is read the first time."""
    from autofit.training.loader import LoaderSettings, make_loader  # most workloads have none

    return make_loader(_read_loader(path), LoaderSettings(**settings))


@lru_cache(maxsize=1)
def _read_loader(path: str) -> Loader:
    loader: Loader = _read(Path(path), "loader")
    return loader


def write_payload(payload: Payload, path: Path, loader_path: Path | None = None) -> None:
    """Write a payload.

    Args:
        payload: its workload may have a loader.
        path: of the payload's file.
        loader_path: of the loader's file; None: the loader is left out.

    Raises:
        InvalidArgument: something in it cannot be pickled, or holds no values; the message names
            the ways out.
        WorkerFailed: the disk is full, or the file may not be written.
    """
    workload, loader = payload.workload, payload.workload.loader
    _check_has_values(workload)
    if loader_path is None or loader is None:
        workload = replace(workload, loader=None)
    else:
        from autofit.training.loader import at_rest  # most workloads have none

        _write(at_rest(loader), loader_path, "loader")
        workload = replace(workload, loader=partial(_sent_loader, str(loader_path)))
    if not workload.makes_batches:
        workload = replace(workload, sample_batch=map_tensors(_own_storage, workload.sample_batch))
    workload = replace(workload, eval_batch=map_tensors(_own_storage, workload.eval_batch))
    contents = replace(payload, workload=workload, strategies=tuple(payload.strategies))
    _write(contents, path, "workload")


def _check_has_values(workload: Workload) -> None:
    """Refuse modules and batches on the meta device, which only a prediction can use."""
    for what in ("model", "criterion", "loss_fn"):
        if isinstance(part := getattr(workload, what), torch.nn.Module):
            check_has_values(part, "the model" if what == "model" else what)
    batch = () if workload.makes_batches else tensors_of(workload.sample_batch)
    if any(tensor.is_meta for tensor in batch):
        raise InvalidArgument(
            "the sample batch is on the meta device, so it has no values to train with: pass "
            "a function that makes it, or one with values"
        )


def _write(contents: Any, path: Path, what: str) -> None:
    try:
        with path.open("wb") as file, unreachable_by_value():
            torch.save(contents, file, pickle_module=PICKLE)
    except MemoryError:
        raise
    except SystemExit as end:  # how an object is pickled may be the user's own code
        mark_users(end)
        raise
    except Exception as error:  # likewise
        disk = next((link for link in chain_of(error) if isinstance(link, OSError)), None)
        if isinstance(disk, FileNotFoundError) and not path.parent.is_dir():
            raise WorkerFailed(
                f"{path.parent} does not exist, and a worker process opens the workload's file "
                "through it: mount /proc"
            ) from error
        if disk is not None:  # torch's writer answers a full disk with a RuntimeError of its own
            raise _no_room(path, disk) from error
        raise InvalidArgument(
            f"the {what} cannot be sent to a worker process ({_words(error)}). {_WAYS_OUT[what]}"
        ) from error


def _no_room(path: str | os.PathLike[str], error: OSError) -> WorkerFailed:
    """Return the error for a payload that the file system does not take."""
    return WorkerFailed(
        f"the workload could not be written to {os.fspath(path)} for the worker process "
        f"({error}): it needs about the model's size on disk; set TMPDIR to a folder that has it"
    )


def read_payload(path: Path, device: torch.device | None = None) -> Payload:
    """Read a fresh copy of what `write_payload` wrote.

    Host tensors are mapped from the file until they are moved. Tensors that the user had on a GPU
    (a teacher model that the loss reaches, say) are placed on `device`; None: in host memory.

    Raises:
        InvalidArgument: something in it cannot be unpickled here; the message names the ways out.
        WorkerFailed: this process has too many open files.
    """

    payload: Payload = _read(path, "workload", device)
    return payload


def _read(path: Path, what: str, device: torch.device | None = None) -> Any:
    def place(storage: Any, location: str) -> Any:
        stays = location == "cpu" or device is None or device.type == "cpu"
        return storage if stays else storage.to(device=device)

    try:
        # The file is the parent's own, written a moment ago: it runs only the user's code.
        return torch.load(
            path, map_location=place, pickle_module=pickle, weights_only=False, mmap=True
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise WorkerFailed(
                f"a worker process has too many open files to read the {what}: close what your "
                "code opens in each forward, or raise the limit (ulimit -n)"
            ) from error
        raise InvalidArgument(
            f"the {what} cannot be read in the worker process ({_words(error)}). {_WAYS_OUT[what]}"
        ) from error


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host: a small view would take its whole storage along."""
    return tensor.detach().cpu().clone().requires_grad_(tensor.requires_grad)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
