"""The report as text: the answer on one screen, numbers first; in full, nothing is left out."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autofit
from autofit.errors import InvalidArgument
from autofit.measurement import ACT, NOT_TRIED, Measurement, Outcome, RankUse, TrialKind
from autofit.plan import Plan
from autofit.report.page import page
from autofit.report.place import Place
from autofit.report.record import Record, Undecided
from autofit.report.report import Report
from autofit.report.summary import MAX_LINES, held_by_ranks, pay_off, summary, validity
from autofit.report.text import render
from tests.report.conftest import compared

MADE = {
    "sample_shapes": {"['x']": "float32[50, 2, 16]", "['packed']": "int64[1, 95]"},
    "samples": "function",
    "described_size": 2,
}
FACTOR = re.compile(r"\d(?:\.\d+)?x\b")


def in_full(record: Record, width: int = 200) -> str:
    return render(record, width, verbose=True)


def rows(record: Record) -> dict[str, tuple[str, str]]:
    """The table of the answer: label -> the first plan's figure, the other's."""
    return {label: (first, other) for label, first, other in summary(record).rows}


def undecided(record: Record) -> Record:
    wide = compared(record, best=[300, 900, 350, 800], baseline=[400, 1000, 420, 900])
    search = replace(record.search, undecided_because=Undecided.NOISE)
    return replace(wide, search=search, recommended_number=wide.trials[-1].number)


def crowded(record: Record) -> Record:
    """The record with more to say than there is room, a long plan among it."""
    notes = tuple(f"{ACT}Do thing {number}: {'word ' * 40}" for number in range(9))
    settings = {f"strategy_{number}.setting": "a_long_value" for number in range(6)}
    plan = replace(record.best.plan, settings={**record.best.plan.settings, **settings})
    trials = (replace(t, plan=plan) if t.plan == record.best.plan else t for t in record.trials)
    return replace(record, notes=notes, trials=tuple(trials))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("make", [lambda record: record, undecided])
def test_the_answer_takes_one_screen(record: Record, width: int, make: Any) -> None:
    lines = render(make(record), width).splitlines()
    table = lines[2 : lines.index("", 2)]
    warnings = [line for line in lines if line.startswith((ACT, "  "))] if width < 80 else []
    room = max(MAX_LINES, len(table) + 8) + len(warnings)
    assert len(lines) <= room, "two messages beside a long plan, and all of the warnings"
    commands = [line for line in lines if line.startswith(("Apply:", "More:"))]
    assert len(commands) == 2
    assert max(len(line) for line in lines if line not in commands) <= width
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_setting_of_the_plan_is_cut(record: Record, width: int) -> None:
    long = crowded(record)
    table = render(long, width).partition("Apply:")[0].partition("\n")[2]
    assert "\u2026" not in table
    for name, value in long.best.plan.settings.items():
        assert re.search(rf"(?<!\S){re.escape(name)}=\s*{value},?(?!\S)", table)


def test_long_words_of_a_table_are_broken_where_they_have_parts() -> None:
    record = autofit.load(Path(__file__).with_name("tiny_resnet.json")).record
    texts = [render(record, width, verbose=True) for width in (60, 80, 100)]
    assert not any(re.search(r"^ *,", text, re.MULTILINE) for text in texts)
    trials = texts[-1].partition("23 trials")[2].partition("Skipped")[0]
    written = re.findall(r"\w+\.\w+=(\w*),?", trials)
    assert set(written) <= {"", "bfloat16", *map(str, range(20))}
    assert "channels_last" in trials


def test_the_numbers_come_first_best_beside_baseline(record: Record) -> None:
    title, _, _, *table = render(record, 200).splitlines()
    assert "7 probes (1 out of memory) in 12.5 s" in title
    for line, words in zip(
        table,
        (
            r"plan +16 x 2, folding\.level=1 +4 x 8, defaults",
            r"throughput +1[67]\d samples/s \(\d+-\d+\) +8\d samples/s \(\d+-\d+\)",
            r"peak memory +44 of 64 MiB +26 MiB",
            r"speedup +2\.1x \(2\.\d-2\.\d\)",
        ),
        strict=False,
    ):
        assert re.fullmatch(words, line)


@pytest.mark.parametrize("best_number", [6, 13])  # also where the baseline measured fastest
@pytest.mark.parametrize(
    ("reason", "word", "wrong"),
    [
        (Undecided.NOISE, "idle", "longer timeout"),
        (Undecided.TIMEOUT, "longer timeout", "idle"),
        (Undecided.MAX_PROBES, "max_probes", "idle"),
        (Undecided.INTERRUPTED, "interrupted", "idle"),
        (Undecided.FAILED, "1% faster", "idle"),
    ],
)
def test_what_is_not_decided_gives_its_reason_and_both_ranges_and_no_factor(
    record: Record, reason: Undecided, word: str, wrong: str, best_number: int
) -> None:
    noisy = undecided(record)
    search = replace(noisy.search, undecided_because=reason)
    report = Report(replace(noisy, search=search, best_number=best_number))
    found = rows(report.record)
    assert found["plan"] == ("4 x 8, defaults", "16 x 2, folding.level=1")
    assert all(re.fullmatch(r"\d+-\d+ samples/s", speed) for speed in found["throughput"])
    assert "not decided" in found["speedup"]
    for text in (render(report.record), in_full(report.record), page(report.record),
                 report.to_markdown(), str(report.warnings)):  # fmt: skip
        assert not FACTOR.search(text)
        assert "No faster plan" not in text
        (line, *_) = [each for each in re.split(r"\n(?! )|<p", text) if "Not decided" in each]
        assert word in line.replace("\n  ", " ")
        assert wrong not in line
    again = Record.from_dict(json.loads(json.dumps(report.to_dict())))
    assert (again.is_decided, again.search.undecided_because) == (False, reason)
    assert report.plan == report.baseline.plan


def failed_above_4(record: Record) -> Record:
    raised = Measurement(Outcome.UNSUPPORTED, "RuntimeError: lengths must be sorted\nat line 3")
    trials = (
        replace(t, measurement=raised) if t.plan.micro_batch > 4 else t for t in record.trials
    )
    return replace(record, trials=tuple(trials), best_number=7)


def of_free_batches(record: Record) -> Record:
    return replace(
        record, trials=tuple(replace(t, plan=Plan(t.plan.micro_batch)) for t in record.trials)
    )


def won(record: Record, best_ms: float) -> Record:
    """The record whose baseline is recommended, after blocks of 400 ms of it and these."""
    final = compared(record, baseline=[400, 400], best=[best_ms] * 2, other=[450])
    return replace(final, best_number=6, recommended_number=6)


def test_every_factor_has_its_range_which_noise_makes_wider(record: Record) -> None:
    widths = []
    for low, high in ((188, 192), (171, 209), (114, 266)):
        noisy = compared(record, best=[low, 190, high], baseline=[400, 400])
        words = rows(noisy)["speedup"][0]
        found: Any = re.fullmatch(r"([\d.]+)x \(([\d.]+)-([\d.]+)\)", words)
        factor, least, most = map(float, found.groups())
        assert least < factor < most
        assert words in re.sub("<[^>]+>", "", page(noisy))
        widths.append(most - least)
    assert widths == sorted(widths)


def test_the_baseline_as_the_best_plan_stands_beside_the_next_one(record: Record) -> None:
    found = rows(won(record, 410))
    assert found["plan"] == ("4 x 8, defaults", "16 x 2, folding.level=1")
    assert re.fullmatch(r"0\.9[78]x \(.*\)", found["speedup"][1])
    assert "No faster plan was found: 5 plans ran" in render(won(record, 410))


def started(record: Record, seconds: float, *, is_warm: bool | None = None) -> Record:
    """The record with a costly setting, whose best plan started for so long in its first trial."""
    costly = replace(record.dimensions["folding.level"], trial_cost_s=20.0)
    first = record.trials[3]
    assert first.plan == record.best.plan
    measurement = replace(first.measurement, start_up_s=seconds, start_is_warm=is_warm)
    trials = tuple(
        replace(first, measurement=measurement) if trial is first else trial
        for trial in record.trials
    )
    return replace(record, trials=trials, dimensions={"folding.level": costly})


BASELINE_FIRST: dict[str, Any] = {"best_number": 0, "recommended_number": 0}
NOTES = (f"{NOT_TRIED}compile", "a remark", f"{ACT}Pass loss_weight=")
SAID: dict[str, tuple[Callable[[Record], Record], str, str]] = {
    "sizes that failed": (
        failed_above_4,
        r"(?s)\A[^!]*! No micro-batch above 4 ran: RuntimeError: lengths must be sorted\n",
        "No faster plan",
    ),
    "sizes out of memory": (lambda record: record, "", "No micro-batch"),
    "another global batch": (
        of_free_batches,
        r"(?s)\A[^!]*! [^!]*from 4 to 16 samples[^!]*global_batch",
        "No faster plan",
    ),
    "the baseline": (
        lambda record: won(record, 410),
        "No faster plan was found: 5 plans ran",
        "tie",
    ),
    "a tie": (lambda record: won(record, 396), "goes to the baseline", "No faster plan"),
    "a comparison that did not end": (
        lambda record: replace(
            record,
            search=replace(record.search, comparison_ended=False),
            trials=record.trials[:6],  # of which 3 measured faster
            **BASELINE_FIRST,
        ),
        "",
        "No faster plan",
    ),
    "one plan": (
        lambda record: replace(record, trials=record.trials[:1], **BASELINE_FIRST),
        "1 plan ran",
        "fastest other",
    ),
    "a baseline that failed": (
        lambda record: replace(
            record,
            trials=(
                replace(record.trials[0], measurement=Measurement(Outcome.OOM)),
                *record.trials[1:7],
            ),
        ),
        r"throughput .*samples/s.* out of memory",
        "speedup",
    ),
    "a start that never pays": (
        lambda record: started(compared(record, best=[500], baseline=[400]), 50.0),
        "! The best plan takes 50.0 s to start",
        "No faster plan",
    ),
    "what to act on above remarks": (
        lambda record: replace(record, notes=NOTES),
        r"(?s)\n! Pass loss_weight=\n.*float32\[8\], int64[^\n]*4e-07[^\n]*Not tried: compile",
        "a remark",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_the_answer_says_what_was_found_and_nothing_else(record: Record, name: str) -> None:
    make, words, absent = SAID[name]
    text = render(make(record), 200)
    assert re.search(words, text)
    assert absent not in text


@pytest.mark.parametrize("width", [40, 100])
def test_warnings_are_whole_and_remarks_without_room_are_counted(
    record: Record, width: int
) -> None:
    text = " ".join(render(crowded(record), width).split())
    assert all(f"! Do thing {number}: {'word ' * 40}".strip() in text for number in range(9))
    assert "2 notes more:" in text
    assert "float32" not in text


def columns(text: str) -> list[str]:
    """The titles of the answer's table, and of that which repeats it in full."""
    titles = r"(?m)^ +((?:best|baseline|fastest other)(?: +(?:baseline|fastest other))?)$"
    return [" | ".join(re.split("  +", found)) for found in re.findall(titles, text)]


