"""A report as text: the best plan, all trials, and skipped variants."""

from __future__ import annotations

import io
import re
import statistics
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
_MOST_SCATTER = 0.05
"""The standard deviation of a plan's repeated log speeds above which the report warns."""
_TIE = (
    "a tie goes to the baseline, then to the plan that changes the arithmetic least, has the "
    "fewest settings that are not plain and needs the least memory"
)
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
    best, baseline = record.best, record.baseline_beside_best
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
    speed, blocks = record.speed_of(trial), record.blocks(plan)
    return {
        "micro-batch": str(plan.micro_batch),
        "accumulation steps": str(plan.accumulation_steps),
        "global batch": str(plan.samples_per_step),
        "settings": _settings(plan.settings, record),
        "outcome": measured.outcome.value,
        "samples/s": _interval(speed, *record.speed_range(trial)),
        "optimizer step": format_seconds(plan.samples_per_step / speed if speed else None),
        "final comparison": counted(len(blocks), "block") if blocks else "not in it",
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
    if record.scatter is not None and record.scatter > _MOST_SCATTER:
        yield (
            f"Noise: repeated blocks of one plan scatter by {record.scatter:.0%} (standard "
            "deviation), so smaller differences between plans were not looked for"
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
            _interval(
                trial.samples_per_second,
                trial.samples_per_second_low,
                trial.samples_per_second_high,
            ),
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


def _settings(settings: Settings, record: Record) -> str:
    """Return the settings that are not at their first value, or "plain"."""
    return _written(unlike(settings, record.plain_settings)) or "plain"


def _written(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _interval(rate: float | None, low: float | None, high: float | None) -> str:
    if rate is None or low is None or high is None:
        return "-"
    text = format_rate(rate).removesuffix(" samples/s")
    spread = (high - low) / 2 / rate
    return f"{text} ±{spread:.1%}" if spread >= 0.001 else text


def _headroom(trial: Trial, vram_budget_bytes: int) -> str:
    held = trial.measurement.held_bytes
    return format_bytes(None if held is None else vram_budget_bytes - held)


# Comparisons of measured speeds, in words. Only the final comparison gives a factor.


def headline(record: Record) -> str:
    """Return a line about the best plan and its speed, after one about a changed global batch."""
    best, baseline = record.best, record.baseline_beside_best
    lines = []
    if best.plan.samples_per_step != baseline.plan.samples_per_step:
        lines.append(
            f"The global batch changed from {baseline.plan.samples_per_step} to "
            f"{best.plan.samples_per_step} samples: give global_batch to keep it."
        )
    words = f"Best plan: {_describe(best.plan, record)}: {format_rate(record.speed_of(best))}"
    if not record.is_confirmed:
        words += (
            ", not confirmed: the final comparison did not end (the search stopped because "
            f"{record.search.stopped_because})"
        )
    if best.plan == baseline.plan:
        words += f". Nothing better than your baseline was found: {_next_best(record)}"
    elif not baseline.ok:
        words += f", the baseline does not fit ({baseline.measurement.outcome.value})"
    elif record.factor is not None:
        words += f", {_against_baseline(record.factor, record)}"
    elif record.is_confirmed:
        words += ", not compared with the baseline"
    return "\n".join([*lines, words])


def _describe(plan: Plan, record: Record) -> str:
    """Return a plan without its plain settings: "8 x 4, precision.dtype=bfloat16"."""
    return str(plan.without(record.plain_settings))


def _against_baseline(factor: float, record: Record) -> str:
    """Return the comparison of the best plan with the baseline and with a faster finalist."""
    best, baseline = record.best, record.baseline_beside_best
    theirs = f"the baseline's {format_rate(record.speed_of(baseline))}"
    words = f"{factor:.2f} times {theirs}" if factor >= 1 else f"{1 - factor:.1%} below {theirs}"
    if _overlap(record.speed_range(best), record.speed_range(baseline)):
        words += ", but their measured ranges overlap"
    less = _held(baseline) - _held(best)
    if factor < 1 and less > 0:
        words += f", and it needs {format_bytes(less)} less memory"
    fastest, speed = record.finalists[0]
    if fastest in (best.plan, baseline.plan):
        return words
    lead = speed / (record.speed_of(best) or 1.0) - 1
    return (
        f"{words}; tied with {_describe(fastest, record)} ({lead:.1%} faster) and preferred to it"
    )


def _next_best(record: Record) -> str:
    """Return how many plans were run, and how fast the fastest but the best one is."""
    best, ran = record.best, [t for t in record.trials if t.role is not Role.VETOED]
    tried = f"{counted(len({trial.plan for trial in ran}), 'plan')} run"
    finalists = [each for each in record.finalists if each[0] != best.plan]
    if is_final := record.is_confirmed and bool(finalists):
        plan, speed = finalists[0]
    else:
        others = [(t.plan, _rate(t)) for t in ran if t.ok and t.plan != best.plan]
        if not others:
            return f"{tried}, and no other fits" if len(ran) > 1 else "no other plan was run"
        plan, speed = max(others, key=lambda each: each[1])
    gap = speed / (record.speed_of(best) or 1.0) - 1
    return (
        f"{tried}, the fastest other {'finalist' if is_final else 'in the search'} is "
        f"{_describe(plan, record)} at {format_rate(speed)}, {abs(gap):.1%} "
        f"{'faster' if gap > 0 else 'slower'}"
        f"{' (a tie, which goes to the baseline)' * (is_final and gap > 0)}"
    )


def _overlap(
    first: tuple[float | None, float | None], second: tuple[float | None, float | None]
) -> bool:
    (low, high), (others_low, others_high) = first, second
    if low is None or high is None or others_low is None or others_high is None:
        return False
    return low <= others_high and others_low <= high


def measured_faster(record: Record) -> Iterator[str]:
    """Yield a line per reason why trials that were measured faster are not the best."""
    best, speed = record.best, record.speed_of(record.best) or 0.0
    reasons: dict[str, list[str]] = {}
    for trial in record.trials:
        ran = trial.ok and trial.role is not Role.VETOED
        if ran and trial.plan != best.plan and _rate(trial) > speed:
            reasons.setdefault(_why_not_best(trial.plan, record), []).append(str(trial.number))
    for why, numbers in reasons.items():
        yield f"Trial{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {why}"


def _why_not_best(plan: Plan, record: Record) -> str:
    """Return why the plan is not the best one although a trial of it measured faster."""
    blocks = [t for t in record.trials if t.plan == plan and t.role is Role.CONFIRMED]
    failed = next((trial for trial in blocks if not trial.ok), None)
    if failed is not None:
        outcome = failed.measurement.outcome
        ended = "did not fit" if outcome.about_memory else "failed"
        return f"{ended} when it was run again (trial {failed.number}: {outcome.value})"
    compared, speed = record.compared_speed(plan), record.speed_of(record.best) or 1.0
    if record.is_confirmed and compared is not None:
        numbers = ", ".join(str(trial.number) for trial in blocks)
        gap, its = f"{abs(compared / speed - 1):.1%}", f"(trial{'s' * (len(blocks) > 1)} {numbers})"
        if compared < speed:
            return f"{gap} slower than the best plan in the final comparison {its}"
        return f"tied with the best plan in the final comparison, {gap} faster {its}: {_TIE}"
    if _mean_speed(plan, record) <= _mean_speed(record.best.plan, record):
        return "no faster than the best plan by the mean of all trials of each"
    if record.is_confirmed:
        return "measured in the search alone, and not among the plans of the final comparison"
    return "the final comparison, which would have decided, did not end"


def _mean_speed(plan: Plan, record: Record) -> float:
    """Return the geometric mean of the plan's samples/s over its trials that fit."""
    ran = [t for t in record.trials if t.plan == plan and t.ok and t.role is not Role.VETOED]
    return statistics.geometric_mean(_rate(trial) for trial in ran if trial.samples_per_second)


def _rate(trial: Trial) -> float:
    return trial.samples_per_second or 0.0


def _held(trial: Trial) -> int:
    return trial.measurement.held_bytes or 0
