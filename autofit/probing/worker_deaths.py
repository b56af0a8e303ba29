"""How a worker died, and how many of them one plan may cost."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, VariantKey

MOST_WORKERS_PER_PLAN = 3


@dataclass
class LostWorkers:
    """The workers that plans have cost; a variant with a plan that cost three is set aside."""

    _lost: Counter[Plan] = field(default_factory=Counter)
    _set_aside: dict[VariantKey, Measurement] = field(default_factory=dict)

    def note(self, plan: Plan, measurement: Measurement) -> None:
        """A probe of `plan` ended like this and cost its worker."""
        self._lost[plan] += 1
        if self._lost[plan] >= MOST_WORKERS_PER_PLAN:
            reason = (
                f"set aside: {MOST_WORKERS_PER_PLAN} workers were lost to {plan}, the last one "
                f"so: {measurement.detail}"
            )
            self._set_aside[plan.variant] = Measurement(measurement.outcome, reason)

    def set_aside_as(self, plan: Plan) -> Measurement | None:
        """What stands for a probe of a plan whose variant is set aside; None: run it."""
        return self._set_aside.get(plan.variant)


def outcome_of_death(returncode: int | None, kills_before: int | None) -> Outcome:
    """What a worker's end means.

    Args:
        returncode: negative for a signal.
        kills_before: `oom_kills()` when the probe began.
    """
    if returncode != -signal.SIGKILL:
        return Outcome.CRASHED
    kills = oom_kills()
    told_apart = kills is not None and kills_before is not None
    return Outcome.CRASHED if told_apart and kills == kills_before else Outcome.HOST_OOM


def words_of_death(returncode: int | None, printed: str) -> str:
    """How a worker ended, and what it printed last."""
    if returncode is None:
        how = "did not end when it was killed: it is inside a call of the driver"
    elif returncode < 0:
        how = f"was ended by {signal.Signals(-returncode).name}"
    else:
        how = f"exited with {returncode}"
    return f"the worker {how}" + (f"; it printed last:\n{printed}" if printed else "")


def oom_kills() -> int | None:
    """Processes that the kernel has killed for want of host memory; None: it does not say."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts = [int(line.split()[1]) for line in counters if line.startswith("oom_kill ")]
    return counts[0] if counts else None
