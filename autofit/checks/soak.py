"""Whether a report's best plan keeps its promise over a longer training: peak, speed and loss.

`soak` trains the best plan for N optimizer steps on the sample batch, in a worker, with everything
a probe watches: growth at the step boundary, allocator retries, other processes, faults.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidRequest
from autofit.measurement import Measurement, Trial, median_interval
from autofit.probing.prober import ProbeRequest, Target, users_error
from autofit.report.record import Record
from autofit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autofit.probing.survey import Survey
    from autofit.strategy import Strategy
    from autofit.training.workload import Workload

PEAK_TOLERANCE = 0.01
"""Peaks repeat to the MiB from probe to probe (measured on an H200)."""
SPEED_TOLERANCE = 0.05
"""How much slower a median may be before it is called slower; GPU-bound steps repeat in 0.2 %.

Where the report's own steps scatter by more than this, so may the medians."""
LOSS_TOLERANCE = 0.05
QUARTER = 4
_NOT_SEEN = (
    "torch, device, parameters and samples are the same, so the code or the options of the model, "
    "the optimizer or the loss have changed, or a flag by which torch computes"
)


@dataclass(frozen=True)
class Endurance:
    """What a longer training did, beside what the report said of its plan.

    Attributes:
        trial: the report's best trial.
        measurement: of the longer training.
        vram_budget_bytes: of the report.
        strayed: what is not where the report put it, one line each; empty where all is.
    """

    trial: Trial
    measurement: Measurement
    vram_budget_bytes: int
    strayed: tuple[str, ...]

    @property
    def held(self) -> bool:
        """Whether peak, speed and loss stayed where the report put them."""
        return not self.strayed

    @property
    def steps(self) -> int:
        """Timed optimizer steps."""
        return len(self.measurement.step_times_s)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "held": self.held,
            "strayed": list(self.strayed),
            "steps": self.steps,
            "plan": self.trial.plan.to_dict(),
            "vram_budget_bytes": self.vram_budget_bytes,
            "measurement": self.measurement.to_dict(),
            "expected": self.trial.measurement.to_dict(),
        }

    def __str__(self) -> str:
        seen, told = self.measurement, self.trial.measurement
        lines = [
            f"{self.trial.plan}: {self.steps} steps",
            f"peak reserved  {format_bytes(seen.peak_reserved_bytes)}"
            f" (report: {format_bytes(told.peak_reserved_bytes)})",
            f"step time      {format_seconds(seen.step_time_s)}"
            f" (report: {format_seconds(told.step_time_s)})",
            f"loss           {_number(seen.loss)}"
            f" (report, after {len(told.step_times_s)} steps: {_number(told.loss)})",
            "as the report says" if self.held else "not as the report says:",
        ]
        return "\n".join([*lines, *(f"- {line}" for line in self.strayed)])


def soak(
    record: Record,
    workload: Workload,
    *,
    steps: int = 200,
    device: str | None = None,
    isolation: str = "process",
    strategies: Sequence[Strategy] = (),
) -> Endurance:
    """Train the report's best plan for `steps` optimizer steps and compare.

    Args:
        record: of a search of this very workload; `Report.record`.
        workload: what was searched; its global batch is the report's.
        steps: timed optimizer steps; the warm-up comes before them.
        device: None: the report's own.
        isolation: as for `autofit.search`.
        strategies: those of the search; the plan's others are the installed ones of their names.

    Raises:
        InvalidRequest: fewer than 8 steps, or the report is of another workload or device.
        DeviceUnavailable: the device is not there, or another search is using it.
        Exception: what the user's own code raised, as it was raised.
    """
    from autofit.probing.isolation import open_prober

    if steps < 2 * QUARTER:
        raise InvalidRequest(f"a soak needs at least {2 * QUARTER} steps, got {steps}")
    resolved = record.resolve_best(remembered=strategies)
    target = Target(
        device or record.environment["device"],
        record.vram_budget_bytes,
        record.search.seed,
        isolation,
    )
    workload = replace(workload, global_batch=record.workload["global_batch"])
    with open_prober(workload, resolved.strategies, target) as prober:
        _check_same(prober.survey(), record)
        step_time_s = record.best.measurement.step_time_s
        measurement = prober.probe(
            ProbeRequest(
                resolved,
                full_accumulation=True,
                expected_seconds=steps * step_time_s if step_time_s else None,
                steps=steps,
            )
        )
        if (error := users_error(prober, measurement)) is not None:
            raise error
    strayed = compare(record.best.measurement, measurement)
    return Endurance(record.best, measurement, record.vram_budget_bytes, strayed)


