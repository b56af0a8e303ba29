"""The answer on one screen: what every form of a report shows first.

A title, the best plan beside the baseline, what to act on, a few remarks, and two commands. Every
form lays out the same `Summary`, so none says more than another.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autofit.measurement import ACT, NOT_TRIED, Outcome, RankUse, StartUp, Trial, probes_of
from autofit.plan import Plan, Scalar, Settings, unlike
from autofit.report.paste import lines_of_trainer
from autofit.report.place import IN_PYTHON, Place
from autofit.report.rates import rate_line
from autofit.report.record import INTERRUPTED, Record, Undecided
from autofit.rounds import Estimate
from autofit.space import Space
from autofit.units import counted, format_bytes, format_rate, format_seconds, rounded, shortened

MAX_LINES = 15
"""Of the answer in a terminal: as many as are read before scrolling."""
_OF_THE_CODE = (
    Outcome.UNSUPPORTED,
    Outcome.USER_ERROR,
    Outcome.SIZE_LIMIT,
    Outcome.NONFINITE,
)
_EQUAL = 1e-3
"""Roundings of float32 move gradients less; bfloat16 and ignored statistics move them more."""
_MAX_SHAPES = 3
_ZEROS = re.compile(r"\.0+ ")

Columns = tuple[str, str, str]


@dataclass(frozen=True)
class Summary:
    """The answer.

    Attributes:
        title: what was searched, where, and what that took.
        columns: the titles of the table.
        rows: (label, figure of the first plan, figure of the second).
        warnings: what the reader should act on.
        remarks: what the answer depends on.
        apply: a line of Python that trains by the plan.
        more: a command or a line of Python that shows the rest.
    """

    title: str
    columns: Columns
    rows: tuple[Columns, ...]
    warnings: tuple[str, ...]
    remarks: tuple[str, ...]
    apply: str
    more: str

    def messages(self, width: int, most_lines: int) -> list[str]:
        """Return warnings, which begin with "! ", and below them the remarks as a paragraph.

        A warning is never cut or left out, whatever room there is. The last remarks are left out
        and counted where the lines would be more than `most_lines`.
        """
        warnings = [line for text in self.warnings for line in wrapped(f"{ACT}{text}", width)]
        for unseen in range(len(self.remarks) + 1):
            shown = self.remarks[: len(self.remarks) - unseen]
            lines = [*warnings, *wrapped(". ".join(shown), width)]
            if unseen:
                lines.append(f"{counted(unseen, 'note')} more: see More")
            if len(lines) <= most_lines:
                return lines
        return lines


def wrapped(text: str, width: int) -> list[str]:
    """Return lines of a paragraph; a flag is never broken at its hyphens."""
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def summary(record: Record, place: Place = IN_PYTHON) -> Summary:
    """Return the answer of a record as it is shown at that place."""
    return Summary(
        title=_title(record),
        columns=columns_of(record),
        rows=tuple(_rows(record, beside_recommended(record))),
        warnings=tuple(map(place.words, warnings_of(record))),
        remarks=tuple(map(place.words, _remarks(record))),
        apply=apply_line(record, place),
        more=place.more,
    )


def one_line(record: Record) -> str:
    """Return the recommended plan, its speed and how that compares, on one line."""
    chosen = record.recommended
    words = f"{describe(chosen.plan, record)}: {speed_words(chosen, record)}"
    if recommends_baseline(record):
        return f"{words}, the baseline" + ("" if record.is_decided else " (not decided)")
    ratio = speedup_words(record)
    return f"{words}, {ratio} against the baseline" if ratio else words


def is_sure(record: Record) -> bool:
    """Whether the final comparison ended and told the best plan from the baseline."""
    return record.is_confirmed and record.is_decided


def recommends_baseline(record: Record) -> bool:
    """Whether the plan to train with is the baseline."""
    return record.recommended.plan == record.baseline_beside_best.plan


def columns_of(record: Record) -> Columns:
    """Return the titles over the recommended plan and what it is shown beside."""
    beside = beside_recommended(record)
    return (
        "",
        role_of(record.recommended.plan, record),
        "" if beside is None else role_of(beside.plan, record),
    )


def role_of(plan: Plan, record: Record) -> str:
    """Return what every form calls a plan: "baseline", "best" or "fastest other".

    Best is the plan that is recommended and is not the baseline; where the baseline is recommended,
    the fastest other plan stands beside it.
    """
    if plan == record.baseline_beside_best.plan:
        return "baseline"
    return "best" if plan == record.recommended.plan else "fastest other"


def name_of(plan: Plan, record: Record) -> str:
    """Return that in a sentence: "baseline", "best plan" or "fastest other plan"."""
    role = role_of(plan, record)
    return role if role == "baseline" else f"{role} plan"


def beside_recommended(record: Record) -> Trial | None:
    """Return what the recommended plan is shown beside.

    The baseline; beside the baseline itself the fastest other plan; None: there is none.
    """
    if not recommends_baseline(record):
        return record.baseline_beside_best
    is_candidate = record.best.plan != record.recommended.plan
    return record.best if is_candidate else next_best(record)


def describe(plan: Plan, record: Record) -> str:
    """Return a plan without its default settings: "8 x 4, precision.dtype=bfloat16"."""
    return str(plan.without(record.default_settings))


def speed_words(trial: Trial, record: Record) -> str:
    """Return the speed of the trial's plan with its range: "381 samples/s (375-388)".

    The range is its 95% interval; where that decides nothing, all that was seen, alone.
    """
    speed, (low, high) = record.speed_of(trial), record.speed_range(trial)
    if not low or not high:
        return format_rate(speed)
    if record.is_decided:
        return f"{rounded_within(speed or 0.0, low, high)} samples/s ({range_words(low, high)})"
    ran = [t for t in probes_of(record.trials) if t.plan == trial.plan and t.samples_per_second]
    low = min(t.samples_per_second_low or 0.0 for t in ran)
    high = max(t.samples_per_second_high or 0.0 for t in ran)
    return f"{range_words(low, high)} samples/s"


def range_words(low: float, high: float, decimals: int | None = None) -> str:
    """Return a range with the digits that its width supports: "375-388"."""
    ends = [rounded_within(end, low, high, decimals) for end in (low, high)]
    return "-".join(dict.fromkeys(ends))


def rounded_within(value: float, low: float, high: float, decimals: int | None = None) -> str:
    """Return a value with the digits that the width of its range supports, or two digits."""
    return rounded(value, min((high - low) / 2, value / 5), decimals)


def speedup_words(record: Record, of: Trial | None = None, over: Trial | None = None) -> str | None:
    """Return how many times as fast a plan is: "1.14x (1.11-1.17)"; None: it is not known.

    Args:
        record: of the search.
        of: None: the best plan.
        over: None: the baseline.
    """
    of, over = of or record.best, over or record.baseline_beside_best
    if not (of.ok and over.ok) or of.plan == over.plan:
        return None
    if not record.is_decided:
        return "not decided"
    if not (of.samples_per_second and over.samples_per_second):
        return None
    if not record.is_confirmed:  # a probe's first speed is no factor: another says otherwise
        return "not confirmed"
    return _factor_words(record.ahead(of.plan, over.plan))


def _factor_words(ahead: Estimate) -> str:
    factor, low, high = map(math.exp, (ahead.log, ahead.low, ahead.high))
    return f"{rounded_within(factor, low, high, 2)}x ({range_words(low, high, 2)})"


def ratio_words(factor: float, *ranges: tuple[float | None, float | None]) -> str:
    """Return a ratio of two speeds with those ranges: "1.14x (1.11-1.17)"."""
    reach = math.hypot(*(math.log(high / low) / 2 for low, high in ranges if low and high))
    low, high = factor * math.exp(-reach), factor * math.exp(reach)
    return f"{rounded_within(factor, low, high, 2)}x ({range_words(low, high, 2)})"


def shown_memory(held: int | None, budget: int | None = None) -> str:
    """Return bytes, of the budget where it is given: "46.0 of 64.0 MiB"."""
    if held is None:
        return "?"
    words, allowed = (_ZEROS.sub(" ", format_bytes(size)) for size in (held, budget))
    if budget is None:
        return words
    unit = f" {allowed.split()[-1]}"
    return f"{words.removesuffix(unit)} of {allowed}"


def apply_line(record: Record, place: Place) -> str:
    """Return one line of Python that trains as recommended, by the trainer that was searched."""
    if by_trainer := lines_of_trainer(record):
        lines = "; ".join(line.partition("  #")[0] for line in by_trainer)
        return lines if place.report == "report" else f"report = {place.report}; {lines}"
    optimizer = "optimizer" if record.recommended.plan.ranks == 1 else "make_optimizer"
    needed = [] if place.has_functions else list(record.functions_given)
    if record.lacks_loss:
        needed = ["loss_fn", *needed]
    given = ", ".join(["model", optimizer, *(f"{name}={name}" for name in needed)])
    return f"{place.report}.apply({given})"


def _title(record: Record) -> str:
    environment, search, workload = record.environment, record.search, record.workload
    target = str(workload.get("target") or workload.get("model") or "")
    name = target.rpartition(":")[2] or f"{workload['parameters']:,} parameters"
    where = environment.get("gpu") or environment["device"]
    ranks = record.recommended.plan.ranks
    version = ".".join(str(environment["torch"]).split(".")[:2])
    oom = f" ({search.oom_probes} out of memory)" if search.oom_probes else ""
    return (
        f"{name} on {f'{ranks} x ' if ranks > 1 else ''}{where}, torch {version}: "
        f"{counted(search.probes, 'probe')}{oom} in {format_seconds(search.seconds)}"
    )


def _rows(record: Record, beside: Trial | None) -> Iterator[Columns]:
    best, shown = record.recommended, beside if beside and beside.ok else None
    outcome = beside.measurement.outcome if beside else None
    held = shown_memory(best.measurement.held_bytes, record.vram_budget_bytes)
    failed = {None: "", Outcome.OOM: "out of memory"}.get(outcome, str(outcome).replace("_", " "))
    speed = speed_words(shown, record) if shown else failed
    theirs = plan_words(beside.plan, record) if beside else ""
    yield "plan", plan_words(best.plan, record), theirs
    yield "throughput", speed_words(best, record), speed
    yield "peak memory", held, shown_memory(shown.measurement.held_bytes) if shown else ""
    if not recommends_baseline(record):
        if ratio := speedup_words(record):
            yield "speedup", ratio, ""
    elif beside and (ratio := speedup_words(record, beside, best)):
        yield "speedup", "", ratio


def plan_words(plan: Plan, record: Record) -> str:
    """Return a plan that also says where all settings are at their default: "8 x 4, defaults"."""
    return f"{replace(plan, settings={})}, {settings_words(plan.settings, record)}"


def settings_words(settings: Settings, record: Record) -> str:
    """Return the settings that are not at their default, or "defaults".

    What a number stands for follows it: "checkpointing.level=6 (recompute 6 of 12 blocks)".
    """
    changed = unlike(settings, record.default_settings)
    words = []
    for name, value in changed.items():
        label = label_of(name, value, record)
        words.append(written({name: value}) + (f" ({label})" if label else ""))
    return ", ".join(words) or "defaults"


def label_of(name: str, value: Scalar, record: Record) -> str:
    """Return what a value of a setting means, on one line, or "" if its strategy does not say."""
    known = record.dimensions.get(name)
    return " ".join(known.labels.get(value, "").split()) if known else ""


def written(settings: Settings) -> str:
    """Return settings as `--set` takes them: "compile.mode=default, precision.tf32=True"."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def next_best(record: Record) -> Trial | None:
    """Return the fastest plan other than the best, by the final comparison if it was in it.

    None that was left out since it does not train as the baseline does.
    """

    def is_other(plan: Plan) -> bool:
        left_out = any(skipped.covers(plan) for skipped in record.skipped)
        return plan != record.best.plan and not left_out

    compared = list(filter(is_other, record.finalists)) if record.is_confirmed else []
    if compared:
        return record.turns(compared[0])[-1]
    probes = probes_of(record.trials)
    ran = [t for t in probes if is_other(t.plan) and t.ok and t.samples_per_second]
    return max(ran, key=lambda t: record.searched_speed(t.plan) or 0.0, default=None)


