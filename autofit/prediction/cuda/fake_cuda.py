"""Run code written for "cuda" unmodified on the meta device, on a machine without a GPU.

Inside `fake_cuda(gpu)`, devices called cuda become meta where tensors and modules are made or
moved; `torch.cuda` answers as that GPU would; the places in PyTorch that list CUDA by name (foreach
optimizers, autocast, gradient scaling) accept meta; and operators are dispatched to kernels that
do what CUDA's do before autograd sees them. Anything else in `torch.cuda` that needs a device
raises: no context of a real GPU is ever made.

Why not torch's FakeTensorMode, whose tensors say "cuda" by themselves: it needs a CUDA build. On
torch 2.13 built for the CPU, `nn.Linear(..., device="cuda")` raises "PyTorch is not linked with
support for cuda devices", and autocast or any backward pass aborts the process (its guard for
missing devices is installed in CUDA builds only). CPU builds are what CI and laptops have. It would
not choose CUDA's kernels either: that a fake tensor says "cuda" does not fuse an operator, keep
cuDNN's buffers or add gradients in place.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from itertools import chain
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autofit.devices.gpu_catalogue import Gpu
from autofit.prediction.cuda import attention, autocast, operators
from autofit.prediction.cuda.values import IN_BACKWARD, users_line
from autofit.torch_private import check, missing

# An object, the name of its attribute, and the value to put there.
Patch = tuple[Any, str, Any]
_META = torch.device("meta")


@contextmanager
def fake_cuda(
    gpu: Gpu,
    note: Callable[[Exception], None] = lambda error: None,
    on_gpu: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_meta,
) -> Iterator[None]:
    """Make torch behave as if this GPU were there; put everything back at the end.

    They are replaced for the whole process, and only one may be active at a time. What is imported
    meanwhile may keep them: use it in a process that is there for dry runs.

    Args:
        gpu: the GPU.
        note: called with each exception that a torch function raises inside.
        on_gpu: whether a tensor lies on the GPU, and so says "cuda" when asked for its device.

    Raises:
        PredictionUnavailable: this torch lacks a part that is replaced.
    """
    mode = _CudaIsMeta(note, on_gpu)
    patches = (_torch_cuda(gpu), _random(), _no_context(note), _amp(), _optimizers())
    check("dry run")
    with ExitStack() as stack:
        stack.enter_context(_cuda_kernels(gpu))
        for target, name, value in (*chain(*patches), *_backward(mode)):
            stack.enter_context(replaced(target, name, value))
        stack.enter_context(mode)
        stack.enter_context(autocast.cast_cache())
        yield


@contextmanager
def _cuda_kernels(gpu: Gpu) -> Iterator[None]:
    """Let the emulation's kernels act on this thread.

    They stand where CUDA's own stand, at an autocast key above autograd. Autograd carries dispatch
    keys along, so they act in the backward pass and in a checkpoint's recomputation too.
    """
    _, device, key = autocast.spare_key()
    _register_kernels()
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, True)  # the key is masked out otherwise
    token = attention.emulated_gpu.set(gpu)
    try:
        with torch._C._IncludeDispatchKeyGuard(key):
            yield
    finally:
        attention.emulated_gpu.reset(token)
        torch.set_autocast_enabled(device, before)


@cache
def _register_kernels() -> list[Any]:
    """Register all kernels at the emulation's key, once: nothing else dispatches there.

    Returns:
        The libraries, which unregister their kernels when they are collected.
    """
    library: Any = torch.library  # torch does not annotate it
    spare, *_ = autocast.spare_key()
    others, aten = library.Library("_", "IMPL"), library.Library("aten", "IMPL")
    others.fallback(library.fallthrough_kernel, spare)
    kernels = autocast.kernels() | attention.KERNELS | operators.KERNELS
    for name, kernel in kernels.items():
        aten.impl(name, kernel, spare)
    return [others, aten]


class _CudaIsMeta(TorchFunctionMode):
    """Translates devices in the arguments of every torch function."""

    def __init__(
        self, note: Callable[[Exception], None], on_gpu: Callable[[torch.Tensor], bool]
    ) -> None:
        super().__init__()
        self._note, self._on_gpu = note, on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PLACES and _asked_by_a_user() and self._on_gpu(args[0]):
            return _PLACES[func]
        if func is torch.Tensor.cuda:
            return args[0].to(_META)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func in _INDEXING and self._on_gpu(args[0]):
            args = (args[0], _with_indices(args[1]), *args[2:])
        if func is torch.Tensor.to:
            args = (args[0], *map(_place, args[1:]))
        else:
            args = tuple(_META if _is_cuda_device(arg) else arg for arg in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = _place(kwargs["device"])
        if isinstance(kwargs.get("generator"), _HostGenerator):
            del kwargs["generator"]
        kwargs.pop("pin_memory", None)
        is_list = bool(args) and isinstance(args[0], list)
        if func is torch.tensor and kwargs.get("device") == _META and is_list:
            del kwargs["device"]
            return _moved(func(*args, **kwargs))
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self._note(error)
            raise


def _with_indices(index: Any) -> Any:
    """Return an index whose lists of numbers are tensors on the GPU.

    Torch makes them below the modes of a dry run, as it makes `torch.tensor(..., device="cuda")`:
    their values would be lost.
    """
    if isinstance(index, tuple):
        return tuple(map(_with_indices, index))
    if isinstance(index, list) and index and all(isinstance(each, int) for each in index):
        return _moved(torch.tensor(index))
    return index


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host on the GPU, as a leaf; the move is one that a dry run sees."""
    return tensor.detach().to(_META).requires_grad_(tensor.requires_grad)


