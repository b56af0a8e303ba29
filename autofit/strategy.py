"""The contract of a strategy: a plug-in that adds dimensions to the search space.

A strategy says which values its settings can take for a model on a device (`dimensions`), applies
chosen values to a training and takes them back exactly (`apply`), and says in code what a user
would write to get the same (`describe`). It is found by the entry-point group
`autofit.strategies`; the core knows none by name. `autofit.testing` has the suite that every
strategy must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from autofit.plan import Dimension, Scalar

if TYPE_CHECKING:
    import torch

__all__ = [
    "Capabilities",
    "Context",
    "Dimension",
    "Numerics",
    "Phase",
    "Strategy",
    "TrainingView",
]


class Phase(IntEnum):
    """When a strategy is applied: MODEL first, COMPILE last; undone in the opposite order."""

    MODEL = 0
    OPTIMIZER = 1
    STEP = 2
    COMPILE = 3


class Numerics(IntEnum):
    """How far a strategy may change the arithmetic."""

    EXACT = 0
    """Losses and gradients are the same."""
    ROUNDING = 1
    """The same up to the order of roundings."""
    REDUCED_PRECISION = 2
    """Fewer bits."""

    @classmethod
    def parse(cls, text: str) -> Numerics:
        """ "rounding" -> Numerics.ROUNDING; raises KeyError for another word."""
        return cls[text.upper()]


@dataclass(frozen=True)
class Capabilities:
    """What a device can do natively, as far as strategies care.

    Attributes:
        device_type: "cuda", "cpu" or "meta".
        bfloat16: bfloat16 arithmetic in hardware, not emulated.
        float16: float16 training is worth trying.
        tf32: matrix products in TF32.
        compute_capability: (major, minor) of an NVIDIA device, else None.
    """

    device_type: str
    bfloat16: bool = False
    float16: bool = False
    tf32: bool = False
    compute_capability: tuple[int, int] | None = None


class Context(Protocol):
    """What a strategy sees when it is asked for its dimensions, in the worker."""

    @property
    def model(self) -> torch.nn.Module:
        """A copy of the user's model, on the device; it may be run, and is thrown away."""

    @property
    def device(self) -> torch.device:
        """Where the plans will run."""

    @property
    def capabilities(self) -> Capabilities:
        """What that device can do natively."""

    def profile(self, run: Callable[[TrainingView, Any], Any], micro_batch: int) -> Any:
        """What `run(training, batch)` returns for a plain training of a fresh model copy.

        `batch` has `micro_batch` samples and lies on the device; the training is undone after.
        """

    def note(self, text: str) -> None:
        """Tell the reader of the report something, such as what was left out and why."""


class TrainingView(Protocol):
    """What a strategy sees of a training while its settings are applied."""

    @property
    def model(self) -> torch.nn.Module:
        """The model that is trained, on the device."""

    @property
    def optimizer(self) -> Any:
        """The optimizer, or a mapping of them where the user's `train_step` has several."""

    @property
    def device(self) -> torch.device:
        """Where model and batches are."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler in force; a strategy may set it, and must set it back."""

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None: ...

    def wrap_forward(
        self, context: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[], None]:
        """Enter `context()` around every forward and loss; returns the function that undoes it."""

    def wrap_optimizer_step(
        self, wrapper: Callable[[Callable[[], None]], None]
    ) -> Callable[[], None]:
        """Call `wrapper(step)` in place of the update; returns the function that undoes it."""

    def loss(self, batch: Any) -> torch.Tensor:
        """Forward and loss of one micro-batch, under the forward contexts in force."""

    def step(self, batch: Any) -> torch.Tensor:
        """One optimizer step, the user's own where there is one; the detached loss."""


@runtime_checkable
class Strategy(Protocol):
    """One technique, such as reduced precision, as dimensions of the search space."""

    name: str
    """Prefix of its settings."""
    phase: Phase
    """When it is applied, beside other strategies."""
    numerics: Numerics
    """How far its settings change the arithmetic."""

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Setting name (with the prefix) -> its values; {} = not for this model or device.

        One value alone adds nothing to a search, and lets a plan name it: where there is nothing
        to choose, that is kinder than {}. On the meta device, what is left out since it takes a
        run to find is noted.
        """

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Apply this strategy's settings; leaving the context undoes them exactly."""

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """The lines a user would write to get the same; [] where the settings are plain PyTorch."""
