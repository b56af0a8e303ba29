"""What a speed means in practice: tokens, model FLOPs, and what an epoch takes and costs.

Each rate is known where its facts are, and left out elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autofit.measurement import Trial, spread_of
from autofit.report.record import Record, rates_of
from autofit.units import format_flops, format_seconds, rounded


def rate_rows(record: Record, first: Trial, second: Trial | None) -> Iterator[tuple[str, str, str]]:
    """Yield (label, the first trial's rate, the second's)."""
    beside = {} if second is None else _words(record, second)
    for label, words in _words(record, first).items():
        yield label, words, beside.get(label, "")
    if tokens := record.workload.get("tokens"):
        share = tokens["padding_share"]
        padding = "" if share is None else f", {share:.0%} of them padding"
        yield "tokens of a sample", f"{tokens['per_sample']:,} ({tokens['counted']}){padding}", ""


def rate_line(record: Record) -> str | None:
    """Return the recommended plan's rates in a line; None: none that a reader would look for."""
    words = _words(record, record.recommended)
    if "mfu" not in rates_of(record, record.recommended):
        words.pop("model FLOP/s", None)
    named = [f"{label}: {text}" for label, text in words.items()]
    return "; ".join(named) or None


def _words(record: Record, trial: Trial) -> dict[str, str]:
    """Return a trial's rates in words, by label."""
    known, search = rates_of(record, trial), record.search
    spread = spread_of(*record.speed_range(trial))
    words: dict[str, str] = {}
    if (tokens := known.get("tokens_per_second")) is not None:
        words["tokens/s"] = f"{float(rounded(tokens, tokens * spread)):,.0f}"
    if (flops := known.get("model_flops_per_second")) is not None:
        share = f", {known['mfu']:.1%} of the GPU's peak (MFU)" if "mfu" in known else ""
        words["model FLOP/s"] = f"{format_flops(flops, flops * spread)}{share}"
    if search.epoch_samples:
        took = _span(known, "epoch", spread) if record.is_decided else "not decided"
        words[f"epoch of {search.epoch_samples:,} samples"] = took
    if search.planned_samples and record.is_decided:
        words[f"training of {search.planned_samples:,} samples"] = _span(known, "training", spread)
    return words


def _span(known: Mapping[str, float], name: str, spread: float) -> str:
    seconds, cost = known.get(f"{name}_seconds"), known.get(f"{name}_cost")
    took = format_seconds(seconds, (seconds or 0.0) * spread)
    return took if cost is None else f"{took}, costs {rounded(cost, cost * spread)}"
