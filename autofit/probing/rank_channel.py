"""The channel to several workers that train one model together, one for each rank.

This process owns all of them: it starts them, asks each through its own pipes, and serves the store
through which they form a process group. A thread for each rank waits for its answers.

Promises: whatever happens on any rank is one reply. The first fault ends the wait: the other ranks
have `GRACE_S` to answer by themselves, then every worker is replaced, since no rank that waits in a
collective can be freed otherwise. So no backend's way of giving up is relied on.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch

from autofit.errors import DeviceUnavailable, InvalidArgument, SearchTimedOut, WorkerFailed
from autofit.probing.agreement import Answer, agree, is_fault
from autofit.probing.requests import (
    Call,
    Deadline,
    DeviceFacts,
    NoReply,
    OnStage,
    ProbeRequest,
    Reply,
    Request,
    Workplace,
    ignore_stage,
)
from autofit.probing.worker_channel import START_TIMEOUT_S, WorkerChannel
from autofit.strategy import Strategy, World
from autofit.training.ranks import join
from autofit.training.workload import Workload
from autofit.units import counted

# After the first fault, the time in which the other ranks may still answer by themselves.
GRACE_S = 0.5
# After a deadline, for a channel to find out where its worker hangs, and to say so.
_SLACK_S = 5.0
# Between two looks for a stage to tell of.
_POLL_S = 0.02
_HOST = "127.0.0.1"
# For a connection within this machine, which takes less than a millisecond. Torch's store lets
# signals wait meanwhile, and its own default is five minutes.
_CONNECT_S = 5.0
# Ranks beyond the machine's cores and GPUs only take turns; so many may, for a trial.
_MAX_TAKING_TURNS = 64
_Result = TypeVar("_Result")


class RankChannel:
    """A channel to a worker for each rank; implements `autofit.probing.requests.Channel`.

    Args:
        size: how many ranks.
        workload, strategies, seed: of every rank, see `WorkerChannel`.
        device: "cuda": each rank takes the GPU of its number; "cpu"; None: cuda where there is one.
        threads: that torch computes with on each rank; None: as here, or on the CPU a share.
        ends_at: when the search ends, in the seconds of `time.monotonic`.

    Raises:
        InvalidArgument: the workload cannot be pickled, the device is one GPU, or a machine as this
            one has no use for so many ranks.
        WorkerFailed: there is no room for the workload's file, or ranks could not meet.
        SearchTimedOut: the search ended first.
    """

    def __init__(
        self,
        size: int,
        workload: Workload,
        strategies: Sequence[Strategy] = (),
        *,
        device: str | None = None,
        seed: int = 0,
        threads: int | None = None,
        ends_at: float = math.inf,
    ) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no name

        _check_number(size)
        _check_host()
        if device_of_rank(device, World(0, 0, size)) == "cpu":  # which they share
            threads = threads or max(1, torch.get_num_threads() // size)
        self._generation = 0
        self._facts: DeviceFacts | None = None
        self._pending: list[Future[Reply]] = []
        self._channels: list[WorkerChannel] = []
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        try:
            for rank in range(size):
                if time.monotonic() > ends_at:
                    raise SearchTimedOut("the time of the search is over")
                world = World(rank, rank, size)
                name = device_of_rank(device, world)
                channel = WorkerChannel(
                    workload, strategies, device=name, seed=seed, world=world, threads=threads
                )
                self._channels.append(channel)
            with socket.create_server((_HOST, 0)) as server:  # torch's own listens to all the world
                port, listening = server.getsockname()[1], server.detach()
            self._store = TCPStore(
                _HOST,
                port,
                None,
                True,
                timedelta(seconds=_CONNECT_S),
                wait_for_workers=False,
                master_listen_fd=listening,
            )
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of rank 0's worker; None where there are no workers now."""
        return None if self._facts is None else self._channels[0].pid

    def open(self, ends_at: float = math.inf) -> DeviceFacts:
        """Have every rank's worker run, hold its device and be one of a process group."""
        if self._facts is None:
            opening = self._on_each(lambda channel: channel.open(ends_at))
            wait(opening)
            opened = [self._opened(rank, future) for rank, future in enumerate(opening)]
            budget = min(facts.total_bytes for facts in opened)
            self._join_group(budget, ends_at)
            free_bytes = min(facts.free_bytes for facts in opened)
            self._facts = DeviceFacts(budget, free_bytes, opened[0].exclusive_key)
        return self._facts

    def _join_group(self, budget: int, ends_at: float) -> None:
        """Make the workers one process group, of a name that no earlier workers had."""
        self._generation += 1
        name = f"generation{self._generation}"
        join_it = Call(partial(_join, host=_HOST, port=self._store.port, name=name), budget)
        deadline = Deadline.after(START_TIMEOUT_S, ends_at)
        try:
            self.call(join_it, deadline, ignore_stage).value_or_raise()
        except SearchTimedOut:
            raise
        except Exception as error:
            self.drop()
            why = error.detail if isinstance(error, NoReply) else error
            raise WorkerFailed(f"the ranks' workers could not join: {why}") from None

    def call(self, request: Request, deadline: Deadline, on_stage: OnStage) -> Reply:
        """Ask every rank, and return what their answers come to; after a fault none has a worker.

        The value of a call is rank 0's.
        """
        stages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._pending = self._on_each(lambda channel: channel.call(request, deadline, stages.put))
        try:
            self._await(deadline, stages, on_stage)
            answers = [_answer(future) for future in self._pending]
        except BaseException:  # Ctrl-C: a rank may answer later, to nobody
            self.drop()
            raise
        if any(is_fault(each) or (isinstance(each, Reply) and each.spent) for each in answers):
            self.drop()
        return agree(answers, is_probe=isinstance(request, ProbeRequest))

    def drop(self) -> None:
        """End every rank's worker; `open` starts others."""
        self._facts = None
        if all(channel.pid is None for channel in self._channels):
            return
        for channel in self._channels:
            channel.drop()
        wait(self._pending)  # whose workers have ended

    def close(self) -> None:
        """End all workers, and let the workload's files go."""
        self._facts = None
        for channel in self._channels:
            channel.close()
        for thread in self._threads:
            thread.shutdown()
        for channel in self._channels:  # what a thread started meanwhile
            channel.close()

    def _on_each(self, do: Callable[[WorkerChannel], _Result]) -> list[Future[_Result]]:
        return [
            thread.submit(do, channel)
            for thread, channel in zip(self._threads, self._channels, strict=True)
        ]

    def _await(self, deadline: Deadline, stages: queue.SimpleQueue[str], on_stage: OnStage) -> None:
        """Wait for every rank, or until `GRACE_S` after the first fault."""
        first_fault: float | None = None
        while any(not future.done() for future in self._pending):
            wait(self._pending, _POLL_S)
            while not stages.empty():
                on_stage(stages.get())
            now = time.monotonic()
            answers = [_answer(future) for future in self._pending if future.done()]
            if first_fault is None and any(map(is_fault, answers)):
                first_fault = now
            is_late = first_fault is not None and now - first_fault > GRACE_S
            if is_late or now > deadline.at + _SLACK_S:
                break

    def _opened(self, rank: int, opening: Future[DeviceFacts]) -> DeviceFacts:
        error = opening.exception()
        if error is None:
            return opening.result()
        self.drop()
        if isinstance(error, DeviceUnavailable | WorkerFailed):
            raise type(error)(f"rank {rank}: {error}") from error
        raise error


