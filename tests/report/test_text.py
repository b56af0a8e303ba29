"""The report as text: the answer on one screen, numbers first; in full, nothing is left out."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autofit
from autofit.errors import InvalidArgument
from autofit.measurement import ACT, NOT_TRIED, Measurement, Outcome, RankUse, Trial, TrialKind
from autofit.plan import Plan
from autofit.report.page import page
from autofit.report.place import Place
from autofit.report.record import Record, Undecided
from autofit.report.report import Report
from autofit.report.summary import MOST_LINES, pay_off, summary, validity
from autofit.report.text import render

FACTOR = re.compile(r"\d(?:\.\d+)?x\b")


def in_full(record: Record, width: int = 200) -> str:
    return render(record, width, verbose=True)


def rows(record: Record, width: int = 200) -> dict[str, tuple[str, str]]:
    """The table of the answer: label -> the best plan's figure, the other's."""
    lines = render(record, width).splitlines()[3:]
    table = lines[: lines.index("")]
    titles = render(record, width).splitlines()[2]
    start, other = re.search(r"\S", titles), re.search(r"\S+(?: other)?$", titles)
    assert start is not None
    assert other is not None
    return {
        line[: start.start()].strip(): (
            line[start.start() : other.start()].strip(),
            line[other.start() :].strip(),
        )
        for line in table
    }


def compared(record: Record, **blocks_ms: list[float]) -> Record:
    """The record with these steps of blocks in the final comparison: "best", "other", "baseline".

    The best plan holds 44 MiB, the other 22, the baseline 26; trial 5 is the other's own.
    """
    models = {"best": record.trials[6], "other": record.trials[5], "baseline": record.trials[7]}
    blocks = [
        replace(
            models[name],
            kind=TrialKind.CONFIRMATION,
            measurement=replace(
                models[name].measurement, step_times_s=[ms / 1e3 * f for f in (0.99, 1, 1.01)]
            ),
        )
        for name, steps_ms in blocks_ms.items()
        for ms in steps_ms
    ]
    numbered = [replace(trial, number=6 + at) for at, trial in enumerate(blocks)]
    return replace(record, trials=(*record.trials[:6], *numbered))


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
    shown = make(record)
    lines = render(shown, width).splitlines()
    table = lines[2 : lines.index("", 2)]
    warnings = [line for line in lines if line.startswith((ACT, "  "))] if width < 80 else []
    room = max(MOST_LINES, len(table) + 8) + len(warnings)
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
    for width in (60, 80, 100):
        assert not re.search(r"^ *,", render(record, width, verbose=True), re.MULTILINE)
    trials = render(record, 100, verbose=True).partition("23 trials")[2].partition("Skipped")[0]
    written = [word.rstrip(",") for word in trials.split() if "." in word and "=" in word]
    assert {word.partition("=")[2] for word in written} <= {"", "bfloat16", *map(str, range(20))}
    assert "channels_last" in trials


def test_the_numbers_come_first_best_beside_baseline(record: Record) -> None:
    found = rows(record)
    assert found["plan"] == ("16 x 2, folding.level=1", "4 x 8, defaults")
    assert re.fullmatch(r"1[67]\d samples/s \(\d+-\d+\)", found["throughput"][0])
    assert re.fullmatch(r"8\d samples/s \(\d+-\d+\)", found["throughput"][1])
    assert found["peak memory"] == ("44 of 64 MiB", "26 MiB")
    assert re.fullmatch(r"2\.1x \(2\.\d-2\.\d\)", found["speedup"][0])
    assert "7 probes (1 out of memory) in 12.5 s" in render(record).splitlines()[0]


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


def test_what_is_not_decided_gives_both_ranges_and_no_factor(record: Record) -> None:
    for best_number in (6, 13):  # also where the baseline itself measured fastest
        noisy = replace(undecided(record), best_number=best_number)
        found = rows(noisy)
        assert found["plan"] == ("4 x 8, defaults", "16 x 2, folding.level=1")
        assert all(re.fullmatch(r"\d+-\d+ samples/s", speed) for speed in found["throughput"])
        assert "not decided" in found["speedup"]
        for text in (in_full(noisy), render(noisy), page(noisy), Report(noisy).to_markdown()):
            assert not FACTOR.search(text)
        assert "No faster plan" not in render(noisy)
        assert noisy.factor is None
        assert not Record.from_dict(noisy.to_dict()).is_decided


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
def test_the_true_reason_is_named_in_every_form(
    record: Record, reason: Undecided, word: str, wrong: str
) -> None:
    noisy = undecided(record)
    noisy = replace(noisy, search=replace(noisy.search, undecided_because=reason))
    report = Report(noisy)
    for text in (render(noisy), page(noisy), report.to_markdown(), str(report.warnings)):
        (line, *_) = [each for each in re.split(r"\n(?! )|<p", text) if "Not decided" in each]
        assert word in line.replace("\n  ", " ")
        assert wrong not in line
    assert json.loads(json.dumps(report.to_dict()))["search"]["undecided_because"] == reason.value
    assert not report.is_decided
    assert report.plan == report.baseline.plan
    assert report.best.plan != report.plan


def test_a_size_that_could_not_run_is_said_with_its_reason(record: Record) -> None:
    """And not that no faster plan was found."""
    raised = Measurement(Outcome.UNSUPPORTED, "RuntimeError: lengths must be sorted\nat line 3")
    trials = tuple(
        replace(t, measurement=raised) if t.plan.micro_batch > 4 else t for t in record.trials
    )
    only = replace(record, trials=trials, best_number=7)
    text = render(only)
    assert "! No micro-batch above 4 ran: RuntimeError: lengths must be sorted\n" in text
    assert "No faster plan" not in text
    assert "No micro-batch" not in render(record), "memory ran out there, and that is no fault"


def test_a_changed_global_batch_is_the_first_message(record: Record) -> None:
    free = tuple(replace(trial, plan=Plan(trial.plan.micro_batch)) for trial in record.trials)
    (first, *_) = [
        line for line in render(replace(record, trials=free)).splitlines() if "!" in line
    ]
    assert re.search(r"from 4 to 16 samples.*global_batch", first)


def test_a_baseline_that_does_not_fit_is_no_yardstick(record: Record) -> None:
    failed = Trial(0, TrialKind.BASELINE, record.trials[0].plan, Measurement(Outcome.OOM))
    found = rows(replace(record, trials=(failed, *record.trials[1:7])))
    assert found["throughput"][1] == "out of memory"
    assert "speedup" not in found


def test_the_baseline_as_the_best_plan_stands_beside_the_next_one(record: Record) -> None:
    final = compared(record, baseline=[400, 400], best=[410, 410], other=[450])
    found = rows(replace(final, best_number=6, recommended_number=6))
    assert found["plan"] == ("4 x 8, defaults", "16 x 2, folding.level=1")
    assert re.fullmatch(r"0\.9[78]x \(.*\)", found["speedup"][1])
    assert "No faster plan was found: 5 plans ran" in render(
        replace(final, best_number=6, recommended_number=6)
    )
    tied = replace(
        compared(record, baseline=[400, 400], best=[396, 396]), best_number=6, recommended_number=6
    )
    assert "No faster plan" not in render(tied)
    assert "goes to the baseline" in render(tied)
    search = replace(record.search, comparison_ended=False)
    cut = replace(
        record, search=search, trials=record.trials[:6], best_number=0, recommended_number=0
    )
    assert "No faster plan" not in render(cut), "trial 3 measured faster"
    alone = replace(record, trials=record.trials[:1], best_number=0, recommended_number=0)
    assert "1 plan ran" in render(alone)
    assert "fastest other" not in render(alone)


def columns(text: str) -> list[str]:
    """The titles of the answer's table, and of that which repeats it in full."""
    titles = r"(?m)^ +((?:best|baseline|fastest other)(?: +(?:baseline|fastest other))?)$"
    return [" | ".join(re.split("  +", found)) for found in re.findall(titles, text)]


