"""All that a report says beside its answer, and how two differ: sections for every form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from autofit.measurement import ACT, BOUNDS, Trial, TrialKind, spread_of
from autofit.report.paste import lines_by_hand, lines_of_trainer
from autofit.report.place import IN_PYTHON, Place
from autofit.report.rates import rate_rows
from autofit.report.record import Record
from autofit.report.summary import (
    apply_line,
    beside_recommended,
    columns_of,
    evaluation_words,
    how_speeds_compare,
    is_sure,
    loader_verdict,
    name_of,
    pay_off,
    plan_words,
    range_words,
    ratio_words,
    role_of,
    rounded_within,
    samples_words,
    settings_words,
    speed_words,
    written,
)
from autofit.units import counted, format_bytes, format_rate, format_seconds, quoted

PLANS = ("best", "baseline")
"""Keys of a record's findings and memory, see `trial_of`."""
TRIAL_TITLES = ("trial", "kind", "plan", "settings", "outcome", "samples/s", "memory", "step")
ABOUT_TRIALS = (
    "A plan is micro-batch x accumulation steps. Speeds are medians of a trial's steps, with their "
    "95% intervals. Memory is peak reserved plus non-torch bytes."
)
_SHORT_DETAIL = 60
_MAX_MODULES = 6
_ALWAYS_COMPARED = ("plan", "throughput", "memory")

Table = Sequence[Sequence[str]]
"""Rows of cells, the titles first."""


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: of the part.
        lines: of words, or of code where `is_code`.
        table: below them; (): none.
        is_code: whether the lines are Python.
    """

    title: str
    lines: Sequence[str] = ()
    table: Table = ()
    is_code: bool = False


def sections(record: Record, place: Place = IN_PYTHON) -> Iterator[Section]:
    """Yield the parts, those first that most readers want."""
    columns = columns_of(record)
    title = " and ".join(filter(None, columns)).capitalize()
    yield Section(title, list(how_speeds_compare(record)), [columns, *figures(record)])
    yield Section("Train by the plan", list(training_lines(record, place)), is_code=True)
    if by_hand := lines_by_hand(record):
        yield Section("The same in a loop of your own", by_hand, is_code=True)
    if notes := list(map(place.words, _notes(record))):
        yield Section("Notes", notes)
    yield from _findings(record)
    yield Section(
        counted(len(record.trials), "trial"),
        [ABOUT_TRIALS],
        [TRIAL_TITLES, *(trial_cells(trial, record) for trial in record.trials)],
    )
    if record.skipped:
        rows = [(written(each.settings), place.words(each.why)) for each in record.skipped]
        yield Section("Skipped", table=[("settings", "why"), *rows])
    yield Section("Search and environment", table=[("", ""), *environment_rows(record).items()])


def _findings(record: Record) -> Iterator[Section]:
    """Yield what was found beside the answer."""
    if ranks := record.recommended.measurement.ranks:
        held = [
            (str(rank), format_bytes(use.held_bytes), format_seconds(use.step_time_s))
            for rank, use in enumerate(ranks)
        ]
        whose = name_of(record.recommended.plan, record)
        yield Section(f"Ranks of the {whose}", table=[("rank", "held", "own step time"), *held])
    if evaluation := record.findings.get("evaluation"):
        why = [f"Not tried to the end: {evaluation['failed']}"] if "failed" in evaluation else []
        yield Section("Evaluation", [evaluation_words(record), *why])
    loader = record.findings.get("loader") or {}
    if loader:
        rates = [
            (str(each["num_workers"]), format_rate(each["samples_per_second"]))
            for each in loader["delivered"]
        ]
        consumed = format_rate(loader["consumed_samples_per_second"])
        own = f"your loader has num_workers={loader['own_workers']}"
        whose = name_of(record.recommended.plan, record)
        lines = [f"{loader_verdict(loader)}. The {whose} consumes {consumed}; {own}."]
        if loader["keeps_workers"]:
            lines.append("Workers of an IterableDataset may repeat samples: num_workers stays.")
        lines += loader["warnings"]
        lines += [f"Not measured to the end: {loader['failed']}"] if "failed" in loader else []
        yield Section("Data loading", lines, [("num_workers", "delivered"), *rates])
    yield from _bounds(record)
    for key in PLANS:
        modules = record.memory.get(key, {}).get("modules", ())
        sizes = [(sum(part["bytes"].values()), part) for part in modules]
        largest = sorted(sizes, key=lambda each: -each[0])[:_MAX_MODULES]
        rows = [
            (f"{_module_words(part)} x {part['count']}", format_bytes(total))
            for total, part in largest
        ]
        if rows:
            title = f"Memory of the {name_of(trial_of(key, record).plan, record)} at its peak"
            yield Section(title, table=[("module", "bytes"), *rows])


def _module_words(part: Mapping[str, Any]) -> str:
    """Return name and class of a module: "'layers.1' Linear"; of the model its class alone."""
    return f"{quoted([part['name']])} {part['class']}" if part["name"] else str(part["class"])


def trial_of(key: str, record: Record) -> Trial:
    """Return the trial that one of `PLANS` means."""
    return record.best if key == "best" else record.baseline_beside_best


def _bounds(record: Record) -> Iterator[Section]:
    """Yield the shares of a step by what bounds it, as torch's profiler saw them."""
    bounds = record.findings.get("bounds") or {}
    plans = [key for key in PLANS if bounds.get(key)]
    rows = [(name, *(f"{bounds[key].get(name, 0.0):.0%}" for key in plans)) for name in BOUNDS]
    titles = ("", *(role_of(trial_of(key, record).plan, record) for key in plans))
    table = [titles, *rows] if plans else []
    why = [f"Not profiled: {bounds['failed']}"] if "failed" in bounds else []
    if table or why:
        yield Section("What a step is spent on", why, table)


