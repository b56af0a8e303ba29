"""What a report says of several ranks: how they share the work, who held most, who was slowest."""

from __future__ import annotations

from collections.abc import Iterator

from autofit.report.record import Record
from autofit.units import counted, format_bytes, format_seconds


def of_ranks(record: Record) -> Iterator[str]:
    """Yield lines on the ranks of the best plan."""
    plan, ranks = record.best.plan, record.best.measurement.ranks
    nodes = record.environment.get("nodes", 1)
    where = f" on {counted(nodes, 'machine')}" if nodes > 1 else ""
    yield (
        f"{plan.world_size} ranks{where}: micro-batch {plan.micro_batch} on each, "
        f"{counted(plan.accumulation_steps, 'accumulation step')} = "
        f"{counted(plan.samples_per_step, 'sample')}"
    )
    if not ranks:
        return
    held = [use.held_bytes for use in ranks]
    times = [use.step_time_s or 0.0 for use in ranks]
    yield (
        f"Held on each rank: {format_bytes(min(held))} to {format_bytes(max(held))} of "
        f"{format_bytes(record.vram_budget_bytes)} (rank {held.index(max(held))} most); own step "
        f"time {format_seconds(min(times))} to {format_seconds(max(times))} (rank "
        f"{times.index(max(times))} slowest)"
    )
