"""The simulated allocator against 30 trainings recorded on an H200 (torch 2.11, CUDA 13.0)."""

from __future__ import annotations

import pytest

from autofit.memory.replay import Replay, replay, required_bytes
from benchmarks.traces.recorded import RecordedTraining, recorded_trainings


@pytest.fixture(scope="module")
def replayed() -> list[tuple[RecordedTraining, Replay]]:
    return [(training, replay(training.recording)) for training in recorded_trainings()]


def test_peak_allocated_is_within_0_3_percent_in_all_30(
    replayed: list[tuple[RecordedTraining, Replay]],
) -> None:
    errors = {
        training.name: abs(result.peak_allocated_bytes / training.traced_allocated_bytes - 1)
        for training, result in replayed
    }
    assert len(errors) == 30
    assert max(errors.values()) <= 0.003


def test_peak_reserved_is_exact_in_29_and_within_1_5_percent_in_all(
    replayed: list[tuple[RecordedTraining, Replay]],
) -> None:
    errors = [
        abs(result.peak_reserved_bytes / training.traced_reserved_bytes - 1)
        for training, result in replayed
    ]
    assert sum(error == 0 for error in errors) >= 29
    assert max(errors) <= 0.015


# cuDNN takes a larger workspace where memory is free and a smaller one where a limit binds, so for
# three convolutional trainings the events of a traced run without a limit are not those of the
# limited runs. The attention of vit_fp32 is 0.02 % beyond the line; limits were bisected to 1 %.
BEYOND_2_PERCENT = {
    "resnet_fp32": 0.07,
    "resnet_tf32": 0.035,
    "resnet_fp32_cl": 0.025,
    "vit_fp32": 0.0205,
}


@pytest.mark.slow
def test_required_bytes_are_within_2_percent_of_the_smallest_limit_in_26() -> None:
    for training in recorded_trainings():
        required = required_bytes(training.recording)
        error = abs(required / training.smallest_limit_bytes - 1)
        assert error <= BEYOND_2_PERCENT.get(training.name, 0.02), training.name
