"""What a third party tests a strategy, a planner or a sampler with."""

from autofit.equivalence.steps import PlainContext
from autofit.testing.conformance import NotConformant, check_strategy
from autofit.testing.simulated import SimulatedProber

__all__ = ["NotConformant", "PlainContext", "SimulatedProber", "check_strategy"]
