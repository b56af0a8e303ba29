"""The rules of batch-size finders, replayed on recorded grids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.finder_rules import FINDERS, Runs, autovram_precisions
from benchmarks.grids.recorded import WORKLOADS, grid_world
from benchmarks.versus_grids import (
    PLAIN,
    Row,
    ahead,
    autofit_row,
    best_precision,
    exact,
    finder_row,
    optuna_row,
)

NO_ANSWER = {("Ultralytics AutoBatch", "resnet50"), ("batchtune", "gpt2_small")}
ANSWERED = sorted({(peer, name) for peer in FINDERS for name in WORKLOADS} - NO_ANSWER)


@pytest.mark.parametrize(("peer", "name"), ANSWERED)
def test_what_a_finder_answers_fits_and_is_no_faster_than_the_best(peer: str, name: str) -> None:
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


def test_autovram_keeps_the_fastest_that_it_ran_and_batch_finder_the_largest() -> None:
    world = grid_world("gpt2_small")
    slower_above_8 = {
        variant: [
            replace(row, seconds=row.seconds and 2 * row.seconds) if row.micro_batch > 8 else row
            for row in its
        ]
        for variant, its in world.rows.items()
    }
    world = replace(world, rows=slower_above_8)
    timed, largest = Runs(world, PLAIN), Runs(world, PLAIN)
    assert FINDERS["autovram"](timed, 0) == 8
    large = FINDERS["batch-finder"](largest, 0)
    assert large == max(size for size, fits in largest.seen.items() if fits)
    assert not largest.fits(large + 1)


def test_autovram_chooses_the_fastest_of_its_precisions_and_counts_the_runs_of_all() -> None:
    world = grid_world("gpt2_small")
    runs, size = autovram_precisions(world, PLAIN)
    each = [
        Runs(world, {**PLAIN, "precision.dtype": name})
        for name in ("default", "bfloat16", "float16")
    ]
    fastest = max(one.speed(FINDERS["autovram"](one, 0)) for one in each)
    assert runs.speed(size) == fastest
    assert (runs.probes, runs.ooms) == (sum(o.probes for o in each), sum(o.ooms for o in each))


def test_batchtune_has_no_answer_where_64_samples_do_not_fit_and_no_other_size_elsewhere() -> None:
    small = Runs(grid_world("gpt2_small"), PLAIN)
    assert FINDERS["batchtune"](small, 0) == 0
    assert small.ooms == 0  # the line said beforehand that 32 would be too much
    answer = FINDERS["batchtune"](runs := Runs(grid_world("resnet50"), PLAIN), 0)
    assert answer % 64 == 0
    assert runs.seen[answer]


@pytest.mark.parametrize("name", WORKLOADS)
def test_exact_arithmetic_leaves_checkpointing_alone_to_choose(name: str) -> None:
    world = exact(grid_world(name))
    varied = {name for name, each in world.space.dimensions.items() if len(each.values) > 1}
    assert varied == {"checkpointing.level"}
    assert len(world.rows) == 3
    row = autofit_row([world], "exact arithmetic", lines=True, times=True)
    assert row.fits == 1
    assert 0 < row.speed < 0.5  # of the whole grid's best, which has another precision


def test_how_far_ahead_is_told_beside_the_answers_that_fit() -> None:
    found = [
        Row("autofit, x", 1.0, 1.0, 5, 0),
        Row("one, float32", 0.5, 1.0, 5, 0),
        Row("two, float32", 0.0, 0.0, 5, 0),
        Row("one, bfloat16", 0.8, 1.0, 5, 0),
    ]
    assert ahead(found, "x", "float32") == [2.0]


def test_the_precision_by_hand_is_the_fastest_of_the_plain_ones() -> None:
    assert best_precision(grid_world("gpt2_small"))["precision.dtype"] == "bfloat16"
    assert best_precision(grid_world("resnet50"))["precision.dtype"] == "float16"


def test_optuna_runs_as_many_trials_as_it_is_given() -> None:
    row = optuna_row(grid_world("gpt2_small"), "TPESampler", trials=8, seeds=1)
    assert row.probes == 8
    assert 0 < row.speed <= 1.1
