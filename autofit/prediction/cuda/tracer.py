"""A tracer of the meta device that allocates what CUDA would.

`MemoryTracer` sees the tensors that operators return. `CudaTracer` adds the memory that CUDA's
kernels and libraries take: scratch buffers, convolution workspaces, and the workspace of cuBLAS,
which each thread that multiplies matrices gets once and keeps. It stands in for operators that the
meta device lacks, refuses those that need a tensor's values, and estimates what the others cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch

from autofit.devices.gpu_catalogue import AskedGpu, Gpu
from autofit.memory.allocator import Block
from autofit.memory.replay import Recording
from autofit.memory.tracer import MemoryTracer, in_backward, tensors_in
from autofit.prediction.cuda.attention import adds_mask
from autofit.prediction.cuda.convolutions import (
    Direction,
    convolution_of,
    copied_operands,
    in_layout_of_cudnn,
    workspace_bytes,
)
from autofit.prediction.cuda.operators import (
    ORDERS,
    STAND_INS,
    in_memory_of_all_losses,
    is_in_place,
)
from autofit.prediction.cuda.roofline import Operation, operation_of
from autofit.prediction.cuda.scratch import (
    GpuSized,
    Reduction,
    Size,
    Workspace,
    bytes_on,
    scratch,
)
from autofit.prediction.cuda.values import (
    NEEDS_VALUES,
    KnownValues,
    NeedsValues,
    Obstacle,
    asked_by_an_optimizer,
    is_obstacle,
)
from autofit.units import MIB

CUBLASLT_WORKSPACE_BYTES = 1 * MIB
_HOST = torch.device("cpu")
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv"})
# Operators whose workspaces cuDNN chooses by heuristics that it does not document.
_OF_CUDNN = frozenset({"convolution", "_cudnn_rnn"})
# Operators of fused optimizers and of gradient scaling: they return nothing, and meta has not all.
_FUSED_IN_PLACE = re.compile(r"_(fused|amp_foreach)_\w+_")


class CudaTracer(MemoryTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """Traces a dry run on the meta device as if it ran on a GPU.

    Args:
        gpu: the GPU whose memory use is emulated.

    Attributes:
        gpu, queries: the GPU; it notes what it is asked.
        gpu_sized: the allocations whose size the GPU decides, by their numbers.
        obstacle: the first thing that could not be done, also if the user's code caught it.
        known_values: those of some tensors.
        operations: while it is a list, the work of operators is added to it.
        uncompiled: the lines that call compiled functions, which ran as they are written.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(device_type="meta", record=True)
        self.queries = AskedGpu(gpu)
        self.gpu = cast(Gpu, self.queries)
        self.gpu_sized: dict[int, GpuSized] = {}
        self._plain_gpu = gpu
        self.obstacle: Obstacle | None = None
        self.known_values = KnownValues()
        self.operations: list[Operation] | None = None
        self.uncompiled: set[str] = set()
        self._shape_cache = ShapeCache()
        self._has_workspace: set[tuple[str, bool]] = set()
        self._order: list[int | torch.Tensor | None] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in a dry run, and skipping it costs each operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Devices were translated above. Shape functions of meta are Python, and much faster when
        # no function mode sees what they ask of tensors.
        with torch._C.DisableTorchFunction():
            return self.trace(func, types, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on meta tensors, or stand in for it; note what can be done neither way.

        Raises:
            NeedsValues: it asks for a tensor's values.
            Exception: whatever it raises itself.
        """
        try:
            return self._compute(func, args, kwargs)
        except Exception as error:
            self.note(error)
            raise

    def note(self, error: Exception) -> None:
        """Keep an error that is being raised now if it is the first that is unsupported."""
        if is_obstacle(error):
            self.note_obstacle(Obstacle.raised_here(error))

    def note_obstacle(self, obstacle: Obstacle) -> None:
        """Keep it if it is the first; the dry run has no result then."""
        self.obstacle = self.obstacle or obstacle

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor stands for one on the GPU, not in host memory."""
        with torch._C.DisableTorchFunction():
            return tensor.is_meta and not self._is_untracked

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = _name(func)
        if name in _PRODUCTS:
            _check_factors(args)
        real = self.known_values.arguments(func, args, kwargs)
        if real is not None and name == "_to_copy" and kwargs.get("device") == _HOST:
            return func(*real[0], **real[1])
        if name in NEEDS_VALUES and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if real is not None:
                return self.known_values.answer(func, real)
            if name == "_local_scalar_dense" and asked_by_an_optimizer():
                return torch.ones((), dtype=args[0].dtype).item()
            raise NeedsValues(NEEDS_VALUES[name])
        result = self._shapes(name, func, args, kwargs)
        self.known_values.follow(func, real, args, kwargs, result)
        return result

    def _shapes(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in STAND_INS and _on_device(args[0]):
            result, self._order = STAND_INS[name](args)
            return result
        if _on_device(args[0] if args else None):
            if is_in_place(name, args):
                return args[0]
            if _FUSED_IN_PLACE.fullmatch(name):
                return None
        result = self._shape_cache.result(func, args, kwargs, super().compute)
        if adds_mask(name, args, result):
            return args[0].view_as(args[0])
        if name in ORDERS and _on_device(result):
            self._order = ORDERS[name](args, result)
        if name == "convolution":
            return in_layout_of_cudnn(args[0], args[1], (result,))[0]
        if name == "convolution_backward":
            return in_layout_of_cudnn(args[1], args[2], result)
        if name == "log_sigmoid_forward":
            return result[0], result[1].new_empty(0)  # only the CPU fills the buffer
        return in_memory_of_all_losses(name, args, result)

    def account(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Allocate workspaces that are needed for the first time, results, and scratch memory."""
        name = _name(func)
        if self._order:
            order, self._order = self._order, []
            self.allocate_in_order(order)
        super().account(func, args, kwargs, result)
        self.uses_cudnn = self.uses_cudnn or name in _OF_CUDNN
        sizes = self._account_scratch(name, args, result) if _on_device(result) else []
        if self.operations is not None:
            operation = operation_of(func, args, kwargs, result, sizes)
            self.operations += [operation] if operation is not None else []

    @property
    def allocations(self) -> Recording:
        """The events so far, with zero for the sizes that the GPU decides."""
        live, gpu_sized = self.recording, self.gpu_sized
        events = tuple((number, 0 if number in gpu_sized else size) for number, size in live.events)
        first: dict[Hashable, int] = {}  # of a purpose, and its name where sizes are compared
        purposes = live.optional.items()
        optional = {number: first.setdefault(purpose, number) for number, purpose in purposes}
        return replace(live, events=events, optional=optional)

    def _account_scratch(self, name: str, args: Any, result: Any) -> list[Size]:
        """Allocate workspaces and scratch memory, and return the sizes of the latter."""
        if name in _PRODUCTS:
            self._use_workspace("cublas", Workspace())
            if name == "addmm" and args[0].dim() == 1:
                self._use_workspace("cublaslt", CUBLASLT_WORKSPACE_BYTES)
        if name in ("convolution", "convolution_backward"):
            return self._convolve(name, args, result)
        sizes = scratch(name, args)
        self.allocate_in_order(sizes)
        return sizes

    def _convolve(self, name: str, args: Any, result: Any) -> list[Size]:
        """Allocate copies of arguments in another layout, and cuDNN's workspaces.

        Returns:
            The sizes of both.
        """
        convolution, directions, operands = convolution_of(name, args, result)
        sizes: list[Size] = [*copied_operands(convolution, operands)]
        self.allocate_in_order(sizes)
        for direction in directions:
            nbytes = workspace_bytes(convolution, direction, self.gpu)
            # A backward pass ends with that of the first layer, when most memory is free again.
            is_first = directions == [Direction.WEIGHT]
            purpose = None if is_first else (convolution, direction)
            if nbytes:
                self.allocate_in_order([nbytes], optional_for=purpose)
                sizes.append(nbytes)
        if name == "convolution_backward" and args[-1][2]:
            but_channels = frozenset(range(args[0].dim())) - {1}
            self.allocate_in_order([Reduction.of(args[0], but_channels)])
        return sizes

    def _allocate(self, nbytes: Size) -> tuple[int, Block | None]:
        number, block = super()._allocate(bytes_on(self._plain_gpu, nbytes))
        if not isinstance(nbytes, int):
            self.gpu_sized[number] = nbytes
        return number, block

    def _use_workspace(self, library: str, size: Size) -> None:
        """Allocate one for the thread of the forward pass, and one for autograd's thread."""
        owner = library, in_backward()
        if owner not in self._has_workspace:
            self._has_workspace.add(owner)
            self._allocate(size)


def _check_factors(args: Any) -> None:
    """Raise what CUDA raises for a product of two types; the meta device takes them."""
    first, second = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)][-2:]
    if first != second:
        raise RuntimeError(f"expected factors of the same dtype, but got: {first} != {second}")


def _on_device(value: Any) -> bool:
    """Return whether a value, or one of several, is a tensor of the meta device."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(part, torch.Tensor) and part.is_meta for part in parts)


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


# A cache of what operators return.

# Shape, strides and type of a tensor.
_Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.memory_format, torch.layout)


class _CannotBeKept(Exception):
    """More than shapes may decide on the result."""


class ShapeCache:
    """Remembers what operators return on the meta device.

    Most of a dry run's time goes into shape functions that PyTorch has in Python (normalizations,
    activations), which layers and steps call again with arguments that look alike. The result
    follows from the arguments' shapes, strides and types, so it is kept for operators that make new
    tensors.
    """

    def __init__(self) -> None:
        self._looks: dict[Hashable, tuple[Any, list[_Look | None]]] = {}

    def result(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Return what `run(func, args, kwargs)` returns, or new tensors that look the same."""
        key = _call_key(func, args, kwargs) if _makes_new_tensors(func) else None
        if key is None:
            return run(func, args, kwargs)
        if (looked_up := self._looks.get(key)) is not None:
            kind, looks = looked_up
            results = [
                None
                if look is None
                else torch.empty_strided(look[0], look[1], dtype=look[2], device="meta")
                for look in looks
            ]
            return kind(results) if kind is not None else results[0]
        result = run(func, args, kwargs)
        several = isinstance(result, (tuple, list))
        tensors = list(result) if several else [result]
        if _are_new([tensor for tensor in tensors if tensor is not None], (args, kwargs)):
            looks = [None if tensor is None else _look(tensor) for tensor in tensors]
            self._looks[key] = type(result) if several else None, looks
        return result


