"""The seam between a search and whatever runs its plans.

A search knows a prober and nothing behind it: a worker process with a GPU, the user's own
process, or a simulated device (`autofit.testing.SimulatedProber`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from autofit.errors import WorkloadFailed
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan

if TYPE_CHECKING:
    from autofit.equivalence.gradients import Comparison
    from autofit.probing.survey import Survey
    from autofit.strategy import Strategy


@dataclass(frozen=True)
class Target:
    """Where and under which conditions plans run.

    Attributes:
        device: "cuda", "cuda:1" or "cpu"; None: cuda where there is one.
        vram_budget: "24GiB", bytes, or a fraction of the device; None: the free memory, less a
            margin.
        seed: of everything random.
        isolation: "process" or "inprocess".
    """

    device: str | None = None
    vram_budget: str | float | None = None
    seed: int = 0
    isolation: str = "process"


@dataclass(frozen=True)
class ProbeRequest:
    """One plan to run, and how long it is worth looking at.

    Attributes:
        resolved: the plan to run.
        incumbent_samples_per_second: the rate to beat; timed steps stop as soon as the plan is
            seen to be slower. None: nothing to beat yet.
        full_accumulation: run every micro-batch of the optimizer step (a confirmation does);
            otherwise two stand for all of them, and the times are scaled.
        expected_seconds: what the probe is expected to take; a hang is told from it. None: unknown.
        steps: time at least so many optimizer steps, however early it is seen to be slower.
    """

    resolved: ResolvedPlan
    incumbent_samples_per_second: float | None = None
    full_accumulation: bool = False
    expected_seconds: float | None = None
    steps: int | None = None

    @property
    def plan(self) -> Plan:
        """The plan to run, without payloads and strategies."""
        return self.resolved.plan


class Prober(Protocol):
    """Something that runs a plan and says what happened.

    Raises (any of its methods that need a worker or the device):
        WorkerFailed: no worker can be started, or it ended or hung amid what is no probe.
        DeviceUnavailable: the device is gone, or was left beyond use in this very process.
    """

    @property
    def vram_budget_bytes(self) -> int:
        """The most that peak reserved plus non-torch bytes may come to."""

    @property
    def strategies(self) -> Sequence[Strategy]:
        """The strategies that can apply settings of a plan here."""

    def probe(self, request: ProbeRequest) -> Measurement:
        """Run the plan; every way in which the plan can end is an outcome, not an exception."""

    def user_exception(self) -> BaseException | None:
        """The exception behind the last `user_error`, as the user's code raised it."""

    def renew(self) -> None:
        """Have the next probe run in a fresh worker, where the prober has workers."""

    def close(self) -> None:
        """Give everything back; probing after that is an error."""


class WorkloadProber(Prober, Protocol):
    """A prober that holds the user's workload; leaving it as a context closes it."""

    def survey(self) -> Survey:
        """The facts of the workload on the device; looked up once.

        Raises:
            InvalidRequest: the workload's functions make no model, optimizer or batch, or a
                strategy breaks the contract of plug-ins.
            Exception: what the user's code raised where no trial forward can report it.
        """

    def rebudget(self, vram_budget_bytes: int) -> None:
        """Hold the following probes to another budget."""

    def compare(self, first: ResolvedPlan, second: ResolvedPlan, samples: int) -> Comparison:
        """Loss and gradients of two plans on the same samples.

        Raises:
            InvalidRequest: the workload has a train_step, whose gradients cannot be looked at.
            Exception: whatever the model or the device raises.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def users_error(prober: Prober, measurement: Measurement) -> BaseException | None:
    """What the user's code raised in that probe; None where its outcome is another."""
    if measurement.outcome is not Outcome.USER_ERROR:
        return None
    return prober.user_exception() or WorkloadFailed(measurement.detail or "the workload failed")


# How many optimizer steps of a plan are timed: the one rule, for real and simulated devices alike.
#
# Steps go on until the 95 % interval of their median is within 1 % of it on either side, or lies
# wholly above the step time that the incumbent's rate allows; from 3 steps on, and for at most 30
# steps or 5 s. A plan that looks faster than the incumbent is not cut short: it may be the answer,
# and its speed decides what is tried next.

FEWEST_TIMED_STEPS = 3
MOST_TIMED_STEPS = 30
MOST_TIMED_SECONDS = 5.0
CLOSE_ENOUGH = 0.01
"""Half the width of the interval, as a share of the median."""


def enough_steps(step_times_s: Sequence[float], request: ProbeRequest) -> bool:
    """Whether further timed steps would tell nothing that matters.

    Args:
        step_times_s: seconds of each whole optimizer step so far.
        request: the plan, the rate to beat, and a number of steps that overrules all else.
    """
    count = len(step_times_s)
    if request.steps is not None:
        return count >= request.steps
    if count < FEWEST_TIMED_STEPS:
        return False
    if count >= MOST_TIMED_STEPS or sum(step_times_s) >= MOST_TIMED_SECONDS:
        return True
    seen = Measurement(Outcome.OK, step_times_s=step_times_s)
    interval, middle = seen.step_time_interval_s, seen.step_time_s
    assert interval is not None  # there are step times
    assert middle is not None
    fastest, slowest = interval
    if slowest - fastest <= 2 * CLOSE_ENOUGH * middle:
        return True
    if request.incumbent_samples_per_second is None:
        return False
    time_to_beat = request.plan.samples_per_step / request.incumbent_samples_per_second
    return fastest > time_to_beat