def compare(told: Measurement, seen: Measurement) -> tuple[str, ...]:
    """What a longer training did otherwise than its probe, one line each."""
    if not seen.ok:
        return (f"it ended {seen.outcome.value}: {seen.detail or 'no detail'}",)
    strayed = [_peak(told, seen), _speed(told, seen), _drift(seen), _loss(told, seen)]
    return tuple(line for line in strayed if line is not None)


def _peak(told: Measurement, seen: Measurement) -> str | None:
    before, now = told.peak_allocated_bytes, seen.peak_allocated_bytes
    if before is None or now is None or now <= before * (1 + PEAK_TOLERANCE):
        return None
    return f"peak allocated rose from {format_bytes(before)} to {format_bytes(now)}"


def _speed(told: Measurement, seen: Measurement) -> str | None:
    interval, now = told.step_time_interval_s, seen.step_time_s
    if interval is None or now is None or not _is_slower(told.step_times_s, seen.step_times_s):
        return None
    return (
        f"the median step took {format_seconds(now)}, where the report has "
        f"{format_seconds(interval[0])} to {format_seconds(interval[1])}"
    )


def _drift(seen: Measurement) -> str | None:
    """A device that throttles, or an allocator that frays, shows late."""
    quarter = len(seen.step_times_s) // QUARTER
    first, last = seen.step_times_s[:quarter], seen.step_times_s[-quarter:]
    if not _is_slower(first, last):
        return None
    slowed = [format_seconds(statistics.median(times)) for times in (first, last)]
    return f"steps slowed from {slowed[0]} to {slowed[1]} on the way"


def _is_slower(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether the median rose by more than the interval and the scatter of the first explain."""
    middle = statistics.median(before)
    upper = median_interval(before)[1]
    scatter = math.sqrt(statistics.fmean(math.log(seconds / middle) ** 2 for seconds in before))
    return statistics.median(now) > upper * (1 + max(SPEED_TOLERANCE, scatter))


def _loss(told: Measurement, seen: Measurement) -> str | None:
    """Trained on one batch for longer, the loss has no reason to end above where it was."""
    if told.loss is None or seen.loss is None or len(seen.step_times_s) < len(told.step_times_s):
        return None
    if seen.loss <= told.loss + LOSS_TOLERANCE * abs(told.loss):
        return None
    return f"the loss rose from {told.loss:.4g} to {seen.loss:.4g}"


def _check_same(here: Survey, there: Record) -> None:
    if here.fingerprint == there.workload["fingerprint"]:
        return
    was, now = there.environment, here.environment
    compared = {
        "torch": (was["torch"], now.torch),
        "device": (was["gpu"] or was["device"], now.gpu or now.device),
        "parameters": (there.workload["parameters"], here.parameters),
        "samples": (_shapes(there.workload["sample_shapes"]), _shapes(here.sample_shapes)),
    }
    differs = [
        f"{name} {then} there, {has} here" for name, (then, has) in compared.items() if then != has
    ]
    raise InvalidRequest(
        f"the report is of another workload: {'; '.join(differs) or _NOT_SEEN}. Search again, or "
        "soak what was searched where the report was made"
    )


def _shapes(sample_shapes: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {shape}" for name, shape in sample_shapes.items())


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
