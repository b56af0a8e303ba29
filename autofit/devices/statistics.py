"""The caching allocator's statistics of a GPU, whole also where a training resets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

_PEAKS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")
_COUNTS = ("num_alloc_retries",)
_RESETS = {
    "_cuda_resetPeakMemoryStats": _PEAKS,
    "_accelerator_resetPeakStats": _PEAKS,
    "_cuda_resetAccumulatedMemoryStats": _COUNTS,
    "_accelerator_resetAccumulatedStats": _COUNTS,
}
"""The functions of torch._C that every public one calls to reset, and what they reset.

Loops that log their memory call these after each step, which would hide a probe's peak.
"""


class AllocatorStatistics:
    """Statistics of one device; what the process resets until `close` is noted before.

    Args:
        device: a CUDA device that this process uses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted = dict.fromkeys((*_PEAKS, *_COUNTS), 0)
        self._replaced: dict[str, Callable[..., Any]] = {}
        for name, reset in _RESETS.items():
            if (function := getattr(torch._C, name, None)) is not None:
                self._replaced[name] = function
                setattr(torch._C, name, partial(self._note_and, function, reset))

    def close(self) -> None:
        """Give torch its functions back."""
        for name, function in self._replaced.items():
            setattr(torch._C, name, function)

    def read(self) -> Mapping[str, int]:
        """Return torch's, with peaks since `restart_peaks` and counts since the start."""
        read: dict[str, int] = torch.cuda.memory_stats(self._device)
        peaks = {name: max(read.get(name, 0), self._noted[name]) for name in _PEAKS}
        counts = {name: read.get(name, 0) + self._noted[name] for name in _COUNTS}
        return {**read, **peaks, **counts}

    def restart_peaks(self) -> None:
        """Restart the peaks at the current values."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._noted.update(dict.fromkeys(_PEAKS, 0))

    def _note_and(self, reset: Callable[..., Any], names: tuple[str, ...], *given: Any) -> Any:
        """Note what is about to be reset, on whatever device, and reset it."""
        known = self.read()
        result = reset(*given)
        now = torch.cuda.memory_stats(self._device)
        for name in names:
            self._noted[name] = known[name] - (now.get(name, 0) if name in _COUNTS else 0)
        return result
