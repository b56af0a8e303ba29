"""`autofit.soak`: train a plan for long, and compare with a shorter run: does it hold?

The shorter run is the trial of a report, or a probe of the plan that is run first. Peak, speed and
loss are compared, so growth between steps, allocator retries, other processes and faults are
watched too. On the CPU, where a step that is accounted for takes longer than one that is not, N
steps are accounted for and then N are timed. A plan of several ranks is trained by as many, and
each rank's peak is compared with its own.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from autofit.checks.tuned import AskedPlan, check_same
from autofit.codec import to_json
from autofit.devices.base import load_of_others
from autofit.errors import InvalidArgument, hides_own_frames
from autofit.measurement import Measurement, Trial, TrialKind, median_interval
from autofit.plan import Plan, ResolvedPlan, Settings, check_count
from autofit.probing.probe import resolve_here, run_one
from autofit.probing.prober import Target
from autofit.probing.torchrun import owned_by_rank_0, ranks_meant
from autofit.registry import load_strategies
from autofit.report.report import Report
from autofit.report.summary import held_by_ranks
from autofit.strategy import Strategy
from autofit.training.workload import Workload
from autofit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autofit.probing.survey import Survey

PEAK_TOLERANCE = 0.01
"""Peaks repeat to the MiB from probe to probe (measured on an H200)."""
SPEED_TOLERANCE = 0.05
"""Allowed growth of the median step time; GPU-bound steps repeat within 0.2%.

If the shorter run's steps scatter more than this, their scatter is allowed."""
LOSS_TOLERANCE = 0.05
QUARTER = 4
_MIN_COMPARED = 4
"""Steps of a quarter; the median of fewer is not told from noise."""
_NOISE = 3.0
"""Standard deviations of its steps' losses that the one loss of before may lie off."""


@dataclass(frozen=True, kw_only=True)
class SoakResult(Trial):
    """A longer training of a plan, compared with a shorter one.

    Attributes:
        expected: the shorter one: the trial of the report, or the probe that came first.
        vram_budget_bytes: that it was trained within.
        deviations: differences from the shorter one, one line each.
        busy: what others did on the device, in this training or in the shorter one; speed is not
            compared then.
        was_busy: whether that was in the shorter one.
        defaults: the default of every setting, which text leaves out.
    """

    expected: Trial
    vram_budget_bytes: int
    deviations: tuple[str, ...] = ()
    busy: str | None = None
    was_busy: bool = False
    defaults: Settings = field(default_factory=dict)

    @property
    def compared(self) -> tuple[str, ...]:
        """Which of peak, speed and loss were compared."""
        now, then = self.measurement, self.expected.measurement
        known = {
            "peak": None not in (now.peak_allocated_bytes, then.peak_allocated_bytes),
            "speed": self.busy is None and bool(now.step_times_s and then.step_times_s),
            "loss": _are_losses_compared(then, now),
        }
        return tuple(what for what, is_known in known.items() if is_known)

    @property
    def passed(self) -> bool:
        """Whether peak and loss are as before, and speed unless the machine was busy."""
        return not self.deviations

    @property
    def steps(self) -> int:
        """Number of timed optimizer steps."""
        return len(self.measurement.step_times_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "passed": self.passed,
            "deviations": list(self.deviations),
            "busy": self.busy,
            "compared": list(self.compared),
            "steps": self.steps,
            "plan": to_json(self.plan),
            "vram_budget_bytes": self.vram_budget_bytes,
            "measurement": to_json(self.measurement),
            "expected": to_json(self.expected.measurement),
        }

    def __str__(self) -> str:
        measured, expected = self.measurement, self.expected.measurement
        is_busy, when = self.busy is not None, "before" if self.was_busy else "now"
        agreeing = ", ".join(self.compared) or "nothing, for nothing could be compared"
        lines = [
            f"{self.plan.without(self.defaults)}: {self.steps} steps",
            f"peak reserved  {format_bytes(measured.peak_reserved_bytes)}"
            f" (before: {format_bytes(expected.peak_reserved_bytes)})",
            f"step time      {format_seconds(measured.step_time_s)}"
            f" (before: {format_seconds(expected.step_time_s)})",
            f"loss           {_number(measured.loss)}"
            f" (before, after {len(expected.step_times_s)} steps: {_number(expected.loss)})",
            *(
                [
                    f"ranks hold     {held_by_ranks(measured.ranks)}"
                    f" (before: {held_by_ranks(expected.ranks)})"
                ]
                if measured.ranks and expected.ranks
                else []
            ),
            *([f"speed was not compared: the machine was busy {when} ({self.busy})"] * is_busy),
            f"as before: {agreeing}" if self.passed else "differs from before:",
        ]
        return "\n".join([*lines, *(f"- {line}" for line in self.deviations)])