@pytest.mark.parametrize(
    ("make", "titles"),
    [
        (lambda record: record, "best | baseline"),
        (undecided, "baseline | fastest other"),
        (lambda record: replace(undecided(record), best_number=13), "baseline | fastest other"),
        (lambda record: won(record, 410), "baseline | fastest other"),
        (
            lambda record: replace(
                record, trials=record.trials[:1], best_number=0, recommended_number=0
            ),
            "baseline",
        ),
    ],
)
def test_a_column_has_one_meaning_in_every_report(record: Record, make: Any, titles: str) -> None:
    """Best is recommended and no baseline; what only stands beside a baseline has another name."""
    shown = make(record)
    assert columns(in_full(shown)) == [titles] * 2
    drawn = set(re.findall(r'<text class="(?:best|baseline)-words[^>]*>([^<]+)<', page(shown)))
    assert drawn == set(titles.split(" | "))


def test_the_table_in_full_is_of_the_plans_of_the_answer(record: Record) -> None:
    (_, table) = in_full(undecided(record)).split("Baseline and fastest other")
    first = dict(re.findall(r"(?m)^(micro-batch|headroom)  +(.*?)(?:  |$)", table))
    assert first == {"micro-batch": "4", "headroom": "38.0 MiB"}, "of the baseline, as recommended"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {
                "sample_shapes": {
                    "['ids']": "int64[8, 128]",
                    "[1][0]['boxes']": "float32[8, 5, 4]",
                    "['t']": "int64[8]",
                },
                "batched": ["['ids']", "['t']"],
            },
            "For samples up to ids int64[128], t int64; constant: [1][0]['boxes'] float32[8, 5, 4]",
        ),
        # Time first, or samples side by side in one row: no dimension is known to hold samples.
        *(
            (MADE | {"samples": how}, "of 2 samples: x float32[50, 2, 16], packed int64[1, 95]")
            for how in ("function", "collate_fn")
        ),
        (
            MADE | {"micro_batch_shapes": {"['x']": "float32[60, 16, 16]"}},  # of the plan shown
            "of 16 samples: x float32[60, 16, 16]",
        ),
    ],
)
def test_names_and_shapes_are_those_of_a_sample_or_of_a_whole_batch_that_is_made(
    record: Record, facts: dict[str, Any], words: str
) -> None:
    (line, *_) = validity(replace(record, workload={**record.workload, **facts}))
    assert line.endswith(words)


