"""A report as text: the best plan, all trials, and skipped variants."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from textwrap import shorten

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autofit.measurement import Role, Trial
from autofit.plan import Plan, Settings, unlike
from autofit.report.record import Record, Skipped
from autofit.units import counted, format_bytes, format_rate, format_seconds

WIDTH = 120
_SHORT_DETAIL = 60
_INDENT = "    "
_LONGEST_SETTING = 40
_QUANTITY = re.compile(r"\d+(?:\.\d+)?(?= (?:samples/s|[KMGT]?i?B)\b)")
_ABOUT_TRIALS = (
    "as micro-batch x accumulation steps. Confirmed ones ran every micro-batch of a step; "
    "others may have run two of them and scaled the time. Held is peak reserved plus non-torch."
)
_ABOUT_HINTS = (
    "What values were expected to change before any trial, in percent of the setting's first value"
)
_HINTED = {
    "bytes a sample": "bytes_per_sample",
    "seconds a sample": "seconds_per_sample",
    "fixed bytes": "fixed_bytes",
}
MOST_HINTED = 12
"""Values of a setting whose expected effect is shown."""
_AGAIN = ", measured again: noise hid whether it is faster"


def render(record: Record, width: int = WIDTH) -> str:
    """Return the report as text of at most `width` columns; only code to paste may be wider."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    for part in _parts(record, width):
        if isinstance(part, Table):
            console.print(part)
        elif part.startswith(_INDENT):  # code to paste would not run with its lines broken
            console.print(Text(part), soft_wrap=True)
        else:
            indent = len(part) - len(part.lstrip(" "))
            console.print(Padding(Text(part[indent:]), (0, 0, 0, indent)))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _parts(record: Record, width: int) -> Iterator[str | Table]:
    best, baseline = record.trial(record.best_number), record.baseline_beside_best
    yield headline(record)
    yield ""
    yield _comparison(best, baseline, record)
    paste = record.paste.get(best.number)
    if paste:
        yield "\nTo train like this:\n"
        yield from (f"{_INDENT}{line}" for line in _apply_lines(best.plan, record))
        yield "\nor without report.apply:\n"
        yield from (f"{_INDENT}{line}" for line in paste)
    yield ""
    yield from _facts(record)
    yield f"\n{counted(len(record.trials), 'trial')}, {_ABOUT_TRIALS}\n"
    yield _trials_table(record, width)
    if faster := list(measured_faster(record)):
        yield "\nWhy trials that were measured faster are not the best plan\n"
        yield from (f"  {line}" for line in faster)
    if (hinted := _hints_table(record)).row_count:
        yield f"\n{_ABOUT_HINTS}\n"
        yield hinted
    if record.skipped:
        yield "\nSkipped\n"
        yield from (f"  {line}" for line in _skipped(record.skipped))


def headline(record: Record) -> str:
    """Return a line about the best plan and its speed, after one about a changed global batch."""
    best, baseline = record.trial(record.best_number), record.baseline_beside_best
    lines = []
    if best.plan.samples_per_step != baseline.plan.samples_per_step:
        lines.append(
            f"The global batch changed from {baseline.plan.samples_per_step} to "
            f"{best.plan.samples_per_step} samples: give global_batch to keep it."
        )
    speed, against = format_rate(best.samples_per_second), against_baseline(best, baseline)
    unconfirmed = (
        "" if best.role is Role.CONFIRMED else " [not confirmed: the search was cut short]"
    )
    lines.append(f"Best plan: {describe(best.plan, record)}: {speed}, {against}{unconfirmed}")
    return "\n".join(lines)


def _apply_lines(plan: Plan, record: Record) -> Iterator[str]:
    """Yield code that trains by `report.apply`."""
    again = ", ".join(f"{name}=..." for name in record.functions_given)
    yield f'# a saved one: autofit.load("report.json"){again and f", and {again} to apply"}'
    yield "with report.apply(model, optimizer) as training:"
    yield f"    for batch in loader:  # {counted(plan.samples_per_step, 'sample')} each"
    yield "        loss = training.step(batch)"


def _comparison(best: Trial, baseline: Trial, record: Record) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "best", "baseline"):
        table.add_column(name, justify="left" if not name else "right")
    beside = _figures(baseline, record)
    for label, figure in _figures(best, record).items():
        table.add_row(label, figure, beside[label])
    table.add_row("VRAM budget", format_bytes(record.vram_budget_bytes), "")
    table.add_row("headroom", _headroom(best, record.vram_budget_bytes), "")
    return table