def _call_key(func: Any, args: Any, kwargs: Any) -> Hashable | None:
    """Return what decides on an operator's result; None where that is more than shapes."""
    try:
        named = tuple((name, _key(value)) for name, value in kwargs.items())
        return func, torch.get_default_dtype(), tuple(map(_key, args)), named
    except _CannotBeKept:
        return None


@cache
def _makes_new_tensors(func: Any) -> bool:
    returned = func._schema.returns
    aliases = [value.alias_info for value in returned if value.alias_info is not None]
    return bool(returned) and not func._schema.is_mutable and not aliases


def _key(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN or not _is_simple(value):
            raise _CannotBeKept
        return _look(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, torch.device):
        return str(value)
    if type(value) in _SCALARS:
        return type(value), value
    raise _CannotBeKept


def _is_simple(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and tensor.layout is torch.strided and not tensor.is_complex()


def _are_new(results: list[Any], args: Any) -> bool:
    """Return whether each result fills a storage of its own.

    The schema does not tell: that of `_unsafe_view` names no alias.
    """
    if not all(type(each) is torch.Tensor and _is_simple(each) for each in results):
        return False
    storages = [tensor.untyped_storage() for tensor in (*results, *tensors_in(args))]
    of_results, of_args = storages[: len(results)], storages[len(results) :]
    pairs = zip(of_results, results, strict=True)
    whole = all(storage.nbytes() == each.nbytes for storage, each in pairs)
    keys = {each._cdata for each in of_results} - {each._cdata for each in of_args}
    return whole and len(keys) == len(of_results)


def _look(tensor: torch.Tensor) -> _Look:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
