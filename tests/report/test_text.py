"""The report as text: what a person reads first comes first, and nothing is left out."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from textwrap import dedent
from types import SimpleNamespace

import pytest

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Dimension, Hint, Plan
from autofit.report.record import Record, Skipped
from autofit.report.text import headline, render


def test_the_best_plan_comes_first_and_against_the_baseline(record: Record) -> None:
    first = render(record).splitlines()[0]
    assert first.startswith("Best plan: 16 x 2, folding.level=1: 168 samples/s")
    assert re.search(r"2\.11\b.*80\.0 samples/s", first)


def test_the_parts_come_in_the_order_of_their_use(record: Record) -> None:
    text = render(record)
    heads = ["Best plan:", "headroom", "To train like this:", "7 trials", "Skipped"]
    places = [text.index(head) for head in heads]
    assert places == sorted(places)


def test_lines_to_paste_are_never_broken(record: Record) -> None:
    lines = render(record, width=80).splitlines()
    for line in record.paste[6]:
        assert f"    {line}" in lines


def test_the_lines_to_paste_begin_with_report_apply_and_run(record: Record) -> None:
    text = render(record).partition("To train like this:")[2].partition("or without")[0]
    assert "criterion=... to apply" in text
    trained: list[str] = []
    report = SimpleNamespace(apply=lambda *given: nullcontext(SimpleNamespace(step=trained.append)))
    scope = {"report": report, "model": None, "optimizer": None, "loader": ["one", "two"]}
    exec(dedent(text.strip("\n")), scope)
    assert trained == ["one", "two"]


@pytest.mark.parametrize("width", [80, 120])
def test_everything_else_keeps_to_the_width(record: Record, width: int) -> None:
    pasted = {f"    {line}" for line in record.paste[6]}
    lines = [line for line in render(record, width).splitlines() if line not in pasted]
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


def test_what_values_were_expected_to_change(record: Record) -> None:
    """Tried or not; of many values, evenly spread ones with the last."""
    dimension = Dimension(
        range(31), hints={level: Hint(1 - level / 50, 1 + level / 100) for level in range(31)}
    )
    text = render(replace(record, dimensions={"folding.level": dimension}))
    rows = [line.split() for line in text.splitlines() if line.startswith("folding.level=")]
    assert 5 <= len(rows) <= 12
    assert rows[-1] == ["folding.level=30", "40%", "130%", "none"]
    assert ["folding.level=2", "96%", "102%", "1"] in rows
    assert "expected to change" not in render(record)


def test_every_trial_has_its_line_failures_included(record: Record) -> None:
    table = render(record).partition("7 trials")[2].partition("Skipped")[0]
    rows = [line for line in table.splitlines() if re.match(r"\d", line)]
    assert [row.split()[0] for row in rows] == [str(trial.number) for trial in record.trials]
    for row, trial in zip(rows, record.trials, strict=True):
        assert trial.role.value in row
        vetoed = trial.role is Role.VETOED
        assert ("not run:" if vetoed else trial.measurement.outcome.value) in row
    assert re.search(r"baseline +4 x 8 +plain +ok +80\.0 ±\d\.\d% +26\.0 MiB +400 ms", rows[0])


def test_an_outcome_that_bytes_do_not_explain_says_why_in_short(record: Record) -> None:
    text = render(record)
    assert "ValueError: level 2 needs" in re.sub(r"\s+", " ", text)
    assert "an even number" not in text
    assert "CUDA out of memory" not in text  # the outcome says it, and the bytes held


def test_what_was_skipped_stands_with_its_reason(record: Record) -> None:
    assert re.search("folding.level=2: level 1 does not run out of memory", render(record))


def test_a_setting_is_not_broken_within_its_name(record: Record) -> None:
    long = replace(record.trials[3].plan, settings={"memory_format.layout": "channels_last"})
    trials = (*record.trials[:3], replace(record.trials[3], plan=long), *record.trials[4:])
    text = render(replace(record, trials=trials))
    assert "memory_format.layout=channels_last" in text
    assert re.search(r"^trial .* held +step$", text, re.MULTILINE)
    assert re.search(r"^3 .*channels_last.* 200 ms$", text, re.MULTILINE)


def test_skipped_values_with_one_reason_are_one_line(record: Record) -> None:
    slow = "predicted to reach {} samples/s at most, and the leading plan 85 samples/s"
    skipped = [Skipped({"a.b": value}, slow.format(9.5 + value)) for value in (2, 1, 3)]
    others = [Skipped({"a.b": 4}, "it raises"), Skipped({"a.b": 1, "c": 2}, "level 3 is known")]
    text = render(replace(record, skipped=(*skipped, *others)), width=82)
    assert text.partition("Skipped\n\n")[2].splitlines() == [
        "  a.b=2, 1, 3: predicted to reach 10.5 to 12.5 samples/s at most, and the leading",
        "  plan 85 samples/s",
        "  a.b=4: it raises",
        "  a.b=1, c=2: level 3 is known",
    ]


def test_facts_that_the_answer_depends_on_are_said(record: Record) -> None:
    text = render(record)
    for line in (
        r"cpu, torch 2\.13\.0, autofit 0\.1\.0",
        r"6 probes, 1 out of memory, 12\.5 s.*no plan is",
        r"\[0\]: float32\[4, 8\], \[1\]: int64\[4\]",
        r"loss.* 9e-08.*gradients.* 3\.6e-07",
        r"memory_format left out: nothing to lay out",
    ):
        assert re.search(line, text)
    assert re.search(r"headroom +20\.0 MiB", text)


def test_a_changed_global_batch_is_the_first_line(record: Record) -> None:
    free = [replace(trial, plan=Plan(trial.plan.micro_batch)) for trial in record.trials]
    first = render(replace(record, trials=tuple(free))).splitlines()[0]
    assert re.search(r"from 4 to 16 samples.*global_batch", first)


def test_a_baseline_that_does_not_fit_is_no_yardstick(record: Record) -> None:
    failed = Trial(0, Role.BASELINE, record.trials[0].plan, Measurement(Outcome.OOM))
    line = headline(replace(record, trials=(failed, *record.trials[1:])))
    assert re.search(r"baseline.*oom", line)
    assert "times" not in line


def test_a_best_plan_that_was_not_confirmed_says_so(record: Record) -> None:
    assert "not confirmed" not in headline(record)
    assert "not confirmed" in headline(replace(record, best_number=3))


def test_the_baseline_as_the_best_plan_is_not_compared_with_itself(record: Record) -> None:
    line = headline(replace(record, best_number=0))
    assert re.search(r"80\.0 samples/s.*baseline", line)


def beside(record: Record, milliseconds: float, reserved_mib: int) -> Record:
    """The record with a confirmation of another speed and peak."""
    last = record.trials[-1]
    factor = milliseconds / 1000 / (last.measurement.step_time_s or 1.0)
    measurement = replace(
        last.measurement,
        step_times_s=[seconds * factor for seconds in last.measurement.step_times_s],
        peak_reserved_bytes=reserved_mib * 2**20,
    )
    return replace(record, trials=(*record.trials[:-1], replace(last, measurement=measurement)))


@pytest.mark.parametrize(
    ("milliseconds", "reserved_mib", "words"),
    [
        (
            405,
            20,
            "as fast as the baseline (80.0 samples/s) within measurement error, and it needs "
            "4.00 MiB less memory",
        ),
        (395, 42, "1.01 times the baseline's 80.0 samples/s, which is within measurement error"),
        (300, 42, "1.33 times the baseline's 80.0 samples/s"),
    ],
)
def test_a_tie_with_the_baseline_is_called_one(
    record: Record, milliseconds: float, reserved_mib: int, words: str
) -> None:
    assert headline(beside(record, milliseconds, reserved_mib)).endswith(words)


def test_a_plan_that_was_run_twice_says_why(record: Record) -> None:
    again = replace(record.trials[5], number=7)
    rows = render(replace(record, trials=(*record.trials, again)), width=200).splitlines()
    assert [line.split()[0] for line in rows if "measured again: noise hid" in line] == ["7"]


def test_what_was_measured_faster_than_the_best_plan_is_explained(record: Record) -> None:
    slow = beside(record, 270, 42)  # trial 5 took 260 ms; trial 3, of the best plan's own, 200
    text = render(slow)
    assert re.search(r"Trial 5: .*trial 3\n", text)
    tied = render(beside(record, 262, 10))
    assert re.search("Trial 5: .*within measurement error", tied)
    confirmed = replace(slow.trials[0], number=7, role=Role.CONFIRMED, plan=slow.trials[5].plan)
    again = render(replace(slow, trials=(*slow.trials, confirmed)))
    assert re.search(r"Trial 5: slower.*trial 7\b", again)
    assert "Trial 5: " not in render(record)
    only = tuple(trial for trial in slow.trials if trial.number != 3)
    alone = render(replace(slow, trials=only))
    assert re.search("Trial 5: measured in the search alone", alone)
    twice = replace(slow, trials=(*only, replace(only[-2], number=7, role=Role.CONFIRMED)))
    assert "  Trials 5, 7: " in render(twice)