def _figures(trial: Trial, record: Record) -> dict[str, str]:
    plan, measured = trial.plan, trial.measurement
    return {
        "micro-batch": str(plan.micro_batch),
        "accumulation steps": str(plan.accumulation_steps),
        "global batch": str(plan.samples_per_step),
        "settings": _settings(plan.settings, record),
        "outcome": measured.outcome.value,
        "samples/s": _interval(trial),
        "optimizer step": format_seconds(measured.step_time_s),
        "peak allocated": format_bytes(measured.peak_allocated_bytes),
        "peak reserved": format_bytes(measured.peak_reserved_bytes),
        "non-torch": format_bytes(measured.non_torch_bytes),
    }


def _facts(record: Record) -> Iterator[str]:
    environment, search = record.environment, record.search
    where = environment.get("gpu") or environment["device"]
    yield f"Device: {where}, torch {environment['torch']}, autofit {record.version}"
    sessions = f" in {search.sessions} sessions" if search.sessions > 1 else ""
    yield (
        f"Search: {counted(search.probes, 'probe')}, {search.oom_probes} out of memory, "
        f"{format_seconds(search.seconds)}{sessions}; stopped because {search.stopped_because}"
    )
    shapes = ", ".join(
        f"{name}: {shape}" for name, shape in record.workload["sample_shapes"].items()
    )
    yield f"The answer holds for samples no longer than the sample batch's: {shapes}"
    yield f"Loss: {record.workload['loss'] or 'unknown'}"
    if record.difference is not None:
        yield (
            f"The best plan against the baseline, on the same samples: loss differs by "
            f"{record.difference['loss']:.2g} and gradients by {record.difference['gradient']:.2g} "
            "(relative)"
        )
    for note in record.notes:
        yield f"Note: {note}"