@hides_own_frames
def soak(
    workload: Workload,
    *,
    plan: Plan | Report,
    steps: int = 200,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
) -> SoakResult:
    """Train a plan for long, and say whether peak, speed and loss stay as in a shorter run.

    Args:
        workload: what is trained; with a report, that of its search.
        plan: a report, whose recommended plan is trained and compared with its trial there; or a
            plan, which is probed first and compared with that.
        steps: timed optimizer steps, at least 8; warm-up steps come first.
        vram_budget: None: the report's; of a plan as for `probe`.
        device: likewise.
        strategies: names or Strategy objects that may have settings in the plan; None: those of
            the search, or the installed ones.

    Raises:
        InvalidArgument: an argument is not valid, or the report is of another workload.
        DeviceUnavailable: the device is not there.
        WorkerFailed: the worker ended or hung before the plan ran.
        Exception: what the user's own code raised, as it was raised.
    """
    if check_count("steps", steps) < 2 * QUARTER:
        raise InvalidArgument(f"a soak takes {2 * QUARTER} steps or more, got {steps}")
    asked = AskedPlan.read(workload, plan)
    if asked.plan is None:
        raise InvalidArgument("soak needs a plan, such as autofit.Plan(8), or a report")
    size = asked.plan.ranks
    if isinstance(plan, Report):
        course = _of_report(plan, workload, strategies, device, vram_budget)
    else:
        size = ranks_meant(None, asked.plan)
        target = Target(device, vram_budget)
        course = _of_plan(asked.plan.on(size), workload, strategies, target)
    return owned_by_rank_0(lambda ranks: course.result(steps, ranks), ranks=size)


@dataclass(frozen=True)
class _Course:
    """What a soak trains, and what it is compared with.

    Attributes:
        workload, strategies, choose, target: as for `run_one`.
        expected: the shorter run; None: the plan is probed first.
        busy: what others did on the device then.
        defaults: of the settings; {} before the plan is probed.
    """

    workload: Workload
    strategies: Sequence[Strategy]
    choose: Callable[[Survey], ResolvedPlan]
    target: Target
    expected: Trial | None = None
    busy: str | None = None
    defaults: Settings = field(default_factory=dict)

    def result(self, steps: int, ranks: int) -> SoakResult:
        """Train for so many steps, on as many ranks, and compare."""
        asked = replace(self, target=replace(self.target, ranks=ranks))
        return (asked if asked.expected else asked._probed())._trained(steps)

    def _probed(self) -> _Course:
        trial, survey = run_one(self.workload, self.strategies, self.target, self.choose)
        return replace(
            self,
            target=replace(self.target, vram_budget=survey.vram_budget_bytes),
            expected=trial,
            busy=survey.busy,
            defaults=survey.space().default_settings,
        )

    def _trained(self, steps: int) -> SoakResult:
        assert self.expected is not None  # see `result`
        step_time_s = self.expected.measurement.step_time_s
        trial, survey = run_one(
            self.workload,
            self.strategies,
            self.target,
            self.choose,
            expected_seconds=steps * step_time_s if step_time_s else None,
            steps=steps,
        )
        busy = self.busy or survey.busy
        if busy is None and survey.environment.gpu is None:
            busy = load_of_others(load_of_search=os.cpu_count() or 1)
        return SoakResult(
            number=0,
            kind=TrialKind.SEARCH,
            plan=self.expected.plan,
            measurement=trial.measurement,
            expected=self.expected,
            vram_budget_bytes=survey.vram_budget_bytes,
            deviations=compare(self.expected.measurement, trial.measurement, busy=busy is not None),
            busy=busy,
            was_busy=self.busy is not None,
            defaults=self.defaults,
        )


def _of_plan(
    plan: Plan,
    workload: Workload,
    strategies: Iterable[str | Strategy] | None,
    target: Target,
) -> _Course:
    chosen = load_strategies(strategies, plan=plan, ranks=plan.ranks)
    return _Course(
        workload, chosen, lambda survey: resolve_here(plan, survey, chosen, None), target
    )


