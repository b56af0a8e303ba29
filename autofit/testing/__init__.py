"""What a third party tests a strategy, a planner or a sampler with.

The names are loaded when they are first used: a simulated device needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.testing.simulated import SimulatedProber

__all__ = ["SimulatedProber"]

_HOMES = {"SimulatedProber": "autofit.testing.simulated"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
