"""Whether the segments of CUDA's caching allocator grow.

`cuda_allocator.expandable_segments` starts at False: the allocator takes segments of fixed size,
and memory that lies free in several of them serves no request that is larger than each. With True
it maps memory page by page to one range of addresses, so that little of what it holds lies free.

Whoever sets the option in the environment, to either value, has chosen. Segments that a process
holds already stay as they are, so a probe of it has a worker of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.plan import CostHint
from autofit.strategy import Context, Numerics, Phase

from .one_setting import SwitchOfGpu

SETTING = "cuda_allocator.expandable_segments"
_OPTION = "expandable_segments"
# Torch reads the first that is set, and before 2.10 not the second.
_BOTH = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_VARIABLES: tuple[str, ...] = _BOTH if torch.__version__ >= "2.10" else _BOTH[:1]


class ExpandableSegments(SwitchOfGpu):
    """How the caching allocator takes memory from the driver."""

    name = "cuda_allocator"
    setting = SETTING
    phase = Phase.MODEL
    numerics = Numerics.EXACT
    # To start the worker of a probe: importing torch and opening the device took 3.4 to 6 s on an
    # H200.
    trial_cost_s = 5.0
    hint = CostHint(bytes_per_sample=1.0, seconds_per_sample=1.0)

    def is_free(self, context: Context) -> bool:
        """Return whether the environment leaves the choice, and the allocator is torch's own."""
        is_gpu = context.device.type == "cuda"
        is_own = not is_gpu or torch.cuda.get_allocator_backend() == "native"
        return is_own and _OPTION not in _configured()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let segments grow that are taken from now on."""
        _set_options(_with_own(True))
        try:
            yield
        finally:
            _set_options(_with_own(False))

    def lines(self, value: Any, payload: Any) -> list[str]:
        return [
            "import os",
            f"os.environ['{_VARIABLES[0]}'] = '{_with_own(True)}'  # before CUDA is first used",
        ]


def _set_options(options: str) -> None:
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(options)
    else:  # before torch 2.10
        torch.cuda.memory._set_allocator_settings(options)


def _configured() -> str:
    """Return the options of the allocator that the environment sets."""
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), "")


def _with_own(grow: bool) -> str:
    """Return the environment's options with this one: torch resets those that are left out."""
    options = _configured().strip(" ,")
    return f"{options}{',' if options else ''}{_OPTION}:{grow}"