def warnings_of(record: Record) -> Iterator[str]:
    """Yield what the reader should act on, the most important first."""
    best, baseline = record.recommended, record.baseline_beside_best
    sizes = [trial.plan.samples_per_step for trial in (baseline, best)]
    if sizes[0] != sizes[1]:
        yield (
            f"The global batch changed from {sizes[0]} to {sizes[1]} samples: pass global_batch= "
            "to keep it"
        )
    if not record.is_decided:
        yield undecided_words(record)
    elif not record.is_confirmed:
        reason = record.search.stopped_because
        because = "it was interrupted" if reason == INTERRUPTED else reason
        yield f"Not confirmed: the final comparison did not end, since {because}"
    start = pay_off(record)
    if start is not None and start.steps is None:
        yield f"{start.words(record)}: search again on an idle machine before you rely on it"
    if record.lacks_loss:
        yield "The search had no loss; a real one may need more memory: pass criterion= or loss_fn="
    yield from sizes_that_failed(record)
    yield from (note.removeprefix(ACT) for note in record.notes if note.startswith(ACT))
    loader = record.findings.get("loader") or {}
    if loader.get("bottleneck") not in (None, "device"):
        yield loader_verdict(loader)


_UNDECIDED = {
    Undecided.TIMEOUT: "Time ran out first: give a longer timeout",
    Undecided.MAX_PROBES: "The search reached max_probes first: allow more",
    Undecided.INTERRUPTED: "The search was interrupted first: let it end",
}


