"""The result of a probe as plain data: its outcome, step times and memory.

Raw step times are kept; every statistic is derived from them. A probe has the standard error of its
median step, of which the scatter of single steps is no part: a host that takes some steps of a
probe away moves those far and their median hardly at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from autofit.codec import Amount, Count, Duration, Number, Wait, to_json, without_controls
from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.units import format_bytes, format_rate, format_seconds

BOUNDS = ("arithmetic", "memory traffic", "launches", "optimizer")
"""What takes the time of an optimizer step: products, convolutions and attention; the other
operators; time in which no operator works; the update."""

ACT = "! "
"""What a note begins with that asks its reader to do something."""
NOT_TRIED = "Not tried: "
"""What a note begins with that names what was left out of a search."""
NEVER_UPDATED = (
    f"{ACT}No step changed a parameter of the model: does training_step call "
    "training.optimizer_step(), and does the optimizer update?"
)
"""The note on a probe whose steps trained nothing."""

IN_EVALUATION = "in an evaluation of "
"""What the detail says of a fault that the training did not have, but an evaluation beside it."""


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
    """A kernel does not support this size; says nothing about memory."""
    HOST_OOM = "host_oom"
    """The host's memory ran out, not the device's."""
    TIMEOUT = "timeout"
    """It ran for much longer than expected, and was ended."""
    CRASHED = "crashed"
    """The worker died, and not because host memory ran out."""
    POISONED = "poisoned"
    """The device context can no longer be used; the worker was replaced."""
    LEAK = "leak"
    """Every step left more bytes allocated than the one before."""
    NONFINITE = "nonfinite"
    """The loss became infinite or not a number."""
    UNSUPPORTED = "unsupported"
    """The model or the device cannot run with these settings, or at so small a micro-batch."""
    USER_ERROR = "user_error"
    """The user's own code raised."""

    @property
    def about_memory(self) -> bool:
        """Whether the plan does not fit, and so moves the memory line."""
        return self in (Outcome.OOM, Outcome.OVER_BUDGET, Outcome.RETRIES)

    @property
    def ran(self) -> bool:
        """Whether every timed step ran with losses that are right, within the budget or not."""
        return self in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.RETRIES)

    @property
    def may_be_transient(self) -> bool:
        """Whether it may be a transient failure: of the machine rather than of the plan."""
        return self in (Outcome.HOST_OOM, Outcome.TIMEOUT, Outcome.CRASHED, Outcome.POISONED)


class TrialKind(StrEnum):
    """The reason why a trial was run."""

    BASELINE = "baseline"
    """The first probe: plain settings, at the sample batch's own size."""
    SEARCH = "search"
    """It was expected to gain enough to be worth a probe."""
    CONFIRMATION = "confirmation"
    """A finalist or the baseline, run again at the end."""
    VETOED = "vetoed"
    """Proposed, and refused before it ran: it is not a probe."""


@dataclass(frozen=True)
class RankUse:
    """What one of several ranks held in a probe, and how long its own steps took.

    Attributes:
        peak_allocated_bytes, peak_reserved_bytes, non_torch_bytes: as for `Measurement`.
        step_time_s: median seconds of its optimizer steps.
    """

    peak_allocated_bytes: Amount | None
    peak_reserved_bytes: Amount | None
    non_torch_bytes: Amount | None
    step_time_s: Duration | None

    @property
    def held_bytes(self) -> int:
        """Peak reserved plus non-torch bytes; 0 where they are unknown."""
        return (self.peak_reserved_bytes or 0) + (self.non_torch_bytes or 0)


