"""autofit finds the fastest way to train a PyTorch model within a VRAM budget, by running it.

    report = autofit.search(model, sample_batch, vram_budget="24GiB")

Importing this module imports no torch: each public name is loaded when it is first used.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.capacity import check
    from autofit.endurance import Endurance
    from autofit.errors import (
        AutofitError,
        CannotTell,
        DeviceUnavailable,
        InvalidRequest,
        NoFeasiblePlan,
        StudyRefused,
        WorkerFailed,
        WorkloadFailed,
    )
    from autofit.measurement import Measurement, Outcome, Role, Trial
    from autofit.plan import Dimension, Hint, Plan
    from autofit.prediction.engine import Prediction, predict
    from autofit.report.report import Report, load
    from autofit.searching.public import search
    from autofit.searching.single import probe
    from autofit.strategy import Numerics, Phase, Strategy
    from autofit.training import Training
    from autofit.verdict import Verdict
    from autofit.workload import Workload

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
    "autofit.capacity": ("check",),
    "autofit.endurance": ("Endurance",),
    "autofit.errors": (
        "AutofitError",
        "CannotTell",
        "DeviceUnavailable",
        "InvalidRequest",
        "NoFeasiblePlan",
        "StudyRefused",
        "WorkerFailed",
        "WorkloadFailed",
    ),
    "autofit.measurement": ("Measurement", "Outcome", "Role", "Trial"),
    "autofit.plan": ("Dimension", "Hint", "Plan"),
    "autofit.prediction.engine": ("Prediction", "predict"),
    "autofit.report.report": ("Report", "load"),
    "autofit.searching.public": ("search",),
    "autofit.searching.single": ("probe",),
    "autofit.strategy": ("Numerics", "Phase", "Strategy"),
    "autofit.training": ("Training",),
    "autofit.verdict": ("Verdict",),
    "autofit.workload": ("Workload",),
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
