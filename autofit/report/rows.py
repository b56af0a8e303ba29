"""What a report shows, in rows of words; text, Markdown and HTML lay out the same ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from textwrap import shorten

from autofit.measurement import Role, Trial, spread_of
from autofit.plan import Plan, Scalar, Settings, unlike
from autofit.report.answer import factor_words, pay_off, share_words, speed_words
from autofit.report.findings import findings_lines
from autofit.report.record import Record, Skipped
from autofit.units import counted, format_bytes, format_seconds, rounded

ABOUT_TRIALS = (
    "Sizes are micro-batch x accumulation steps. Confirmed ones ran every micro-batch of a step; "
    "others may have run two of them and scaled the time. Held is peak reserved plus non-torch. "
    '"again": noise had hidden whether the plan is faster.'
)
BY_HAND = "or in a loop of your own"
"""What stands between the lines of `apply_lines` and those that do without autofit's."""
ABOUT_HINTS = (
    "What values were expected to change before any trial, in percent of the setting's first value"
)
MOST_HINTED = 12
"""Values of a setting whose expected effect is shown."""
_HINTED = {
    "bytes a sample": "bytes_per_sample",
    "seconds a sample": "seconds_per_sample",
    "fixed bytes": "fixed_bytes",
}
_SHORT_DETAIL = 60
_QUANTITY = re.compile(r"\d+(?:\.\d+)?(?= (?:samples/s|[KMGT]?i?B)\b)")
_MOST_SCATTER = 0.05
"""The standard deviation of a plan's repeated log speeds above which the report warns."""
_AGAIN = ", again"


def key_numbers(record: Record) -> dict[str, str]:
    """Return the three numbers of the answer: speed, memory, and the step that they are for."""
    best, plan = record.best, record.best.plan
    factor = factor_words(record)
    against = ""
    if factor and not _is_baseline(record):
        against = f", {factor[0]} ({factor[1]}) times the baseline's"
    samples = counted(plan.samples_per_step, "sample")
    split = f"{plan.micro_batch} x {plan.accumulation_steps}"
    return {
        "speed": f"{speed_words(best, record)}{against}",
        "memory": (
            f"{format_bytes(best.measurement.held_bytes)} of "
            f"{format_bytes(record.vram_budget_bytes)} allowed, {headroom(record)} headroom"
        ),
        "step": f"{_step_words(best, record)} for {samples}, as {split}",
    }


def comparison(record: Record) -> list[tuple[str, str, str]]:
    """Return (label, the best plan's figure, the baseline's) for each figure of both."""
    beside = _figures(record.baseline_beside_best, record)
    rows = [(name, each, beside[name]) for name, each in _figures(record.best, record).items()]
    return [
        *rows,
        ("VRAM budget", format_bytes(record.vram_budget_bytes), ""),
        ("headroom", headroom(record), ""),
    ]


def _figures(trial: Trial, record: Record) -> dict[str, str]:
    plan, measured = trial.plan, trial.measurement
    speed, blocks = record.speed_of(trial), record.blocks(plan)
    return {
        "micro-batch": str(plan.micro_batch),
        "accumulation steps": str(plan.accumulation_steps),
        "global batch": str(plan.samples_per_step),
        "settings": settings_words(plan.settings, record),
        "outcome": measured.outcome.value,
        "samples/s": _interval(speed, *record.speed_range(trial)),
        "optimizer step": _step_words(trial, record),
        "final comparison": counted(len(blocks), "block") if blocks else "not in it",
        "peak allocated": format_bytes(measured.peak_allocated_bytes),
        "peak reserved": format_bytes(measured.peak_reserved_bytes),
        "non-torch": format_bytes(measured.non_torch_bytes),
    }


def _step_words(trial: Trial, record: Record) -> str:
    """Return the duration of an optimizer step at the plan's speed."""
    speed = record.speed_of(trial)
    seconds = trial.plan.samples_per_step / speed if speed else None
    return format_seconds(seconds, (seconds or 0.0) * spread_of(*record.speed_range(trial)))


def headroom(record: Record) -> str:
    """Return the bytes of the budget that the best plan leaves."""
    held = record.best.measurement.held_bytes
    return format_bytes(None if held is None else record.vram_budget_bytes - held)


