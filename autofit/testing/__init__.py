"""What a third party tests a strategy, a planner or a sampler with.

The names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.equivalence.steps import PlainContext
    from autofit.testing.conformance import NotConformant, check_strategy
    from autofit.testing.simulated import SimulatedProber

__all__ = ["NotConformant", "PlainContext", "SimulatedProber", "check_strategy"]

_HOMES = {
    "NotConformant": "autofit.testing.conformance",
    "PlainContext": "autofit.equivalence.steps",
    "SimulatedProber": "autofit.testing.simulated",
    "check_strategy": "autofit.testing.conformance",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
