"""autofit finds the fastest way to train a PyTorch model within a VRAM budget, by running it.

    report = autofit.search(model, sample_batch, vram_budget="24GiB")

Importing this module imports no torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.checks.check import check
    from autofit.checks.soak import Endurance
    from autofit.checks.verdict import Verdict
    from autofit.errors import (
        AutofitError,
        CannotTell,
        DeviceUnavailable,
        InvalidRequest,
        NoFeasiblePlan,
        SearchTimedOut,
        StudyRefused,
        WorkerFailed,
        WorkloadFailed,
    )
    from autofit.measurement import Measurement, Outcome, Role, Trial
    from autofit.plan import Dimension, Hint, Plan
    from autofit.prediction.predict import Prediction, predict
    from autofit.probing.probe import probe
    from autofit.report.report import Report, load
    from autofit.searching.search import search
    from autofit.strategy import Numerics, Phase, Strategy
    from autofit.training.training import Training
    from autofit.training.workload import Workload

__all__ = [
    "AutofitError",
    "CannotTell",
    "DeviceUnavailable",
    "Dimension",
    "Endurance",
    "Hint",
    "InvalidRequest",
    "Measurement",
    "NoFeasiblePlan",
    "Numerics",
    "Outcome",
    "Phase",
    "Plan",
    "Prediction",
    "Report",
    "Role",
    "SearchTimedOut",
    "Strategy",
    "StudyRefused",
    "Training",
    "Trial",
    "Verdict",
    "WorkerFailed",
    "Workload",
    "WorkloadFailed",
    "check",
    "load",
    "predict",
    "probe",
    "search",
]

_HOMES = {
    "autofit.checks.check": ("check",),
    "autofit.checks.soak": ("Endurance",),
    "autofit.errors": (
        "AutofitError",
        "CannotTell",
        "DeviceUnavailable",
        "InvalidRequest",
        "NoFeasiblePlan",
        "SearchTimedOut",
        "StudyRefused",
        "WorkerFailed",
        "WorkloadFailed",
    ),
    "autofit.measurement": ("Measurement", "Outcome", "Role", "Trial"),
    "autofit.plan": ("Dimension", "Hint", "Plan"),
    "autofit.prediction.predict": ("Prediction", "predict"),
    "autofit.report.report": ("Report", "load"),
    "autofit.searching.search": ("search",),
    "autofit.probing.probe": ("probe",),
    "autofit.strategy": ("Numerics", "Phase", "Strategy"),
    "autofit.training.training": ("Training",),
    "autofit.checks.verdict": ("Verdict",),
    "autofit.training.workload": ("Workload",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("torch-autofit")
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
