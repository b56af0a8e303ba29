"""A report in place of a plan: the plan it recommends, what its settings mean, and its workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.devices.gpu_catalogue import find_gpu
from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.report.record import Record
from autofit.report.report import Report
from autofit.training.fingerprint import differing_parts
from autofit.training.samples import Made
from autofit.training.workload import Workload, check_arguments

if TYPE_CHECKING:
    from autofit.probing.survey import Survey

_HIDDEN_CAUSES = {
    "model": "the model's code or options",
    "samples": "the samples or the global batch",
    "optimizer": "the optimizer's code or options",
    "functions": "the code of the loss or another function",
    "torch": "torch",
    "device": "the device",
    "flags": "torch's flags, its number of threads on the CPU, or a variable of its allocator",
}
"""Parts of a fingerprint in words."""


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
            check_arguments(workload, plan)
            return cls(plan)
        check_arguments(workload, None)
        best = plan.record.plan_to_rerun
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
        """Refuse a workload whose model or samples are not those of the report.

        Args:
            parameters: of the model that was checked; None: not known.
            workload: that was checked.

        Raises:
            InvalidArgument: they differ. What only a worker sees (code, device) is not compared.
        """
        if self.record is None:
            return
        samples = None  # a function's batches may have other shapes each time
        if not isinstance(workload.samples, Made):
            samples = workload.sample_shapes()
        if differs := _differences(self.record, parameters=parameters, samples=samples):
            raise InvalidArgument(
                f"the report is of another workload: {differs}. Pass the workload of "
                "that search, or search again with this one"
            )


def check_same(here: Survey, there: Record) -> None:
    """Refuse a survey of another workload than that of the report.

    Raises:
        InvalidArgument: it differs, with what does.
    """
    parts = differing_parts(there.workload["fingerprint"], here.fingerprint)
    if not parts:
        return
    now = here.environment
    differs = _differences(
        there,
        torch=now.torch,
        device=now.gpu or now.device,
        parameters=here.parameters,
        samples=here.sample_shapes,
    )
    hidden = " and ".join(_HIDDEN_CAUSES.get(part, part) for part in parts)
    raise InvalidArgument(
        f"the report is of another workload: {differs or f'{hidden} changed'}. Search "
        "again, or pass the workload of that search on the same device"
    )


def _differences(there: Record, **here: Any) -> str:
    """Return which of these facts the report has otherwise; None is not known, and not compared."""
    environment, workload = there.environment, there.workload
    facts = {**workload, **environment, "device": environment["gpu"] or environment["device"]}
    facts["samples"] = _shapes(workload["sample_shapes"])
    if here.get("samples") is not None:
        here["samples"] = _shapes(here["samples"])
    return "; ".join(
        f"{name} {facts[name]} there, {now} here"
        for name, now in here.items()
        if now is not None and facts[name] != now
    )


def _shapes(sample_shapes: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {shape}" for name, shape in sample_shapes.items())