def test_the_lines_of_python_run_where_they_are_printed(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    applied: list[Any] = []

    class Loaded(Report):
        def apply(self, *given: Any, **named: Any) -> Any:
            applied.append((given, named))
            return nullcontext(SimpleNamespace(step=applied.append))

    scope = {"report": Loaded(record), "model": "m", "optimizer": "o", "criterion": "c"}
    scope["loader"] = [1]
    exec(summary(record, Place()).apply, scope)
    exec(summary(record, Place()).more, scope)
    exec(summary(record, Place(has_functions=True)).apply, scope)
    assert applied == [(("m", "o"), {"criterion": "c"}), (("m", "o"), {})]
    assert "8 trials" in capsys.readouterr().out
    code = in_full(record).partition("Train by the plan\n\n")[2].partition("\n\n")[0]
    exec(textwrap.dedent(code), scope)
    assert applied[-1] == 1


def test_a_path_of_any_name_is_quoted(record: Record, tmp_path: Any) -> None:
    path = Report(record).save(tmp_path / """it's "my" report.json""")
    found = eval(Place(str(path), "autofit").report, {"autofit": autofit})
    assert found.best == record.best


def test_a_start_that_takes_time_is_said_with_the_steps_that_pay_for_it(record: Record) -> None:
    """By the final comparison: there the best plan saves 200 ms a step against the baseline."""
    final = started(compared(record, best=[200], baseline=[400]), 50.0)
    found: Any = pay_off(final)
    assert (found.seconds, found.beside) == (50.0, record.trials[0].plan)
    assert found.steps == pytest.approx(250, rel=0.03)  # the search saw a little more
    assert f"{found.steps} steps" in render(final)
    assert pay_off(record) is None
    never = started(compared(record, best=[500], baseline=[400]), 50.0)
    assert (pay_off(never) or found).steps is None
    assert pay_off(replace(never, **BASELINE_FIRST)) is None


@pytest.mark.parametrize("verbose", [False, True])
def test_a_warm_start_is_what_pays_and_a_cold_one_is_said_too(
    record: Record, verbose: bool
) -> None:
    final = started(compared(record, best=[200], baseline=[400]), 50.0, is_warm=False)
    first = final.trials[3]
    warm = replace(first.measurement, start_up_s=5.0, start_is_warm=True)
    both = replace(final, trials=(*final.trials, replace(first, number=99, measurement=warm)))
    found: Any = pay_off(both)
    assert (found.start.cold_s, found.start.warm_s, found.seconds) == (50.0, 5.0, 5.0)
    shown = render(both, 200, verbose=verbose)
    assert all(words in shown for words in ("5.00 s", "50.0 s", "25 steps"))


def test_every_trial_has_its_line_failures_included(record: Record) -> None:
    table = in_full(record).partition("8 trials")[2].partition("Skipped")[0]
    found = re.findall(r"(?m)^ *(\d+ +\w+ .*)$", table)
    for row, trial in zip(found, record.trials, strict=True):
        vetoed = trial.kind is TrialKind.VETOED
        outcome = "not run:" if vetoed else trial.measurement.outcome.value
        assert re.match(rf"{trial.number} +{trial.kind.value} .*{outcome}", row)
    assert re.search(r"baseline +4 x 8 +defaults +ok +80 .* 26\.0 MiB +400 ms", found[0])


@pytest.mark.parametrize("verbose", [False, True])
def test_only_a_terminal_gets_control_characters(record: Record, verbose: bool) -> None:
    colored = render(record, verbose=verbose, color=True)
    assert "\x1b" in colored.splitlines()[0]
    assert re.sub("\x1b\\[[0-9;]*m", "", colored) == render(record, verbose=verbose)
    assert "\x1b" not in render(record, verbose=verbose)


# -- What was found beside the answer

LOADER: dict[str, Any] = {
    "own_workers": 0,
    "consumed_samples_per_second": 200.0,
    "delivered": [{"num_workers": 4, "samples_per_second": 110.0}],
    "num_workers": 4,
    "bottleneck": "loader",
    "keeps_workers": True,
    "warnings": ["rows are longer"],
    "failed": "OSError: no disk",
}
BEST = {"arithmetic": 0.5, "memory traffic": 0.3, "launches": 0.15, "optimizer": 0.05}


def test_what_ranks_hold_is_a_range_where_they_differ() -> None:
    held = [RankUse(0, mib * 2**20, 0, 0.1) for mib in (20, 24, 24)]
    assert held_by_ranks(held) == "20.0 MiB to 24.0 MiB (rank 1 most)"
    assert held_by_ranks(held[1:]) == "24.0 MiB each"


def test_what_was_found_is_shown(record: Record) -> None:
    ranks = tuple(RankUse(0, held * 2**20, 0, s) for held, s in ((20, 0.2), (24, 0.1)))
    best = replace(record.best, measurement=replace(record.best.measurement, ranks=ranks))
    bounds = {"best": BEST, "baseline": BEST | {"memory traffic": 0.6}}
    findings = {"loader": LOADER, "bounds": bounds}
    full = replace(record, findings=findings, trials=(*record.trials[:6], best, record.trials[7]))
    read = Record.from_dict(json.loads(json.dumps(full.to_dict())))
    text = " ".join(in_full(read, 400).split())
    for words in (
        "fastest with num_workers=4",
        "consumes 200 samples/s",
        "num_workers stays",
        "4 110 samples/s",
        "no disk",
        "memory traffic 30% 60%",
        "0 20.0 MiB 200 ms 1 24.0 MiB 100 ms",
        "rows are longer",
    ):
        assert words in text
    failed = {"bounds": {"failed": "RuntimeError: busy"}}
    assert "RuntimeError: busy" in in_full(replace(record, findings=failed))


@pytest.mark.parametrize(
    ("findings", "place"),
    [
        ({"loader": LOADER | {"bottleneck": "the cat"}}, "findings.loader.bottleneck"),
        ({"bounds": {"best": {"arithmetic": "half"}}}, "findings.bounds.best"),
        ({"loader": LOADER | {"delivered": [{}]}}, "findings.loader.delivered"),
    ],
)
def test_findings_that_mean_nothing_are_refused(
    record: Record, findings: dict[str, Any], place: str
) -> None:
    data = replace(record, findings=findings).to_dict()
    with pytest.raises(InvalidArgument, match=place.replace(".", r"\.")):
        Record.from_dict(data)


@pytest.mark.parametrize("is_explained", [True, False])
def test_gradients_that_differ_are_told_beside_what_roundings_explain(
    record: Record, is_explained: bool
) -> None:
    tolerance = 0.7 if is_explained else 0.031
    difference = {"loss": 0.01, "gradient": 0.62, "tolerance": tolerance, "modules": []}
    said = " ".join(validity(replace(record, difference=difference)))
    assert "62%" in said
    assert ("3.1%" in said) is not is_explained
