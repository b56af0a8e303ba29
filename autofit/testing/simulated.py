"""A prober of a simulated device, to try a planner or a sampler without hardware.

The device is two functions, the bytes a plan holds and the seconds its optimizer step takes, plus
noise. A measurement depends only on the seed, the plan and how often that plan was probed before,
and where others slow the device down, on the time that earlier probes took; so the same search
gives the same result.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from autofit.errors import InvalidArgument
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan
from autofit.probing.measure import enough_steps
from autofit.probing.requests import ProbeRequest, Reply
from autofit.strategy import Strategy

PlanFunction: TypeAlias = Callable[[Plan], float]

SET_UP_S = 1.0
"""Seconds of a probe before its timed steps, as far as a slowdown of the device goes by."""


class SimulatedProber:
    """Answers probes from formulas.

    Args:
        vram_budget_bytes: a plan that holds more runs out of memory.
        memory: plan -> bytes held at its peak.
        step_time: plan -> seconds of one optimizer step, all its micro-batches included.
        allocated: plan -> bytes in live tensors at its peak; None: all that it holds.
        resident: plan -> bytes in live tensors as the optimizer begins to update; None: unknown.
        gradients: plan -> bytes of that which gradients take; None: unknown.
        memory_noise: standard deviation of the log of the bytes held, from probe to probe.
        time_noise: standard deviation of the log of step times from probe to probe, or plan -> it:
            all steps of a probe are so much slower or faster, as on a machine that drifts.
        step_noise: standard deviation of the log of step times from step to step, or plan -> it.
        slices: the share of steps that another process interrupts, and for how many seconds; each
            interruption is up to a fifth shorter or longer.
        slowdown: seconds since the first probe -> the factor by which all steps take longer then,
            as beside other processes; None: never.
        size_limit: plan -> the largest micro-batch that its kernels support; None: unlimited.
        fault: plan -> the measurement of its probe; None: as the formulas give. Called at each
            attempt, so it can tell a transient failure, which does not come again, from a limit.
        seed: of all noise.

    Attributes:
        vram_budget_bytes: as given.
        probed: the requests so far, in order.
        renewals: how often a fresh worker was requested.
    """

    strategies: Sequence[Strategy] = ()
    """Empty: plans go to the formulas as they are."""

    start_s = 0.0

    def __init__(
        self,
        vram_budget_bytes: int,
        memory: PlanFunction,
        step_time: PlanFunction,
        *,
        allocated: PlanFunction | None = None,
        resident: PlanFunction | None = None,
        gradients: PlanFunction | None = None,
        memory_noise: float = 0.0,
        time_noise: PlanFunction | float = 0.0,
        step_noise: PlanFunction | float = 0.0,
        slices: tuple[float, float] = (0.0, 0.0),
        slowdown: Callable[[float], float] | None = None,
        size_limit: Callable[[Plan], int | None] | None = None,
        fault: Callable[[Plan], Measurement | None] | None = None,
        seed: int = 0,
    ) -> None:
        if vram_budget_bytes <= 0:
            raise InvalidArgument(f"vram_budget_bytes must be above zero, got {vram_budget_bytes}")
        self.vram_budget_bytes = vram_budget_bytes
        self._memory, self._step_time = memory, step_time
        self._allocated, self._resident, self._gradients = allocated, resident, gradients
        self._memory_noise = memory_noise
        self._time_noise = time_noise if callable(time_noise) else lambda plan: time_noise
        self._step_noise = step_noise if callable(step_noise) else lambda plan: step_noise
        self._slices, self._slowdown, self._now_s = slices, slowdown, 0.0
        self._size_limit = size_limit or (lambda plan: None)
        self._fault = fault or (lambda plan: None)
        self._seed = seed
        self._times_asked: Counter[Plan] = Counter()
        self._closed = False
        self.probed: list[ProbeRequest] = []
        self.renewals = 0

    def probe(self, request: ProbeRequest) -> Reply:
        """Return the measurement of a plan, within the smaller of the two budgets.

        Raises:
            InvalidArgument: the prober is closed.
        """
        if self._closed:
            raise InvalidArgument("this prober is closed: make another one")
        self.probed.append(request)
        return Reply(self._measurement(request))

    def _measurement(self, request: ProbeRequest) -> Measurement:
        plan = request.plan
        budget = min(self.vram_budget_bytes, request.vram_budget_bytes or self.vram_budget_bytes)
        noise = random.Random(f"{self._seed}/{plan}/{self._times_asked[plan]}")
        self._times_asked[plan] += 1
        self._now_s += SET_UP_S
        fault = self._fault(plan)
        if fault is not None:
            return fault
        limit = self._size_limit(plan)
        if limit is not None and plan.micro_batch > limit:
            return Measurement(Outcome.SIZE_LIMIT, detail=f"no kernel takes more than {limit}")
        held = math.ceil(self._memory(plan) * math.exp(noise.gauss(0.0, self._memory_noise)))
        if held > budget:
            return Measurement(Outcome.OOM, detail="the simulated budget ran out")
        run, allocated, resident = plan.accumulation_steps, self._allocated, self._resident
        gradients = self._gradients
        return Measurement(
            Outcome.OK,
            step_times_s=self._steps(request, noise),
            peak_allocated_bytes=held if allocated is None else math.floor(allocated(plan)),
            peak_reserved_bytes=held,
            non_torch_bytes=0,
            resident_bytes=None if resident is None else math.floor(resident(plan)),
            gradient_bytes=None if gradients is None else math.floor(gradients(plan)),
            allocator_retries=0,
            micro_batches_run=run if request.full_accumulation else min(2, run),
        )

    def renew(self) -> None:
        """Count the request in `renewals`; there are workers, which take no time to start."""
        self.renewals += 1

    def close(self) -> None:
        """Refuse any later probe."""
        self._closed = True

    def _steps(self, request: ProbeRequest, noise: random.Random) -> list[float]:
        """Return as many step times as a real probe would measure."""
        between = self._time_noise(request.plan)
        middle = self._step_time(request.plan) * math.exp(noise.gauss(0.0, between))
        sigma, (share, slice_s) = self._step_noise(request.plan), self._slices
        times: list[float] = []
        while not enough_steps(times, request):
            taken_s = slice_s * noise.uniform(0.8, 1.2) if noise.random() < share else 0.0
            slower = 1.0 if self._slowdown is None else self._slowdown(self._now_s)
            times.append(slower * middle * math.exp(noise.gauss(0.0, sigma)) + taken_s)
            self._now_s += times[-1]
        return times