def device_of_rank(asked: str | None, world: World) -> str | None:
    """Return the device of a rank: the GPU with its local rank, or the host.

    Raises:
        InvalidArgument: one GPU is asked for, and there are several ranks.
    """
    from torch.cuda import device_count

    name = None if asked is None else str(asked)
    if name is not None and name.startswith("cuda:"):
        raise InvalidArgument(
            f"device={name!r} names one GPU, and there are {world.size} ranks: give cuda, and each "
            "rank takes the GPU of its local rank"
        )
    if name == "cpu" or (name is None and not device_count()):
        return "cpu"
    return f"cuda:{world.local_rank}"


def _check_number(ranks: int) -> None:
    """Refuse more ranks than a machine can run side by side, as a typo would ask for.

    Raises:
        InvalidArgument: there are more than its cores and GPUs, and more than take turns.
    """
    from torch.cuda import device_count

    most = max(_MAX_TAKING_TURNS, os.cpu_count() or 1, device_count())
    if ranks > most:
        raise InvalidArgument(
            f"ranks={ranks}: each rank is a process on this machine, which has "
            f"{counted(os.cpu_count() or 1, 'core')} and {counted(device_count(), 'GPU')}: give at "
            f"most {most}. predict and check take any number of ranks (--ranks)"
        )


def _check_host() -> None:
    """Refuse if processes cannot reach one another: torch's store would try for minutes.

    Raises:
        WorkerFailed: it is so, as in a sandbox without a loopback device.
    """
    try:
        with (
            socket.create_server((_HOST, 0)) as server,
            socket.create_connection(server.getsockname(), _CONNECT_S),
        ):
            pass
    except OSError as error:
        raise WorkerFailed(
            f"ranks meet at {_HOST}, which this process cannot reach ({error.strerror or error}): "
            "bring the loopback device up (ip link set lo up), or search with one rank"
        ) from error


def _join(session: Workplace, host: str, port: int, name: str) -> None:
    """Join the process group of this generation of workers."""
    join(session.builder.world, session.builder.device.torch_device, host, port, name)


def _answer(pending: Future[Reply]) -> Answer:
    """Return the reply of a rank, or what its channel raised instead; None: there is none yet.

    Raises:
        SearchTimedOut: the deadline was the search's.
    """
    if not pending.done():
        return None
    try:
        return pending.result()
    except NoReply as lost:
        return lost
    except SearchTimedOut:
        raise
    except Exception as error:
        return Reply(exception=error, spent=True)
