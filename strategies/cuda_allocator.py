"""Whether the segments of CUDA's caching allocator grow.

`cuda_allocator.expandable_segments` starts at False: the allocator takes segments of fixed size,
and memory that lies free in several of them serves no request that is larger than each. With True
it maps memory page by page to one range of addresses, so that little of what it holds lies free.

Whoever sets the option in the environment, to either value, has chosen. Segments that a process
holds already stay as they are, so a probe of it has a worker of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autofit.errors import Unsupported
from autofit.plan import CostHint, Dimension
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .one_setting import OneSetting

SETTING = "cuda_allocator.expandable_segments"
_OPTION = "expandable_segments"
# Torch reads the first that is set.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# To start the worker of a probe: importing torch and opening the device took 3.4 to 6 s on an H200.
_TRIAL_COST_S = 5.0


class ExpandableSegments(OneSetting):
    """How the caching allocator takes memory from the driver."""

    name = "cuda_allocator"
    setting, plain = SETTING, False
    phase = Phase.MODEL
    numerics = Numerics.EXACT

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the choice on an NVIDIA GPU, unless the environment has made it."""
        if context.capabilities.compute_capability is None or _OPTION in _configured():
            return {}
        if context.device.type != "cuda":
            context.note(f"{SETTING} skipped: its memory can only be measured, not predicted")
            return {SETTING: Dimension([False])}
        if torch.cuda.get_allocator_backend() != "native":
            return {}
        dimension = Dimension(
            [False, True],
            hints={True: CostHint(bytes_per_sample=1.0, seconds_per_sample=1.0)},
            trial_cost_s=_TRIAL_COST_S,
            fresh_worker=True,
        )
        return {SETTING: dimension}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Let segments grow that are taken from now on.

        Raises:
            Unsupported: the training is not on a GPU.
        """
        if training.device.type != "cuda":
            raise Unsupported(f"{SETTING}=True: its memory can only be measured, not predicted")
        return _growing()

    def lines(self, value: Any, payload: Any) -> list[str]:
        return [
            "import os",
            f"os.environ['{_VARIABLES[0]}'] = '{_with_own(True)}'  # before CUDA is first used",
        ]


@contextmanager
def _growing() -> Iterator[None]:
    torch._C._accelerator_setAllocatorSettings(_with_own(True))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(_with_own(False))


def _configured() -> str:
    """Return the options of the allocator that the environment has."""
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), "")


def _with_own(grow: bool) -> str:
    """Return the environment's options with this one: torch resets those that are left out."""
    own = _configured().strip(" ,")
    return f"{own}{',' if own else ''}{_OPTION}:{grow}"
