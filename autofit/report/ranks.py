"""What a report says of several ranks: how they share the work, who held most, who was slowest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autofit.measurement import RankUse
from autofit.plan import Plan
from autofit.report.record import Record
from autofit.units import counted, format_bytes, format_seconds


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
