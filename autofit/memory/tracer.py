"""A tracer that turns the tensors of any code into calls of the simulated allocator.

`MemoryTracer` sees every operator, of real computation on the CPU and of dry runs on the meta
device alike. A storage that an operator creates on the traced device is allocated, and released
when it is collected: inside or outside the mode, in forward, backward, a checkpoint's recomputation
or an optimizer's step. So is one whose size is set past all operators (`UntypedStorage.resize_`),
as sharding does. Where the allocator refuses, `torch.OutOfMemoryError` is raised out of the
operator, as on a GPU. Storages that existed before (seen as arguments first, or registered) are
foreign: neither they nor views of them count.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeAlias

import torch

from autofit.memory.allocator import Block, CachingAllocator, OutOfBudget
from autofit.memory.replay import Event, Recording
from autofit.torch_private import TorchDispatchMode


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value and in its lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return a tensor's storage, or one for each part of a sparse or a wrapped tensor."""
    if type(tensor) not in _PLAIN and _unwraps_itself(type(tensor)):
        inner: Any = tensor
        values = (getattr(inner, name) for name in inner.__tensor_flatten__()[0])
        tensors = (
            each for each in values if isinstance(each, torch.Tensor)
        )  # others have no bytes
        return [storage for each in tensors for storage in storages_of(each)]
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return [part.untyped_storage() for part in parts]
    return []  # opaque layouts (MKL-DNN) do not show their memory


# The order of allocations; see `MemoryTracer.allocate_in_order`.
Order: TypeAlias = list[int | torch.Tensor | None]

_FOREIGN = 0


class MemoryTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """A dispatch mode that feeds an allocator; it may be entered any number of times.

    Args:
        allocator: the allocator; None: one without a limit.
        device_type: the kind of device whose storages count, such as "cpu" or "meta".
        record: keep every event for replays.

    Attributes:
        allocator: the allocator.
        events: the events so far, if they are recorded.
        forward: numbers of allocations made with gradients enabled, outside a backward pass.
        step_ends: for each optimizer step, the number of events at its end.
        resized: number of a storage whose size was set -> its number before.
        uses_cudnn: see `Recording`.
        last_number: of the latest allocation; 0 before the first.
    """

    def __init__(
        self,
        allocator: CachingAllocator | None = None,
        *,
        device_type: str = "cpu",
        record: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.allocator = allocator or CachingAllocator()
        self.events: list[Event] = []
        self.forward: set[int] = set()
        self.resized: dict[int, int] = {}
        self.uses_cudnn = False
        self._device_type = device_type
        self._record = record
        self.step_ends: list[int] = []
        self._optional: dict[int, Hashable] = {}
        self._storages: dict[int, _Storage] = {}
        self.last_number = _FOREIGN
        self._collected: deque[_Storage] = deque()
        self._busy = False
        self._is_untracked = False

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        _entered.append(self)
        torch.UntypedStorage.resize_ = _resize_and_notify  # type: ignore[method-assign, assignment]  # no operator
        return self

    def __exit__(self, *raised: Any) -> None:
        _entered.remove(self)
        if not _entered:
            del torch.UntypedStorage.resize_  # that of its C class is found again
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.trace(func, types, args, kwargs or {})

    def trace(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and account for it; the body of `__torch_dispatch__`."""
        if types and any(map(_unwraps_itself, types)):
            return NotImplemented  # its inner tensors follow one by one, and those count
        arguments = tensors_in((args, kwargs))
        if func is not _LIFT_FRESH:
            self._meet(arguments)
        result = self.compute(func, args, kwargs)
        if self._is_untracked:
            self._meet(tensors_in(result))
            return result
        try:
            self._settle(arguments)
            self.account(func, args, kwargs, result)
        except torch.OutOfMemoryError:
            del arguments, result  # the traceback must not keep alive what did not fit
            raise
        return result

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; subclasses may stand in for operators that the device lacks."""
        return func(*args, **kwargs)

    def account(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Allocate what an operator returned; subclasses may add the memory of its kernel.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        self._settle(tensors_in(result))

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Treat storages created inside as foreign, as if they lay in the host's memory."""
        before, self._is_untracked = self._is_untracked, True
        try:
            yield
        finally:
            self._is_untracked = before

    def end_step(self) -> None:
        """Mark the end of an optimizer step (see `recording`)."""
        self.step_ends.append(len(self.events))

    @property
    def recording(self) -> Recording:
        """The events recorded so far, and where steps ended."""
        ends, optional = tuple(self.step_ends), dict(self._optional)
        return Recording(tuple(self.events), ends, optional, self.uses_cudnn)

    def live_numbers(self) -> list[int]:
        """Return the numbers of the storages that count now."""
        return [each.number for each in self._storages.values() if each.number != _FOREIGN]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage in the events; None where it does not count."""
        for storage in storages_of(tensor):
            tracked = self._storages.get(storage._cdata)
            if tracked is not None and tracked.number != _FOREIGN:
                return tracked.number
        return None

    def allocate_in_order(self, items: Iterable[Any], *, optional_for: Hashable = None) -> None:
        """Allocate the scratch memory and the results of a kernel in turn.

        Args:
            items: a number is scratch memory of that many bytes, a tensor is a result; None
                releases the scratch memory so far, and so does the end.
            optional_for: the purpose that can do without the scratch (see `Recording.optional`).

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        scratch: list[tuple[int, Block | None]] = []
        try:
            for item in items:
                if isinstance(item, torch.Tensor):
                    self._settle([item])
                elif item is None:
                    self._release_all(scratch)
                else:
                    scratch.append(self._allocate(item))
                    if optional_for is not None:
                        self._optional[scratch[-1][0]] = optional_for
        finally:
            self._release_all(scratch)

    def _release_all(self, blocks: list[tuple[int, Block | None]]) -> None:
        while blocks:
            self._release(*blocks.pop())

    def _meet(self, tensors: Any) -> None:
        """Register every storage that is not known yet as foreign."""
        for tensor in tensors:
            if tensor.device.type == self._device_type:
                for storage in storages_of(tensor):
                    if storage._cdata not in self._storages:
                        self._track(storage)

    def _settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Allocate storages that an operator created, and reallocate those that it resized."""
        for tensor in tensors:
            if tensor.device.type != self._device_type:
                continue
            for storage in storages_of(tensor):
                tracked = self._storages.get(storage._cdata)
                nbytes = storage.nbytes()
                if tracked is None:
                    tracked = self._track(storage)
                    tracked.number, tracked.block = self._allocate(nbytes)
                    tracked.nbytes = nbytes
                elif tracked.nbytes != nbytes and tracked.number != _FOREIGN:
                    self._resize(tracked, nbytes)

    def _track(self, storage: torch.UntypedStorage) -> _Storage:
        tracked = _Storage(storage, self._on_collected)
        tracked.key, tracked.number = storage._cdata, _FOREIGN
        tracked.block, tracked.nbytes = None, storage.nbytes()
        self._storages[tracked.key] = tracked
        return tracked

    def _resize(self, tracked: _Storage, nbytes: int) -> None:
        """Allocate the new size before the old one is released, as CUDA does."""
        old = tracked.number, tracked.block
        tracked.number, tracked.block = self._allocate(nbytes)
        tracked.nbytes = nbytes
        self._release(*old)

    def size_was_set(self, storage: torch.UntypedStorage) -> None:
        """Account for a new size of a storage that counts.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        tracked = self._storages.get(storage._cdata)
        nbytes = storage.nbytes()
        if tracked is None or tracked.number == _FOREIGN or tracked.nbytes == nbytes:
            return
        before = tracked.number
        self._resize(tracked, nbytes)
        self.resized[tracked.number] = before

    def _on_collected(self, tracked: _Storage) -> None:
        # A storage may be collected at any time, also while the allocator is at work.
        self._collected.append(tracked)
        self._release_collected()

    def _release_collected(self) -> None:
        while self._collected and not self._busy:
            tracked = self._collected.popleft()
            if self._storages.get(tracked.key) is tracked:
                del self._storages[tracked.key]
            self._release(tracked.number, tracked.block)

    def _allocate(self, nbytes: int) -> tuple[int, Block | None]:
        """Return a new number and its block (None for an empty storage)."""
        self.last_number += 1
        number = self.last_number
        self._busy = True
        try:
            block = self.allocator.allocate(nbytes) if nbytes else None
            if self._record:
                self.events.append((number, nbytes))
                if torch.is_grad_enabled() and not in_backward():
                    self.forward.add(number)
        except OutOfBudget as refusal:
            raise _out_of_memory(refusal) from None
        finally:
            self._busy = False
        self._release_collected()
        return number, block

    def _release(self, number: int, block: Block | None) -> None:
        if number == _FOREIGN:
            return
        self._busy = True
        if block is not None:
            self.allocator.free(block)
        if self._record:
            self.events.append((-number, 0))
        self._busy = False
        self._release_collected()


def _out_of_memory(refusal: OutOfBudget) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory (simulated). {refusal}")


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A reference to a watched storage, and the block that stands for it."""

    __slots__ = ("block", "key", "nbytes", "number")
    key: int
    number: int
    nbytes: int
    block: Block | None


# The tracers that are entered now, once for each time.
_entered: list[MemoryTracer] = []
_resize_storage = torch.UntypedStorage.resize_
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _resize_and_notify(storage: torch.UntypedStorage, nbytes: int) -> Any:
    result = _resize_storage(storage, nbytes)
    for tracer in dict.fromkeys(_entered):
        tracer.size_was_set(storage)
    return result


# The end of `torch.tensor`: its argument was just created, out of the mode's sight.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


def in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def _unwraps_itself(kind: type) -> bool:
    """Return whether a tensor class runs operators on inner tensors of its own."""
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass_type(kind)


# Compiled code: torch.compile takes other tracers for a reason not to compile, and the code that
# inductor writes for a CPU makes its buffers by a function of its own, past any dispatch mode.

# The name of that function in the modules that inductor writes.
_ALLOCATES = "empty_strided_cpu"


class CompiledMemoryTracer(MemoryTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """A tracer of a CPU's tensors under which compiled code runs compiled.

    It stands in for the function that makes the buffers (`_empty_strided_cpu`): one is allocated
    when it is made and released when it is collected, as any storage. What kernels keep on their
    stacks is not seen.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the mode is off while code is compiled, and on while that code runs."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return the same for torch 2.8, which has only this method."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Enter the tracer, and see what compiled code allocates inside."""
        guards: Any = torch._C._dynamo.guards
        allocate = guards._empty_strided_cpu

        def counted(*args: Any) -> Any:
            buffer = allocate(*args)
            self._settle([buffer])
            return buffer

        guards._empty_strided_cpu = counted
        _replace(allocate, counted)
        try:
            with self:
                yield
        finally:
            guards._empty_strided_cpu = allocate
            _replace(counted, allocate)


def _replace(before: Any, after: Any) -> None:
    """Make modules written by inductor call one function in place of another."""
    cache = sys.modules.get("torch._inductor.codecache")
    for module in () if cache is None else cache.PyCodeCache.modules:
        if vars(module).get(_ALLOCATES) is before:
            setattr(module, _ALLOCATES, after)