def _trials_table(record: Record, width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("trial", "role", "micro-batch"):
        table.add_column(name, no_wrap=True)
    # One setting a line keeps names whole, where the other columns leave room for them.
    words = (word for t in record.trials for word in _settings(t.plan.settings, record).split())
    is_wide = width >= WIDTH and max(map(len, words), default=0) <= _LONGEST_SETTING
    table.add_column("settings", overflow="fold", no_wrap=is_wide)
    table.add_column("outcome", overflow="fold")
    for name in ("samples/s", "held", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    run: set[Plan] = set()
    for trial in record.trials:
        measured = trial.measurement
        again = trial.role is Role.SEARCH and trial.plan in run
        run.add(trial.plan)
        table.add_row(
            str(trial.number),
            trial.role.value,
            str(replace(trial.plan, settings={})),
            Text(_settings(trial.plan.settings, record).replace(", ", ",\n" if is_wide else ", ")),
            Text(_outcome(trial) + _AGAIN * again),
            _interval(trial),
            format_bytes(measured.held_bytes),
            format_seconds(measured.step_time_s),
        )
    return table


def _hints_table(record: Record) -> Table:
    """Return what the values of each setting were expected to change, evenly thinned if many."""
    hints = [hint for dimension in record.dimensions.values() for hint in dimension.hints.values()]
    known = {
        title: name
        for title, name in _HINTED.items()
        if any(getattr(hint, name) is not None for hint in hints)
    }
    ran = [trial for trial in record.trials if trial.role is not Role.VETOED]
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", overflow="fold")
    for title in (*known, "trials"):
        table.add_column(title, justify="right", no_wrap=True)
    for setting, dimension in record.dimensions.items():
        hinted = [value for value in dimension.values[1:] if value in dimension.hints]
        rows = min(len(hinted), MOST_HINTED)
        for value in (hinted[(number + 1) * len(hinted) // rows - 1] for number in range(rows)):
            ratios = (getattr(dimension.hints[value], name) for name in known.values())
            shares = ["" if ratio is None else f"{ratio:.0%}" for ratio in ratios]
            tried = sum(trial.plan.settings.get(setting) == value for trial in ran)
            table.add_row(f"{setting}={value}", *shares, str(tried or "none"))
    return table


def _skipped(skipped: Iterable[Skipped]) -> Iterator[str]:
    """Yield a line per reason; reasons that differ in a measured quantity alone are one."""
    groups: dict[tuple[tuple[str, ...], str], list[Skipped]] = {}
    for each in skipped:
        groups.setdefault((tuple(each.settings), _QUANTITY.sub("", each.why)), []).append(each)
    for (names, _), group in groups.items():
        if len(names) == 1:
            values = ", ".join(str(each.settings[names[0]]) for each in group)
            what = f"{names[0]}={values}"
        else:
            what = "; ".join(_written(each.settings) for each in group)
        yield f"{what}: {_why_together([each.why for each in group])}"


def _why_together(reasons: Sequence[str]) -> str:
    """Return the reason, with the range of each quantity in which they differ."""
    words = _QUANTITY.split(reasons[0])
    columns = zip(*(_QUANTITY.findall(reason) for reason in reasons), strict=True)
    ranges = [
        least
        if (least := min(column, key=float)) == (most := max(column, key=float))
        else f"{least} to {most}"
        for column in columns
    ]
    return "".join(chain.from_iterable(zip_longest(words, ranges, fillvalue="")))


def _outcome(trial: Trial) -> str:
    """Return the outcome, with a short reason if outcome and held bytes do not show it."""
    measured = trial.measurement
    if trial.role is Role.VETOED:  # the detail is the reason, unless the plan was run before
        why = measured.detail or ""
        return why if why.startswith("not run") else f"not run again: {measured.outcome.value}"
    contended = ", contended" if measured.contended else ""
    why = ""
    if measured.detail and not measured.ok and not measured.outcome.about_memory:
        first_line = measured.detail.strip().partition("\n")[0]
        why = f": {shorten(first_line, _SHORT_DETAIL, placeholder=' ...')}"
    return f"{measured.outcome.value}{contended}{why}"


def describe(plan: Plan, record: Record) -> str:
    """Return a plan without its plain settings: "8 x 4, precision.dtype=bfloat16"."""
    return str(plan.without(record.plain_settings))


def _settings(settings: Settings, record: Record) -> str:
    """Return the settings that are not at their first value, or "plain"."""
    return _written(unlike(settings, record.plain_settings)) or "plain"


def _written(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _interval(trial: Trial) -> str:
    rate, low, high = (
        trial.samples_per_second,
        trial.samples_per_second_low,
        trial.samples_per_second_high,
    )
    if rate is None or low is None or high is None:
        return "-"
    text = format_rate(rate).removesuffix(" samples/s")
    spread = (high - low) / 2 / rate
    return f"{text} ±{spread:.1%}" if spread >= 0.001 else text


def _headroom(trial: Trial, vram_budget_bytes: int) -> str:
    held = trial.measurement.held_bytes
    return format_bytes(None if held is None else vram_budget_bytes - held)


# Comparisons of measured speeds. Two trials are equally fast if their 95 % intervals overlap.


def against_baseline(best: Trial, baseline: Trial) -> str:
    """Return the comparison of the best plan with the baseline, as a part of a sentence."""
    if not baseline.ok:
        return f"the baseline does not fit ({baseline.measurement.outcome.value})"
    if best.plan == baseline.plan:
        return "which is the baseline itself"
    theirs = format_rate(baseline.samples_per_second)
    ratio = _rate(best) / (_rate(baseline) or 1.0)
    if not best.ties_with(baseline):
        return f"{ratio:.2f} times the baseline's {theirs}"
    less = _held(baseline) - _held(best)
    if less > 0:
        return (
            f"as fast as the baseline ({theirs}) within measurement error, and it needs "
            f"{format_bytes(less)} less memory"
        )
    return f"{ratio:.2f} times the baseline's {theirs}, which is within measurement error"


def measured_faster(record: Record) -> Iterator[str]:
    """Yield a line per reason why trials that were measured faster are not the best."""
    best = record.trial(record.best_number)
    ran = [t for t in record.trials if t.ok and t.role is not Role.VETOED]
    reasons: dict[str, list[str]] = {}
    for trial in ran:
        if trial.plan != best.plan and _rate(trial) > _rate(best):
            reasons.setdefault(_why_not_best(trial, best, ran), []).append(str(trial.number))
    for why, numbers in reasons.items():
        yield f"Trial{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {why}"


def _why_not_best(trial: Trial, best: Trial, ran: Sequence[Trial]) -> str:
    last = [other for other in ran if other.plan == trial.plan][-1]
    fastest = max((other for other in ran if other.plan == best.plan), key=_rate)
    if last is not trial and _rate(last) <= _rate(best):
        return f"slower than the best plan when it was run again (trial {last.number})"
    if trial.ties_with(best) and _held(trial) >= _held(best):
        return "as fast as the best plan within measurement error, and needs no less memory"
    if _rate(trial) <= _rate(fastest):
        return f"no faster than the best plan was in trial {fastest.number}"
    if best.role is Role.CONFIRMED and last.role is not Role.CONFIRMED:
        return "measured in the search alone, and not among the plans that were confirmed"
    return "all measurements together do not show it to be faster"


def _rate(trial: Trial) -> float:
    return trial.samples_per_second or 0.0


def _held(trial: Trial) -> int:
    return trial.measurement.held_bytes or 0
