"""The grid's table: who won, also where some of the plans failed when they took turns."""

from __future__ import annotations

import pytest

from autofit import Plan
from autofit.space import Space
from benchmarks.grid import standing

FOUR, FIVE, SIX = Plan(4), Plan(5), Plan(6)


@pytest.mark.parametrize(
    ("rates", "table"),
    [
        (
            {FOUR: 90.0, FIVE: 100.0, SIX: 80.0},
            ["grid's best | micro-batch 5 x 1: 100", "answer | micro-batch 4 x 1: 90", "| 0.900 |"],
        ),
        (
            {FOUR: 90.0, SIX: 80.0},
            [
                "finalist of the grid | micro-batch 5 x 1: failed",
                "best | micro-batch 6",
                "4 x 1: 90",
                "| 1.125 |",
            ],
        ),
        (
            {FIVE: 100.0, SIX: 80.0},
            ["best | micro-batch 5 x 1: 100", "answer | micro-batch 4 x 1: failed in every turn"],
        ),
        (
            {},
            ["5 x 1: failed in every turn", "6 x 1: failed in every turn", "4 x 1: failed in"],
        ),
    ],
)
def test_only_plans_that_ran_are_ranked_and_the_others_are_named(
    rates: dict[Plan, float], table: list[str]
) -> None:
    lines = list(standing(FOUR, [FIVE, SIX], rates, Space({}, 4)))
    assert len(lines) == len(table)
    assert all(words in line for words, line in zip(table, lines, strict=True))
