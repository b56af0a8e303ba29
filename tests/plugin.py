"""A strategy of a third party, of which a test overrides what it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autofit.plan import Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView


class Plugin:
    """Has one setting, on or off, and does nothing to a training."""

    name = "plugin"
    phase = Phase.STEP
    numerics = Numerics.EXACT

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {f"{self.name}.on": Dimension([False, True])}

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        return []


class Changing(Plugin):
    """Where it is on, does to a training what a test says.

    Args:
        change: may return the context in which the change is in force.
    """

    def __init__(self, change: Callable[[TrainingView], AbstractContextManager[None] | None]):
        self.change = change

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        changed = self.change(training) if settings[f"{self.name}.on"] else None
        return changed or nullcontext()

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        return ["change(model)"] if settings[f"{self.name}.on"] else []
