"""The report as text: what a person reads first comes first, and nothing is left out."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from textwrap import dedent
from types import SimpleNamespace

import pytest

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.plan import Dimension, Hint, Plan
from autofit.report.answer import headline
from autofit.report.page import page
from autofit.report.record import Record, Skipped
from autofit.report.text import render as laid_out


def render(record: Record, width: int = 120) -> str:
    """The report in full."""
    return laid_out(record, width, verbose=True)


def test_the_best_plan_comes_first_and_against_the_baseline(record: Record) -> None:
    first = render(record).splitlines()[0]
    assert first.startswith("Best plan: 16 x 2, folding.level=1: 168 samples/s")
    assert re.search(r"2\.11\b.*\b80 samples/s", first)


def test_the_parts_come_in_the_order_of_their_use(record: Record) -> None:
    text = render(record)
    heads = ["Best plan:", "headroom", "To train like this:", "8 trials", "Skipped"]
    places = [text.index(head) for head in heads]
    assert places == sorted(places)


def test_lines_to_paste_are_never_broken(record: Record) -> None:
    lines = render(record, width=80).splitlines()
    for line in record.paste[6]:
        assert f"    {line}" in lines


def test_the_lines_to_paste_begin_with_report_apply_and_run(record: Record) -> None:
    text = render(record).partition("To train like this:")[2].partition("or in a loop")[0]
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
    table = render(record).partition("8 trials")[2].partition("Skipped")[0]
    rows = [line for line in table.splitlines() if re.match(r"\d", line)]
    assert [row.split()[0] for row in rows] == [str(trial.number) for trial in record.trials]
    for row, trial in zip(rows, record.trials, strict=True):
        assert trial.role.value in row
        vetoed = trial.role is Role.VETOED
        assert ("not run:" if vetoed else trial.measurement.outcome.value) in row
    assert re.search(r"baseline +4 x 8 +plain +ok +80 ±2% +26\.0 MiB +400 ms", rows[0])


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
    assert re.search(r"^3 .*channels_last.* 191 ms$", text, re.MULTILINE)


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
        r"7 probes, 1 out of memory, 12\.5 s.*no plan is",
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
    line = headline(replace(record, trials=(failed, *record.trials[1:7])))
    assert re.search(r"baseline.*oom", line)
    assert "times" not in line


def test_what_is_not_confirmed_says_why_and_has_no_factor(record: Record) -> None:
    assert "not confirmed" not in headline(record)
    search = replace(record.search, comparison_ended=False, stopped_because="interrupted")
    for line in (
        headline(replace(record, search=search)),
        headline(replace(record, best_number=3)),
    ):
        assert "not confirmed" in line
        assert "times" not in line
    cut = replace(record, search=search, trials=record.trials[:6], best_number=0)
    assert re.search("not confirmed: .*interrupted", headline(cut))


def compared(record: Record, **blocks_ms: list[float]) -> Record:
    """The record with these steps of blocks in the final comparison: "best", "other", "baseline".

    The best plan holds 44 MiB, the other 22, the baseline 26; trial 5 is the other's own.
    """
    models = {"best": record.trials[6], "other": record.trials[5], "baseline": record.trials[7]}
    blocks = [
        replace(
            models[name],
            role=Role.CONFIRMED,
            measurement=replace(
                models[name].measurement, step_times_s=[ms / 1e3 * f for f in (0.99, 1, 1.01)]
            ),
        )
        for name, steps_ms in blocks_ms.items()
        for ms in steps_ms
    ]
    numbered = [replace(trial, number=6 + at) for at, trial in enumerate(blocks)]
    return replace(record, trials=(*record.trials[:6], *numbered))


def test_the_baseline_as_the_best_plan_is_said_with_the_evidence(record: Record) -> None:
    final = replace(
        compared(record, baseline=[400, 400], best=[410, 410], other=[450]), best_number=6
    )
    line = headline(final)
    assert line.startswith("Best plan: 4 x 8: 80 samples/s")
    assert "Nothing better than your baseline was found: 5 plans run" in line
    assert line.endswith("finalist is 16 x 2, folding.level=1 at 78 samples/s, 2% slower")
    tied = replace(compared(record, baseline=[400, 400], best=[396, 396]), best_number=6)
    assert re.search(r"16 x 2.* 1% faster .*tie.* baseline", headline(tied))
    failures = replace(record, trials=record.trials[:3], best_number=0)
    assert headline(failures).endswith("3 plans run, and no other worked")
    alone = replace(record, trials=record.trials[:1], best_number=0)
    assert headline(alone).endswith("no other plan was run")
    twice = replace(alone, trials=(*alone.trials, replace(alone.trials[0], number=1)))
    assert headline(twice).endswith("no other plan was run")


def test_what_is_not_decided_gives_both_ranges_and_no_factor(record: Record) -> None:
    search = replace(record.search, is_decided=False)
    wide = compared(record, best=[300, 900, 350, 800], baseline=[400, 1000, 420, 900])
    for best_number in (6, 10):  # also where the tie went to the baseline
        undecided = replace(wide, search=search, best_number=best_number)
        line = headline(undecided)
        assert line.startswith("Not decided: 16 x 2, folding.level=1 ran at ")
        assert len(re.findall(r"at [\d.]+ to [\d.]+ samples/s", line)) == 2
        for text in (line, render(undecided), laid_out(undecided)):
            assert "times" not in text
            assert "Nothing better" not in text
        assert undecided.factor is None
        assert undecided.to_dict()["search"]["is_decided"] is False
        assert not Record.from_dict(undecided.to_dict()).search.is_decided


def test_a_comparison_that_was_cut_short_compares_like_with_like(record: Record) -> None:
    """The baseline's block was three times as fast as its probe, at another moment."""
    search = replace(record.search, comparison_ended=False)
    cut = compared(record, baseline=[130])
    line = headline(replace(cut, search=search, best_number=6))
    assert "faster" in line
    assert "Nothing better" not in line
    slower = tuple(t for t in cut.trials if t.number in (0, 6))
    assert "Nothing better" in headline(replace(cut, search=search, best_number=6, trials=slower))


