"""Answers on a machine that others use too."""

from __future__ import annotations

import pytest

from benchmarks.busy_machine import Case, score


@pytest.mark.slow
@pytest.mark.parametrize("max_probes", [4, None])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_interrupted_steps_do_not_turn_the_answer_around(
    share: float, max_probes: int | None
) -> None:
    for seed in range(2):
        assert not score(Case("slices", share, 1.5, max_probes, seed)).is_wrong


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "amount"), [("slices", 0.1), ("wild", 0.2), ("drift", 0.05)])
def test_a_plan_that_is_much_faster_is_the_answer(kind: str, amount: float) -> None:
    found = score(Case(kind, amount, 2.8, None, seed=0))
    assert found.is_decided
    assert not found.is_wrong