_tensor: Any = torch.Tensor
_INDEXING = (_tensor.__getitem__, _tensor.__setitem__)
# How user code asks where a tensor is, and what one on the GPU answers.
_PLACES = {
    _tensor.is_cuda.__get__: True,
    _tensor.device.__get__: torch.device("cuda", 0),
    _tensor.get_device: 0,
}


def _asked_by_a_user() -> bool:
    """Return whether neither torch nor autofit calls the torch function.

    Torch's own Python code knows meta tensors, and part of it (a checkpoint's hooks) sees them with
    and without the mode: it must be told the same each time.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and _module(frame) == "torch.utils._device":
        frame = frame.f_back
    return _module(frame).partition(".")[0] not in ("torch", "autofit")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_cuda_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _place(value: Any) -> Any:
    """Return meta for a device called cuda, by object, name or number; else the value."""
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    numbered = isinstance(value, int) and not isinstance(value, bool)
    return _META if named or numbered or _is_cuda_device(value) else value


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value, and its own back at the end."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _asking(ask: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: ask()


def _torch_cuda(gpu: Gpu) -> Iterator[Patch]:
    # The GPU is asked when the user's code asks, and not before (`AskedGpu`).
    questions: dict[str, Callable[[], Any]] = {
        "is_bf16_supported": lambda: gpu.native_bfloat16,
        "get_device_capability": lambda: gpu.capability,
        "get_device_name": lambda: gpu.name,
        "get_device_properties": lambda: SimpleNamespace(
            name=gpu.name,
            major=gpu.capability[0],
            minor=gpu.capability[1],
            total_memory=gpu.total_bytes,
            multi_processor_count=gpu.multiprocessors,
        ),
        "mem_get_info": lambda: (gpu.total_bytes, gpu.total_bytes),
    }
    for name, ask in questions.items():
        yield torch.cuda, name, _asking(ask)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "init": None,
        "synchronize": None,
        "set_device": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
    }
    for name, value in answers.items():
        yield torch.cuda, name, _answer(value)
    for name in ("device", "stream", "Stream", "Event"):
        yield torch.cuda, name, _Nothing  # a class: code that is imported now may annotate with it
    for name in ("current_stream", "default_stream", "nvtx"):
        yield torch.cuda, name, _Nothing()
    # Optimizers of torch 2.15 ask here, and not torch.cuda, whether a graph is captured.
    accelerator: dict[str, Any] = {
        "is_available": True,
        "current_accelerator": _META,
        "device_count": 1,
        "current_device_index": 0,
        "current_stream": SimpleNamespace(is_capturing=_answer(False), synchronize=_answer(None)),
        "set_device_index": None,
        "set_stream": None,
        "synchronize": None,
    }
    for name, value in accelerator.items():
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, _answer(value)


def _random() -> Iterator[Patch]:
    # No number is drawn on the device, so its random states are those of the host.
    for name in ("manual_seed", "seed", "set_rng_state"):
        yield torch.cuda, name, _answer(None)
        yield torch.cuda, f"{name}_all", _answer(None)
    yield torch.cuda, "initial_seed", torch.initial_seed
    yield torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()
    yield torch.cuda, "get_rng_state_all", lambda: [torch.get_rng_state()]
    fork = torch.random.fork_rng

    def fork_of_host(devices: Any = None, enabled: bool = True, **kwargs: Any) -> Any:
        return fork(devices=[], enabled=enabled, device_type="cuda")

    yield torch.random, "fork_rng", fork_of_host
    yield torch, "Generator", _HostGenerator


def _no_context(note: Callable[[Exception], None]) -> Iterator[Patch]:
    """Refuse to initialize CUDA, from Python or from within torch."""

    def refuse() -> None:
        error = NotImplementedError("torch.cuda was asked for something that only a GPU can do")
        note(error)
        raise error

    name = "_lazy_init"
    initialize = torch.cuda._lazy_init
    for module in [module for key, module in sys.modules.items() if key.startswith("torch.")]:
        if vars(module).get(name) is initialize:
            yield module, name, refuse


class _Nothing:
    """Stands for streams, events and ranges, which hold no memory; accepts any use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _HostGenerator(torch.Generator):
    """A generator of random numbers for any device, since none are drawn."""

    def __new__(cls, device: Any = "cpu") -> _HostGenerator:
        return super().__new__(cls)


