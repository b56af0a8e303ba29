"""What the benchmark of searches beside busy loops counts, without running one."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.busy_machine import Run, runs_of, table

DECIDED = Run(0, 1, True, None, "64 x 2", "64 x 2", 1.8, 1.6, 2.0, 1.9, 12, 2, 50.0)
BASELINE = replace(DECIDED, plan="8 x 16")


@pytest.mark.parametrize(
    ("run", "judged", "is_right"),
    [(DECIDED, 1.1, True), (DECIDED, 0.99, False), (BASELINE, 1.04, True), (BASELINE, 1.2, False)],
)
def test_a_decided_direction_is_right_where_the_judge_sees_it(
    run: Run, judged: float, is_right: bool
) -> None:
    assert replace(run, judged=judged).is_right is is_right


def test_searches_that_were_written_down_are_not_run_again(tmp_path: Path) -> None:
    known = [replace(DECIDED, seed=seed, loops=loops) for seed in (0, 1) for loops in (1, 2)]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(f"{json.dumps(asdict(run))}\n" for run in known))
    asked = Namespace(json=path, runs=2, loops="1,2", turns=1, minutes=math.inf, seed=0)
    assert list(runs_of(asked)) == known


def test_the_table_counts_what_is_decided_and_wrong() -> None:
    wrong, open_ = replace(DECIDED, judged=0.9), replace(DECIDED, decided=False, judged=0.9)
    (row,) = list(table([DECIDED, wrong, open_]))[2:]
    assert row == "| 1 | 3 | 2 | 1 | 2.0 | 12.0 | 50 |"