def _of_report(
    report: Report,
    workload: Workload,
    strategies: Iterable[str | Strategy] | None,
    device: str | None,
    vram_budget: str | float | None,
) -> _Course:
    record = report.record
    resolved = record.resolve_plan(strategies, report.strategies)
    own = record.environment["device"]  # of several ranks that of rank 0
    where = device or (own if resolved.plan.ranks == 1 else own.partition(":")[0])
    budget = record.vram_budget_bytes if vram_budget is None else vram_budget

    def plan_if_same(survey: Survey) -> ResolvedPlan:
        check_same(survey, record)
        return resolved

    return _Course(
        replace(workload, global_batch=record.workload["global_batch"]),
        resolved.strategies,
        plan_if_same,
        Target(where, budget, record.search.seed),
        record.recommended,
        record.search.busy,
        record.default_settings,
    )


def compare(expected: Measurement, measured: Measurement, *, busy: bool = False) -> tuple[str, ...]:
    """Return the deviations of a longer training from its probe, one line each.

    Args:
        expected: of the probe.
        measured: of the longer training.
        busy: others used the machine in one of both, so that their speeds tell nothing.
    """
    if not measured.ok:
        return (f"it ended with {measured.outcome.value}: {measured.detail or 'no detail'}",)
    speeds = () if busy else _speeds(expected, measured)
    return (*_peaks(expected, measured), *speeds, *_losses(expected, measured))


def _peaks(expected: Measurement, measured: Measurement) -> Iterator[str]:
    """Yield how the peak rose; of several ranks, how each one's own did."""
    pairs: list[tuple[str, Any, Any]] = [("", expected, measured)]
    if measured.ranks and len(measured.ranks) == len(expected.ranks):
        both = zip(expected.ranks, measured.ranks, strict=True)
        pairs = [(f"rank {rank}: ", *uses) for rank, uses in enumerate(both)]
    for whose, then, now in pairs:
        before, after = then.peak_allocated_bytes, now.peak_allocated_bytes
        if before is not None and after is not None and after > before * (1 + PEAK_TOLERANCE):
            yield f"{whose}peak allocated rose from {format_bytes(before)} to {format_bytes(after)}"


def _speeds(expected: Measurement, measured: Measurement) -> Iterator[str]:
    """Yield how steps were slower than in the shorter run, and slowed down.

    The last quarter is compared with the first: throttling and fragmentation show late.
    """
    times, interval = measured.step_times_s, expected.step_time_interval_s
    if interval and times and _is_slower(expected.step_times_s, times):
        yield (
            f"the median step took {format_seconds(measured.step_time_s)}, where it took "
            f"{format_seconds(interval[0])} to {format_seconds(interval[1])} before"
        )
    quarter = len(times) // QUARTER
    if quarter >= _MIN_COMPARED and _is_slower(times[:quarter], times[-quarter:]):
        first, last = (statistics.median(part) for part in (times[:quarter], times[-quarter:]))
        yield f"steps slowed down from {format_seconds(first)} to {format_seconds(last)}"


def _is_slower(before: Sequence[float], now: Sequence[float]) -> bool:
    """Return whether the median rose above the interval of `before` by more than the scatter."""
    upper = median_interval(before)[1]
    scatter = max(_scatter(before), _scatter(now))
    return statistics.median(now) > upper * (1 + max(SPEED_TOLERANCE, scatter))


def _scatter(seconds: Sequence[float]) -> float:
    """Return the scatter about the median, as a share of it."""
    middle = statistics.median(seconds)
    return math.sqrt(statistics.fmean(math.log(one / middle) ** 2 for one in seconds))


def _losses(expected: Measurement, measured: Measurement) -> Iterator[str]:
    """Yield how the loss rose: on a single batch a longer training should not end higher.

    The loss of one step says little where dropout or sampling scatters it, so the end is the
    median of the last quarter, and the scatter there is allowed to the loss of before.
    """
    if not _are_losses_compared(expected, measured):
        return
    assert expected.loss is not None
    assert measured.loss is not None
    losses = measured.losses or (measured.loss,)
    end = statistics.median(losses[-max(1, len(losses) // QUARTER) :])
    allowed = max(LOSS_TOLERANCE * abs(expected.loss), _NOISE * _deviation(losses))
    if end > expected.loss + allowed:
        yield f"the loss rose from {expected.loss:.4g} to {end:.4g}"


def _are_losses_compared(expected: Measurement, measured: Measurement) -> bool:
    is_longer = len(measured.step_times_s) >= len(expected.step_times_s)
    return is_longer and expected.loss is not None and measured.loss is not None


def _deviation(losses: Sequence[float]) -> float:
    """Return the standard deviation of losses about their trend, from neighbours' differences.

    Their median absolute difference is 0.95 of it where they are normally distributed.
    """
    differences = [abs(after - before) for before, after in pairwise(losses)]
    return statistics.median(differences) / 0.954 if differences else 0.0


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