def undecided_words(record: Record) -> str:
    """Return what was not decided, why, and what is recommended in its place."""
    search, reason = record.search, record.search.undecided_because
    why = _UNDECIDED.get(reason) if reason else None
    if reason is Undecided.FAILED:
        why = f"The search ended first: {search.stopped_because}"
    if why is None:
        busy = f" ({search.busy})" if search.busy else ""
        why = f"Speeds are too close or too unsteady{busy}: search again on an idle machine"
    if not recommends_baseline(record):
        return f"Not decided whether another plan is over 5% faster. {why}"
    if record.best.plan == record.recommended.plan:
        return f"Not decided whether another plan is over 5% faster than the baseline. {why}"
    return (
        "Not decided whether the fastest other plan beats the baseline, so the baseline is "
        f"recommended. {why}"
    )


def sizes_that_failed(record: Record) -> Iterator[str]:
    """Yield that no micro-batch above or below those that ran could run, and why.

    Where it is not for lack of memory: then no plan of another size could win. The plan is named
    where it is of settings that ran at no other size, which may be to blame.
    """
    probes = probes_of(record.trials)
    ran = [trial for trial in probes if trial.measurement.outcome.ran]
    sizes, variants = [t.plan.micro_batch for t in ran], {t.plan.variant for t in ran}
    if not ran:
        return
    above = [trial for trial in probes if trial.plan.micro_batch > max(sizes)]
    below = [trial for trial in probes if trial.plan.micro_batch < min(sizes)]
    for side, beyond, its in (("above", max(sizes), above), ("below", min(sizes), below)):
        failed = [trial for trial in its if trial.measurement.outcome in _OF_THE_CODE]
        if not failed or any(trial.measurement.outcome.about_memory for trial in its):
            continue
        first = min(failed, key=lambda trial: trial.plan.variant not in variants)
        why = (first.measurement.detail or first.measurement.outcome.value).strip().splitlines()[0]
        named = "" if first.plan.variant in variants else f"{describe(first.plan, record)}: "
        yield f"No micro-batch {side} {beyond} ran: {named}{why}"


