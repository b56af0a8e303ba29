"""Predicted lines of variants that a search on a GPU starts from.

Predicted before the first probe: memory, so that the first micro-batches are near the largest that
fit, and time, by which variants are compared until they are measured.
Where the training cannot be predicted a search goes on without, and notes it. Of several ranks the
first predicts, in a process that is in none of their groups, while the others wait for its next
word and for no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from autofit.devices.base import Environment
from autofit.plan import VariantKey
from autofit.probing.prober import Prober
from autofit.probing.survey import Survey
from autofit.space import Space

if TYPE_CHECKING:
    from autofit.probing.session import Session

# Enough for GPT-2 small, whose dry runs take about a second each. With 8 s some of its precisions
# had lines and others none (benchmarks/results/gpu-h100-2026-11-27.md).
MAX_SECONDS = 20.0
SHARE_OF_TIME = 1 / 6  # of what is left of a search's timeout: probes need the rest

# Variant -> what is fixed (bytes, or seconds of a micro-batch), and what each sample adds.
Lines = Mapping[VariantKey, tuple[float, float]]
# Memory lines, time lines, and notes.
Predicted = tuple[Lines, Lines, tuple[str, ...]]


def most_seconds(seconds_left: float | None) -> float:
    """Return how long a search may predict that has this many seconds left; None: no end."""
    return MAX_SECONDS if seconds_left is None else min(MAX_SECONDS, SHARE_OF_TIME * seconds_left)


def predicted_lines(
    prober: Prober,
    survey: Survey,
    space: Space,
    open_apart: Callable[[], AbstractContextManager[Prober]] | None = None,
    timeout_s: float = MAX_SECONDS,
) -> Predicted:
    """Return memory and time lines of the plain variant and of each setting's values, and notes.

    There are no time lines for several ranks or a GPU whose rates are unknown.

    Args:
        prober: of the search.
        survey: of its workload and device, a GPU.
        space: of its plans.
        open_apart: opens the prober to predict with, where that of the search runs in processes
            that are ranks of a group; None: the search's own.
        timeout_s: seconds that predicting may take, besides opening that prober.
    """
    # Where the probes run, not here: a dry run calls the user's code and replaces functions of
    # torch.cuda in its whole process. `Prober.run` takes any function, so probing need not import
    # prediction; and only the process that predicts imports it, below.
    predict = partial(
        predict_lines,
        environment=survey.environment,
        space=space,
        budget=survey.vram_budget_bytes,
        timeout_s=timeout_s,
    )
    try:
        with nullcontext(prober) if open_apart is None else open_apart() as predictor:
            return predictor.run(predict, expected_seconds=timeout_s)
    except (Exception, SystemExit) as error:  # a search goes on without lines
        why = f"memory was not predicted before the first probe: {type(error).__name__}: {error}"
        return {}, {}, (why,)


def predict_lines(
    session: Session, environment: Environment, space: Space, budget: int, timeout_s: float
) -> Predicted:
    """Predict lines of a session's workload on the environment's GPU, within a budget in bytes."""
    session.on_stage("predicting memory")
    from autofit.devices.gpu_catalogue import gpu_of
    from autofit.prediction.prior_lines import prior_lines

    gpu = gpu_of(environment)
    if gpu is None:
        return {}, {}, ()
    return prior_lines(
        session.builder.fresh_workload(),
        space,
        gpu,
        budget,
        strategies=session.strategies,
        timeout_s=timeout_s,
    )