_RANGE = re.compile(r" \(([\d.]+) to ([\d.]+)\)")


@pytest.mark.parametrize(
    ("best", "baseline", "words"),
    [
        ([300, 300], [400, 400], "107 samples/s, 1.33 times the baseline's 80 samples/s"),
        (
            [395, 395],
            [400, 400],
            "1.01 times the baseline's 80 samples/s, but their measured ranges overlap",
        ),
        (
            [390, 300, 310],
            [380, 420, 410],
            "100 samples/s, 1.3 times the baseline's 80 samples/s, but their measured ranges "
            "overlap",
        ),
        (
            [300, 400],
            [800, 1600],
            "90 samples/s, 3 times the baseline's 30 samples/s, but their measured ranges overlap",
        ),
        ([500, 500], [400, 400], "64 samples/s, 20% below the baseline's 80 samples/s"),
    ],
)
def test_the_factor_and_both_speeds_are_those_of_the_final_comparison(
    record: Record, best: list[float], baseline: list[float], words: str
) -> None:
    final = compared(record, best=best, baseline=baseline)
    assert _RANGE.sub("", headline(final)).endswith(words)
    row = re.search(r"^samples/s +([\d.]+)\b.* ([\d.]+) ±", render(final), re.MULTILINE)
    assert row is not None
    assert final.factor == pytest.approx(float(row[1]) / float(row[2]), rel=0.1)


def test_every_factor_has_its_range_which_noise_makes_wider(record: Record) -> None:
    widths = []
    for low, high in ((188, 192), (171, 209), (114, 266)):
        noisy = compared(record, best=[low, 190, high], baseline=[400, 400])
        found = re.search(r"([\d.]+)" + _RANGE.pattern + " times", headline(noisy))
        assert found is not None
        factor, least, most = map(float, found.groups())
        assert least < factor < most
        assert found[0] in laid_out(noisy).split("\n\n", 1)[1]
        assert f"({found[2]} to {found[3]})" in page(noisy)
        widths.append(most - least)
    assert widths == sorted(widths)


