"""Rules are switched off and on again."""

from __future__ import annotations

from benchmarks.prediction_ablation import ABLATIONS, compared_without
from benchmarks.prediction_accuracy import compared
from benchmarks.traces.recorded import recorded_trainings


def test_an_ablation_changes_a_prediction_and_ends() -> None:
    vit = next(each for each in recorded_trainings() if each.name == "vit_bf16")
    whole = compared(vit)
    (without,) = compared_without(ABLATIONS["scratch of sum"], [vit], {vit.name: whole})
    assert without.required_error < whole.required_error - 0.05
    assert compared(vit).required_error == whole.required_error