def apply_lines(record: Record) -> Iterator[str]:
    """Yield code that trains by the report: by the trainer that was searched, or `report.apply`."""
    if by_trainer := record.workload.get("apply"):
        yield '# a saved one: report = autofit.load("report.json")'
        yield from by_trainer
        return
    again = ", ".join(f"{name}=..." for name in record.functions_given)
    yield f'# a saved one: autofit.load("report.json"){again and f", and {again} to apply"}'
    plan, optimizer = record.best.plan, "optimizer"
    if plan.world_size > 1:
        optimizer = "make_optimizer"
        yield "# make_optimizer: a function of parameters, such as torch.optim.AdamW"
    if record.lacks_loss:
        yield "# the search had no loss: give your own"
        yield f"with report.apply(model, {optimizer}, loss_fn=...) as training:"
    else:
        yield f"with report.apply(model, {optimizer}) as training:"
    samples = counted(plan.samples_per_step, "sample")
    whose = "this rank's share of " if plan.world_size > 1 else ""
    yield f"    for batch in loader:  # {whose}{samples}{'' if whose else ' each'}"
    yield "        loss = training.step(batch)"


def facts(record: Record) -> Iterator[str]:
    """Yield lines on where and how the answer was found."""
    environment, search = record.environment, record.search
    where = environment.get("gpu") or environment["device"]
    yield f"Device: {where}, torch {environment['torch']}, autofit {record.version}"
    sessions = f" in {search.sessions} sessions" if search.sessions > 1 else ""
    yield (
        f"Search: {counted(search.probes, 'probe')}, {search.oom_probes} out of memory, "
        f"{format_seconds(search.seconds)}{sessions}; stopped because {search.stopped_because}"
    )


def conditions(record: Record) -> Iterator[str]:
    """Yield lines on what the answer depends on."""
    if record.best.plan.world_size > 1:
        from autofit.report.ranks import of_ranks  # most reports are of one device

        yield from of_ranks(record)
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
    if (start := pay_off(record)) is not None:
        yield start.words(record)
    if record.scatter is not None and record.scatter > _MOST_SCATTER:
        yield (
            f"Noise: repeated blocks of one plan scatter by {record.scatter:.0%} (standard "
            "deviation), so smaller differences between plans were not looked for"
        )
    yield from findings_lines(record)


@dataclass(frozen=True)
class TrialRow:
    """A trial in words.

    Attributes:
        number, role, outcome: its number, why it was run, and how it ended.
        size: "8 x 4", micro-batch x accumulation steps.
        settings: those that are not plain.
        speed: in samples/s, with its spread.
        held: peak reserved plus non-torch bytes.
        step: duration of an optimizer step.
    """

    number: str
    role: str
    size: str
    settings: str
    outcome: str
    speed: str
    held: str
    step: str


def trial_rows(record: Record) -> Iterator[TrialRow]:
    """Yield every trial, in order."""
    run: set[Plan] = set()
    for trial in record.trials:
        measured, step_s = trial.measurement, trial.measurement.step_time_s
        again = trial.role is Role.SEARCH and trial.plan in run
        run.add(trial.plan)
        yield TrialRow(
            str(trial.number),
            trial.role.value,
            str(replace(trial.plan, settings={})),
            settings_words(trial.plan.settings, record),
            outcome_words(trial) + _AGAIN * again,
            trial_speed(trial),
            format_bytes(measured.held_bytes),
            format_seconds(step_s, (step_s or 0.0) * _spread(trial)),
        )


def trial_speed(trial: Trial) -> str:
    """Return the speed of one trial in samples/s, with its spread: "168 ±3%"; "-": none."""
    return _interval(
        trial.samples_per_second, trial.samples_per_second_low, trial.samples_per_second_high
    )