def figures(record: Record) -> list[tuple[str, str, str]]:
    """Return (label, the recommended plan's figure, that beside it) for what the answer omits."""
    first, second = record.recommended, beside_recommended(record)
    held = first.measurement.held_bytes
    headroom = None if held is None else record.vram_budget_bytes - held
    beside = {} if second is None else _figures(second, record)
    return [
        *((name, words, beside.get(name, "")) for name, words in _figures(first, record).items()),
        ("headroom", format_bytes(headroom), ""),
        *rate_rows(record, first, second),
    ]


def _figures(trial: Trial, record: Record) -> dict[str, str]:
    plan, measured = trial.plan, trial.measurement
    speed, blocks = record.speed_of(trial), record.turns(plan)
    step_s = plan.samples_per_step / speed if speed else None
    return {
        "micro-batch": str(plan.micro_batch),
        "accumulation steps": str(plan.accumulation_steps),
        "global batch": str(plan.samples_per_step),
        "settings": settings_words(plan.settings, record),
        "outcome": measured.outcome.value,
        "optimizer step": format_seconds(
            step_s, (step_s or 0.0) * spread_of(*record.speed_range(trial))
        ),
        "probes compared": str(len(blocks) or "none"),
        "peak allocated": format_bytes(measured.peak_allocated_bytes),
        "peak reserved": format_bytes(measured.peak_reserved_bytes),
        "non-torch": format_bytes(measured.non_torch_bytes),
    }


def training_lines(record: Record, place: Place) -> Iterator[str]:
    """Yield code that trains by the report: by the trainer that was searched, or by a loop."""
    if by_trainer := lines_of_trainer(record):
        if place.report != "report":
            yield f"report = {place.report}"
        yield from by_trainer
        return
    ranks = record.recommended.plan.ranks
    share = "this rank's share of " if ranks > 1 else ""
    samples = counted(record.recommended.plan.samples_per_step, "sample")
    yield f"with {apply_line(record, place)} as training:"
    yield f"    for batch in loader:  # {share}{samples}"
    yield "        loss = training.step(batch)"


def _notes(record: Record) -> Iterator[str]:
    """Yield all notes in full, those to act on first."""
    acts = [note for note in record.notes if note.startswith(ACT)]
    yield from acts
    if (start := pay_off(record)) is not None:
        yield start.words(record)
    if record.difference is not None:
        yield (
            f"Relative differences of the {name_of(record.best.plan, record)} from the baseline on "
            f"the same samples: loss {record.difference['loss']:.2g}, gradients "
            f"{record.difference['gradient']:.2g}"
        )
    for key, use in record.memory.items():
        if "why_not" in use:
            whose = name_of(trial_of(key, record).plan, record)
            yield f"The memory of the {whose} is not shown: {use['why_not']}"
    yield from (note for note in record.notes if note not in acts)


def trial_cells(trial: Trial, record: Record) -> tuple[str, ...]:
    """Return a trial in words, by `TRIAL_TITLES`."""
    measured, step_s = trial.measurement, trial.measurement.step_time_s
    low, high = trial.samples_per_second_low, trial.samples_per_second_high
    return (
        str(trial.number),
        trial.kind.value,
        str(replace(trial.plan, settings={})),
        settings_words(trial.plan.settings, record),
        outcome_words(trial),
        f"{rounded_within(trial.samples_per_second or 0.0, low, high)} ({range_words(low, high)})"
        if low and high
        else "-",
        format_bytes(measured.held_bytes),
        format_seconds(step_s, (step_s or 0.0) * spread_of(low, high)),
    )


