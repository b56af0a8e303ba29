"""All that a report says beside its answer, in sections that every form lays out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten

from autofit.measurement import ACT, Trial, TrialKind, probes_of, spread_of
from autofit.plan import Plan
from autofit.report.findings import findings_lines, of_ranks
from autofit.report.record import Record
from autofit.report.summary import (
    IN_PYTHON,
    Place,
    apply_line,
    pay_off,
    range_words,
    settings_words,
)
from autofit.units import counted, format_bytes, format_seconds, rounded

TRIAL_TITLES = ("trial", "kind", "plan", "settings", "outcome", "samples/s", "memory", "step")
ABOUT_TRIALS = (
    "A plan is micro-batch x accumulation steps. Memory is peak reserved plus non-torch bytes. "
    "Ranges are 95 % intervals."
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SHORT_DETAIL = 60


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: of the part.
        lines: of words, or of code where `is_code`.
        table: rows of cells, the titles first.
        is_code: whether the lines are Python.
    """

    title: str
    lines: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    is_code: bool = False


def sections(record: Record, place: Place = IN_PYTHON) -> Iterator[Section]:
    """Yield the parts, those first that most readers want."""
    yield Section("Best plan and baseline", table=[("", "best", "baseline"), *figures(record)])
    yield Section("Train by the plan", list(training_lines(record, place)), is_code=True)
    if by_hand := record.paste.get(record.best.number):
        yield Section("The same in a loop of your own", by_hand, is_code=True)
    if notes := list(notes_of(record)):
        yield Section("Notes", notes)
    yield Section(
        counted(len(record.trials), "trial"),
        [ABOUT_TRIALS],
        [TRIAL_TITLES, *(trial_cells(trial, record) for trial in record.trials)],
    )
    if faster := list(measured_faster(record)):
        yield Section("Why trials that were measured faster are not the best plan", faster)
    if record.skipped:
        yield Section("Skipped", list(skipped_lines(record)))
    yield Section("Search and environment", table=[("", ""), *environment(record).items()])


def figures(record: Record) -> list[tuple[str, str, str]]:
    """Return (label, the best plan's figure, the baseline's) for all that the answer leaves out."""
    held = record.best.measurement.held_bytes
    headroom = None if held is None else record.vram_budget_bytes - held
    columns = [_figures(trial, record) for trial in (record.best, record.baseline_beside_best)]
    return [
        *((name, columns[0][name], columns[1][name]) for name in columns[0]),
        ("headroom", format_bytes(headroom), ""),
    ]


def _figures(trial: Trial, record: Record) -> dict[str, str]:
    plan, measured = trial.plan, trial.measurement
    speed, blocks = record.speed_of(trial), record.blocks(plan)
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
    if by_trainer := record.workload.get("apply"):
        if place.report != "report":
            yield f"report = {place.report}"
        yield from by_trainer
        return
    ranks = record.best.plan.world_size
    share = "this rank's share of " if ranks > 1 else ""
    samples = counted(record.best.plan.samples_per_step, "sample")
    yield f"with {apply_line(record, place)} as training:"
    yield f"    for batch in loader:  # {share}{samples}"
    yield "        loss = training.step(batch)"


def notes_of(record: Record) -> Iterator[str]:
    """Yield all notes in full, those to act on first, and what was found beside the answer."""
    acts = [note for note in record.notes if note.startswith(ACT)]
    yield from acts
    if (start := pay_off(record)) is not None:
        yield start.words(record)
    if record.best.plan.world_size > 1:
        yield from of_ranks(record)
    yield from findings_lines(record)
    if record.difference is not None:
        yield (
            f"Best plan against baseline, same samples: loss {record.difference['loss']:.2g}, "
            f"gradients {record.difference['gradient']:.2g} (relative differences)"
        )
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
        f"{rounded(trial.samples_per_second or 0.0, (high - low) / 2)} ({range_words(low, high)})"
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


def measured_faster(record: Record) -> Iterator[str]:
    """Yield a line per reason why trials that were measured faster are not the best."""
    best, speed = record.best, record.speed_of(record.best) or 0.0
    reasons: dict[str, list[str]] = {}
    for trial in probes_of(record.trials):
        if trial.ok and trial.plan != best.plan and (trial.samples_per_second or 0.0) > speed:
            reasons.setdefault(_why_not_best(trial.plan, record), []).append(str(trial.number))
    for why, numbers in reasons.items():
        yield f"Trial{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {why}"


def _why_not_best(plan: Plan, record: Record) -> str:
    """Return why the plan is not the best one although a trial of it measured faster."""
    blocks = [t for t in record.trials if t.plan == plan and t.kind is TrialKind.CONFIRMATION]
    for trial in blocks:
        if not trial.ok:
            return f"{trial.measurement.outcome.value} when it ran again (trial {trial.number})"
    if not record.is_confirmed:
        return "the final comparison, which would have decided, did not end"
    compared, speed = record.compared_speed(plan), record.speed_of(record.best) or 1.0
    if compared is None:
        return "measured in the search alone, not in the final comparison"
    gap = f"{100 * abs(compared / speed - 1):.1f} %"
    if compared < speed:
        return f"{gap} slower than the best plan in the final comparison"
    return (
        f"{gap} faster in the final comparison, which is a tie: it goes to a plan with headroom, "
        "then to the baseline, then to exact arithmetic, fewer settings, less memory"
    )


def skipped_lines(record: Record) -> Iterator[str]:
    """Yield what was skipped and why; reasons that differ in numbers alone are one line."""
    groups: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for at, each in enumerate(record.skipped):
        groups.setdefault((tuple(each.settings), _NUMBER.sub("", each.why)), []).append(at)
    for (names, _), places in groups.items():
        group = [record.skipped[at] for at in places]
        what = "; ".join(
            ", ".join(f"{name}={value}" for name, value in each.settings.items()) for each in group
        )
        if len(names) == 1:
            what = f"{names[0]}={', '.join(str(each.settings[names[0]]) for each in group)}"
        differ = len({each.why for each in group}) > 1
        yield f"{what}: {'for example, ' if differ else ''}{group[0].why}"


def environment(record: Record) -> Mapping[str, str]:
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
        "sample batch": ", ".join(
            f"{name}: {shape}" for name, shape in workload["sample_shapes"].items()
        ),
        "fingerprint": workload["fingerprint"],
    }
    return {label: str(value) for label, value in known.items() if value is not None}
