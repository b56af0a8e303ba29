"""What one real probe teaches about a GPU with its driver and torch, for later predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidRequest
from autofit.measurement import Measurement

if TYPE_CHECKING:
    from autofit.prediction.engine import Prediction

_PLAUSIBLE = (0.8, 1.25)
"""A measured peak further than this from the predicted one has another cause than constants."""


@dataclass(frozen=True)
class Calibration:
    """Constants of a GPU, its driver and torch.

    Attributes:
        non_torch_bytes: what a process holds outside the allocator.
        residual_bytes: measured peak allocated less the predicted one, at the plan that was run
            (for convolutions, what cuDNN's choice of algorithms took beyond the prediction).
    """

    non_torch_bytes: int
    residual_bytes: int = 0

    @classmethod
    def learn(cls, prediction: Prediction, measurement: Measurement) -> Calibration:
        """From a plan that was predicted without calibration, and then run.

        Raises:
            InvalidRequest: nothing was measured, or something else than the predicted plan.
        """
        measured, non_torch = measurement.peak_allocated_bytes, measurement.non_torch_bytes
        if measured is None or non_torch is None:
            raise InvalidRequest(
                f"nothing can be learned from a probe that ended as {measurement.outcome}: "
                "it measured no memory"
            )
        ratio = measured / prediction.peak_allocated_bytes
        if not _PLAUSIBLE[0] <= ratio <= _PLAUSIBLE[1]:
            raise InvalidRequest(
                f"the measured peak is {ratio:.2f} times the predicted one: the two are not of "
                "the same plan, or the model does something that a rehearsal does not see"
            )
        return cls(non_torch, residual_bytes=measured - prediction.peak_allocated_bytes)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, for the report's "calibration"."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """The calibration that `to_dict` wrote; keys it does not know are ignored."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**known)

    @classmethod
    def of(cls, given: Calibration | Mapping[str, Any] | None) -> Calibration | None:
        """What a user gave as one: itself, or a report's; None where that is empty.

        Raises:
            InvalidRequest: it is neither.
        """
        if given is None or isinstance(given, Calibration):
            return given
        if isinstance(given, Mapping) and (not given or "non_torch_bytes" in given):
            return cls.from_dict(given) if given else None
        raise InvalidRequest(
            f"calibration must be a report's, or what Calibration.learn returned, got {given!r}"
        )
