"""What is looked up about a workload before its first probe, in the worker that holds the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from autofit.devices.base import Environment
from autofit.errors import NoFeasiblePlan
from autofit.plan import Dimension
from autofit.probing.comparison import Comparison
from autofit.space import Space
from autofit.units import format_bytes
from autofit.workload import Workload


@dataclass(frozen=True)
class Survey:
    """The facts of a workload on a device, as plain data.

    Attributes:
        environment: device and versions.
        vram_budget_bytes: the budget, resolved on the device.
        fingerprint: see `autofit.fingerprint`.
        parameters: how many numbers the model learns or holds as parameters.
        parameter_bytes: their size.
        loss: where the loss comes from, in words; None where the trial forward failed.
        sample_batch_size: samples in the user's batch.
        sample_shapes: where each tensor of the sample batch stands -> its dtype and shape.
        global_batch: samples per optimizer step to keep.
        resplit: how split and whole gradients compare; None where that was not asked or failed.
        may_resplit: whether the accumulation count may change.
        dimensions: setting -> its values.
        notes: what a reader of the report should know.
    """

    environment: Environment
    vram_budget_bytes: int
    fingerprint: str
    parameters: int
    parameter_bytes: int
    loss: str | None
    sample_batch_size: int
    sample_shapes: Mapping[str, str]
    global_batch: int | None
    resplit: Comparison | None
    may_resplit: bool
    dimensions: Mapping[str, Dimension]
    notes: tuple[str, ...] = ()

    def space(self, max_micro_batch: int | None = None) -> Space:
        """The search space that these facts leave."""
        choices = {name: d for name, d in self.dimensions.items() if len(d.values) > 1}
        fixed = {name: d.values[0] for name, d in self.dimensions.items() if name not in choices}
        return Space(
            choices,
            self.sample_batch_size,
            global_batch=self.global_batch,
            may_resplit=self.may_resplit,
            max_micro_batch=max_micro_batch,
            fixed=fixed,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return vars(self) | {
            "environment": asdict(self.environment),
            "dimensions": {name: d.to_dict() for name, d in self.dimensions.items()},
            "resplit": self.resplit.to_dict() if self.resplit else None,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Survey:
        """The survey that `to_dict` wrote."""
        dimensions = {name: Dimension.from_dict(d) for name, d in data["dimensions"].items()}
        resplit = Comparison.from_dict(data["resplit"]) if data["resplit"] else None
        return cls(
            **{
                **data,
                "environment": Environment(**data["environment"]),
                "dimensions": dimensions,
                "resplit": resplit,
                "notes": tuple(data["notes"]),
            }
        )


def check_weights_fit(survey: Survey) -> None:
    """Refuse a budget that not even the weights fit into.

    Raises:
        NoFeasiblePlan: the model's parameters alone are larger than the budget.
    """
    if survey.parameter_bytes <= survey.vram_budget_bytes:
        return
    raise NoFeasiblePlan(
        f"the model's parameters alone take {format_bytes(survey.parameter_bytes)}, and the VRAM "
        f"budget is {format_bytes(survey.vram_budget_bytes)}",
        plan=None,
        required_bytes=survey.parameter_bytes,
        allowed_bytes=survey.vram_budget_bytes,
    )


def note_own_copy(survey: Survey, workload: Workload) -> Survey:
    """The survey, with a note where this process holds the model on a GPU beside the worker's."""
    if not isinstance(workload.model, torch.nn.Module):
        return survey
    held = sum(
        tensor.untyped_storage().nbytes()
        for tensor in (*workload.model.parameters(), *workload.model.buffers())
        if tensor.device.type == "cuda"
    )
    if not held:
        return survey
    note = (
        f"your own copy of the model holds {format_bytes(held)} on the GPU, which no plan can "
        "use: move it away with model.cpu(), or pass a function that builds the model"
    )
    return replace(survey, notes=(*survey.notes, note))
