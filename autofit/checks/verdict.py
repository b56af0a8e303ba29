"""The verdict of a check, as a line, as a table and as JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.codec import Amount, from_json, to_json
from autofit.notebook import shown
from autofit.plan import Plan
from autofit.prediction.of_ranks import NCCL_UNKNOWN
from autofit.units import format_bytes

ASSUMED = " (assumed: no gpu given)"
METHODS = {"probe": "a probe: run on the device", "predict": "a dry run on torch's meta device"}
"""By its name, how a verdict was found, for a reader."""


@dataclass(frozen=True)
class Verdict:
    """Whether a plan fits. Every None means unknown.

    Attributes:
        fits: True or False.
        plan: the plan that was checked.
        method: "probe" or "predict".
        vram_budget_bytes: the budget.
        peak_allocated_bytes: most bytes in live tensors.
        required_bytes: by prediction, the smallest VRAM budget under which the plan runs without
            an allocator retry in its timed steps; by probe, the bytes it held (peak reserved plus
            non-torch), so that a smaller budget may be enough.
        margin_bytes: added to required bytes before the comparison with the budget.
        breakdown: bytes by kind, if predicted.
        largest_micro_batch: the largest that would fit, if the plan does not.
        parameters: elements of the model's parameters, trained or not; of ranks None.
        unknown_bytes: the room that a fit leaves for what is not counted; see `Prediction`.
        detail: why `fits` is unknown, or how the probe ended.
        device: "cuda" or "cpu".
        gpu: name of the GPU; None also for a CPU.
        gpu_assumed: whether the GPU is the default because none was named.
    """

    fits: bool | None
    plan: Plan
    method: str
    vram_budget_bytes: Amount
    required_bytes: Amount | None = None
    margin_bytes: Amount = 0
    breakdown: Mapping[str, Amount] | None = None
    largest_micro_batch: Amount | None = None
    detail: str | None = None
    peak_allocated_bytes: Amount | None = None
    device: str | None = None
    gpu: str | None = None
    gpu_assumed: bool = False
    unknown_bytes: Amount = 0
    parameters: Amount | None = None

    @property
    def headroom_bytes(self) -> int | None:
        """Budget minus required bytes; negative if the plan does not fit."""
        if self.required_bytes is None:
            return None
        return self.vram_budget_bytes - self.required_bytes

    def __str__(self) -> str:
        answer = {True: "fits", False: "does not fit", None: "could not be told"}[self.fits]
        line = f"{self.plan} {answer} in {format_bytes(self.vram_budget_bytes)}{self._where()}"
        if self.required_bytes is not None:
            line += f": {self._needs()}"
        elif self.detail:
            line += f": {self.detail}"
        if self.fits is False and self.largest_micro_batch:
            line += f"; the largest micro-batch that fits is {self.largest_micro_batch}"
        return line

    def _where(self) -> str:
        name = self.gpu or self.device
        return "" if name is None else f" on {name}{ASSUMED * self.gpu_assumed}"

    def _needs(self) -> str:
        how = "measured" if self.method == "probe" else "predicted"
        needs = f"{format_bytes(self.required_bytes)} {how}"
        needs += f" + {format_bytes(self.margin_bytes)} margin" if self.margin_bytes else ""
        if self.unknown_bytes and self.fits is None:
            room = format_bytes(self.unknown_bytes)
            needs += f" + NCCL, not known: leave {room} for it, or measure on the ranks"
        return needs

    def _rows(self) -> list[tuple[str, str]]:
        sizes: list[tuple[str, int | None]] = [("required", self.required_bytes)]
        sizes += [("margin", self.margin_bytes)] if self.margin_bytes else []
        sizes += [("allowed", self.vram_budget_bytes), *(self.breakdown or {}).items()]
        rows = [(name.replace("_", " "), format_bytes(size)) for name, size in sizes]
        rows += [("NCCL", NCCL_UNKNOWN)] if self.unknown_bytes else []
        return [("method", METHODS.get(self.method, self.method)), *rows]

    def explain(self) -> str:
        """Return the verdict and a table of required, allowed and broken-down bytes."""
        lines = [f"  {name:<16}{size:>12}" for name, size in self._rows()]
        return "\n".join([str(self), *lines])

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return shown([str(self)], self._rows())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**to_json(self), "headroom_bytes": self.headroom_bytes}

    @classmethod
    def from_dict(cls, data: Any) -> Verdict:
        """Return the verdict that `to_dict` wrote.

        Raises:
            InvalidArgument: the data are not such a verdict.
        """
        return from_json(data, cls, "the verdict")
