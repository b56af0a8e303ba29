"""The rules of batch-size finders, replayed on recorded grids."""

from __future__ import annotations

import pytest

from benchmarks.grids.recorded import WORKLOADS, grid_world
from benchmarks.versus_grids import FINDERS, PLAIN, Runs, best_precision, finder_row, optuna_row


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("peer", sorted(set(FINDERS) - {"Ultralytics AutoBatch"}))
def test_what_a_finder_ran_last_fits_and_is_no_faster_than_the_best(name: str, peer: str) -> None:
    world = grid_world(name)
    row = finder_row(world, peer, FINDERS[peer], PLAIN, "float32")
    assert row.fits == 1
    assert 0 < row.speed < 0.5  # at float32 most of the speed is left on the table
    assert row.ooms < row.probes


def test_shrinking_by_a_tenth_runs_out_of_memory_most_often() -> None:
    runs = Runs(grid_world("gpt2_small"), PLAIN)
    answer = FINDERS["accelerate find_executable_batch_size"](runs, 128)
    assert runs.fits(answer)
    assert not runs.fits(int(answer / 0.9) + 1)
    assert runs.ooms > 5


def test_a_bisection_ends_below_the_largest_that_fits() -> None:
    runs = Runs(grid_world("resnet50"), PLAIN)
    answer = FINDERS["Lightning scale_batch_size, binsearch"](runs, 0)
    largest = max(size for size, fits in runs.seen.items() if fits)
    assert answer == int(0.95 * largest)
    assert not runs.fits(largest + 1)


def test_the_precision_by_hand_is_the_fastest_of_the_plain_ones() -> None:
    assert best_precision(grid_world("gpt2_small"))["precision.dtype"] == "bfloat16"
    assert best_precision(grid_world("resnet50"))["precision.dtype"] == "float16"


def test_optuna_runs_as_many_trials_as_it_is_given() -> None:
    row = optuna_row(grid_world("gpt2_small"), trials=8, seeds=1)
    assert row.probes == 8
    assert 0 < row.speed <= 1.1
