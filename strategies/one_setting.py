"""Strategies of one setting, whose first value is plain: there is nothing to apply or to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from autofit.plan import Scalar
from autofit.strategy import TrainingView


class OneSetting(ABC):
    """A strategy of one setting.

    Attributes:
        setting: its name, with the strategy's before it.
        plain: its first value.
    """

    setting: ClassVar[str]
    plain: ClassVar[Scalar] = "default"

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Apply the setting; leaving the context undoes it. Raises as `applied` does."""
        value = settings.get(self.setting, self.plain)
        if value == self.plain:
            return nullcontext()
        return self.applied(training, value, payloads.get(self.setting))

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """Return the equivalent lines of a training script."""
        value = settings.get(self.setting, self.plain)
        return [] if value == self.plain else self.lines(value, payloads.get(self.setting))

    @abstractmethod
    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Return the context in which a value that is not plain is in force."""

    @abstractmethod
    def lines(self, value: Any, payload: Any) -> list[str]:
        """Return the lines for such a value."""
