"""What a probe brings back, as plain data: how it ended, how long steps took, what it held.

Raw step times are kept; every statistic is derived from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from math import comb
from typing import Any

from autofit.plan import Plan


class Outcome(StrEnum):
    """How a probe ended."""

    OK = "ok"
    """It ran within the VRAM budget."""
    OOM = "oom"
    """The device's memory, as far as the VRAM budget allows it, ran out."""
    OVER_BUDGET = "over_budget"
    """It ran, and held more than the VRAM budget."""
    RETRIES = "retries"
    """It ran, but the allocator flushed its cache during timed steps."""
    SIZE_LIMIT = "size_limit"
    """A kernel refuses this size; says nothing about memory."""
    HOST_OOM = "host_oom"
    """The host's memory ran out, not the device's."""
    TIMEOUT = "timeout"
    """It went on for much longer than was expected, and was ended."""
    CRASHED = "crashed"
    """The worker died, and not for want of host memory."""
    POISONED = "poisoned"
    """The device context is beyond use; the worker was replaced."""
    LEAK = "leak"
    """Every step leaves more bytes allocated than the one before."""
    NONFINITE = "nonfinite"
    """The loss became infinite or not a number."""
    UNSUPPORTED = "unsupported"
    """The model or the device cannot run with these settings, or at so small a micro-batch."""
    USER_ERROR = "user_error"
    """The user's own code raised."""

    @property
    def about_memory(self) -> bool:
        """Whether it says that the plan does not fit (and so moves the memory line)."""
        return self in (Outcome.OOM, Outcome.OVER_BUDGET, Outcome.RETRIES)


class Role(StrEnum):
    """Why a trial was run."""

    BASELINE = "baseline"
    """The user's own plan, the first to run."""
    SEARCH = "search"
    """It was expected to gain enough to be worth a probe."""
    CONFIRMED = "confirmed"
    """A leading plan, or the baseline beside it, run again at the end."""
    VETOED = "vetoed"
    """Asked for, and refused before it ran: it was no probe."""


@dataclass(frozen=True)
class Measurement:
    """The result of one probe.

    Attributes:
        outcome: how it ended.
        detail: what a person should know about it; None where there is nothing to say.
        step_times_s: seconds of each timed optimizer step.
        peak_allocated_bytes: most bytes in live tensors, over warm-up and timed steps.
        peak_reserved_bytes: most bytes held by the caching allocator, likewise.
        non_torch_bytes: what the process held on the device outside the allocator.
        allocator_retries: times the allocator flushed its cache in the timed steps.
        micro_batches_run: micro-batches that each timed step really ran; fewer than the plan's
            accumulation steps where a search probe shortened them (their time is then scaled).
        loss: mean loss of the last step.
        contended: whether other processes' use of the device moved during the probe, or held of it
            what the budget allows. A plan that ran out of memory then is only known to need what
            it held.
        seconds: what the probe cost, building and warming up included.
    """

    outcome: Outcome
    detail: str | None = None
    step_times_s: Sequence[float] = ()
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    non_torch_bytes: int | None = None
    allocator_retries: int | None = None
    micro_batches_run: int | None = None
    loss: float | None = None
    contended: bool = False
    seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcome", Outcome(self.outcome))
        object.__setattr__(self, "step_times_s", tuple(self.step_times_s))

    @property
    def ok(self) -> bool:
        """Whether the plan ran and may be returned."""
        return self.outcome is Outcome.OK

    @property
    def held_bytes(self) -> int | None:
        """Peak reserved plus non-torch bytes: what is compared with the VRAM budget."""
        if self.peak_reserved_bytes is None:
            return None
        return self.peak_reserved_bytes + (self.non_torch_bytes or 0)

    @property
    def step_time_s(self) -> float | None:
        """Median seconds of an optimizer step."""
        return statistics.median(self.step_times_s) if self.step_times_s else None

    @property
    def step_time_interval_s(self) -> tuple[float, float] | None:
        """A 95 % confidence interval of the median step time; see `median_interval`."""
        return median_interval(self.step_times_s) if self.step_times_s else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self) | {
            "outcome": self.outcome.value,
            "step_times_s": list(self.step_times_s),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """The measurement that `to_dict` wrote; keys it does not know are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, free of any distribution.

    From order statistics: the ranks whose binomial coverage reaches 95 %; with fewer than six
    values, the smallest and the largest (Conover, Practical Nonparametric Statistics, 3.2).
    """
    ordered = sorted(values)
    rank = _median_interval_rank(len(ordered))
    return ordered[rank], ordered[-1 - rank]


def _median_interval_rank(count: int) -> int:
    """How many of `count` sorted values may be cut from either end with 95 % coverage kept."""
    rank, tail = 0, 1 / 2**count
    while 2 * (tail + comb(count, rank + 1) / 2**count) <= 0.05:
        rank += 1
        tail += comb(count, rank) / 2**count
    return rank


@dataclass(frozen=True)
class Trial:
    """One entry of a study.

    Attributes:
        number: its place in the study, from 0, the baseline.
        role: why it was run.
        plan: what was run.
        measurement: what came back.
        predicted_peak_bytes: held bytes that the planner expected before it ran; None: unknown.
    """

    number: int
    role: Role
    plan: Plan
    measurement: Measurement
    predicted_peak_bytes: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the plan ran within the budget."""
        return self.measurement.ok

    @property
    def samples_per_second(self) -> float | None:
        """Samples trained per second at the median step time; None where nothing was timed."""
        return self._rate(self.measurement.step_time_s)

    @property
    def samples_per_second_low(self) -> float | None:
        """The lower end of the 95 % interval."""
        interval = self.measurement.step_time_interval_s
        return self._rate(interval[1] if interval else None)

    @property
    def samples_per_second_high(self) -> float | None:
        """The upper end of the 95 % interval."""
        interval = self.measurement.step_time_interval_s
        return self._rate(interval[0] if interval else None)

    def ties_with(self, other: Trial) -> bool:
        """Whether the two are equally fast within measurement error: their intervals overlap."""
        low, high = self.samples_per_second_low, self.samples_per_second_high
        others_low, others_high = other.samples_per_second_low, other.samples_per_second_high
        if low is None or high is None or others_low is None or others_high is None:
            return False
        return low <= others_high and others_low <= high

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: what was measured, and beside it the rates that follow from it."""
        return {
            "number": self.number,
            "role": self.role.value,
            "plan": self.plan.to_dict(),
            "samples_per_second": self.samples_per_second,
            "samples_per_second_low": self.samples_per_second_low,
            "samples_per_second_high": self.samples_per_second_high,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            **self.measurement.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The trial that `to_dict` wrote; keys it does not know are ignored."""
        return cls(
            data["number"],
            Role(data["role"]),
            Plan.from_dict(data["plan"]),
            Measurement.from_dict(data),
            data.get("predicted_peak_bytes"),
        )

    def _rate(self, step_time_s: float | None) -> float | None:
        return self.plan.samples_per_step / step_time_s if step_time_s else None


# Trials at a glance: which were run, how many ran out of memory, which was fastest.


def probes_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that were run: all but the vetoed."""
    return [trial for trial in trials if trial.role is not Role.VETOED]


def oom_probes_of(trials: Sequence[Trial]) -> int:
    """How many probes ran out of memory."""
    return sum(trial.measurement.outcome is Outcome.OOM for trial in probes_of(trials))


def fastest_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest probe so far that fits, as it was measured."""
    fits = [trial for trial in probes_of(trials) if trial.ok]
    return max(fits, key=lambda trial: trial.samples_per_second or 0.0, default=None)
