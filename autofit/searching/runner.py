"""Whoever runs the plans of a search: one device, several of them, or the machines of an executor.

Promises: the one process that searches submits every job and hears how each ended.

In: jobs, as many at once as there are lanes. Out: each job with the result of its probe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass

from autofit.plan import Plan
from autofit.probing.messages import (
    QUIET_S,
    STILL_RUNNING,
    OnStage,
    ProbeRequest,
    ProbeResult,
    ignore_stage,
)
from autofit.probing.prober import SupportsProbing
from autofit.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Job:
    """A plan to run, and in which worker.

    Attributes:
        request: of the plan.
        needs_fresh_worker: whether it runs in a fresh worker.
        runs_alone: whether that worker runs nothing before or after it.
        is_replicate: whether it is one of a plan's replicates: each of them runs in a worker that
            has run replicates alone, and none of the same plan.
    """

    request: ProbeRequest
    needs_fresh_worker: bool = False
    runs_alone: bool = False
    is_replicate: bool = False


class Bench:
    """A prober, and what its present worker has run.

    Args:
        prober: used by one thread at a time.
    """

    def __init__(self, prober: SupportsProbing) -> None:
        self._prober = prober
        self._replicated: set[Plan] = set()  # by the present worker, which ran nothing else

    def run(self, job: Job) -> ProbeResult:
        """Run a job in a worker of the kind that it asks for."""
        plan = job.request.plan
        is_used = job.is_replicate and (not self._replicated or plan in self._replicated)
        if job.needs_fresh_worker or job.runs_alone or is_used:
            self._renew()
        result = self._prober.probe(job.request)
        if job.runs_alone:
            self._renew()
        elif job.is_replicate:
            self._replicated.add(plan)
        else:
            self._replicated.clear()
        return result

    def _renew(self) -> None:
        self._prober.renew()
        self._replicated.clear()


@dataclass(frozen=True, eq=False)
class Lane:
    """One place where a job can run.

    Attributes:
        run: runs a job there.
        executor: takes it there; None: it runs in the thread that waits for it.
        stop: ends what runs there, so that its future ends soon.
    """

    run: Callable[[Job], ProbeResult]
    executor: Executor | None = None
    stop: Callable[[], object] = lambda: None


class Runner:
    """Runs jobs on lanes, one on each at a time.

    Args:
        prober: of the device that the search looked at; its facts hold for all lanes.
        lanes: where jobs run; None: on the prober, in the caller's thread.
        on_stage: called with a line of words where nothing has ended for `QUIET_S`.
    """

    def __init__(
        self,
        prober: SupportsProbing,
        lanes: Sequence[Lane] | None = None,
        on_stage: OnStage = ignore_stage,
    ) -> None:
        self._prober, self._on_stage = prober, on_stage
        self._lanes = lanes or [Lane(Bench(prober).run)]
        self._in_flight: dict[Future[ProbeResult], tuple[Job, Lane]] = {}
        self._replicates: dict[Lane, Counter[Plan]] = {lane: Counter() for lane in self._lanes}

    @property
    def slots(self) -> int:
        """How many jobs can be in flight."""
        return len(self._lanes)

    @property
    def strategies(self) -> Sequence[Strategy]:
        """The strategies that can apply settings of a plan."""
        return self._prober.strategies

    @property
    def start_s(self) -> float:
        """Seconds that a fresh worker takes to start."""
        return self._prober.start_s

    def submit(self, job: Job) -> None:
        """Run a job on a free lane; a replicate on the one that ran its plan least often."""
        busy = {lane for _, lane in self._in_flight.values()}
        free = [lane for lane in self._lanes if lane not in busy]
        lane = min(free, key=lambda lane: self._replicates[lane][job.request.plan])
        self._replicates[lane][job.request.plan] += job.is_replicate
        future = Future() if lane.executor is None else lane.executor.submit(lane.run, job)
        self._in_flight[future] = job, lane

    def next_ended(self) -> tuple[Job, Future[ProbeResult]]:
        """Wait for a job in flight to end; return it with its ended future, the oldest first."""
        for future, (job, lane) in self._in_flight.items():
            if lane.executor is None:
                try:
                    future.set_result(lane.run(job))
                except Exception as error:
                    future.set_exception(error)
        while True:
            ended, _ = wait(self._in_flight, QUIET_S, FIRST_COMPLETED)
            if ended:
                future = next(each for each in self._in_flight if each in ended)
                return self._in_flight.pop(future)[0], future
            plans = ", ".join(str(job.request.plan) for job, _ in self._in_flight.values())
            self._on_stage(f"{STILL_RUNNING} {plans}")

    def cancel(self) -> None:
        """End what is in flight; its results are lost."""
        for future, (_, lane) in self._in_flight.items():
            if not future.cancel():
                lane.stop()
        self._in_flight.clear()
