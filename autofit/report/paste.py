"""A plan as the lines that a user would write to train with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.plan import Plan, settings_of
from autofit.strategy import Strategy


def paste_lines(
    plan: Plan, strategies: Sequence[Strategy], payloads: Mapping[str, Any]
) -> list[str]:
    """Batch geometry first, then what each strategy says of its settings."""
    lines = [f"micro_batch = {plan.micro_batch}  # samples in one forward and backward"]
    if plan.accumulation_steps > 1:
        lines.append(
            f"accumulation_steps = {plan.accumulation_steps}  # micro-batches in one "
            f"optimizer step of {plan.samples_per_step} samples; "
            "weight each loss by its share of the samples"
        )
    for strategy in strategies:
        settings = settings_of(strategy.name, plan.settings)
        if settings:
            lines += strategy.describe(settings, settings_of(strategy.name, payloads))
    return lines
