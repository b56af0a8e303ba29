"""The comparison with other tools: what several runs of it come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.versus.__main__ import Bench, verdicts_of, what_trains
from benchmarks.versus.summary import ALL, markdown, summary
from benchmarks.versus.table import Comparison, Row, keeps

FINDER, TUNER = "accelerate find_executable_batch_size", "Optuna TPE"


def answer(
    micro_batch: int, accumulation: int | None = None, precision: str = "float32", **more: Any
) -> Any:
    told = {"micro_batch": micro_batch, "accumulation_steps": accumulation}
    return {**told, "precision": precision, "report": None, "probes": None, **more}


OURS = answer(8, report="report.json")


def row(peer: str, precision: str, told: Any, *speeds: float) -> Row:
    """A row of a tool; without speeds its answer died."""
    found = {"answer": told, "seconds": 2.0, "changed": [], "versions": {"torch": version("torch")}}
    rates = [(speed, 1.0) for speed in speeds]
    return Row(peer, precision, found, 5, 1, 1, {"survives": bool(speeds)}, rates)


def run(name: str, seed: int, rows: Sequence[Row], budget_bytes: int = 100) -> Comparison:
    return Comparison(name, budget_bytes, "cpu", seed, 16, 200, {"float32": 8}, None, rows)


def runs(name: str = "net", ours: float = 1.0, *, one_dies: bool = False) -> list[Comparison]:
    """Three seeds; the fastest finder does not keep the global batch of 16."""

    def rows(seed: int, *speeds: float) -> list[Row]:
        by_hand = answer(8, None, "bfloat16")
        return [
            row(FINDER, "float32", answer(16), 0.5),
            row(FINDER, "bfloat16", by_hand, *([] if one_dies and seed else [0.8])),
            row(TUNER, "own", answer(8), 0.4),
            row("autofit", "own", OURS, *speeds),
        ]

    speeds = (ours, ours, ours), (1.2,), (1.1,)
    return [run(name, seed, rows(seed, *each)) for seed, each in enumerate(speeds)]


def test_a_speed_is_the_median_of_all_pairs_and_is_set_beside_each_kind_of_rival() -> None:
    told = summary([*runs(), *runs("other", 2.0)])
    found = told["net"]["autofit"]
    assert (found["speed"], found["range"], found["mean_ooms"]) == (1.0, [1.0, 1.2], 1)
    best = {"finder at float32": 0.5, "finder": 0.8, "tuner": 0.4}
    ratios = {kind: 1 / speed for kind, speed in best.items()}
    ratios["finder at the kept global batch"] = 1 / 0.5
    assert found["against"] == pytest.approx(ratios)
    means = {kind: (2.0**0.5) * ratio for kind, ratio in ratios.items()}
    assert told[ALL]["autofit"]["against"] == pytest.approx(means)


def test_an_answer_that_dies_in_one_run_has_no_speed_and_is_not_compared() -> None:
    told = summary(runs(one_dies=True))
    by_hand = told["net"][f"{FINDER}, bfloat16"]
    assert (by_hand["speed"], by_hand["lived"], by_hand["runs"]) == (None, 1, 3)
    assert told["net"]["autofit"]["against"]["finder"] == 1.0 / 0.5
    assert f"| {FINDER} | 0.50, - | 4 of 6 |" in "\n".join(markdown(told))


def test_a_tool_that_one_workload_lacks_keeps_its_column_and_has_no_mean() -> None:
    with_tuner = run("other", 0, [row(TUNER, "own", answer(8), 0.4)])
    told = summary([*runs(), with_tuner])
    lines = list(markdown(told))
    assert f"| {FINDER} | 0.50, 0.80 | - | 6 of 6 | 1.0 | 2 to 2 |" in lines
    assert "| autofit: finder | 1.25 | - | - |" in lines


def of_torch(comparison: Comparison, version: str) -> Comparison:
    rows = [replace(r, found=r.found | {"versions": {"torch": version}}) for r in comparison.rows]
    return replace(comparison, rows=rows)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (run("net", 3, [], budget_bytes=99), "net: runs differ"),
        (of_torch(replace(runs()[1], seed=3), "1.0"), "torch"),
        (runs()[0], "two rows"),
    ],
)
def test_runs_that_differ_or_are_the_same_are_not_put_together(
    other: Comparison, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        summary([*runs(), other])


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (answer(16), True),
        (answer(15), False),
        (answer(17), False),
        (answer(6, 3), True),
        (answer(7, 3), False),
        (answer(9, report="report.json"), True),
    ],
    ids=["equal", "smaller", "larger", "rounded up", "larger than rounded up", "a report"],
)
def test_only_the_global_batch_itself_is_kept_but_for_rounding(told: Any, kept: bool) -> None:
    assert keeps(16, told) is kept


@pytest.mark.parametrize(
    "differs", [{}, {"workload": "other"}, {"budget_bytes": 99}, {"place": "cuda"}, {"steps": 9}]
)
def test_only_a_plain_loop_of_the_same_task_takes_its_verdict_over(
    tmp_path: Path, differs: dict[str, Any]
) -> None:
    task: dict[str, Any] = {"workload": "net", "budget_bytes": 100, "place": "cpu", **differs}
    bench = Bench(task, {}, tmp_path, task.pop("steps", 200), 20, 1, 9.0)
    plain = [answer(16), answer(8), answer(8, None, "bfloat16")]
    expected = {what_trains(FINDER, one): {"survives": True} for one in plain}
    assert len(expected) == 3
    assert verdicts_of(bench, runs()) == ({} if differs else expected)


def test_a_verdict_of_another_torch_or_of_another_fault_is_not_taken_over(tmp_path: Path) -> None:
    task = {"workload": "net", "budget_bytes": 100, "place": "cpu"}
    bench = Bench(task, {}, tmp_path, 200, 20, 1, 9.0)
    lived = row(FINDER, "float32", answer(16), 1.0)
    elsewhere = replace(lived, found=lived.found | {"versions": {"torch": "1.0"}})

    def taken(*rows: Row) -> int:
        return len(verdicts_of(bench, [run("net", 0, rows)]))

    def died(of: str) -> Row:
        return replace(lived, verdict={"survives": False, "died_of": of})

    assert taken(lived) == taken(died("OutOfMemoryError: of 1 MiB")) == 1
    assert taken(elsewhere) == taken(died("KeyError: 'x'")) == 0
