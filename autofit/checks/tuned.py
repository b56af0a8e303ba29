"""A report in place of a plan: its best plan, with what a search found its settings to mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.checks.same import check_same_model
from autofit.devices.gpus import find_gpu
from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.report.record import Record
from autofit.report.report import Report
from autofit.training.workload import Workload, check_arguments


@dataclass(frozen=True)
class AskedPlan:
    """The plan that `probe`, `predict` or `check` was asked about.

    Attributes:
        plan: None: the baseline.
        payloads: of its settings, by setting; None: as the strategies find them.
        record: of the report that was given in its place; None: a plan was given.
    """

    plan: Plan | None
    payloads: Mapping[str, Any] | None = None
    record: Record | None = None

    @classmethod
    def read(cls, workload: Workload, plan: Plan | Report | None) -> AskedPlan:
        """Return what was given as `plan=`.

        Raises:
            InvalidArgument: it is of another kind, or the workload is none.
        """
        if not isinstance(plan, Report):
            check_arguments(workload, plan, None)
            return cls(plan)
        check_arguments(workload, None, None)
        best = plan.record.best_plan_to_rerun
        return cls(best, plan.record.payloads(best.settings), plan.record)

    @property
    def gpu(self) -> str | int | None:
        """The name of the report's GPU, or its bytes where the name is unknown; None: it has none.

        Raises:
            InvalidArgument: the report has a GPU, and neither a known name nor its bytes.
        """
        environment = self.record.environment if self.record else {}
        if environment.get("gpu") is None:
            return None
        try:
            return find_gpu(environment["gpu"]).name
        except InvalidArgument:  # not in the table: its size is enough for a prediction
            total_bytes = environment.get("total_bytes")
            if total_bytes is None:
                raise InvalidArgument(
                    "the report has neither a known GPU nor its memory: pass gpu="
                ) from None
            return int(total_bytes)

    @property
    def on_cpu(self) -> bool:
        """Whether the report is of a search on the CPU."""
        return self.record is not None and self.record.environment.get("device") == "cpu"

    def calibration_for(self, gpu: Any) -> Mapping[str, Any] | None:
        """Return what the search measured of that GPU; None: nothing, or it ran on another."""
        return self.record.calibration if self.record and gpu in (None, self.gpu) else None

    def check_same_model(self, parameters: int | None, workload: Workload) -> None:
        """Refuse a workload that is not the report's, as `checks.same.check_same_model` does.

        Raises:
            InvalidArgument: it is another one.
        """
        if self.record is not None:
            check_same_model(self.record, parameters, workload)
