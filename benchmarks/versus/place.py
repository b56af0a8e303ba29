"""Where memory ends for a process of the comparison, and what is counted there.

Every tool runs in processes of its own, under the same end of memory: on the CPU device that of the
simulated CUDA caching allocator, on a card that of torch's own. Each OOM, an error that an
operation raised since it could not go on, is written to a log, whoever catches it.
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

LOG, FIXED = "VERSUS_LOG", "VERSUS_FIXED"
"""Variables: the path of the log, and whether glibc's thresholds are fixed in this process."""
# What lasts until the process ends, but for `Memory.unobserved`; a context that nobody names would
# be left at once.
_FOR_GOOD = ExitStack()


def compute_alike(place: str) -> None:
    """Have this process compute as every other of the comparison.

    All steps train on one batch. Once it is memorized, gradients are denormal numbers, with which
    processors compute many times more slowly: a user's training, with many batches, has none. And
    where asked, glibc keeps what is freed, as `Report.apply` has it do.
    """
    torch.set_flush_denormal(True)
    if os.environ.get(FIXED):
        fix_malloc_thresholds(torch.device(place))


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
    """Let this process's memory end at the budget, from now to its end."""
    count_ooms(place)
    if place == "cpu":
        device = CpuDevice()
        device.limit(budget_bytes)
        _FOR_GOOD.enter_context(device.accounting())
        return Memory(budget_bytes, device)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))
    return Memory(budget_bytes, None)


@cache
def count_ooms(place: str) -> None:
    """Note each OOM in this process, whoever catches it."""
    kind: Any = torch.OutOfMemoryError
    made = kind.__init__

    def noted(error: torch.OutOfMemoryError, *arguments: object) -> None:
        if path := os.environ.get(LOG):
            with open(path, "a") as file:
                file.write(json.dumps({"pid": os.getpid(), "event": "oom"}) + "\n")
        made(error, *arguments)

    def worded(refusal: Any) -> torch.OutOfMemoryError:
        # As torch words it: some tools know an OOM by its text alone.
        return torch.OutOfMemoryError(f"CUDA out of memory. {refusal}")

    kind.__init__ = noted
    if place == "cpu":
        tracer._out_of_memory = worded
