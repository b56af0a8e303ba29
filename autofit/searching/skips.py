"""What a search left out, in words that a person can check."""

from __future__ import annotations

import numpy as np

from autofit.plan import Scalar
from autofit.report.record import Skipped
from autofit.searching.beliefs import Beliefs
from autofit.searching.proposals import ceilings, leading
from autofit.searching.sizes import Counts
from autofit.units import format_bytes, format_rate


def skips(beliefs: Beliefs) -> tuple[Skipped, ...]:
    """What was set aside, then each value of a setting that was never run."""
    blamed = [Skipped(dict(pairs), why) for pairs, why in beliefs.exclusions.blamed.items()]
    size: Counts = np.median(ceilings(beliefs), axis=0).astype(np.int64)
    run = {pair for trial in beliefs.probes for pair in trial.plan.variant}
    never = [
        Skipped({name: value}, why)
        for name, dimension in beliefs.facts.space.dimensions.items()
        for value in dimension.values
        if (name, value) not in run and (why := _why_not(beliefs, name, value, size))
    ]
    return (*blamed, *never)


def _why_not(beliefs: Beliefs, name: str, value: Scalar, size: Counts) -> str | None:
    """Why that value was not run; None where what was set aside says so already.

    `size` is the largest micro-batch that each variant is expected to have room for.
    """
    having = [settings[name] == value for settings in beliefs.variants]
    variants = np.flatnonzero(np.array(having) & beliefs.usable)
    leader = leading(beliefs)
    if not len(variants):
        return None
    fitting = variants[size[variants] >= 1]
    if not len(fitting) or leader is None:
        return _too_large(beliefs, variants)
    predicted = np.median(beliefs.speeds(size), axis=0)
    best, ahead = float(predicted[fitting].max()), float(np.median(beliefs.speed(leader.plan)))
    words = (
        f"predicted to reach {format_rate(np.exp(best))} at most, and the leading plan "
        f"{format_rate(np.exp(ahead))}"
    )
    return words if best <= ahead else f"not tried before the search stopped: {words}"


def _too_large(beliefs: Beliefs, variants: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """What the leanest of those variants would hold at its smallest micro-batch."""
    space = beliefs.facts.space
    plans = [space.plan(int(beliefs.sizes.smallest[i]), beliefs.variants[i]) for i in variants]
    held, plan = min(
        ((float(np.median(beliefs.held(plan))), plan) for plan in plans), key=lambda pair: pair[0]
    )
    return (
        f"predicted to hold {format_bytes(held)} at micro-batch {plan.micro_batch} where "
        f"{format_bytes(beliefs.facts.vram_budget_bytes)} are allowed"
    )
