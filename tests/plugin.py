"""A strategy of a third party, of which a test overrides what it is about."""

from __future__ import annotations

from collections.abc import Mapping
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
