"""Would expandable segments of the CUDA allocator help: tried in fresh workers, never set.

Less held memory alone shows little, since the allocator keeps what it has room for. So where a plan
holds less with them, it is run without them under just that budget: only if it then runs out or
flushes its cache in timed steps have they lowered what it requires.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from autofit.codec import to_json
from autofit.measurement import Measurement, Outcome, Trial
from autofit.memory.expandable import CONFIGURED_BY
from autofit.plan import ResolvedPlan
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Prober

SETTING = "expandable_segments:True"
_SLACK = 0.03  # of the budget, reserved and not allocated, or there is nothing to gain
_FULL = 0.9
_LESS = 0.98
_TIMED_S = 1.0


@dataclass(frozen=True)
class Candidates:
    """The plans that expandable segments could help.

    Attributes:
        best: the trial to train with, where much of what it holds is no live tensor.
        flushing: a faster plan that ran and flushed its cache in timed steps.
    """

    best: Trial | None
    flushing: Trial | None

    @property
    def most_probes(self) -> int:
        """The most probes that trying them takes; 0 if there is nothing to try.

        Of the best plan with them, without them, and without them in the bytes that it held with
        them; of the flushing one with them.
        """
        return 0 if self.best is self.flushing is None else 3 + (self.flushing is not None)


def candidates(best: Trial, trials: Sequence[Trial], vram_budget_bytes: int) -> Candidates:
    """Return which plans are worth a try: none where memory does not limit the search."""
    if any(name in os.environ for name in CONFIGURED_BY):
        return Candidates(None, None)  # the user has chosen
    measured = best.measurement
    slack = (measured.peak_reserved_bytes or 0) - (measured.peak_allocated_bytes or 0)
    is_full = (measured.held_bytes or 0) > _FULL * vram_budget_bytes
    binds = is_full or any(trial.measurement.outcome.about_memory for trial in trials)
    flushing = [
        trial
        for trial in trials
        if trial.measurement.outcome is Outcome.RETRIES
        and (trial.samples_per_second or 0) > (best.samples_per_second or 0)
    ]
    return Candidates(
        best if binds and slack > _SLACK * vram_budget_bytes else None,
        max(flushing, key=lambda trial: trial.samples_per_second or 0, default=None),
    )


def try_expandable_segments(
    prober: Prober,
    resolved: ResolvedPlan,
    flushing: ResolvedPlan | None,
    vram_budget_bytes: int,
    expected_seconds: float | None = None,
) -> dict[str, Any]:
    """Run plans with expandable segments and say what that changes, as the report keeps it.

    Args:
        prober: it has workers.
        resolved: the best plan.
        flushing: a faster plan that flushes its cache; None: there is none.
        vram_budget_bytes: of the search.
        expected_seconds: how long a probe of these plans takes; None: unknown.

    Raises:
        SearchTimedOut, WorkerFailed: as `Prober.probe`.
    """
    without: Measurement | None = None
    faster = None
    probe = partial(_probe, prober, expected_seconds=expected_seconds)
    with prober.environment({CONFIGURED_BY[0]: SETTING}):
        held = probe(resolved, vram_budget_bytes)
        if flushing is not None:
            faster = probe(flushing, vram_budget_bytes)
    plain = probe(resolved, vram_budget_bytes)
    lowers = False
    if held.ok and plain.ok and (held.held_bytes or 0) < _LESS * (plain.held_bytes or 0):
        prober.renew()
        without = probe(resolved, held.held_bytes or vram_budget_bytes)
        lowers = without.outcome.about_memory
    removes = faster is not None and faster.ok
    return {
        "setting": f"{CONFIGURED_BY[0]}={SETTING}",
        "recommended": lowers or removes,
        "probes": 2 + (faster is not None) + (without is not None),
        "lowers_required_bytes": lowers,
        "held_bytes": plain.held_bytes,
        "held_bytes_with": held.held_bytes,
        "outcome_with": held.outcome.value,
        "outcome_without_in_that": None if without is None else without.outcome.value,
        "plan_without_retries": to_json(flushing.plan) if flushing and removes else None,
    }


def _probe(
    prober: Prober, resolved: ResolvedPlan, vram_budget_bytes: int, expected_seconds: float | None
) -> Measurement:
    request = ProbeRequest(
        resolved,
        vram_budget_bytes,
        full_accumulation=True,
        expected_seconds=expected_seconds,
        most_timed_seconds=_TIMED_S,
    )
    return prober.probe(request).measurement
