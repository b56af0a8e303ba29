"""What a search on a GPU takes from prediction, and what it gives back.

Before the first probe: memory lines of variants, so that the ladder starts near the
ceiling. After the last: the constants of this GPU, driver and torch, for later predictions. Neither
is needed; where the training cannot be rehearsed a search goes on without, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.measurement import Trial
from autofit.prediction.memory_lines import PredictedLines, gpu_of, memory_lines
from autofit.prediction.predict import Calibration, predict_as_meant
from autofit.probing.survey import Survey
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.training.workload import Workload

MOST_SECONDS = 8.0
"""About what two probes cost on a GPU; rehearsing longer would save less than it takes."""


def predicted_lines(
    workload: Workload, survey: Survey, space: Space, strategies: Sequence[Strategy]
) -> PredictedLines:
    """Memory lines of the plain variant and of each setting's values; none on a CPU."""
    gpu = gpu_of(survey.environment)
    if gpu is None:
        return PredictedLines()
    return memory_lines(
        workload,
        space,
        gpu,
        survey.vram_budget_bytes,
        strategies=strategies,
        timeout_s=MOST_SECONDS,
    )


def learned(
    workload: Workload,
    survey: Survey,
    space: Space,
    strategies: Sequence[Strategy],
    baseline: Trial,
) -> Mapping[str, Any]:
    """The calibration that the baseline's probe teaches; {} where it teaches none."""
    gpu = gpu_of(survey.environment)
    if gpu is None or not baseline.ok:
        return {}
    plan = baseline.plan
    payloads = space.payloads(plan.settings)
    try:
        prediction = predict_as_meant(workload, plan, gpu, strategies=strategies, payloads=payloads)
        return Calibration.learn(prediction, baseline.measurement).to_dict()
    except Exception:  # a calibration is a gift to later predictions, never worth a report
        return {}