def outcome_words(trial: Trial) -> str:
    """Return the outcome, with a short reason if outcome and memory do not show it."""
    measured = trial.measurement
    if trial.kind is TrialKind.VETOED:  # the detail is the reason, unless the plan was run before
        why = measured.detail or ""
        return why if why.startswith("not run") else f"not run again: {measured.outcome.value}"
    why = ""
    if measured.detail and not measured.ok and not measured.outcome.about_memory:
        first_line = measured.detail.strip().partition("\n")[0]
        why = f": {shorten(first_line, _SHORT_DETAIL, placeholder=' ...')}"
    return f"{measured.outcome.value}{', contended' if measured.contended else ''}{why}"


def environment_rows(record: Record) -> Mapping[str, str]:
    """Return what is known of device, software, workload and search, by label."""
    at, workload, search = record.environment, record.workload, record.search
    sessions = f" in {search.sessions} sessions" if search.sessions > 1 else ""
    known = {
        "device": at.get("gpu") or at["device"],
        "device memory": format_bytes(at.get("total_bytes")),
        "compute capability": at.get("capability"),
        "driver": at.get("driver"),
        "CUDA": at.get("cuda"),
        "torch": at["torch"],
        "Python": at.get("python"),
        "autofit": record.version,
        "searched": record.created.replace("T", " ").replace("Z", " UTC"),
        "duration": f"{format_seconds(search.seconds)}{sessions}",
        "probes": f"{search.probes}, {search.oom_probes} out of memory",
        "stopped because": search.stopped_because,
        "effort": search.effort,
        "seed": str(search.seed),
        "VRAM budget": format_bytes(record.vram_budget_bytes),
        "workload": workload.get("target") or workload.get("model"),
        "parameters": f"{workload['parameters']:,}",
        "loss": workload["loss"],
        "optimizer": workload.get("optimizer"),
        "sample batch": ", ".join(
            f"{name}: {shape}" for name, shape in workload["sample_shapes"].items()
        ),
        "samples": samples_words(record),
        "fingerprint": workload["fingerprint"],
    }
    return {label: str(value) for label, value in known.items() if value is not None}


def changes(before: Record, after: Record) -> Section:
    """Return plan, speed and memory of both reports, and all else that differs.

    Above the table stands why the two may not be compared like for like.
    """
    was, now = _facts(before), _facts(after)
    rows = [
        (label, was.get(label, ""), now.get(label, ""))
        for label in {**was, **now}
        if label in _ALWAYS_COMPARED or was.get(label) != now.get(label)
    ]
    is_other = "fingerprint" in [label for label, *_ in rows]
    if ratio := _speedup(before, after, is_other=is_other):
        rows.insert(len(_ALWAYS_COMPARED), ("speedup", "", ratio))
    lines = [f"{ACT}The workloads differ"] * is_other
    lines += [
        f"{ACT}The {name} report does not decide which plan is the fastest"
        for name, record in (("earlier", before), ("later", after))
        if not is_sure(record)
    ]
    return Section("Changes", lines, [("", "before", "after"), *rows])


def _speedup(before: Record, after: Record, *, is_other: bool) -> str | None:
    """Return the later speed over the earlier one, or why there is none; None: no speed is known.

    Args:
        is_other: whether the workloads differ.
    """
    speeds = [record.speed_of(record.recommended) for record in (before, after)]
    if not all(speeds):
        return None
    if is_other:
        return "not comparable"
    if not (is_sure(before) and is_sure(after)):
        return "not decided"
    ranges = [record.speed_range(record.recommended) for record in (before, after)]
    return ratio_words((speeds[1] or 0.0) / (speeds[0] or 1.0), *ranges)


def _facts(record: Record) -> dict[str, str]:
    """Return the facts of a report in words, by label; what each search has anew is left out."""
    best, baseline = record.recommended, record.baseline_beside_best
    facts = {
        "plan": plan_words(best.plan, record),
        "throughput": speed_words(best, record),
        "memory": format_bytes(best.measurement.held_bytes),
        **{label: figure for label, figure, _ in figures(record)},
        "throughput of the baseline": speed_words(baseline, record),
        "memory of the baseline": format_bytes(baseline.measurement.held_bytes),
        **environment_rows(record),
    }
    return {label: fact for label, fact in facts.items() if label not in ("searched", "duration")}