def test_a_slower_plan_says_what_memory_it_saves(record: Record) -> None:
    lean = replace(compared(record, other=[500, 500], baseline=[400, 400]), best_number=6)
    assert headline(lean).endswith("20% below the baseline's 80 samples/s, and it needs 4.00 "
                                   "MiB less memory")  # fmt: skip


def started(record: Record, seconds: float) -> Record:
    """The record with a costly setting, whose best plan started for so long in its first trial."""
    costly = replace(record.dimensions["folding.level"], trial_cost_s=20.0)
    first = record.trials[3]
    assert first.plan == record.best.plan
    measurement = replace(first.measurement, start_up_s=seconds)
    trials = tuple(
        replace(first, measurement=measurement) if trial is first else trial
        for trial in record.trials
    )
    return replace(record, trials=trials, dimensions={"folding.level": costly})


def test_a_start_that_takes_time_is_said_with_the_steps_that_pay_for_it(record: Record) -> None:
    """By the final comparison: there the best plan saves 200 ms a step against the baseline."""
    final = started(compared(record, best=[200], baseline=[400]), 50.0)
    assert headline(final).endswith(
        "; its start takes 50.0 s, which 250 optimizer steps have paid for"
    )
    assert "against 4 x 8, the fastest plan that starts at once" in " ".join(
        render(final, 4000).split()
    )
    assert "start" not in headline(record)
    slower = started(compared(record, best=[500], baseline=[400]), 50.0)
    assert "paid for" not in render(slower, 4000)
    assert "4 x 8, which starts at once, was as fast in the trials of both" in render(slower, 4000)
    at_once = replace(slower, best_number=0)
    assert "start" not in headline(at_once)


def test_a_start_is_seen_against_the_fastest_plan_even_where_that_was_not_compared(
    record: Record,
) -> None:
    """A baseline in the final comparison is no measure of what compiling gains."""
    final = started(compared(record, best=[200], baseline=[400]), 50.0)
    searched = final.trials[3]
    assert searched.plan == final.best.plan
    plain = replace(
        searched,
        plan=Plan.split(32, 16, {"folding.level": 0}),
        measurement=replace(
            searched.measurement, step_times_s=[t * 1.07 for t in searched.measurement.step_times_s]
        ),
    )
    quick = replace(final, trials=(*final.trials[:4], plain, *final.trials[4:]))
    assert searched.samples_per_second is not None
    assert plain.samples_per_second is not None
    sample_s = 1 / plain.samples_per_second - 1 / searched.samples_per_second
    steps = math.ceil(50.0 / (sample_s * quick.best.plan.samples_per_step))
    said = " ".join(render(quick, 4000).split())
    assert (
        f"against {plain.plan.without(quick.plain_settings)}, the fastest plan that starts at once "
        f"by the trials of the search, that has paid for itself after {steps:,} optimizer steps"
    ) in said
    assert f"which {steps:,} optimizer steps have paid for" in headline(quick)


def test_a_tied_plan_that_was_preferred_names_the_faster_one(record: Record) -> None:
    tied = compared(record, best=[202, 202], other=[200, 199, 201], baseline=[400])
    assert headline(tied).endswith(
        "; tied with 8 x 4, folding.level=1 (1% faster) and preferred to it"
    )
    why = r"Trials 8, 9, 10: tied .*1% faster \(trials 8, 9, 10\): a tie goes to"
    assert re.search(why, render(tied, width=400))


def test_noise_is_said_where_blocks_scatter(record: Record) -> None:
    noisy = render(compared(record, best=[180, 200], baseline=[360, 400]))
    assert re.search(r"Noise: .* by 7%", noisy)
    assert "Noise" not in render(compared(record, best=[195, 200], baseline=[360]))
    assert "Noise" not in render(record)


