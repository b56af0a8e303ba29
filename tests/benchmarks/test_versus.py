"""The comparison with other tools: what several runs of it come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.versus.__main__ import Bench, verdicts_of, what_trains
from benchmarks.versus.summary import ALL, markdown, summary
from benchmarks.versus.table import Comparison, Row, keeps

FINDER, TUNER = "accelerate find_executable_batch_size", "Optuna TPE"


def answer(micro_batch: int, accumulation: int | None = None, *, ours: bool = False) -> Any:
    report = "report.json" if ours else None
    return {
        "micro_batch": micro_batch,
        "precision": "float32",
        "accumulation_steps": accumulation,
        "report": report,
        "probes": None,
    }


def row(peer: str, precision: str, told: Any, speed: float, *, lives: bool = True) -> Row:
    found = {"answer": told, "seconds": 2.0, "changed": []}
    rates = [(speed, 1.0)] if lives else []
    return Row(peer, precision, found, 5, 1, 1, {"survives": lives}, rates)


def run(seed: int, rows: Sequence[Row], global_batch: int | None = None) -> Comparison:
    return Comparison("net", 100, "cpu", seed, global_batch, 200, {"float32": 8}, None, rows)


def runs(*, lives: bool = True) -> list[Comparison]:
    return [
        run(
            seed,
            [
                row(FINDER, "float32", answer(8), 0.5),
                row(FINDER, "bfloat16", answer(16), 0.8, lives=lives or not seed),
                row(TUNER, "own", answer(8), 0.4),
                row("autofit", "own", answer(8, ours=True), speed),
            ],
            global_batch=16,
        )
        for seed, speed in enumerate((1.0, 1.2, 1.1))
    ]


def test_a_speed_is_the_median_of_the_seeds_and_is_set_beside_each_kind_of_rival() -> None:
    told = summary(runs())
    assert told["net"]["autofit"]["speed"] == 1.1
    assert told["net"]["autofit"]["range"] == [1.0, 1.2]
    expected = {"finder at float32": 1.1 / 0.5, "finder": 1.1 / 0.8, "tuner": 1.1 / 0.4}
    expected["finder at the kept global batch"] = 1.1 / 0.8
    assert told["net"]["autofit"]["against"] == pytest.approx(expected)
    assert told[ALL]["autofit"]["against"] == pytest.approx(expected)


def test_an_answer_that_dies_in_one_run_has_no_speed_and_is_no_rival() -> None:
    told = summary(runs(lives=False))
    by_hand = told["net"][f"{FINDER}, bfloat16"]
    assert (by_hand["speed"], by_hand["lived"], by_hand["runs"]) == (None, 1, 3)
    assert told["net"]["autofit"]["against"]["finder"] == 1.1 / 0.5
    assert f"| {FINDER} | 0.50, - | 4 of 6 |" in "\n".join(markdown(told))


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (answer(16), True),
        (answer(15), False),
        (answer(17), False),
        (answer(6, 3), True),
        (answer(7, 3), False),
    ],
    ids=["equal", "smaller", "larger", "rounded up", "larger by a micro-batch"],
)
def test_only_the_global_batch_itself_is_kept_but_for_rounding(told: Any, kept: bool) -> None:
    assert keeps(16, told) is kept


def test_only_a_plain_loop_of_the_same_task_takes_its_verdict_over(tmp_path: Any) -> None:
    task = {"workload": "net", "budget_bytes": 100, "place": "cpu"}
    bench = Bench(task, {}, tmp_path, 200, 20, 1, 9.0)
    found = verdicts_of(bench, runs())
    assert found == {what_trains(FINDER, answer(size)): {"survives": True} for size in (8, 16)}
    other = Bench({**task, "budget_bytes": 99}, {}, tmp_path, 200, 20, 1, 9.0)
    assert verdicts_of(other, runs()) == {}
