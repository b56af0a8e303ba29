"""Saved activations in the host's memory between forward and backward.

`offload.activations` starts at False. With True, what autograd saves in forward is copied to the
host and its memory on the device is free until backward asks for it. Parameters and buffers stay,
and so does what is small: it would cost more launches than bytes. Nothing is computed again and
nothing is rounded, so losses and gradients are the same to the bit.

It differs from `torch.autograd.graph.save_on_cpu` in what stays on the device, and in that a tensor
that stays and is written to between forward and backward raises, as it does without hooks. One that
moved keeps the values it was saved with, each time that it was saved. On a GPU the host's memory is
pinned, and copies run in the order of the computation: so the memory of a tensor is free at once,
and what a step needs does not depend on how far ahead the host runs. It is a last resort: a step
moves all its activations over the bus twice, which takes longer than most recomputations, so it is
offered only where a search names this strategy or knows how long the training is.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autofit.plan import CostHint, Dimension
from autofit.strategy import Context, Numerics, Phase, TrainingView, undone

from .calls import look, run_step, storage_of
from .one_setting import OneSetting

SETTING = "offload.activations"
# Smaller tensors stay on the device: a choice, not measured.
MIN_BYTES = 2**17
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
        run = partial(_moved_bytes, samples / looked_at)
        moved: int | None = look(context, SETTING, run, looked_at)
        if moved == 0:
            context.note(
                f"{SETTING} skipped: a forward of {samples} samples saves no activation of "
                f"{MIN_BYTES // 2**10} KiB or more"
            )
        if not moved:
            return {SETTING: Dimension([False])}
        return {
            SETTING: Dimension(
                [False, True],
                when={"compile.mode": ("off", None)},  # compiled code saves by itself
                trial_cost_s=round(_TRIAL_COST_S + moved * _PIN_S_PER_BYTE, 1),
                hints={True: CostHint(seconds_per_sample=1.0)},  # copies beside kernels, at best
                opt_in=context.device.type == "cpu",  # there it frees no memory of the machine
            )
        }

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Have forwards save to the host.

        Steps raise MemoryError where the host has no room for what they save.
        """
        host = _Host(training.in_host_memory, HOST_SHARE * training.host_available_bytes)
        return _saving(training, lambda: _packing(host, training.model))

    def lines(self, value: Any, payload: Any) -> list[str]:
        return [
            "import torch",
            "from autofit.strategies.offload import offloaded",
            "with offloaded(model):  # around the training loop",
        ]


def offloaded(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Save the activations of forwards inside to the host's memory.

    Args:
        model: its parameters and buffers stay on the device.
    """
    return saved_tensors_hooks(*_packing(_Host(), model))


def _saving(
    training: TrainingView, hooks: Callable[[], tuple[Any, Any]]
) -> AbstractContextManager[None]:
    """Save tensors in the training's forwards by what `hooks()` returns, made for each."""
    around = lambda: saved_tensors_hooks(*hooks())  # noqa: E731  # a context a forward
    return undone(training.wrap_forward(around, also_recomputation=False))


def _packing(
    host: _Host, model: torch.nn.Module
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return how to save a tensor of a forward, and how to get it back in backward."""
    is_moved = _movable(model, MIN_BYTES)

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device | None, int]:
        if is_moved(tensor):
            return host.copy_of(tensor), tensor.device, 0
        return tensor.detach(), None, tensor._version  # see `saved_bytes`

    def unpack(saved: tuple[torch.Tensor, torch.device | None, int]) -> torch.Tensor:
        tensor, device, version = saved
        if device is not None:
            return tensor.to(device, non_blocking=True, copy=True)
        if tensor._version != version:  # autograd itself checks none where there are hooks
            raise RuntimeError(
                "a tensor that the backward needs was modified in place after the forward "
                f"saved it: {tensor.dtype} {list(tensor.shape)} is at version "
                f"{tensor._version}, expected {version}"
            )
        return tensor

    return pack, unpack


def _movable(model: torch.nn.Module, min_bytes: float) -> Callable[[torch.Tensor], bool]:
    """Return a function that says whether a tensor has memory of its own that is worth moving.

    Not that of parameters, also of those that are gathered for the time of a call, and buffers.
    """
    of_model = {storage_of(tensor) for tensor in chain(model.parameters(), model.buffers())}

    def is_movable(tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and min_bytes <= tensor.nbytes <= tensor.untyped_storage().nbytes()
            and not isinstance(tensor._base, torch.nn.Parameter)
            and storage_of(tensor) not in of_model
        )

    return is_movable


def _moved_bytes(times: float, training: TrainingView, batch: Any) -> int:
    """Return the bytes that a forward of this many times the batch's samples would move."""
    is_moved = _movable(training.model, MIN_BYTES / times)
    moved: dict[Any, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if is_moved(tensor):
            moved[storage_of(tensor)] = round(times * tensor.nbytes)
        return tensor.detach()  # see `saved_bytes`

    with _saving(training, lambda: (pack, lambda tensor: tensor)):
        run_step(training, batch)
    return sum(moved.values())


class _Host:
    """The host's memory that saved tensors are copied to; torch's allocator reuses what is freed.

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
        self._held_bytes, self._most_bytes = 0, most_bytes

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in the host's memory; raise MemoryError where there is no room."""
        on_host = tensor.device.type in ("cpu", "meta")
        nbytes = 1 << (tensor.nbytes - 1).bit_length()  # what torch's host allocator takes for it
        if self._held_bytes + nbytes > self._most_bytes:
            raise MemoryError(
                f"{SETTING}: the step saves more than {self._most_bytes / 2**30:.2g} "
                f"GiB, {HOST_SHARE:.0%} of the host's available memory"
            )
        with self._in_host_memory():
            device = tensor.device if on_host else "cpu"
            copy = torch.empty_like(tensor, device=device, pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=True)
        self._hold(nbytes)
        weakref.finalize(copy, self._hold, -nbytes)
        return copy

    def _hold(self, more_bytes: int) -> None:
        self._held_bytes += more_bytes