def test_a_plan_that_was_run_twice_says_why(record: Record) -> None:
    again = replace(record.trials[5], number=8)
    rows = render(replace(record, trials=(*record.trials, again)), width=200).splitlines()
    assert [line.split()[0] for line in rows if "ok, again" in line] == ["8"]


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ({"best": [270] * 2, "other": [280], "baseline": [400]}, r"\d+% slower .*\(trial 8\)"),
        (
            {"best": [270, 270], "other": [276, 280, 282], "baseline": [400]},
            r"Trial 5: 4% slower .*\(trials 8, 9, 10\)",
        ),
        ({"best": [270], "baseline": [400]}, "Trial 5: no faster .* trials of the search"),
    ],
)
def test_what_was_measured_faster_than_the_best_plan_is_explained(
    record: Record, blocks: dict[str, list[float]], why: str
) -> None:
    """Trial 5 took 260 ms; trial 3, of the best plan's own, 190."""
    assert re.search(why, render(compared(record, **blocks), width=400))
    assert "Trial 5: " not in render(record)


def test_a_faster_plan_that_was_not_compared_or_did_not_fit_again(record: Record) -> None:
    slow = compared(record, best=[270], baseline=[400])
    alone = replace(slow, trials=tuple(trial for trial in slow.trials if trial.number != 3))
    assert "Trial 5: measured in the search alone" in render(alone, width=400)
    over = replace(slow.trials[5].measurement, outcome=Outcome.OVER_BUDGET)
    again = replace(slow.trials[5], number=8, role=Role.CONFIRMED, measurement=over)
    failed = render(replace(slow, trials=(*slow.trials, again)), width=400)
    assert "Trial 5: did not fit when it was run again (trial 8: over_budget)" in failed


def test_the_short_form_is_the_answer_its_numbers_and_the_lines_to_paste(record: Record) -> None:
    text = laid_out(replace(record, notes=("one " * 120,)))
    pasted = {f"    {line}" for line in record.paste[6]}
    lines = [line for line in text.splitlines() if line not in pasted]
    assert max(map(len, lines)) <= 100
    answer = lines.index("")
    assert " ".join(lines[:answer]) == headline(record)
    numbers = [line.split(maxsplit=1) for line in lines[answer + 1 : answer + 4]]
    assert [name for name, _ in numbers] == ["speed", "memory", "step"]
    assert _RANGE.sub("", numbers[0][1]) == "168 samples/s, 2.11 times the baseline's"
    assert numbers[1][1] == "44.0 MiB of 64.0 MiB allowed, 20.0 MiB headroom"
    assert numbers[2][1] == "190 ms for 32 samples, as 16 x 2"
    for kept in (*pasted, "loss = training.step(batch)", "float32[4, 8]", "3.6e-07"):
        assert kept in text
    note = [line for line in lines if "one one" in line]
    assert note[0].startswith("Note: one one")
    assert note[-1].endswith(" ...")
    assert len(note) == 3
    assert "8 trials: report.to_text(verbose=True)" in lines[-1]
    assert "unsupported" not in text


def test_only_a_terminal_gets_control_characters(record: Record) -> None:
    for verbose in (False, True):
        colored = laid_out(record, verbose=verbose, color=True)
        bare = laid_out(record, verbose=verbose)
        assert "\x1b" not in bare
        assert re.sub("\x1b\\[[0-9;]*m", "", colored) == bare
        assert "\x1b" in colored.splitlines()[0]


def test_noise_takes_the_digits_that_it_hides(record: Record) -> None:
    """Half the range of a plan's blocks: 2 % leaves three digits, 10 % two, 40 % one."""
    shown = {}
    for low, high in ((186, 194), (171, 209), (114, 266)):
        noisy = compared(record, best=[low, 190, high], baseline=[400, 400])
        shown[low] = re.search(r"level=1: (\S+) samples/s, (\S+) \(", headline(noisy))
    assert {low: found and found.groups() for low, found in shown.items()} == {
        186: ("168", "2.11"),
        171: ("170", "2.1"),
        114: ("170", "2"),
    }
