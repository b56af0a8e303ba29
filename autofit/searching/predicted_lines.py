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
from autofit.prediction.predict import Calibration
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


def learned(survey: Survey, baseline: Trial) -> Mapping[str, Any]:
    """Return the calibration that the baseline's probe on a GPU teaches; {} where there is none."""
    if gpu_of(survey.environment) is None or baseline.measurement.non_torch_bytes is None:
        return {}
    return Calibration.learn(baseline.measurement).to_dict()