@dataclass(frozen=True)
class Measurement:
    """The result of one probe.

    Of several ranks, the peaks are those of the rank that held most, and the step times those of
    the slowest rank in each step.

    Attributes:
        outcome: how it ended.
        detail: further information for a person; None: there is none.
        step_times_s: seconds of each timed optimizer step.
        peak_allocated_bytes: most bytes in live tensors, over warm-up and timed steps.
        peak_reserved_bytes: most bytes held by the caching allocator, likewise.
        non_torch_bytes: bytes that the process held on the device outside the allocator.
        resident_bytes: bytes in live tensors as the optimizer begins to update: parameters,
            gradients and optimizer state, whatever the micro-batch. None: unknown.
        gradient_bytes: of that, gradients: an update drops them, so that they are not held in the
            first forward of a step. None: unknown.
        allocator_retries: how often the allocator flushed its cache in the timed steps.
        micro_batches_run: micro-batches that each timed step actually ran; fewer than the plan's
            accumulation steps if a search probe shortened them (step times are then scaled up).
        loss: mean loss of the last step.
        losses: that of every third timed step.
        contended: whether other processes changed their use of the device during the probe, or
            used memory that the budget allows. A plan that then ran out of memory is only known to
            need the bytes that it held.
        seconds: duration of the probe, building and warm-up included.
        start_up_s: seconds that the training took before its steps had their usual duration, such
            as those of a compilation: from building it to the end of warm-up, less the steps.
        start_is_warm: whether all code that was compiled was found in torch's cache of it; None:
            nothing was compiled.
        evaluation_peak_bytes: most bytes held by the caching allocator in an evaluation beside the
            training, whose cache was released before; None: the workload has none, or it did not
            run. With the non-torch bytes it is within the budget too.
        new_shape_s: where lengths vary, the seconds that the first timed step of each shorter
            length took beyond a later one, such as for a recompilation; the shortest first.
        notes: what the plan's strategies have to say of the run; or `NEVER_UPDATED`.
        failed_rank: the rank that is to blame for the outcome; None: none, or one device ran alone.
        ranks: of each rank, what it held and its own step time; empty where one device ran alone.
    """

    outcome: Outcome
    detail: str | None = None
    step_times_s: Sequence[Duration] = ()
    peak_allocated_bytes: Amount | None = None
    peak_reserved_bytes: Amount | None = None
    non_torch_bytes: Amount | None = None
    allocator_retries: Amount | None = None
    micro_batches_run: Count | None = None
    loss: Number | None = None
    losses: Sequence[Number] = ()
    contended: bool = False
    seconds: Number | None = None
    start_up_s: Wait | None = None
    start_is_warm: bool | None = None
    evaluation_peak_bytes: Amount | None = None
    new_shape_s: Sequence[Wait] = ()
    notes: Sequence[str] = ()
    resident_bytes: Amount | None = None
    gradient_bytes: Amount | None = None
    failed_rank: Amount | None = None
    ranks: Sequence[RankUse] = ()

    def __post_init__(self) -> None:
        for name in ("ranks", "step_times_s", "losses", "new_shape_s", "notes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        # Texts of the user's code, or of a file, that are shown in a terminal
        object.__setattr__(self, "detail", without_controls(self.detail))
        object.__setattr__(self, "notes", tuple(map(without_controls, self.notes)))

    @property
    def ok(self) -> bool:
        """Whether the plan ran and may be returned."""
        return self.outcome is Outcome.OK

    @property
    def held_bytes(self) -> int | None:
        """Peak reserved plus non-torch bytes, which the VRAM budget limits, or None if unknown."""
        if self.peak_reserved_bytes is None:
            return None
        return self.peak_reserved_bytes + (self.non_torch_bytes or 0)

    @property
    def least_held_bytes(self) -> int | None:
        """What the plan holds at any micro-batch, non-torch bytes included, or None if unknown."""
        if self.resident_bytes is None:
            return None
        return self.resident_bytes + (self.non_torch_bytes or 0)

    @property
    def evaluation_held_bytes(self) -> int | None:
        """What the process held in an evaluation, non-torch bytes included, or None if unknown."""
        if self.evaluation_peak_bytes is None:
            return None
        return self.evaluation_peak_bytes + (self.non_torch_bytes or 0)

    @property
    def is_of_evaluation(self) -> bool:
        """Whether the training ran, and an evaluation beside it had no room."""
        return self.outcome.about_memory and IN_EVALUATION in (self.detail or "")

    @property
    def needed_bytes(self) -> int | None:
        """The larger of what training and evaluation held, or None if unknown."""
        held = self.held_bytes
        return held if held is None else max(held, self.evaluation_held_bytes or 0)

    @cached_property
    def step_time_s(self) -> float | None:
        """Median seconds of an optimizer step."""
        return statistics.median(self.step_times_s) if self.step_times_s else None

    @cached_property
    def step_error(self) -> float:
        """The standard error of the log of `step_time_s`, as far as its steps tell."""
        return median_error(self.step_times_s)

    @property
    def step_time_interval_s(self) -> tuple[float, float] | None:
        """A confidence interval of the median step time: 95% from six steps on.

        See `median_interval`.
        """
        return median_interval(self.step_times_s) if self.step_times_s else None


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a distribution-free 95% confidence interval of the median, from six values on.

    Its ends are order statistics: the ranks whose binomial coverage reaches 95% (Conover,
    Practical Nonparametric Statistics, 3.2). Of fewer values they are the smallest and the largest,
    which cover less: 75% with three, 88% with four, 94% with five.
    """
    ordered = sorted(values)
    rank = _median_interval_rank(len(ordered))
    return ordered[rank], ordered[-1 - rank]


def median_error(values: Sequence[float]) -> float:
    """Return the standard error of the log of the median, from the width of `median_interval`.

    Args:
        values: above zero. Of one alone nothing is known, and the error is 0.
    """
    count = len(values)
    if count < 2:
        return 0.0
    low, high = median_interval(values)
    rank = _median_interval_rank(count)
    outside = sum(math.comb(count, below) for below in range(rank + 1)) / 2**count
    return math.log(high / low) / (2 * statistics.NormalDist().inv_cdf(1 - outside))


def _median_interval_rank(count: int) -> int:
    """Return how many of `count` sorted values can be cut from each end at 95% coverage."""
    rank, tail = 0, 1 / 2**count
    while 2 * (tail + math.comb(count, rank + 1) / 2**count) <= 0.05:
        rank += 1
        tail += math.comb(count, rank) / 2**count
    return rank


@dataclass(frozen=True)
class StartUp:
    """How long a training takes to start, as probes of one plan, or of one variant, measured it.

    Attributes:
        cold_s: the most seconds of a start that compiled something, or that had no use for torch's
            cache of compiled code; None: there was none.
        warm_s: the most seconds of a start that found all its compiled code there; likewise.
    """

    cold_s: float | None
    warm_s: float | None

    @classmethod
    def of(cls, measurements: Iterable[Measurement]) -> StartUp:
        """Return that of these probes."""
        starts = [(m.start_is_warm, m.start_up_s) for m in measurements if m.start_up_s is not None]
        cold, warm = (
            max((s for is_warm, s in starts if bool(is_warm) is wanted), default=None)
            for wanted in (False, True)
        )
        return cls(cold, warm)

    @property
    def own_s(self) -> float | None:
        """What the user's own training takes: a probe ran before it, so its code is compiled."""
        return self.cold_s if self.warm_s is None else self.warm_s


@dataclass(frozen=True)
class Trial:
    """One entry of a study.

    Attributes:
        number: its number in the study, counted from 0; numbers of lost trials are missing.
        kind: why it was run.
        plan: the plan that was run.
        measurement: the result.
        predicted_peak_bytes: held bytes that the planner expected before it ran; None: unknown.
    """

    number: Amount
    kind: TrialKind
    plan: Plan
    measurement: Measurement
    predicted_peak_bytes: Amount | None = None

    @property
    def ok(self) -> bool:
        """Whether the plan ran within the budget."""
        return self.measurement.ok

    @property
    def blames_workload(self) -> bool:
        """Whether the workload itself failed, which ends a search; it may be mended since."""
        outcome = self.measurement.outcome
        fails_plain = self.kind is TrialKind.BASELINE and outcome in (
            Outcome.NONFINITE,
            Outcome.LEAK,
        )
        return fails_plain or outcome is Outcome.USER_ERROR

    @property
    def samples_per_second(self) -> float | None:
        """Samples trained per second at the median step time, or None if nothing was timed."""
        return self._rate(self.measurement.step_time_s)

    @property
    def samples_per_second_low(self) -> float | None:
        """The lower end of the interval of `Measurement.step_time_interval_s`."""
        interval = self.measurement.step_time_interval_s
        return self._rate(interval[1] if interval else None)

    @property
    def samples_per_second_high(self) -> float | None:
        """The upper end of that interval."""
        interval = self.measurement.step_time_interval_s
        return self._rate(interval[0] if interval else None)

    @property
    def speed_words(self) -> str:
        """The speed with the digits that its interval supports: "168 samples/s"; "?": none."""
        spread = spread_of(self.samples_per_second_low, self.samples_per_second_high)
        return format_rate(self.samples_per_second, spread * (self.samples_per_second or 0.0))

    def row(self) -> dict[str, Any]:
        """Return it as a flat object of JSON: the rates that follow, the measurement's own keys."""
        return {
            "number": self.number,
            "kind": self.kind.value,
            "plan": to_json(self.plan),
            "samples_per_second": self.samples_per_second,
            "samples_per_second_low": self.samples_per_second_low,
            "samples_per_second_high": self.samples_per_second_high,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            **to_json(self.measurement),
        }

    def __str__(self) -> str:
        measured = self.measurement
        if not self.ok:
            return f"{self.plan}: {measured.outcome.value}: {measured.detail or 'no detail'}"
        notes = "".join(f"; {note}" for note in measured.notes)
        if measured.evaluation_held_bytes is not None:
            notes = f"; an evaluation held {format_bytes(measured.evaluation_held_bytes)}{notes}"
        if measured.new_shape_s:
            seconds = format_seconds(max(measured.new_shape_s))
            notes = f"; the first step of another length took up to {seconds} more{notes}"
        return (
            f"{self.plan}: {self.speed_words}, "
            f"{format_seconds(measured.step_time_s)} an optimizer step, "
            f"held {format_bytes(measured.held_bytes)} "
            f"(peak allocated {format_bytes(measured.peak_allocated_bytes)}, "
            f"peak reserved {format_bytes(measured.peak_reserved_bytes)}, "
            f"non-torch {format_bytes(measured.non_torch_bytes)}){notes}"
        )

    def _rate(self, step_time_s: float | None) -> float | None:
        return self.plan.samples_per_step / step_time_s if step_time_s else None


def spread_of(low: float | None, high: float | None) -> float:
    """Return half of a range of speeds, as a share of its middle; 0 where it is unknown."""
    if not low or not high:
        return 0.0
    return (high - low) / (high + low)


def check_ran(trial: Trial) -> None:
    """Check that a trial that was read from a file ran within the budget, with speed and memory.

    Raises:
        InvalidArgument: it did not.
    """
    if not trial.ok or not trial.samples_per_second or trial.measurement.held_bytes is None:
        raise InvalidArgument(f"trial {trial.number} did not run, or lacks its speed or memory")


def probes_of(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that were run: all but the vetoed."""
    return [trial for trial in trials if trial.kind is not TrialKind.VETOED]


def oom_probes_of(trials: Sequence[Trial]) -> int:
    """Return how many probes ran out of memory."""
    return sum(trial.measurement.outcome is Outcome.OOM for trial in probes_of(trials))


def fastest_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the middle probe of the plan that measured fastest; None: nothing fits.

    By the median of the plan's probes, not by its luckiest. It is what there is to beat while a
    search runs: what is expected of plans (`autofit.planning.beliefs.Beliefs.incumbent`) and how
    they came out side by side (`autofit.planning.confirmation`) decide what is tried and returned.
    """
    fits = by_plan(trial for trial in probes_of(trials) if trial.ok)
    return max(
        map(middle_of, fits.values()),
        key=lambda trial: trial.samples_per_second or 0.0,
        default=None,
    )


def by_plan(trials: Iterable[Trial]) -> dict[Plan, list[Trial]]:
    """Return the trials of each plan, in their order."""
    found: dict[Plan, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.plan, []).append(trial)
    return found


def middle_of(trials: Sequence[Trial]) -> Trial:
    """Return the trial of median speed, of timed ones; of two, the slower."""
    ordered = sorted(trials, key=lambda trial: trial.samples_per_second or 0.0)
    return ordered[(len(ordered) - 1) // 2]


def compared_log_speed(trials: Sequence[Trial]) -> float:
    """Return the median log of the samples/s of timed trials, by which plans are compared.

    Of an even number it is the log of the geometric mean of the middle two.
    """
    return statistics.median(math.log(trial.samples_per_second or 0.0) for trial in trials)
