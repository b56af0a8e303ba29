"""Whoever runs the plans of a search: one device, several of them, or the machines of an executor.

A search chooses a plan, runs it and stores its trial, one after the other; `Runner` runs it where
its result is waited for. `ParallelRunner` takes as many jobs as it has places, and the search
chooses beside those pending, of which it believes what is expected of them.

Promises: the one process that searches submits every job and hears how each ended. The devices are
alike, so that their times can be compared, and each may be filled as far as the one with the least
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optuna
import torch

from autofit.devices.request import device_names
from autofit.errors import InvalidArgument
from autofit.measurement import TrialKind
from autofit.plan import Plan
from autofit.planning.planner import Proposal
from autofit.probing.prober import Prober, SupportsProbing
from autofit.probing.requests import (
    QUIET_S,
    STILL_RUNNING,
    OnStage,
    ProbeRequest,
    Reply,
)
from autofit.searching.options import SearchOptions
from autofit.strategy import Strategy

if TYPE_CHECKING:
    from autofit.probing.session import Session


@dataclass(frozen=True, eq=False)
class Job:
    """A plan that runs for a trial.

    Attributes:
        asked: the Optuna trial that it will finish.
        kind: why it runs. Each replicate of a plan, a confirmation, runs in a worker that has run
            replicates alone, and none of the same plan.
        proposal: the plan, and what is expected of its probe.
        runs_alone: whether its worker runs nothing before or after it.
        is_repeated: whether it ended before, by what may be a transient failure: then it runs in a
            fresh worker.
    """

    asked: optuna.Trial
    kind: TrialKind
    proposal: Proposal
    runs_alone: bool = False
    is_repeated: bool = False

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self.proposal.plan


class Runner:
    """Runs one job at a time, where its result is waited for.

    Attributes:
        prober: of the device; it is not closed.
        pending: the jobs whose results were not taken yet, each with its request.
    """

    slots = 1
    """How many jobs can be pending."""

    def __init__(self, prober: SupportsProbing) -> None:
        self.prober = prober
        self.pending: dict[Job, ProbeRequest] = {}
        self._replicated: set[Plan] = set()  # by the present worker, which ran nothing else

    @property
    def strategies(self) -> Sequence[Strategy]:
        """The strategies that can apply settings of a plan."""
        return self.prober.strategies

    @property
    def start_s(self) -> float:
        """Seconds that a fresh worker takes to start."""
        return self.prober.start_s

    def submit(self, job: Job, request: ProbeRequest) -> None:
        """Take a job, which fewer than `slots` may precede."""
        self.pending[job] = request

    def next_ended(self) -> tuple[Job, Reply]:
        """Wait for a pending job to end; raise what its prober raised."""
        job, request = next(iter(self.pending.items()))
        result = self.run(job, request)
        del self.pending[job]
        return job, result

    def cancel(self) -> None:
        """End what is pending, whose results are lost."""
        self.pending.clear()

    def run(self, job: Job, request: ProbeRequest) -> Reply:
        """Run a job in a worker of the kind that it asks for."""
        is_replicate = job.kind is TrialKind.CONFIRMATION
        is_used = is_replicate and (not self._replicated or job.plan in self._replicated)
        if job.is_repeated or job.runs_alone or is_used:
            self._renew()
        result = self.prober.probe(request)
        if job.runs_alone:
            self._renew()
        elif is_replicate:
            self._replicated.add(job.plan)
        else:
            self._replicated.clear()
        return result

    def _renew(self) -> None:
        self.prober.renew()
        self._replicated.clear()


class ParallelRunner(Runner):
    """Runs jobs at several places at once, each in a thread of its own.

    Args:
        places: each runs one job at a time, in its thread; the facts of the first hold for all.
        on_stage: called with a line of words where nothing has ended for `QUIET_S`.
    """

    def __init__(self, places: Mapping[Runner, Executor], on_stage: OnStage) -> None:
        super().__init__(next(iter(places)).prober)
        self.slots = len(places)
        self._threads, self._on_stage = places, on_stage
        self._running: dict[Future[Reply], tuple[Job, Runner]] = {}
        self._replicates: Counter[tuple[Runner, Plan]] = Counter()

    def submit(self, job: Job, request: ProbeRequest) -> None:
        """Run a job at a free place; a replicate at the one that ran its plan least often."""
        super().submit(job, request)
        busy = {place for _, place in self._running.values()}
        free = [place for place in self._threads if place not in busy]
        place = min(free, key=lambda place: self._replicates[place, job.plan])
        self._replicates[place, job.plan] += job.kind is TrialKind.CONFIRMATION
        self._running[self._threads[place].submit(place.run, job, request)] = job, place

    def next_ended(self) -> tuple[Job, Reply]:
        """Wait for a pending job to end; of several the oldest is first."""
        while not (ended := wait(self._running, QUIET_S, FIRST_COMPLETED).done):
            plans = ", ".join(str(job.plan) for job in self.pending)
            self._on_stage(f"{STILL_RUNNING} {plans}")
        future = next(each for each in self._running if each in ended)
        (job, _), result = self._running.pop(future), future.result()
        del self.pending[job]
        return job, result

    def cancel(self) -> None:
        """End what is pending, and the workers that run it."""
        for future, (_, place) in self._running.items():
            if not future.cancel():
                place.prober.renew()
        self._running.clear()
        super().cancel()


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
        yield Runner(prober)
        return
    on_stage(f"starting workers on {len(others)} more")
    with ExitStack() as held:
        threads = [held.enter_context(ThreadPoolExecutor(1)) for _ in places.devices]
        opening = [thread.submit(open_at, at) for at, thread in enumerate(threads) if at]
        probers = [prober, *_all_opened(opening, held)]
        _check_alike(probers, places.devices)
        prober.vram_budget_bytes = min(each.vram_budget_bytes for each in probers)
        yield ParallelRunner(dict(zip(map(Runner, probers), threads, strict=True)), on_stage)


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
                "of different devices cannot be compared, so search on devices of one kind"
            )


def _facts(session: Session) -> str:
    """Return what decides how fast a device is, in words."""
    found = session.builder.device.environment
    return f"{found.gpu or found.device}, driver {found.driver}, torch {found.torch}"
