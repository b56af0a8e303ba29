"""What a third party tests a strategy, a planner or a sampler with."""

from autofit.equivalence.steps import PlainContext
from autofit.testing.conformance import NotConformant, check_strategy
from autofit.testing.matrix import Cell, check_usages, usage_table
from autofit.testing.simulated import SimulatedProber
from autofit.testing.usages import Usage, usages

__all__ = [
    "Cell",
    "NotConformant",
    "PlainContext",
    "SimulatedProber",
    "Usage",
    "check_strategy",
    "check_usages",
    "usage_table",
    "usages",
]