def test_a_column_has_one_meaning_in_every_report(record: Record) -> None:
    """Best is recommended and no baseline; what only stands beside a baseline has another name."""
    won = replace(
        compared(record, baseline=[400, 400], best=[410, 410]), best_number=6, recommended_number=6
    )
    for shown, titles in (
        (record, "best | baseline"),
        (undecided(record), "baseline | fastest other"),
        (replace(undecided(record), best_number=13), "baseline | fastest other"),
        (won, "baseline | fastest other"),
        (replace(won, trials=won.trials[:1], best_number=0, recommended_number=0), "baseline"),
    ):
        assert columns(in_full(shown)) == [titles] * 2
        drawn = set(re.findall(r'<text class="(?:best|baseline)-words[^>]*>([^<]+)<', page(shown)))
        assert drawn == set(titles.split(" | "))


def test_the_table_in_full_is_of_the_plans_of_the_answer(record: Record) -> None:
    noisy = undecided(record)
    (_, table), sizes = in_full(noisy).split("Baseline and fastest other"), []
    for label in ("micro-batch", "headroom"):
        found: Any = re.search(rf"(?m)^{label} +(.*)$", table)
        sizes.append(found[1].split("  ")[0])
    assert sizes == ["4", "38.0 MiB"], "of the baseline, which is recommended"


