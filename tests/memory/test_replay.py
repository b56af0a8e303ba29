"""Replays: repeating steps, the smallest limit, and 30 trainings recorded on an H200."""

from __future__ import annotations

import pytest

from autofit.memory.allocator import OutOfBudget
from autofit.memory.replay import Recording, Replay, replay, required_bytes
from autofit.units import MIB
from benchmarks.traces.recorded import RecordedTraining, recorded_trainings


def test_recorded_steps_come_first_and_the_last_is_repeated() -> None:
    recording = Recording([(1, 512), (2, 512), (-2, 0), (3, 1024), (-3, 0)], [3, 5])
    first, second, third, fourth = recording.replayed
    assert list(first) == [(1, 512), (2, 512), (-2, 0)]
    assert list(second) == [(3, 1024), (-3, 0)]
    for repeated in (third, fourth):
        (born, size), (died, nothing) = repeated
        assert (size, nothing) == (1024, 0)
        assert died == -born
        assert born > 3
    assert third != fourth


def test_a_repeated_step_releases_what_the_step_before_it_left() -> None:
    """Each step leaves a loss, and the next step drops it."""
    recording = Recording([(1, 512), (2, 512), (-1, 0)], [1, 3])
    _, _, third, fourth = recording.replayed
    assert third[1] == (-2, 0)
    assert fourth[1] == (-third[0][0], 0)


@pytest.mark.parametrize(
    ("recording", "peak_allocated_bytes"),
    [
        (Recording([(1, 512), (2, 512)], [1, 2]), 4 * 512),  # what every step leaves adds up
        (Recording([(1, 4 * MIB), (-1, 0), (2, 512)], [1, 3]), 4 * MIB),  # released for good
        (Recording([(1, 512), (2, 512), (-1, 0)], [1, 3]), 1024),  # of the step before
    ],
)
def test_the_peak_of_repeated_steps(recording: Recording, peak_allocated_bytes: int) -> None:
    assert replay(recording).peak_allocated_bytes == peak_allocated_bytes


def test_required_lies_below_peak_reserved_where_a_flush_in_warm_up_helps() -> None:
    """Building leaves a segment behind that no step can use."""
    events = [(1, 30 * MIB), (-1, 0), (2, 40 * MIB), (-2, 0), (3, 40 * MIB), (-3, 0)]
    recording = Recording(events, [4, 6])
    free = replay(recording)
    assert free.peak_reserved_bytes == 70 * MIB
    assert required_bytes(recording) == 40 * MIB
    assert replay(recording, limit_bytes=40 * MIB).late_retries == 0


def test_a_limit_that_forces_a_flush_in_every_step_is_not_enough() -> None:
    events = [(1, 30 * MIB), (-1, 0), (2, 40 * MIB), (-2, 0), (3, 15 * MIB), (4, 1), (-3, 0)]
    step = [(5, 30 * MIB), (6, 30 * MIB), (-5, 0), (-6, 0), (7, 40 * MIB), (8, 20 * MIB)]
    events += [*step, (-7, 0), (-8, 0)]
    recording = Recording(events, [7, len(events)])
    required = required_bytes(recording)
    assert replay(recording, limit_bytes=required).late_retries == 0
    try:
        below = replay(recording, limit_bytes=required - 2 * MIB)
    except OutOfBudget:
        return
    assert below.late_retries > 0


def test_expandable_segments_never_require_more_than_pages_allow() -> None:
    events = [(1, 30 * MIB), (-1, 0), (2, 70 * MIB), (-2, 0)]
    assert required_bytes(Recording(events, [4]), expandable_segments=True) == 80 * MIB


# -- The simulated allocator against 30 trainings recorded on an H200 (torch 2.11, CUDA 13.0)


@pytest.fixture(scope="module")
def replayed() -> list[tuple[RecordedTraining, Replay]]:
    return [(training, replay(training.recording)) for training in recorded_trainings()]


@pytest.mark.slow
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
