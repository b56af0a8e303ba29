"""Saved activations in the host's memory between forward and backward.

`offload.activations` starts at False. With True, what autograd saves in forward is copied to the
host and its memory on the device is free until backward asks for it. Parameters and buffers stay,
and so does what is small: it would cost more launches than bytes. Nothing is computed again and
nothing is rounded, so losses and gradients are the same to the bit.

On a GPU the host's memory is pinned, buffers are used again by later steps, and copies run on a
stream of their own beside the computation. As backward asks for a tensor, the one that was saved
before it is already copied back, since it is most likely the next; never more than one. It is a
last resort: a step moves all its activations over the bus twice, which takes longer than most
recomputations, so it is offered only where a search names this strategy or knows how long the
training is.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autofit.plan import Dimension
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .calls import run_step
from .checkpointing.saved_tensors import saving_by, version_counter
from .one_setting import OneSetting

SETTING = "offload.activations"
# Smaller tensors stay on the device: a choice, not measured.
LEAST_BYTES = 2**17
# Samples of the forward that is looked at: of one, BatchNorm has one value a channel to normalize
# over, and refuses.
_SAMPLES = 2
# The share of the host's available memory that may hold activations.
HOST_SHARE = 0.8
# Pinning takes about half a second per GiB (assumed, not measured); a trial costs that more.
_PIN_S_PER_BYTE = 1 / 2**31
_TRIAL_COST_S = 0.5


class Offload(OneSetting):
    """Activations in the host's memory from forward to backward."""

    name = "offload"
    setting, plain = SETTING, False
    phase = Phase.STEP
    numerics = Numerics.EXACT

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return a dimension if a forward saves activations that are worth moving."""
        samples = context.samples_per_step
        looked_at = min(_SAMPLES, samples)
        moved: int = context.with_training(partial(_moved_bytes, samples / looked_at), looked_at)
        if not moved:
            context.note(
                f"{SETTING} skipped: a forward of {samples} samples saves no activation of "
                f"{LEAST_BYTES // 2**10} KiB or more"
            )
            return {SETTING: Dimension([False])}
        return {
            SETTING: Dimension(
                [False, True],
                when={"compile.mode": ("off", None)},  # compiled code saves by itself
                trial_cost_s=round(_TRIAL_COST_S + moved * _PIN_S_PER_BYTE, 1),
            )
        }

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Have forwards save to the host; leaving the context frees what is held.

        Steps raise MemoryError where the host has no room for what they save.
        """
        return _offloading(training)

    def lines(self, value: Any, payload: Any) -> list[str]:
        return [
            "import torch",
            "from autofit.strategies.offload import offloaded",
            "with offloaded(model):  # around the training loop",
        ]


@contextmanager
def offloaded(model: torch.nn.Module) -> Iterator[None]:
    """Save the activations of forwards inside to the host's memory.

    Args:
        model: its parameters and buffers stay on the device.
    """
    host = _Host()
    try:
        with torch.autograd.graph.saved_tensors_hooks(*_packing(host, model)):
            yield
    finally:
        host.clear()


@contextmanager
def _offloading(training: TrainingView) -> Iterator[None]:
    host = _Host(training.in_host_memory, HOST_SHARE * training.host_available_bytes)
    try:
        with saving_by(training, *_packing(host, training.model)):
            yield
    finally:
        host.clear()


