"""Where memory ends for a process of the comparison, and what is counted there.

Every tool runs in processes of its own, under the same end of memory: on the CPU device that of the
simulated CUDA caching allocator, on a card that of torch's own. What ran and what ran out of memory
is written to a log by the user's code and by the allocator, never taken from a tool's own account.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from autofit.devices.cpu import CpuDevice, fix_malloc_thresholds
from autofit.memory import tracer

LOG = "VERSUS_LOG"
"""The variable with the path of the log."""
# What lasts until the process ends, but for `Memory.unobserved`; a context that nobody names would
# be left at once.
_FOR_GOOD = ExitStack()


def compute_alike(place: str) -> None:
    """Have this process compute as every other of the comparison.

    All steps train on one batch. Once it is memorized, gradients are denormal numbers, with which
    processors compute many times more slowly: a user's training, with many batches, has none. And
    glibc keeps what is freed, as `Report.apply` has it do, so that plans are compared and not
    allocators.
    """
    torch.set_flush_denormal(True)
    fix_malloc_thresholds(torch.device(place if place == "cpu" else "cuda"))


def note(event: str, **values: Any) -> None:
    """Append an event to the log, in one write, whichever process it happens in."""
    if path := os.environ.get(LOG):
        line = json.dumps({"pid": os.getpid(), "event": event, **values})
        with open(path, "a") as file:
            file.write(line + "\n")


@dataclass(frozen=True)
class Memory:
    """The memory of this process's device, as any user could read it.

    Attributes:
        budget_bytes: where it ends.
        device: simulated; None: a card.
    """

    budget_bytes: int
    device: CpuDevice | None

    @property
    def reserved_bytes(self) -> int:
        """Bytes in segments of the allocator."""
        return self.device.read().reserved_bytes if self.device else torch.cuda.memory_reserved()

    @property
    def peak_bytes(self) -> int:
        """Most bytes in segments so far, and on a card what the process holds beside them."""
        if self.device:
            return self.device.read().peak_reserved_bytes
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.max_memory_reserved() + total - free - torch.cuda.memory_reserved()

    def release(self) -> None:
        """Give cached segments back."""
        if self.device:
            self.device.release_cache()
        else:
            torch.cuda.empty_cache()

    def place_model(self, model: nn.Module) -> None:
        """Have a model that was made before be held here; on a card its tool moves it there."""
        if self.device:
            self.device.place_model(model)

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Time steps without what it takes to simulate an allocator, as autofit times its own."""
        _FOR_GOOD.close()
        try:
            yield
        finally:
            if self.device:
                _FOR_GOOD.enter_context(self.device.accounting())


@cache
def bounded(place: str, budget_bytes: int) -> Memory:
    """Let this process's memory end at the budget, from now to its end.

    A card that is emulated ends there by itself. On a real one the allocator's share is capped.
    """
    count_ooms(place)
    if place == "cpu":
        device = CpuDevice()
        device.limit(budget_bytes)
        _FOR_GOOD.enter_context(device.accounting())
        return Memory(budget_bytes, device)
    if place == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))
    return Memory(budget_bytes, None)


@cache
def count_ooms(place: str) -> None:
    """Note each refusal of the allocator in this process, whoever catches it, and each OOM.

    They differ: a convolution goes on without the workspace that cuDNN was refused. An OOM is an
    error that an operation raised, since it could not go on. Where the card had what was asked for,
    the tool itself has limited its process to less.
    """
    last = _Last()
    _note_errors(last)
    if place == "cpu":

        def noted(refusal: Any) -> torch.OutOfMemoryError:
            note("refusal")
            # Worded as torch words it: some tools know an OOM by its text alone.
            return torch.OutOfMemoryError(f"CUDA out of memory. {refusal}")

        tracer._out_of_memory = noted
    else:

        def refused(device: int, asked_bytes: int, allocated_bytes: int, free_bytes: int) -> None:
            note("refusal")
            last.had_room = asked_bytes <= free_bytes

        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch left it so
        observe: Any = vars(torch._C)["_cuda_attach_out_of_memory_observer"]
        observe(refused)


@dataclass
class _Last:
    """The last refusal in this process: whether the card had what was asked for."""

    had_room: bool = False


def _note_errors(last: _Last) -> None:
    kind: Any = torch.OutOfMemoryError
    made = kind.__init__

    def noted(error: torch.OutOfMemoryError, *arguments: object) -> None:
        note("own limit" if last.had_room else "oom")
        made(error, *arguments)

    kind.__init__ = noted
