"""Whoever runs the plans of a search: one device, several of them, or the machines of an executor.

Promises: the one process that searches submits every job and hears how each ended. The devices are
alike, so that their times can be compared, and each may be filled as far as the one with the least
memory. A thread of its own uses each prober, so that they run side by side.

In: jobs, as many at once as there are places. Out: each job with the result of its probe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autofit.devices.request import device_names
from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.probing.prober import Prober, SupportsProbing
from autofit.probing.requests import (
    QUIET_S,
    STILL_RUNNING,
    OnStage,
    ProbeRequest,
    ProbeResult,
    ignore_stage,
)
from autofit.probing.session import Session
from autofit.searching.options import SearchOptions
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


class Place:
    """One place where a job can run: a prober, its thread, and what its worker has run.

    Args:
        prober: of the place's device.
        thread: that runs the jobs, and has opened the prober; None: the one that waits for them.
    """

    def __init__(self, prober: SupportsProbing, thread: Executor | None = None) -> None:
        self.prober, self.thread = prober, thread
        self.replicates: Counter[Plan] = Counter()
        self._replicated: set[Plan] = set()  # by the present worker, which ran nothing else

    def run(self, job: Job) -> ProbeResult:
        """Run a job in a worker of the kind that it asks for."""
        plan = job.request.plan
        is_used = job.is_replicate and (not self._replicated or plan in self._replicated)
        if job.needs_fresh_worker or job.runs_alone or is_used:
            self._renew()
        result = self.prober.probe(job.request)
        if job.runs_alone:
            self._renew()
        elif job.is_replicate:
            self._replicated.add(plan)
        else:
            self._replicated.clear()
        return result

    def _renew(self) -> None:
        self.prober.renew()
        self._replicated.clear()


class Runner:
    """Runs jobs at places, one at each at a time.

    Args:
        places: where jobs run; the facts of the first one's prober hold for all.
        on_stage: called with a line of words where nothing has ended for `QUIET_S`.
    """

    def __init__(self, places: Sequence[Place], on_stage: OnStage = ignore_stage) -> None:
        self._places, self._prober, self._on_stage = places, places[0].prober, on_stage
        self._in_flight: dict[Future[ProbeResult], tuple[Job, Place]] = {}

    @property
    def slots(self) -> int:
        """How many jobs can be in flight."""
        return len(self._places)

    @property
    def strategies(self) -> Sequence[Strategy]:
        """The strategies that can apply settings of a plan."""
        return self._prober.strategies

    @property
    def start_s(self) -> float:
        """Seconds that a fresh worker takes to start."""
        return self._prober.start_s

    def submit(self, job: Job) -> None:
        """Run a job at a free place; a replicate at the one that ran its plan least often."""
        busy = {place for _, place in self._in_flight.values()}
        free = [place for place in self._places if place not in busy]
        place = min(free, key=lambda place: place.replicates[job.request.plan])
        place.replicates[job.request.plan] += job.is_replicate
        future = Future() if place.thread is None else place.thread.submit(place.run, job)
        self._in_flight[future] = job, place

    def next_ended(self) -> tuple[Job, Future[ProbeResult]]:
        """Wait for a job in flight to end; return it with its ended future, the oldest first."""
        for future, (job, place) in self._in_flight.items():
            if place.thread is None:
                try:
                    future.set_result(place.run(job))
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
        for future, (_, place) in self._in_flight.items():
            if not future.cancel():
                place.prober.renew()
        self._in_flight.clear()


@dataclass(frozen=True)
class Places:
    """Where plans run.

    Attributes:
        devices: the name of each place's device; None: cuda where there is one.
        executor: in whose processes the places are; None: on this machine.
        threads: that torch computes with in a worker; None: as many as here.
    """

    devices: Sequence[str | None]
    executor: Executor | None = None
    threads: int | None = None

    @classmethod
    def asked(cls, device: Any, options: SearchOptions, *, ranks: int) -> Places:
        """Return the places that a search's arguments mean.

        Raises:
            InvalidArgument: they name several devices and what can use only one.
        """
        devices = device_names(device)
        if options.executor is not None:
            if len(devices) > 1:
                raise InvalidArgument(
                    f"device names {len(devices)} devices, but each process of the executor uses "
                    "one: name the device that they all use"
                )
            devices = devices * options.workers
        is_one = len(devices) == 1 and options.executor is None
        if not is_one and ranks > 1:
            raise InvalidArgument(
                f"{ranks} ranks train one model together and use all devices: leave the executor "
                "out, and name one kind of device"
            )
        share_cores = options.executor is None and len(devices) > 1 and devices[0] == "cpu"
        threads = max(1, torch.get_num_threads() // len(devices)) if share_cores else None
        return cls(devices, options.executor, threads)


@contextmanager
def open_runner(
    prober: Prober, places: Places, open_at: Callable[[int], Prober], on_stage: OnStage
) -> Iterator[Runner]:
    """Open a prober at each further place, and yield the runner of all.

    Args:
        prober: of the first place; its budget becomes the least of all.
        places: all of them.
        open_at: number of a place -> a prober there.
        on_stage: see `Runner`.

    Raises:
        InvalidArgument: the devices differ.
        Exception: as of `open_at`.
    """
    others = places.devices[1:]
    if not others:
        yield Runner([Place(prober)], on_stage)
        return
    on_stage(f"starting workers on {len(others)} more")
    with ExitStack() as held:
        threads = [held.enter_context(ThreadPoolExecutor(1)) for _ in places.devices]
        opening = [thread.submit(open_at, at) for at, thread in enumerate(threads) if at]
        probers = [prober, *_all_opened(opening, held)]
        _check_alike(probers, places.devices)
        prober.vram_budget_bytes = min(each.vram_budget_bytes for each in probers)
        yield Runner(list(map(Place, probers, threads)), on_stage)


def _all_opened(opening: Sequence[Future[Prober]], held: ExitStack) -> list[Prober]:
    """Return the probers once all are open; those beside one that failed are closed too."""
    wait(opening)
    for future in opening:
        if future.exception() is None:
            held.enter_context(future.result())
    return [future.result() for future in opening]


def _check_alike(probers: Sequence[Prober], names: Sequence[str | None]) -> None:
    facts = [each.run(_facts) for each in probers]
    for name, own in zip(names, facts, strict=True):
        if own != facts[0]:
            raise InvalidArgument(
                f"device {name or 'of a worker'} is {own} and the first one is {facts[0]}: times "
                "of unlike devices cannot be compared, so search on devices of one kind"
            )


def _facts(session: Session) -> str:
    """Return what decides how fast a device is, in words."""
    found = session.builder.device.environment
    return f"{found.gpu or found.device}, driver {found.driver}, torch {found.torch}"
