"""Times the forward passes of chosen modules, on the device's own clock."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Stopwatch:
    """Seconds of each module over all its forward calls, and of the body as a whole.

    Args:
        model: holds the modules.
        names: which of them to time, as `named_modules` names them.
        device: where they run; the host does not wait for it while it is timed.
    """

    def __init__(self, model: nn.Module, names: Collection[str], device: torch.device) -> None:
        self._modules = {name: model.get_submodule(name) for name in names}
        self._device = device
        self._begun: dict[str, list[Any]] = {name: [] for name in names}
        self._calls: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
        self._whole: tuple[Any, Any] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what runs in the body, and leave no hook behind."""
        handles: list[Any] = []
        try:
            for name, module in self._modules.items():
                handles.append(module.register_forward_pre_hook(self._begin(name)))
                handles.append(module.register_forward_hook(self._end(name)))
            start = self._mark()
            yield
            self._whole = (start, self._mark())
        finally:
            for handle in handles:
                handle.remove()

    def seconds(self) -> dict[str, float]:
        """Forward seconds of each module; waits for the device."""
        return {name: sum(map(self._between, calls)) for name, calls in self._calls.items()}

    def whole_s(self) -> float:
        """Seconds of the body; waits for the device."""
        return self._between(self._whole) if self._whole else 0.0

    def _begin(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            if _is_forward():
                self._begun[name].append(self._mark())

        return hook

    def _end(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            if _is_forward() and self._begun[name]:
                self._calls[name].append((self._begun[name].pop(), self._mark()))

        return hook

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return _host_clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not annotate it
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, marks: tuple[Any, Any]) -> float:
        begin, end = marks
        if self._device.type != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def _host_clock() -> float:
    """Seconds; of this thread's work alone where it does all of it, whatever others are doing."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _is_forward() -> bool:
    """Whether no backward pass is under way: there, only recomputations call modules."""
    return torch._C._current_graph_task_id() == -1