def _remarks(record: Record) -> Iterator[str]:
    best, baseline = record.recommended, record.baseline_beside_best
    yield from how_speeds_compare(record)
    if record.is_decided and (line := rate_line(record)):
        yield line
    failed = any(sizes_that_failed(record))
    if best.plan == baseline.plan and record.is_decided and not failed:
        other = next_best(record)
        if other is None or record.ahead(other.plan, best.plan).log <= 0:
            plans = len({trial.plan for trial in probes_of(record.trials)})
            yield f"No faster plan was found: {counted(plans, 'plan')} ran"
        elif record.is_confirmed:
            yield "The fastest other plan is hardly faster, and a tie goes to the baseline"
    if (factor := record.factor) is not None and factor < 1 and best.plan != baseline.plan:
        less = (baseline.measurement.held_bytes or 0) - (best.measurement.held_bytes or 0)
        if less > 0:
            yield f"The best plan is as fast as the baseline and needs {format_bytes(less)} less"
    start = pay_off(record)
    if start is not None and start.steps is not None:
        yield start.words(record)
    if ranks := best.measurement.ranks:
        yield f"The ranks hold {held_by_ranks(ranks)}"
    if record.findings.get("evaluation"):
        yield evaluation_words(record)
    yield from validity(record)
    if record.assumes_optimizer:
        yield f"Trained by {record.workload['optimizer']}, the default: pass optimizer= for another"
    yield from (note for note in record.notes if note.startswith(NOT_TRIED))