def test_what_to_act_on_stands_above_remarks(record: Record) -> None:
    notes = (f"{NOT_TRIED}compile", "a remark", f"{ACT}Pass loss_weight=")
    lines = render(replace(record, notes=notes)).splitlines()
    (act,) = [at for at, line in enumerate(lines) if line == "! Pass loss_weight="]
    (remark,) = [at for at, line in enumerate(lines) if "float32[8], int64" in line]
    assert act < remark
    assert "Not tried: compile" in lines[remark]
    assert "4e-07" in lines[remark]
    assert not any("a remark" in line for line in lines)
    assert "a remark" in in_full(replace(record, notes=notes))


@pytest.mark.parametrize("width", [40, 100])
def test_warnings_are_whole_and_remarks_without_room_are_counted(
    record: Record, width: int
) -> None:
    lines = render(crowded(record), width).splitlines()
    text = " ".join(" ".join(lines).split())
    assert all(f"! Do thing {number}: {'word ' * 40}".strip() in text for number in range(9))
    assert "2 notes more:" in text
    assert "float32" not in text
    assert in_full(crowded(record)).count("! Do thing") >= 9


def test_names_and_shapes_are_those_of_a_sample(record: Record) -> None:
    shapes = {
        "['ids']": "int64[8, 128]",
        "[1][0]['boxes']": "float32[8, 5, 4]",
        "['t']": "int64[8]",
    }
    workload = {**record.workload, "sample_shapes": shapes, "batched": ["['ids']", "['t']"]}
    (line, *_) = validity(replace(record, workload=workload))
    held = "ids int64[128], t int64"
    assert line == f"For samples up to {held}; constant: [1][0]['boxes'] float32[8, 5, 4]"


@pytest.mark.parametrize("samples", ["function", "collate_fn"])
def test_shapes_of_batches_that_are_made_are_whole(record: Record, samples: str) -> None:
    # time first, or samples side by side in one row: no dimension is known to hold samples
    shapes = {"['x']": "float32[50, 2, 16]", "['packed']": "int64[1, 95]"}
    made = {"sample_shapes": shapes, "samples": samples, "described_size": 2}
    (line, *_) = validity(replace(record, workload={**record.workload, **made}))
    assert line.endswith("of 2 samples: x float32[50, 2, 16], packed int64[1, 95]")
    made["micro_batch_shapes"] = {"['x']": "float32[60, 16, 16]"}  # of the plan that is shown
    (line, *_) = validity(replace(record, workload={**record.workload, **made}))
    assert line.endswith("of 16 samples: x float32[60, 16, 16]")


