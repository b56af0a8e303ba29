"""Predictions against the recorded trainings; `benchmarks/prediction_accuracy.py` prints them."""

from __future__ import annotations

import pytest

from benchmarks.prediction_accuracy import PROMISES, comparisons, summary


@pytest.mark.slow
def test_predictions_keep_their_promises_on_all_30_recorded_trainings() -> None:
    results = list(comparisons())
    assert len(results) == 30
    figures = summary(results)
    assert {name: figures[name] for name, bound in PROMISES.items() if figures[name] > bound} == {}
