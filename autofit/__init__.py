"""autofit finds the fastest way to train a PyTorch model within a VRAM budget, by running it.

    report = autofit.search(model, sample_batch, vram_budget="24GiB")

Importing this module imports no torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.checks.check import check as check
    from autofit.checks.predict import GpuTable as GpuTable, predict as predict
    from autofit.checks.probe import probe as probe
    from autofit.checks.soak import SoakResult as SoakResult, soak as soak
    from autofit.checks.verdict import Verdict as Verdict
    from autofit.dimension import CostHint as CostHint, Dimension as Dimension
    from autofit.errors import (
        AutofitError as AutofitError,
        DeviceUnavailable as DeviceUnavailable,
        InvalidArgument as InvalidArgument,
        PredictionUnavailable as PredictionUnavailable,
        SearchTimedOut as SearchTimedOut,
        StudyError as StudyError,
        WorkerFailed as WorkerFailed,
        WorkloadFailed as WorkloadFailed,
    )
    from autofit.integrations.checkpoint_to_budget import (
        checkpoint_to_budget as checkpoint_to_budget,
    )
    from autofit.integrations.loader_batches import from_loader as from_loader
    from autofit.measurement import (
        Measurement as Measurement,
        Outcome as Outcome,
        Trial as Trial,
        TrialKind as TrialKind,
    )
    from autofit.plan import NoFeasiblePlan as NoFeasiblePlan, Plan as Plan
    from autofit.prediction.predict import Prediction as Prediction
    from autofit.report.report import Report as Report, load as load
    from autofit.searching.batch_size import (
        BatchSize as BatchSize,
        find_batch_size as find_batch_size,
    )
    from autofit.searching.options import SearchOptions as SearchOptions
    from autofit.searching.search import search as search
    from autofit.strategy import Numerics as Numerics, Phase as Phase, Strategy as Strategy
    from autofit.training.lengths import Lengths as Lengths
    from autofit.training.training import Training as Training
    from autofit.training.workload import Workload as Workload

_HOMES = {
    "autofit.checks.predict": ("GpuTable", "predict"),
    "autofit.checks.probe": ("probe",),
    "autofit.checks.soak": ("SoakResult", "soak"),
    "autofit.checks.check": ("check",),
    "autofit.errors": (
        "AutofitError",
        "PredictionUnavailable",
        "DeviceUnavailable",
        "InvalidArgument",
        "SearchTimedOut",
        "StudyError",
        "WorkerFailed",
        "WorkloadFailed",
    ),
    "autofit.integrations.checkpoint_to_budget": ("checkpoint_to_budget",),
    "autofit.measurement": ("Measurement", "Outcome", "TrialKind", "Trial"),
    "autofit.dimension": ("CostHint", "Dimension"),
    "autofit.plan": ("NoFeasiblePlan", "Plan"),
    "autofit.prediction.predict": ("Prediction",),
    "autofit.report.report": ("Report", "load"),
    "autofit.searching.batch_size": ("BatchSize", "find_batch_size"),
    "autofit.integrations.loader_batches": ("from_loader",),
    "autofit.searching.options": ("SearchOptions",),
    "autofit.searching.search": ("search",),
    "autofit.strategy": ("Numerics", "Phase", "Strategy"),
    "autofit.training.lengths": ("Lengths",),
    "autofit.training.training": ("Training",),
    "autofit.checks.verdict": ("Verdict",),
    "autofit.training.workload": ("Workload",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("torch-autofit")
    if name == "integrations":
        return import_module("autofit.integrations")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'autofit' has no attribute {name!r}")
    drawn = random.getstate()
    try:
        value = getattr(import_module(_HOME_OF[name]), name)
    finally:
        random.setstate(drawn)  # rich draws a number when it is imported, and it is the user's
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