def test_the_lines_of_python_run_where_they_are_printed(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    applied: list[Any] = []

    class Loaded:
        def apply(self, *given: Any, **named: Any) -> Any:
            applied.append((given, named))
            return nullcontext(SimpleNamespace(step=applied.append))

        def to_text(self, **given: Any) -> str:
            return Report(record).to_text(**given)

    scope = {"report": Loaded(), "model": "m", "optimizer": "o", "criterion": "c", "loader": [1]}
    answer = summary(record, Place())
    for line in (answer.apply, answer.more):
        exec(line, scope)
    assert applied == [(("m", "o"), {"criterion": "c"})]
    assert "8 trials" in capsys.readouterr().out
    exec(summary(record, Place(has_functions=True)).apply, scope)
    assert applied[-1] == (("m", "o"), {})
    code = in_full(record).partition("Train by the plan\n\n")[2].partition("\n\n")[0]
    exec("\n".join(line[4:] for line in code.splitlines()), scope)
    assert applied[-1] == 1


def test_a_path_of_any_name_is_quoted(record: Record, tmp_path: Any) -> None:
    path = Report(record).save(tmp_path / """it's "my" report.json""")
    place = Place(str(path), "autofit")
    scope: dict[str, Any] = {"autofit": autofit}
    exec(f"loaded = {place.report}", scope)
    assert scope["loaded"].best == record.best


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


def test_a_start_that_takes_time_is_said_with_the_steps_that_pay_for_it(record: Record) -> None:
    """By the final comparison: there the best plan saves 200 ms a step against the baseline."""
    final = started(compared(record, best=[200], baseline=[400]), 50.0)
    found: Any = pay_off(final)
    assert (found.seconds, found.beside) == (50.0, record.trials[0].plan)
    assert found.steps == pytest.approx(250, rel=0.03)  # the search saw a little more
    assert f"{found.steps} steps" in render(final)
    assert pay_off(record) is None
    slower = started(compared(record, best=[500], baseline=[400]), 50.0)
    never: Any = pay_off(slower)
    assert never.steps is None
    assert "! The best plan takes 50.0 s to start" in render(slower)
    assert pay_off(replace(slower, best_number=0, recommended_number=0)) is None


def test_a_warm_start_is_what_pays_and_a_cold_one_is_said_too(record: Record) -> None:
    final = started(compared(record, best=[200], baseline=[400]), 50.0, is_warm=False)
    first = final.trials[3]
    warm = replace(first.measurement, start_up_s=5.0, start_is_warm=True)
    both = replace(final, trials=(*final.trials, replace(first, number=99, measurement=warm)))
    found: Any = pay_off(both)
    assert (found.start.cold_s, found.start.warm_s, found.seconds) == (50.0, 5.0, 5.0)
    for shown in (render(both), in_full(both)):
        assert "5.00 s" in shown
        assert "50.0 s" in shown
        assert "25 steps" in shown


def test_every_trial_has_its_line_failures_included(record: Record) -> None:
    table = in_full(record).partition("8 trials")[2].partition("Skipped")[0]
    found = [line for line in table.splitlines() if re.match(r" *\d", line)]
    assert [row.split()[0] for row in found] == [str(trial.number) for trial in record.trials]
    for row, trial in zip(found, record.trials, strict=True):
        assert trial.kind.value in row
        vetoed = trial.kind is TrialKind.VETOED
        assert ("not run:" if vetoed else trial.measurement.outcome.value) in row
    assert re.search(r"baseline +4 x 8 +defaults +ok +80 .* 26\.0 MiB +400 ms", found[0])


def test_only_a_terminal_gets_control_characters(record: Record) -> None:
    for verbose in (False, True):
        colored = render(record, verbose=verbose, color=True)
        bare = render(record, verbose=verbose)
        assert "\x1b" not in bare
        assert re.sub("\x1b\\[[0-9;]*m", "", colored) == bare
        assert "\x1b" in colored.splitlines()[0]


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


def test_what_was_found_is_shown(record: Record) -> None:
    ranks = tuple(RankUse(0, held * 2**20, 0, s) for held, s in ((20, 0.2), (24, 0.1)))
    best = replace(record.best, measurement=replace(record.best.measurement, ranks=ranks))
    bounds = {"best": BEST, "baseline": BEST | {"memory traffic": 0.6}}
    full = replace(
        record,
        findings={"loader": LOADER, "bounds": bounds},
        trials=(*record.trials[:6], best, record.trials[7]),
    )
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
    failed = replace(record, findings={"bounds": {"failed": "RuntimeError: busy"}})
    assert "RuntimeError: busy" in in_full(failed)


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