def how_speeds_compare(record: Record) -> Iterator[str]:
    """Yield how the speedup was computed, if the two throughputs would give another one."""
    beside = beside_recommended(record)
    if beside is None or not (beside.ok and record.is_decided):
        return
    speeds = [record.speed_of(trial) for trial in (record.recommended, beside)]
    ahead = record.ahead(record.recommended.plan, beside.plan)
    if all(speeds) and not ahead.low <= math.log((speeds[0] or 1) / (speeds[1] or 1)) <= ahead.high:
        yield (
            "Throughput counts all steps of a plan's fastest run; the speedup compares the steps "
            "of all its undisturbed runs"
        )


def evaluation_words(record: Record) -> str:
    """Return what an evaluation beside the best plan holds, and the largest that has room."""
    found, own = record.findings["evaluation"], record.recommended.measurement.evaluation_held_bytes
    if "largest_samples" not in found:
        return f"An evaluation holds {format_bytes(own)}; a larger one was not tried"
    least = "" if found["is_bound"] else "at least "
    return (
        f"An evaluation of {counted(found['samples'], 'sample')} holds "
        f"{format_bytes(found['held_bytes'])}; one of {least}{found['largest_samples']} has room "
        f"({format_bytes(found['largest_held_bytes'])})"
    )


def loader_verdict(loader: Mapping[str, Any]) -> str:
    """Return whether the loader keeps up with the best plan, and by how many workers."""
    workers = f"num_workers={loader['num_workers']}"
    if loader["bottleneck"] == "device":
        return f"The loader keeps the device busy with {workers}"
    if loader["bottleneck"] == "loader":
        return f"The loader is slower than the device, and fastest with {workers}"
    return "The loader was measured"


def held_by_ranks(ranks: Sequence[RankUse]) -> str:
    """Return what the ranks held: "20.0 MiB to 24.0 MiB (rank 1 most)", or "20.0 MiB each"."""
    held = [use.held_bytes for use in ranks]
    least, most = format_bytes(min(held)), format_bytes(max(held))
    each = f"{least} to {most} (rank {held.index(max(held))} most)"
    return f"{most} each" if least == most else each


def validity(record: Record) -> Iterator[str]:
    """Yield which samples the answer holds for, and how equal the gradients are."""
    shapes: Mapping[str, str] = record.workload["sample_shapes"]
    size = record.workload.get("described_size")
    if (made := record.workload.get("micro_batch_shapes")) is not None:
        shapes, size = made, record.recommended.plan.micro_batch
    whole = {name: _shape_words(name, shape) for name, shape in shapes.items()}
    if how := _BATCHES.get(record.workload.get("samples", "")):
        shown = shortened(list(whole.values()), _MAX_SHAPES)
        yield f"For batches like those of {size} samples: {shown}"
        yield how
    else:
        batched = record.workload.get("batched") or list(shapes)
        held = [_shape_words(name, shapes[name], of_one=True) for name in shapes if name in batched]
        held = list(dict.fromkeys(filter(None, held)))
        constant = [words for name, words in whole.items() if name not in batched]
        beside = f"; constant: {shortened(constant, _MAX_SHAPES)}" if constant else ""
        if held or constant:
            yield f"For samples up to {shortened(held, _MAX_SHAPES) or 'one number'}{beside}"
    if recommends_baseline(record):
        return
    if record.difference is None and record.baseline_beside_best.ok:
        yield "Gradients were not compared with the baseline's"
    elif record.difference is not None:
        gradient = record.difference["gradient"]
        if gradient <= _EQUAL:
            yield (
                f"Gradients match the baseline's to {gradient:.0e}"
                if gradient
                else "Gradients equal the baseline's"
            )
        else:
            told = f"Gradients differ from the baseline's by {100 * gradient:.2g}%"
            explained = record.difference["tolerance"]
            beyond = f", where roundings explain {100 * explained:.2g}%"
            yield told + (", by roundings" if gradient <= explained else beyond)


