"""Is what is checked the workload that a report is of?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autofit.errors import InvalidArgument
from autofit.training.batch import describe
from autofit.training.fingerprint import differing_parts
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from autofit.probing.survey import Survey
    from autofit.report.record import Record

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


def check_same(here: Survey, there: Record) -> None:
    """Refuse a survey of another workload than that of the report.

    Raises:
        InvalidArgument: it differs, with what does.
    """
    parts = differing_parts(there.workload["fingerprint"], here.fingerprint)
    if parts == ():
        return
    was, now = there.environment, here.environment
    compared = {
        "torch": (was["torch"], now.torch),
        "device": (was["gpu"] or was["device"], now.gpu or now.device),
        "parameters": (there.workload["parameters"], here.parameters),
        "samples": (_shapes(there.workload["sample_shapes"]), _shapes(here.sample_shapes)),
    }
    differs = [
        f"{name} {then} there, {has} here" for name, (then, has) in compared.items() if then != has
    ]
    if parts is None and not differs:  # an older version's report, whose code cannot be compared
        return
    hidden = " and ".join(_HIDDEN_CAUSES.get(part, part) for part in parts or ())
    raise InvalidArgument(
        f"the report is of another workload: {'; '.join(differs) or f'{hidden} changed'}. Search "
        "again, or pass the workload of that search on the same device"
    )


def _shapes(sample_shapes: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {shape}" for name, shape in sample_shapes.items())


def check_same_model(there: Record, parameters: int | None, workload: Workload) -> None:
    """Refuse a workload whose model or samples are not those of the report.

    Args:
        there: the report's record.
        parameters: of the model that was checked; None: not known.
        workload: that was checked.

    Raises:
        InvalidArgument: they differ. What only a worker sees (code, device) is not compared.
    """
    samples = workload.batch(workload.sample_batch_size)
    compared = {
        "parameters": (there.workload["parameters"], parameters),
        "samples": (_shapes(there.workload["sample_shapes"]), _shapes(describe(samples))),
    }
    differs = [
        f"{name} {then} there, {has} here"
        for name, (then, has) in compared.items()
        if has is not None and then != has
    ]
    if differs:
        raise InvalidArgument(
            f"the report is of another workload: {'; '.join(differs)}. Pass the workload of "
            "that search, or search again with this one"
        )
