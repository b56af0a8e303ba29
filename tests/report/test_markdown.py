"""Markdown of a report, and of two reports compared: what a pull request shows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autofit.measurement import ACT
from autofit.report.details import TRIAL_TITLES, changes, trial_cells
from autofit.report.record import Record, Undecided
from autofit.report.summary import ratio_words, summary
from autofit.report.text import markdown, plain


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_answer_is_the_heading_and_the_numbers_stand_in_a_table(record: Record) -> None:
    text, answer = markdown(record), summary(record)
    assert text.splitlines()[0] == f"### {answer.title}"
    table = [tuple(row) for row in map(cells, text.splitlines()) if len(row) == 3]
    assert {*answer.rows, ("headroom", "20.0 MiB", "")} <= {*table}
    assert answer.apply in text


def test_everything_else_is_folded_and_complete(record: Record) -> None:
    text = markdown(record)
    assert text.count("<details>") == text.count("</details>") > 3
    rows = [cells(line) for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [(row[0], len(row)) for row in rows] == [(str(t.number), 8) for t in record.trials]
    assert "| folding.level=2 | level 1 does not run out of memory |" in text
    codes = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    assert codes[-1].splitlines() == record.paste[6]


def test_names_are_shown_and_mean_nothing(record: Record) -> None:
    hostile = "<script>alert(1)</script> | `x` [a](b) **c**"
    lines = replace(record, notes=(f"{ACT}{hostile}",), paste={6: ["```", hostile]})
    text = markdown(lines)
    (warning,) = re.findall(r"(?m)^> \[!WARNING\]\n> (.*)$", text)
    (note,) = re.findall(r"(?m)^- ! (.*alert.*)$", text)  # among all notes
    assert warning == note == plain(hostile)
    assert re.fullmatch(r"[^<]*\\\|.*\\`x\\`.*\\\[a\\\].*", warning)
    fences = re.findall(r"^(`+)python$", text, re.MULTILINE)
    assert max(map(len, fences)) == 4  # longer than any in the code


# -- Two reports compared: plan, speed and bytes, and what forbids to compare them


def rows_of(before: Record, after: Record) -> dict[str, tuple[str, str]]:
    return {what: (was, now) for what, was, now in changes(before, after).table}


def test_plan_speed_memory_and_what_else_differs_stand_in_a_table(record: Record) -> None:
    """The plan that the earlier report measured as trial 5 is now the best, and slower."""
    other = record.trials[5]
    slower = replace(other.measurement, step_times_s=[0.38, 0.379, 0.381, 0.38], loss=0.25)
    now = replace(record.trials[6], plan=other.plan, measurement=slower)
    later = replace(record, trials=(*record.trials[:6], now, record.trials[7]))
    rows = rows_of(record, later)
    assert rows["plan"] == ("16 x 2, folding.level=1", "8 x 4, folding.level=1")
    assert re.match(r"0\.5\d?x \(", rows["speedup"][1])
    assert rows["micro-batch"] == ("16", "8")
    assert {"torch", "VRAM budget", "seed"}.isdisjoint(rows), "what is alike is left out"
    assert not changes(record, later).lines


def test_speeds_of_other_workloads_or_undecided_searches_give_no_factor(record: Record) -> None:
    other = replace(record, workload={**record.workload, "fingerprint": "beef"})
    assert rows_of(record, other)["speedup"] == ("", "not comparable")
    noisy = replace(record, search=replace(record.search, undecided_because=Undecided.NOISE))
    for before, after in ((record, noisy), (noisy, record)):
        assert rows_of(before, after)["speedup"] == ("", "not decided")


@pytest.mark.parametrize("slow_s", [0.08, 0.8, 3.0])
def test_a_speed_of_a_wide_range_is_shown_within_it(record: Record, slow_s: float) -> None:
    times = [0.0004, 0.0005, *[slow_s] * 5]
    trial = record.trials[3]
    trial = replace(trial, measurement=replace(trial.measurement, step_times_s=times))
    shown = trial_cells(trial, record)[TRIAL_TITLES.index("samples/s")]
    speed, low, high = map(float, re.findall(r"[\d.]+", shown))
    assert low <= speed <= high
    assert ratio_words(4.6, (1.0, 64.0)).startswith("4.6x ("), "and no factor is zero"


def test_what_forbids_to_compare_is_said(record: Record) -> None:
    other = replace(
        record,
        environment={**record.environment, "torch": "2.15.0"},
        workload={**record.workload, "fingerprint": "beef"},
        vram_budget_bytes=2**27,
        search=replace(record.search, comparison_ended=False),
    )
    rows, section = rows_of(record, other), changes(record, other)
    assert rows["torch"] == ("2.13.0", "2.15.0")
    assert rows["VRAM budget"] == ("64.0 MiB", "128 MiB")
    assert [line.partition(" report")[0] for line in section.lines] == [
        f"{ACT}The workloads differ",
        f"{ACT}The later",
    ]
