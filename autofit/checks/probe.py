"""`autofit.probe`: run one plan; or a report's recommended plan for longer: does it hold?

The latter is a probe of N optimizer steps on the sample batch, compared in peak, speed and loss, so
growth between steps, allocator retries, other processes and faults are watched too. On the CPU,
where a step that is accounted for takes longer than one that is not, N steps are accounted for and
then N are timed. A plan of several ranks is trained by as many, and each rank's peak is compared
with its own.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

from autofit.checks.tuned import AskedPlan, check_same
from autofit.codec import to_json
from autofit.devices.base import load_of_others
from autofit.errors import InvalidArgument, hides_own_frames
from autofit.measurement import Measurement, Trial, TrialKind, median_interval
from autofit.plan import Plan, ResolvedPlan, Settings
from autofit.probing.probe import probe_if, run_one
from autofit.probing.prober import Target
from autofit.probing.torchrun import owned_by_rank_0
from autofit.report.record import Record
from autofit.report.report import Report
from autofit.report.summary import held_by_ranks
from autofit.strategy import Strategy
from autofit.training.workload import Workload
from autofit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autofit.probing.survey import Survey


@overload
def probe(
    workload: Workload,
    *,
    plan: Report,
    steps: int,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    seed: int = 0,
    ranks: int | None = None,
) -> SoakResult: ...


@overload
def probe(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    steps: int | None = None,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    seed: int = 0,
    ranks: int | None = None,
) -> Trial: ...


@hides_own_frames
def probe(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    steps: int | None = None,
    vram_budget: str | float | None = None,
    device: str | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    seed: int = 0,
    ranks: int | None = None,
) -> Trial:
    """Run one plan and return what it needs and how fast it is.

    With a report and steps=200 its recommended plan trains for that long, within the report's
    budget, and the `SoakResult` says how peak, speed and loss compare with the report.

    Args:
        workload: what is trained.
        plan: what to run, or a report, whose recommended plan is run; None: the baseline. Settings
            that a plan leaves out are at their default.
        steps: timed optimizer steps; None: as many as a search times.
        vram_budget: as for `search`; None with a report and steps: the report's.
        device: one device, as for `search`; None with a report and steps: the report's.
        strategies: as for `search`.
        seed: of everything random.
        ranks: workers that train the model together, each on a GPU of its own or all on the CPU; if
            None, as many as the plan says or torchrun started.

    Returns:
        The trial, whatever its outcome; its accumulation was run in full.

    Raises:
        InvalidArgument: an argument is of another kind, the plan names a setting or a value that
            does not exist here, or the report is of another workload.
        DeviceUnavailable: the device is not there.
        WorkerFailed: the worker ended or hung before the plan ran.
        Exception: what the user's own code raised, as it was raised.
    """
    asked = AskedPlan.read(workload, plan)
    if asked.record is not None and steps is not None:
        known = plan.strategies if isinstance(plan, Report) else ()
        return soak(asked.record, workload, steps, device, vram_budget, known)
    return probe_if(
        lambda survey: asked.check_same_model(survey.parameters, workload),
        workload,
        plan=asked.plan,
        steps=steps,
        vram_budget=vram_budget,
        device=device,
        strategies=strategies,
        payloads=asked.payloads,
        seed=seed,
        ranks=ranks,
    )


PEAK_TOLERANCE = 0.01
"""Peaks repeat to the MiB from probe to probe (measured on an H200)."""
SPEED_TOLERANCE = 0.05
"""Allowed growth of the median step time; GPU-bound steps repeat within 0.2 %.

If the report's own steps scatter more than this, their scatter is allowed."""
LOSS_TOLERANCE = 0.05
QUARTER = 4
_MIN_COMPARED = 4
"""Steps of a quarter; the median of fewer is not told from noise."""
_NOISE = 3.0
"""Standard deviations of its steps' losses that the report's one loss may lie off."""


