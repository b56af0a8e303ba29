"""Strategies of one setting, whose first value is plain: there is nothing to apply or to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from autofit.errors import Unsupported
from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import Context, TrainingView

_MEASURED = "its memory can only be measured, not predicted"


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


class SwitchOfGpu(OneSetting):
    """A setting of an NVIDIA GPU that is off, or on in a worker of its own: a process remembers it.

    Attributes:
        devices: types of those where its memory can be measured.
        trial_cost_s: seconds that it takes to try.
        hint: what it is expected to hold and to cost; None: nobody knows.
    """

    plain = False
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    trial_cost_s: ClassVar[float]
    hint: ClassVar[CostHint | None] = None

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the choice on such a GPU where it is free; off alone where nothing is measured."""
        if context.capabilities.compute_capability is None or not self.is_free(context):
            return {}
        if context.device.type not in self.devices:
            context.note(f"{self.setting} skipped: {_MEASURED}")
            return {self.setting: Dimension([False])}
        dimension = Dimension(
            [False, True],
            hints={} if self.hint is None else {True: self.hint},
            trial_cost_s=self.trial_cost_s,
            fresh_worker=True,
        )
        return {self.setting: dimension}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Turn it on.

        Raises:
            Unsupported: on a device where its memory cannot be measured.
        """
        if training.device.type not in self.devices:
            raise Unsupported(f"{self.setting}=True: {_MEASURED}")
        return self.on()

    @abstractmethod
    def is_free(self, context: Context) -> bool:
        """Return whether it may matter to the training, and the user has not chosen."""

    @abstractmethod
    def on(self) -> AbstractContextManager[None]:
        """Return the context in which it is on."""
