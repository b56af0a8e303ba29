"""What a search found beside its answer, as a report file holds it and in sentences.

That is the loader, what bounds a step, and of several ranks who held most and who was slowest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from autofit.codec import Amount, Number
from autofit.measurement import RankUse
from autofit.plan import BOUNDS, Plan
from autofit.units import counted, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from autofit.report.record import Record


_IN_WORDS = {
    "arithmetic": "arithmetic",
    "memory traffic": "memory traffic",
    "launches": "kernel launches and idle time",
    "optimizer": "the optimizer",
}


class _Delivered(TypedDict):
    num_workers: Amount
    samples_per_second: Number


class _Loader(TypedDict):
    failed: NotRequired[str]
    own_workers: Amount
    consumed_samples_per_second: Number
    delivered: list[_Delivered]
    num_workers: Amount | None
    bottleneck: Literal["device", "loader"] | None
    keeps_workers: bool
    warnings: list[str]


class _Bounds(TypedDict, total=False):
    failed: str
    trace: str
    best: dict[str, Number] | None
    baseline: dict[str, Number] | None


class Findings(TypedDict, total=False):
    """The findings of a report as JSON."""

    loader: _Loader
    bounds: _Bounds


def findings_lines(record: Record) -> Iterator[str]:
    """Yield a line about each finding: the loader, what bounds a step."""
    found = record.findings
    if "loader" in found:
        yield loader_words(found["loader"])
    if "bounds" in found:
        yield bounds_words(record)


def loader_words(loader: Mapping[str, Any]) -> str:
    """Return whether the loader keeps up with the best plan, and by how many workers."""
    rates = {each["num_workers"]: each["samples_per_second"] for each in loader["delivered"]}
    table = ", ".join(f"{format_rate(rate)} with {count}" for count, rate in rates.items())
    consumed, workers, own = (
        loader[name] for name in ("consumed_samples_per_second", "num_workers", "own_workers")
    )
    verdict = {
        "device": f"The loader keeps the device busy with num_workers={workers}",
        "loader": f"The loader is slower than the device, and fastest with num_workers={workers}",
        None: "The loader was measured",
    }[loader["bottleneck"]]
    if workers not in (None, own):
        verdict += f" (yours: {own})"
    parts = [f"{verdict}: the best plan consumes {format_rate(consumed)}"]
    parts += [f"it delivers {table} workers"] if rates else []
    if loader["keeps_workers"]:
        parts.append(
            f"num_workers stays {own}: workers of an IterableDataset may repeat each other's "
            "samples"
        )
    parts += dict.fromkeys(loader["warnings"])
    if "failed" in loader:
        parts.append(f"not measured to the end: {_line_of(loader['failed'])}")
    return "; ".join(parts)


def bounds_words(record: Record) -> str:
    """Return the shares of a step of the best plan and of the baseline."""
    bounds = record.findings["bounds"]
    best, baseline = bounds.get("best"), bounds.get("baseline")
    if not best:
        why = bounds.get("failed", "the profiler saw no operator on the device")
        return f"A step could not be profiled: {_line_of(why)}"
    words = f"A step of the best plan is {_shares(best)}"
    if baseline and baseline != best:
        words += f"; of the baseline {_shares(baseline)}"
    return words


def _shares(shares: Mapping[str, float]) -> str:
    ordered = sorted(BOUNDS, key=lambda name: -shares.get(name, 0.0))
    return ", ".join(f"{shares.get(name, 0.0):.0%} {_IN_WORDS[name]}" for name in ordered)


def _line_of(error: str) -> str:
    """Return an error in a line; of a process of a loader torch has the cause in the last one."""
    lines = error.strip().splitlines() or [""]
    return lines[-1 if "DataLoader worker process" in lines[0] else 0]


def of_ranks(record: Record) -> Iterator[str]:
    """Yield lines on the ranks of the best plan."""
    plan, ranks = record.best.plan, record.best.measurement.ranks
    yield (
        f"{plan.world_size} ranks: micro-batch {plan.micro_batch} on each, "
        f"{counted(plan.accumulation_steps, 'accumulation step')} = "
        f"{counted(plan.samples_per_step, 'sample')}"
    )
    if ranks:
        held = held_by_ranks(ranks, record.vram_budget_bytes)
        yield f"Held on each rank: {held}; {times_of_ranks(ranks)}"


def held_by_ranks(ranks: Sequence[RankUse], vram_budget_bytes: int) -> str:
    """Return what the ranks held, from the least to the most, and which one that was."""
    held = [use.held_bytes for use in ranks]
    return (
        f"{format_bytes(min(held))} to {format_bytes(max(held))} of "
        f"{format_bytes(vram_budget_bytes)} (rank {held.index(max(held))} most)"
    )


def times_of_ranks(ranks: Sequence[RankUse]) -> str:
    """Return the ranks' own step times, from the shortest to the longest, and whose that was."""
    times = [use.step_time_s or 0.0 for use in ranks]
    return (
        f"own step time {format_seconds(min(times))} to {format_seconds(max(times))} "
        f"(rank {times.index(max(times))} slowest)"
    )


def lines_to_paste(plan: Plan, *, has_loss_weight: bool) -> list[str]:
    """Return how ranks split and weight their samples, of which wrappers know nothing.

    Both `DistributedDataParallel` and `fully_shard` divide the sum of gradients by the ranks, so
    each loss takes a weight whose mean over the ranks adds up to one, as in `Training`.
    """
    ranks, samples, steps = plan.world_size, plan.samples_per_step, plan.accumulation_steps
    shares = [sum(plan.micro_batch_sizes_of(rank)) for rank in (0, ranks - 1)]
    share = " or ".join(map(str, dict.fromkeys(shares)))
    geometry = (
        f"accumulation_steps = {steps}  # micro-batches of each rank, the same number on all: "
        f"its {share} of {samples} samples, cut by tensor_split(accumulation_steps)"
    )
    if has_loss_weight:
        return [
            geometry,
            f"# multiply each loss by {ranks} * loss_weight(micro_batch) / the sum of these over "
            f"all micro-batches of all ranks: gradients are averaged over the {ranks} ranks",
        ]
    return [
        geometry,
        f"loss_factor = {ranks} / {samples}  # multiply each loss by this and by the samples of "
        f"its micro-batch: gradients are averaged over the {ranks} ranks",
        "# a loss that is a mean over something else (valid tokens, see loss_weight): multiply by "
        f"{ranks} * that / its sum over all micro-batches of all ranks",
    ]