@dataclass(frozen=True, kw_only=True)
class SoakResult(Trial):
    """A longer training of a report's recommended plan, compared with its trial in the report.

    Attributes:
        expected: the trial of the report's recommended plan.
        vram_budget_bytes: that it was trained within.
        deviations: differences from the report, one line each.
        busy: what others did on the device, here or in the search; speed is not compared then.
        was_busy: whether that was in the search.
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
        """Which of peak, speed and loss were compared with the report."""
        now, then = self.measurement, self.expected.measurement
        known = {
            "peak": None not in (now.peak_allocated_bytes, then.peak_allocated_bytes),
            "speed": self.busy is None and bool(now.step_times_s and then.step_times_s),
            "loss": _are_losses_compared(then, now),
        }
        return tuple(what for what, is_known in known.items() if is_known)

    @property
    def passed(self) -> bool:
        """Whether peak and loss are as in the report, and speed unless the machine was busy."""
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
        is_busy, when = self.busy is not None, "in the search" if self.was_busy else "now"
        agreeing = ", ".join(self.compared) or "nothing, for nothing could be compared"
        lines = [
            f"{self.plan.without(self.defaults)}: {self.steps} steps",
            f"peak reserved  {format_bytes(measured.peak_reserved_bytes)}"
            f" (report: {format_bytes(expected.peak_reserved_bytes)})",
            f"step time      {format_seconds(measured.step_time_s)}"
            f" (report: {format_seconds(expected.step_time_s)})",
            f"loss           {_number(measured.loss)}"
            f" (report, after {len(expected.step_times_s)} steps: {_number(expected.loss)})",
            *(
                [
                    f"ranks hold     {held_by_ranks(measured.ranks)}"
                    f" (report: {held_by_ranks(expected.ranks)})"
                ]
                if measured.ranks and expected.ranks
                else []
            ),
            *([f"speed was not compared: the machine was busy {when} ({self.busy})"] * is_busy),
            f"as in the report: {agreeing}" if self.passed else "differs from the report:",
        ]
        return "\n".join([*lines, *(f"- {line}" for line in self.deviations)])


def soak(
    record: Record,
    workload: Workload,
    steps: int = 200,
    device: str | None = None,
    vram_budget: str | float | None = None,
    strategies: Sequence[Strategy] = (),
) -> SoakResult:
    """Train the report's recommended plan for `steps` optimizer steps, and compare as `probe`.

    Args:
        record, strategies: of the search; the installed ones are used for other names.
        workload: of the search; its global batch is replaced by the report's.
        steps: at least 8; warm-up steps come first.
        device, vram_budget: None: the report's.
    """
    if steps < 2 * QUARTER:
        raise InvalidArgument(f"a report is compared over {2 * QUARTER} steps or more, got {steps}")
    resolved = record.resolve_plan(remembered=strategies)
    step_time_s = record.recommended.measurement.step_time_s
    trained = replace(workload, global_batch=record.workload["global_batch"])
    ranks = record.recommended.plan.ranks
    own = record.environment["device"]  # of several ranks that of rank 0
    where = device or (own if ranks == 1 else own.partition(":")[0])
    budget = record.vram_budget_bytes if vram_budget is None else vram_budget
    target = Target(where, budget, record.search.seed, ranks=ranks)

    def plan_if_same(survey: Survey) -> ResolvedPlan:
        check_same(survey, record)
        return resolved

    def lead(ranks: int) -> tuple[Measurement, str | None, int]:
        trial, survey = run_one(
            trained,
            resolved.strategies,
            target,
            plan_if_same,
            expected_seconds=steps * step_time_s if step_time_s else None,
            steps=steps,
        )
        busy = record.search.busy or survey.busy
        if busy is None and record.environment["gpu"] is None:
            busy = load_of_others(load_of_search=os.cpu_count() or 1)
        return trial.measurement, busy, survey.vram_budget_bytes

    measured, busy, budget_bytes = owned_by_rank_0(lead, ranks=ranks)
    best = record.recommended
    return SoakResult(
        number=0,
        kind=TrialKind.SEARCH,
        plan=best.plan,
        measurement=measured,
        expected=best,
        vram_budget_bytes=budget_bytes,
        deviations=compare(best.measurement, measured, busy=busy is not None),
        busy=busy,
        was_busy=record.search.busy is not None,
        defaults=record.default_settings,
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
    """Yield how steps were slower than in the report, and slowed down.

    The last quarter is compared with the first: throttling and fragmentation show late.
    """
    times, interval = measured.step_times_s, expected.step_time_interval_s
    if interval and times and _is_slower(expected.step_times_s, times):
        yield (
            f"the median step took {format_seconds(measured.step_time_s)}, where the report has "
            f"{format_seconds(interval[0])} to {format_seconds(interval[1])}"
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
    median of the last quarter, and the scatter there is allowed to the report's loss.
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