_BATCHES = {
    "collate_fn": "Batches are made of samples by collate_fn",
    "function": "The function n -> batch was believed about n",
}
"""How samples become batches, where they are no rows."""


def samples_words(record: Record) -> str | None:
    """Return what holds the samples of a batch: "ids, labels; constant: positions"."""
    shapes, batched = record.workload["sample_shapes"], record.workload.get("batched")
    how = _BATCHES.get(record.workload.get("samples", ""))
    if how is not None or batched is None:
        return how
    constant = [_shown_name(name).strip() or name for name in shapes if name not in batched]
    held = [_shown_name(name).strip() or name for name in shapes if name in batched]
    shown = shortened(held, _MAX_SHAPES)
    return shown + f"; constant: {shortened(constant, _MAX_SHAPES)}" * bool(constant)


def _shown_name(name: str) -> str:
    """Return where a tensor stands in a batch, of a plain key or place alone without brackets."""
    if re.fullmatch(r"(\[\d+\])?", name):
        return ""
    key = re.fullmatch(r"\['(\w+)'\]", name)
    return f"{key[1] if key else name} "


def _shape_words(name: str, shape: str, *, of_one: bool = False) -> str:
    """Return the name of a tensor and its shape: "3x32x32", "ids[128]"; "": it has neither.

    Args:
        name: where it stands in the batch.
        shape: with its type: "int64[8, 128]".
        of_one: leave out the first dimension, which counts the samples.
    """
    sizes = shape.partition("[")[2].rstrip("]").split(", ")[of_one:]
    if of_one and sizes == ["1"]:  # one number, in a dimension of its own
        sizes = []
    named, size = _shown_name(name).rstrip(), "x".join(filter(None, sizes))
    if named and size:
        return f"{named} {size}" if named.endswith("]") else f"{named}[{size}]"
    return named or (size if len(sizes) > 1 else f"length {size}" * bool(size))


@dataclass(frozen=True)
class PayOff:
    """What the start of a plan takes that is costly to try, such as a compiled one.

    Attributes:
        start: seconds before its steps have their speed.
        seconds: of the user's own training.
        beside: the fastest plan without such a start.
        steps: optimizer steps after which the start has paid for itself against that plan; None:
            that plan was as fast.
    """

    start: StartUp
    seconds: float
    beside: Plan
    steps: int | None

    def words(self, record: Record) -> str:
        """Return a sentence about it."""
        start, other = f"{format_seconds(self.seconds)} to start", describe(self.beside, record)
        if self.start.warm_s is not None:
            start += ", with its compiled code in torch's cache"
            if self.start.cold_s is not None:
                start += f" ({format_seconds(self.start.cold_s)} without)"
        if self.steps is None:
            return f"The best plan takes {start}, and {other} is as fast without that"
        return f"It takes {start}: paid back after {self.steps:,} steps, against {other}"


def pay_off(record: Record) -> PayOff | None:
    """Return what the recommended plan's start takes; None: nothing, or nobody measured it.

    It is seen against the fastest plan of the search that does: a baseline alone in the final
    comparison is no measure of it. Where both were compared there, their speeds are those.
    """
    space, best = Space(record.dimensions, 1), record.recommended.plan

    def starts_at_once(plan: Plan) -> bool:
        return not space.is_costly({**record.default_settings, **plan.settings})

    ran = [t for t in probes_of(record.trials) if t.ok and t.samples_per_second]
    start = StartUp.of(trial.measurement for trial in ran if trial.plan == best)
    start_s = start.own_s
    others = {trial.plan for trial in ran if starts_at_once(trial.plan)}
    if start_s is None or starts_at_once(best) or not others:
        return None

    beside = max(others, key=lambda plan: record.searched_speed(plan) or 0.0)
    speeds = [record.compared_speeds.get(plan) for plan in (beside, best) if record.is_confirmed]
    if not (speeds and all(speeds)):
        speeds = [record.searched_speed(plan) for plan in (beside, best)]
    saved_s = best.samples_per_step * (1 / (speeds[0] or math.inf) - 1 / (speeds[1] or math.inf))
    steps = math.ceil(start_s / saved_s) if saved_s > 0 else None
    return PayOff(start, start_s, beside, steps)
