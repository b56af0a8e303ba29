"""What the report of a shared study says of its workers: who ran how many of its trials, how long.

In: a record, and the study's trials and workers as they are stored, later ones included. Out: the
record of all workers; what is not in its own trials does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optuna.trial import FrozenTrial

from autofit.report.record import Record
from autofit.searching.liveness import WORKER


def of_all_workers(
    record: Record, stored: Sequence[FrozenTrial], workers: Mapping[str, Mapping[str, Any]]
) -> Record:
    """Return the record with the trials of each worker, and the seconds of all together.

    Args:
        record: of one worker.
        stored: the study's trials.
        workers: their entries, by key.
    """
    numbers = {trial.number for trial in record.trials}
    trials = [trial for trial in stored if trial.number in numbers]
    keys = [str(trial.user_attrs.get(WORKER)) for trial in trials]
    names = Counter(workers[key]["name"] if key in workers else "unshared" for key in keys)
    search = replace(
        record.search,
        seconds=_seconds(trials),
        sessions=len(names),
        workers=dict(names),
    )
    return replace(record, search=search)


def _seconds(trials: Sequence[FrozenTrial]) -> float:
    """Return the seconds in which at least one trial ran, by the clocks of their workers."""
    spans = [
        (trial.datetime_start.timestamp(), trial.datetime_complete.timestamp())
        for trial in trials
        if trial.datetime_start is not None and trial.datetime_complete is not None
    ]
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