def _packing(
    host: _Host, model: torch.nn.Module
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return how to save a tensor of a forward, and how to get it back in backward."""
    is_moved = _movable(model, LEAST_BYTES)

    def pack(tensor: torch.Tensor) -> _Saved:
        if is_moved(tensor):
            return _Saved(host.move(tensor), tensor._version, version_counter(tensor))
        return _Saved(tensor, tensor._version, tensor)

    def unpack(saved: _Saved) -> torch.Tensor:
        saved.check()
        return (
            saved.value if isinstance(saved.value, torch.Tensor) else host.bring_back(saved.value)
        )

    return pack, unpack


def _movable(model: torch.nn.Module, least_bytes: float) -> Callable[[torch.Tensor], bool]:
    """Return a function that says whether a tensor has memory of its own that is worth moving.

    Not that of the model's parameters and buffers, as they are now.
    """
    held = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def is_movable(tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and least_bytes <= tensor.nbytes <= tensor.untyped_storage().nbytes()
            and _storage(tensor) not in held
        )

    return is_movable


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _moved_bytes(times: float, training: TrainingView, batch: Any) -> int:
    """Return the bytes that a forward of so many times the batch's samples would move."""
    moved: dict[int, int] = {}
    is_moved = _movable(training.model, LEAST_BYTES / times)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if is_moved(tensor):
            moved[_storage(tensor)] = round(times * tensor.nbytes)
        return tensor

    with saving_by(training, pack, lambda tensor: tensor):
        run_step(training, batch)  # not `loss`: a training_step of the user's own has no other way
    return sum(moved.values())


@dataclass(frozen=True)
class _Saved:
    """What stands for a saved tensor: autograd itself checks no versions where there are hooks.

    Attributes:
        value: the tensor, or where it lies now.
        version: of the tensor as it was saved.
        counter: a tensor with the same counter of versions; None: they are not counted.
    """

    value: torch.Tensor | _Moved
    version: int
    counter: torch.Tensor | None

    def check(self) -> None:
        """Raise RuntimeError where the tensor was changed in place since, as autograd does."""
        if self.counter is not None and self.counter._version != self.version:
            value = self.value.copy if isinstance(self.value, _Moved) else self.value
            raise RuntimeError(
                "a tensor that the backward needs was modified in place after the forward "
                f"saved it: {value.dtype} {list(value.shape)} is at version "
                f"{self.counter._version}, expected {self.version}"
            )


class _Moved:
    """A saved tensor that lies on the host; its buffer is free again when this is collected.

    Attributes:
        copy: its values in the host's memory, with its shape and dense strides.
        device: where it was.
        copied: the event at the end of the copy to the host; None: it has ended.
        restored: the tensor on its device again, as long as somebody uses it.
        before: what was moved before it.
        ahead: the tensor on its device again, before somebody asked for it.
    """

    def __init__(self, copy: torch.Tensor, device: torch.device, copied: Any, host: _Host) -> None:
        self.copy, self.device, self.copied = copy, device, copied
        self.restored: weakref.ref[torch.Tensor] | None = None
        self.before: weakref.ref[_Moved] | None = None
        self.ahead: _Ahead | None = None
        self._host = host

    def __del__(self) -> None:
        self.forget_ahead()
        self._host.take_back(self.copy)

    def forget_ahead(self) -> None:
        """Drop what was brought back and is not asked for; its memory awaits the copy."""
        if self.ahead is not None:
            self.ahead.asked_for()
            self.ahead = None


@dataclass(frozen=True)
class _Ahead:
    """A tensor that is copied back before backward asks for it.

    Attributes:
        tensor: on its device.
        copied: the event at the end of the copy.
        stream: whose memory the tensor has.
    """

    tensor: torch.Tensor
    copied: Any
    stream: Any

    def asked_for(self) -> torch.Tensor:
        """Return the tensor; what may use its memory from now on awaits the copy."""
        for stream in {self.stream, torch.cuda.current_stream(self.tensor.device)}:
            stream.wait_event(self.copied)
        return self.tensor


class _Host:
    """The host's memory that saved tensors are moved to.

    Args:
        in_host_memory: entered while its tensors are made.
        most_bytes: how much of it there may be.
    """

    def __init__(
        self,
        in_host_memory: Callable[[], AbstractContextManager[None]] = nullcontext,
        most_bytes: float = math.inf,
    ) -> None:
        self._in_host_memory = in_host_memory
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._moved: dict[Hashable, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}
        self._held_bytes, self._most_bytes = 0, most_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: weakref.ref[_Moved] | None = None
        self._ahead: weakref.ref[_Moved] | None = None

    @torch.no_grad()
    def move(self, tensor: torch.Tensor) -> _Moved:
        """Copy a tensor to the host, once for all that save it."""
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        values = tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor._version
        key = _storage(tensor), *place, *values
        if (before := self._moved_before(key)) is not None:
            return before
        moved = self._copied(tensor)
        moved.before, self._last = self._last, weakref.ref(moved)
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._moved[key] = (storage, weakref.ref(moved))
        return moved

    def _moved_before(self, key: Hashable) -> _Moved | None:
        storage, moved = self._moved.get(key, (None, None))
        if storage is None or moved is None:
            return None
        # another storage may lie at the address of one that is gone
        is_gone = storage.expired()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return None if is_gone else moved()

    def _copied(self, tensor: torch.Tensor) -> _Moved:
        with self._in_host_memory():
            copy = self._buffer(tensor).as_strided(
                tensor.shape, torch.empty_like(tensor, device="meta").stride()
            )
            if tensor.device.type != "cuda":
                return _Moved(copy.copy_(tensor), tensor.device, None, self)
        stream = self._stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
            copied = stream.record_event()
        tensor.record_stream(stream)  # its memory is not given out again before it is copied
        return _Moved(copy, tensor.device, copied, self)

    @torch.no_grad()
    def bring_back(self, moved: _Moved) -> torch.Tensor:
        """Return the tensor, on its device again."""
        tensor = moved.restored() if moved.restored is not None else None
        if tensor is None and moved.ahead is not None:
            tensor, moved.ahead = moved.ahead.asked_for(), None
        if tensor is None:
            tensor = _empty_beside(moved)
            if moved.copied is not None:
                torch.cuda.current_stream(moved.device).wait_event(moved.copied)
            tensor.copy_(moved.copy, non_blocking=True)
        moved.restored = weakref.ref(tensor)
        if moved.device.type == "cuda":
            self._bring_ahead(moved.before() if moved.before is not None else None)
        return tensor

    def _bring_ahead(self, moved: _Moved | None) -> None:
        """Begin to copy this one back, in place of what was so before and is not asked for.

        On the stream of the copies to the host, so that it follows its own; the memory is free when
        all that is launched so far has ended.
        """
        if moved is None or moved.ahead is not None or moved.restored is not None:
            return
        if (other := self._ahead() if self._ahead is not None else None) is not None:
            other.forget_ahead()
        stream, current = self._stream(moved.device), torch.cuda.current_stream(moved.device)
        tensor = _empty_beside(moved)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            tensor.copy_(moved.copy, non_blocking=True)
            copied = stream.record_event()
        moved.ahead, self._ahead = _Ahead(tensor, copied, current), weakref.ref(moved)

    def take_back(self, copy: torch.Tensor) -> None:
        """Keep a buffer for later tensors of its size."""
        self._free[copy.numel(), copy.dtype].append(copy)

    def clear(self) -> None:
        """Free all buffers that no graph holds."""
        self._free.clear()
        self._moved.clear()

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free[tensor.numel(), tensor.dtype]
        if free:
            return free.pop()
        self._held_bytes += tensor.nbytes
        if self._held_bytes > self._most_bytes:
            raise MemoryError(
                f"{SETTING}: the step saves more than {self._most_bytes / 2**30:.2g} "
                f"GiB, {HOST_SHARE:.0%} of the host's available memory"
            )
        on_gpu = tensor.device.type == "cuda"
        device = torch.device("cpu") if on_gpu else tensor.device
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device=device, pin_memory=on_gpu)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        return self._streams[device]


def _empty_beside(moved: _Moved) -> torch.Tensor:
    """Return memory for the tensor on its device."""
    copy = moved.copy
    return torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=moved.device)
