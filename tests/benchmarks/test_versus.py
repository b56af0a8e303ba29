"""The comparison with other tools: what its cells come to, and that it goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.versus.__main__ import PLAIN, alike, cells_left, judged, main, options
from benchmarks.versus.peers import Answer, rounded
from benchmarks.versus.roster import COMPARED, EXPERT, OURS
from benchmarks.versus.summary import ALL, CONDITIONS, Cell, markdown, read, summary

FINDER, BF16 = (f"accelerate find_executable_batch_size, {p}" for p in ("float32", "bfloat16"))
TUNER = "Optuna TPE"


def cell(peer: str, *speeds: float, seed: int = 0, name: str = "net", size: int = 8) -> Cell:
    """A cell of a tool; without speeds its answer died."""
    told = asdict(Answer(size, "bfloat16" if peer == BF16 else "float32"))
    found = {"answer": told, "seconds": 2.0, "versions": {"torch": "2"}}
    rates = {name: [(speed, 1.0) for speed in speeds] for name in CONDITIONS}
    verdict = {"survives": bool(speeds), "died_of": "OutOfMemoryError"}
    return Cell(name, 100, "cpu", seed, 200, peer, found, 1, verdict, rates if speeds else {})


def cells(name: str = "net", ours: float = 1.0, *, one_dies: bool = False) -> list[Cell]:
    """Three seeds of a finder in two precisions, an expert, autofit and a tuner."""
    found = []
    for seed, speeds in enumerate([(ours, ours, ours), (1.2,), (1.1,)]):
        at = partial(cell, seed=seed, name=name)
        found += [at(FINDER, 0.5), at(EXPERT, 1.1), at(OURS, *speeds), at(TUNER, 0.4)]
        found.append(at(BF16, *([] if one_dies and seed else [0.8])))
    return found


def test_a_speed_is_the_median_of_all_pairs_and_is_set_beside_each_kind_of_rival() -> None:
    told = summary([*cells(), *cells("other", 2.0)])
    assert (told["net"][OURS]["speed"], told["net"][OURS]["mean_ooms"]) == (1.0, 1)
    best = {"best finder": 0.8, "best finder at float32": 0.5, EXPERT: 1.1, "best tuner": 0.4}
    best["best plan by hand"] = 1.1
    for kind, speed in best.items():
        key = f"{kind}, speed"
        assert told["net"][OURS]["against"][key] == pytest.approx(1 / speed)
        overall = told[ALL][OURS]["against"][key]
        assert overall == pytest.approx({"mean": 2**0.5 / speed, "least": 1 / speed})


def test_an_answer_that_dies_in_one_run_has_no_speed_and_is_not_compared() -> None:
    told = summary(cells(one_dies=True))
    tool = told["net"][BF16]
    assert (tool["speed"], tool["lived"], tool["runs"]) == (None, 1, 3)
    assert told["net"][OURS]["against"]["best finder, speed"] == 1.0 / 0.5
    assert f"| {BF16} | -, - | 1 of 3 |" in "\n".join(markdown(told))


def test_a_tool_that_was_ended_has_no_speed_and_the_others_keep_theirs() -> None:
    ended = Cell("net", 100, "cpu", 0, 200, "autovram tune", {"error": "TimeoutExpired"}, 3)
    told = summary([*cells(), ended])
    assert (told["net"]["autovram tune"]["speed"], told["net"][OURS]["speed"]) == (None, 1.0)
    assert "| autovram tune | -, - | 0 of 1 | 3.0 | - |" in "\n".join(markdown(told))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(cell(FINDER, 1.0, seed=3), budget_bytes=99), "net: runs differ in budget"),
        (replace(cell(FINDER, 1.0, seed=3), found={"versions": {"torch": "1"}}), "torch"),
        (cell(FINDER, 1.0), "two cells"),
    ],
)
def test_runs_that_differ_or_are_the_same_are_not_put_together(other: Cell, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        summary([*cells(), other])


@pytest.mark.parametrize(
    ("size", "global_batch", "kept"),
    [(8, None, (8, 1)), (8, 16, (8, 2)), (15, 32, (11, 3)), (200, 32, (32, 1)), (0, 32, (0, 1))],
)
def test_an_answer_is_brought_to_the_users_global_batch(
    size: int, global_batch: int | None, kept: tuple[int, int]
) -> None:
    found = Answer(size, "float32").keeping(global_batch)
    assert (found.micro_batch, found.accumulation_steps) == kept


@pytest.mark.parametrize(("size", "written"), [(7, 7), (8, 8), (43, 40)])
def test_a_person_writes_multiples_of_eight(size: int, written: int) -> None:
    assert rounded(size) == written


def test_what_trains_alike_takes_a_verdict_over_and_within_a_seed_its_speeds() -> None:
    plain, known = cell(PLAIN, 1.0), cell(FINDER, 0.7, size=16)
    new = replace(known, peer=EXPERT, verdict=None, rates={})
    told = judged(new, [plain, known], at=nobody(), repeats=1)
    assert (told.verdict, told.rates) == (known.verdict, known.rates)
    elsewhere = replace(new, seed=1)
    at = nobody(pair=lambda ours, plain, **_: (2.0, 4.0))
    told = judged(elsewhere, [replace(plain, seed=1), known], at=at, repeats=2)
    assert told.verdict == known.verdict
    assert [told.shares(name) for name in CONDITIONS] == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    "differs", [{"workload": "other"}, {"budget_bytes": 99}, {"place": "cuda"}, {"steps": 9}]
)
def test_only_the_same_task_takes_a_verdict_over(differs: dict[str, Any]) -> None:
    known = cell(FINDER, 1.0)
    assert list(alike(known, [known])) == [known]
    assert list(alike(known, [replace(known, **differs)])) == []


def test_a_verdict_of_another_torch_or_of_another_fault_is_not_taken_over() -> None:
    known, died = cell(FINDER, 1.0), cell(FINDER)
    elsewhere = replace(known, found=known.found | {"versions": {"torch": "1"}})
    fault = replace(died, verdict={"survives": False, "died_of": "KeyError: 'x'"})
    assert list(alike(known, [elsewhere, fault])) == []
    assert list(alike(known, [died])) == [died]


def test_a_run_goes_on_with_the_cells_that_its_file_lacks(tmp_path: Path) -> None:
    path, words = tmp_path / "raw.jsonl", ["net=1GiB", "--seeds", "0", "1", "--json"]
    given = options().parse_args([*words, str(path)])
    everything = [(task["seed"], name) for name, task in cells_left(given)]
    assert everything == [(seed, name) for seed in (0, 1) for name in (PLAIN, *COMPARED)]
    done = [cell(PLAIN, 1.0), cell(OURS, 1.0, seed=1)]
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in done))
    assert [each.verdict for each in read([path])] == [each.verdict for each in done]
    left = [(task["seed"], name) for name, task in cells_left(given)]
    assert left == [each for each in everything if each not in [(0, PLAIN), (1, OURS)]]


def nobody(**can: Any) -> Any:
    """A bench whose judge must not be asked for what is not named."""
    return SimpleNamespace(**can)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_tool_is_run_judged_and_timed_in_processes_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    few: Sequence[str] = [
        "--steps",
        "2",
        "--timed-steps",
        "1",
        "--seeds",
        "0",
        "--only",
        "bfloat16",
    ]
    main(["tiny_mlp=64MiB", "--json", str(path), *few])
    plain, by_hand = read([path])
    assert (plain.peer, by_hand.peer) == (PLAIN, "bfloat16")
    assert plain.lives
    assert by_hand.lives
    assert all(share > 0 for name in CONDITIONS for share in by_hand.shares(name))