def _amp() -> Iterator[Patch]:
    """Let autocast and gradient scaling of "meta" be those of "cuda"."""

    def aliased(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return function(*("cuda" if arg == "meta" else arg for arg in args))

        return call

    for name in (
        "is_autocast_enabled",
        "set_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_dtype",
    ):
        yield torch, name, aliased(getattr(torch, name))
    for module in (torch.amp.autocast_mode, torch.amp):
        yield module, "is_autocast_available", aliased(module.is_autocast_available)
    # In a dry run no gradient is infinite.
    scaler = torch.amp.grad_scaler.GradScaler
    yield scaler, "_maybe_opt_step", lambda self, optimizer, state, *a, **k: optimizer.step(*a, **k)
    yield scaler, "get_scale", lambda self: self._init_scale


def _optimizers() -> Iterator[Patch]:
    """Offer the foreach and fused kernels and the capturable steps that CUDA has."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils as lists

    name = "_get_capturable_supported_devices"
    capturable = [*optimizer._get_capturable_supported_devices(), "meta"]
    for module in [module for key, module in sys.modules.items() if key.startswith("torch.optim")]:
        if hasattr(module, name):
            yield module, name, _answer(capturable)
    for name in (
        "_get_foreach_kernels_supported_devices",
        "_get_fused_kernels_supported_devices",
    ):
        devices = [*getattr(lists, name)(), "meta"]
        for module in (optimizer, lists):
            yield module, name, _answer(devices)


def _backward(mode: _CudaIsMeta) -> Iterator[Patch]:
    """Keep translating in the backward pass, where a checkpoint runs the user's code again.

    `Tensor.backward` is itself a torch function, and inside one the mode is not active.
    """
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        overrides: Any = torch.overrides
        if mode in overrides._get_current_function_mode_stack():
            return engine(*args, **kwargs)
        with mode:
            return engine(*args, **kwargs)

    yield autograd, "_engine_run_backward", run


# Functions that user code compiles run as they are written: a trace of operators does not see a
# compiled kernel, and the compiler does not know the stand-ins of a dry run.


@contextmanager
def uncompiled(note: Callable[[str], None]) -> Iterator[None]:
    """Run compiled functions as they are written.

    Args:
        note: called with the line that calls one, each time; never where this torch does not say.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if missing("calls of compiled functions") is None:
            stack.enter_context(_calls_noted(note))
        yield


def _calls_noted(note: Callable[[str], None]) -> AbstractContextManager[None]:
    from torch._dynamo import eval_frame  # an optimizer imports it in any case

    choose = eval_frame._callback_from_stance

    def noted(callback: Any) -> Any:
        if callable(callback):  # else a function that is never compiled
            line = users_line(traceback.extract_stack())
            note("a function of the workload" if line == IN_BACKWARD else line)
        return choose(callback)

    return replaced(eval_frame, "_callback_from_stance", noted)