def hint_rows(record: Record) -> list[list[str]]:
    """Return what values were expected to change, evenly thinned if many; the titles come first."""
    hints = [hint for dimension in record.dimensions.values() for hint in dimension.hints.values()]
    known = {
        title: name
        for title, name in _HINTED.items()
        if any(getattr(hint, name) is not None for hint in hints)
    }
    ran = [trial for trial in record.trials if trial.role is not Role.VETOED]
    table = [["setting", *known, "trials"]]
    for setting, dimension in record.dimensions.items():
        hinted = [value for value in dimension.values[1:] if value in dimension.hints]
        rows = min(len(hinted), MOST_HINTED)
        for value in (hinted[(number + 1) * len(hinted) // rows - 1] for number in range(rows)):
            ratios = (getattr(dimension.hints[value], name) for name in known.values())
            shares = ["" if ratio is None else f"{ratio:.0%}" for ratio in ratios]
            tried = sum(trial.plan.settings.get(setting) == value for trial in ran)
            table.append([f"{setting}={value}", *shares, str(tried or "none")])
    return table if len(table) > 1 else []


def skipped_lines(skipped: Iterable[Skipped]) -> Iterator[tuple[str, str]]:
    """Yield (what, why); reasons that differ in a measured quantity alone are one."""
    groups: dict[tuple[tuple[str, ...], str], list[Skipped]] = {}
    for each in skipped:
        groups.setdefault((tuple(each.settings), _QUANTITY.sub("", each.why)), []).append(each)
    for (names, _), group in groups.items():
        if len(names) == 1:
            values = ", ".join(str(each.settings[names[0]]) for each in group)
            what = f"{names[0]}={values}"
        else:
            what = "; ".join(_written(each.settings) for each in group)
        yield what, _why_together([each.why for each in group])


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


def outcome_words(trial: Trial) -> str:
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


def settings_words(settings: Settings, record: Record) -> str:
    """Return the settings that are not at their first value, or "plain"."""
    return _written(unlike(settings, record.plain_settings)) or "plain"


def short_settings(settings: Settings, record: Record) -> str:
    """Return the settings that are not plain, for a narrow place: "bfloat16, level=2"; or "plain".

    A text says enough without its name, unless another setting has the same value.
    """
    texts = [value for each in record.dimensions.values() for value in each.values]

    def short(name: str, value: Scalar) -> str:
        own = name.partition(".")[2] or name
        says_it = isinstance(value, str) and texts.count(value) == 1
        return str(value) if says_it else f"{own}={value}"

    changed = unlike(settings, record.plain_settings)
    return ", ".join(short(*each) for each in changed.items()) or "plain"


def environment_rows(record: Record) -> Mapping[str, str]:
    """Return what is known of device, software, workload and search, by label."""
    environment, workload, search = record.environment, record.workload, record.search
    known = {
        "device": environment["device"],
        "GPU": environment.get("gpu"),
        "compute capability": environment.get("capability"),
        "memory": format_bytes(environment.get("total_bytes")),
        "driver": environment.get("driver"),
        "CUDA": environment.get("cuda"),
        "torch": environment["torch"],
        "Python": environment.get("python"),
        "autofit": record.version,
        "searched": record.created.replace("T", " ").replace("Z", " UTC"),
        "duration": format_seconds(search.seconds),
        "probes": f"{search.probes}, {search.oom_probes} out of memory",
        "stopped because": search.stopped_because,
        "effort": search.effort,
        "seed": str(search.seed),
        "parameters": f"{workload['parameters']:,}",
        "loss": workload["loss"],
        "sample batch": ", ".join(
            f"{name}: {shape}" for name, shape in workload["sample_shapes"].items()
        ),
        "workload": workload.get("target"),
        "fingerprint": workload["fingerprint"],
    }
    return {label: str(value) for label, value in known.items() if value is not None}


def _is_baseline(record: Record) -> bool:
    return record.best.plan == record.baseline_beside_best.plan


def _written(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _spread(trial: Trial) -> float:
    return spread_of(trial.samples_per_second_low, trial.samples_per_second_high)


def _interval(rate: float | None, low: float | None, high: float | None) -> str:
    """Return a rate and half its range in percent: "168 ±3%"."""
    if rate is None or low is None or high is None:
        return "-"
    spread = spread_of(low, high)
    text = rounded(rate, spread * rate)
    return f"{text} ±{share_words(spread, spread)}" if spread >= 0.001 else text
