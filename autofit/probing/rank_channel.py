"""The channel to several workers that train one model together, one for each rank.

This process owns all of them: it starts them, asks each through its own pipes, and serves the store
through which they form a process group. A thread for each rank starts its workers, which end with
it, and waits for their answers.

Promises: whatever happens on any rank is one reply. The first fault ends the wait: the other ranks
have `GRACE_S` to answer by themselves, then every worker is replaced, since no rank that waits in a
collective can be freed otherwise. So no backend's way of giving up is relied on.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from autofit.errors import DeviceUnavailable, InvalidRequest, SearchTimedOut, WorkerFailed
from autofit.measurement import Measurement, Outcome
from autofit.probing.agreement import RankReply, agree, gravest
from autofit.probing.faults import fault_of
from autofit.probing.messages import (
    Call,
    Deadline,
    DeviceFacts,
    DeviceFull,
    NoReply,
    OnStage,
    ProbeRequest,
    Reply,
    Request,
    ignore_stage,
    reply_from_dict,
    request_to_dict,
)
from autofit.probing.worker_channel import START_TIMEOUT_S, WorkerChannel, WorkerProcess
from autofit.strategy import Strategy, World
from autofit.training.ranks import join
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from autofit.probing.session import Session

GRACE_S = 0.5
"""After the first fault, the time in which the other ranks may still answer by themselves."""
_SLACK_S = 5.0
"""After a deadline, for a channel to find out where its worker hangs, and to say so."""
_POLL_S = 0.02
"""Between two looks for a stage to tell of."""
_HOST = "127.0.0.1"
_Answer = TypeVar("_Answer")


class SparedChannel(WorkerChannel):
    """A channel to a worker that can be replaced at once: the next one waits, torch imported."""

    _spare: WorkerProcess | None = None
    _spare_environment: Mapping[str, str] | None = None

    def warm(self) -> None:
        """Start the next worker, if none waits; it takes no memory of the device."""
        if self._spare is None:
            self._spare, self._spare_environment = self._start(), self.environment
            self._spare.tell({"warm": True})

    def _next_process(self) -> WorkerProcess:
        if self._spare_environment != self.environment:
            self._end_spare()
        spare, self._spare = self._spare, None
        return spare or self._start()

    def _end_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()

    def close(self) -> None:
        """End both workers, and let the workload's files go."""
        self._end_spare()
        super().close()


class RankChannel:
    """A channel to a worker for each rank; implements `autofit.probing.messages.Channel`.

    Args:
        size: how many ranks.
        workload, strategies, seed: of every rank, see `WorkerChannel`.
        device: "cuda": each rank takes the GPU of its number; "cpu"; None: cuda where there is one.
        threads: that torch computes with on each rank; None: as here, or on the CPU a share.

    Attributes:
        environment: variables that the next workers have besides those of this process.
        seconds_to_agree: from the first fault to the agreement on it, in the last faulty probe.
        seconds_to_replace: to end all ranks' workers, the last time they were.

    Raises:
        InvalidRequest: the workload cannot be pickled, or the device is one GPU.
        WorkerFailed: there is no room for the workload's file.
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
    ) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no name

        if device_of_rank(device, World(0, 0, size)) == "cpu":  # which they share
            threads = threads or max(1, torch.get_num_threads() // size)
        self._strategies = strategies
        self.seconds_to_agree = self.seconds_to_replace = 0.0
        self._generation = 0
        self._facts: DeviceFacts | None = None
        self._asked: list[Future[Reply]] = []
        self._stages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._channels: list[SparedChannel] = []
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        try:
            for rank in range(size):
                world = World(rank, rank, size)
                name = device_of_rank(device, world)
                channel = SparedChannel(
                    workload, strategies, device=name, seed=seed, world=world, threads=threads
                )
                self._channels.append(channel)
            with socket.create_server((_HOST, 0)) as server:  # torch's own listens to all the world
                port, listening = server.getsockname()[1], server.detach()
            self._store = TCPStore(
                _HOST, port, None, True, wait_for_workers=False, master_listen_fd=listening
            )
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that the next workers have besides those of this process."""
        return self._channels[0].environment

    @environment.setter
    def environment(self, variables: Mapping[str, str]) -> None:
        for channel in self._channels:
            channel.environment = variables

    @property
    def pid(self) -> int | None:
        """Process id of rank 0's worker; None where there are no workers now."""
        return None if self._facts is None else self._channels[0].pid

    def open(self, ends_at: float = float("inf")) -> DeviceFacts:
        """Have every rank's worker run, hold its device and be one of a process group."""
        if self._facts is None:
            opening = self._on_each(lambda channel: channel.open(ends_at))
            wait(opening)
            opened = [self._opened(rank, future) for rank, future in enumerate(opening)]
            self._generation += 1
            name = f"generation{self._generation}"
            joins = partial(_join, host=_HOST, port=self._store.port, name=name)
            budget = min(facts.total_bytes for facts in opened)
            deadline = Deadline.after(START_TIMEOUT_S, ends_at)
            reply = self._agreed_call(Call(joins, budget), deadline, ignore_stage)
            if reply.exception is not None:
                self.drop()
                raise WorkerFailed(f"the ranks' workers could not join: {reply.exception}")
            self._facts = DeviceFacts(
                budget, min(facts.free_bytes for facts in opened), opened[0].exclusive_key
            )
        return self._facts

    def call(self, request: Request, deadline: Deadline, on_stage: OnStage) -> Reply:
        """Ask every rank, and return what their answers come to; after a fault none has a worker.

        The value of a call is rank 0's.
        """
        if isinstance(request, ProbeRequest):
            return self._agreed_probe(request, deadline, on_stage)
        return self._agreed_call(request, deadline, on_stage)

    def drop(self) -> None:
        """End every rank's worker, and have each rank start another one that waits."""
        began, self._facts = time.monotonic(), None
        if all(channel.pid is None for channel in self._channels):
            return
        for channel in self._channels:
            channel.drop()
        wait(self._asked)  # whose workers have ended
        self.seconds_to_replace = time.monotonic() - began
        self._on_each(SparedChannel.warm)

    def close(self) -> None:
        """End all workers, and let the workload's files go."""
        self._facts = None
        for channel in self._channels:
            channel.close()
        for thread in self._threads:
            thread.shutdown()
        for channel in self._channels:  # what a thread started meanwhile
            channel.close()

    def _on_each(self, do: Callable[[SparedChannel], _Answer]) -> list[Future[_Answer]]:
        return [
            thread.submit(do, channel)
            for thread, channel in zip(self._threads, self._channels, strict=True)
        ]

    def _agreed_probe(self, request: ProbeRequest, deadline: Deadline, on_stage: OnStage) -> Reply:
        replies = self._ask(request, deadline, on_stage)
        agreed = agree([_of_rank(reply) for reply in replies])
        blamed = None if agreed.failed_rank is None else replies[agreed.failed_rank]
        kept = [reply for reply in replies if isinstance(reply, Reply)]
        if len(kept) < len(replies) or any(_must_go(reply) for reply in kept):
            self.drop()
        is_users = agreed.outcome is Outcome.USER_ERROR
        raised = blamed if is_users and isinstance(blamed, Reply) else Reply()
        return Reply(
            agreed,
            exception=raised.exception,
            traceback=raised.traceback,
            spent=len(kept) < len(replies),
            worth_repeating=any(reply.worth_repeating for reply in kept),
        )

    def _agreed_call(self, call: Call, deadline: Deadline, on_stage: OnStage) -> Reply:
        replies = self._ask(call, deadline, on_stage)
        raised = {
            rank: fault_of(reply.exception)
            for rank, reply in enumerate(replies)
            if isinstance(reply, Reply) and reply.exception is not None
        }
        lost = [
            reply or NoReply(Outcome.TIMEOUT, f"rank {rank} did not answer")
            for rank, reply in enumerate(replies)
            if not isinstance(reply, Reply)
        ]
        if raised or lost:
            self.drop()
        named = [reply for reply in lost if reply.outcome is not Outcome.TIMEOUT]
        if raised and not (named and all(fault.is_consequence for fault in raised.values())):
            decisive = replies[gravest(raised)]
            assert isinstance(decisive, Reply)  # it raised
            return replace(decisive, spent=True)
        if lost:
            raise (named or lost)[0]
        assert isinstance(replies[0], Reply)  # none is lost
        return replies[0]

    def _ask(
        self, request: Request, deadline: Deadline, on_stage: OnStage
    ) -> list[Reply | NoReply | None]:
        """Return every rank's reply, or how its worker was lost; None: nothing was heard of it.

        Raises:
            SearchTimedOut: the deadline was the search's.
        """
        message = request_to_dict(request, self._strategies)

        def exchanged(channel: SparedChannel) -> Reply:
            return reply_from_dict(channel.exchange(message, deadline, self._stages.put))

        self._asked = self._on_each(exchanged)
        try:
            self._await(deadline, on_stage)
        except BaseException:  # Ctrl-C: a rank may answer later, to nobody
            self.drop()
            raise
        replies = [_read(future) if future.done() else None for future in self._asked]
        if any(isinstance(reply, SearchTimedOut) for reply in replies):
            self.drop()
            raise SearchTimedOut("the time of the search is over")
        return [None if isinstance(reply, SearchTimedOut) else reply for reply in replies]

    def _await(self, deadline: Deadline, on_stage: OnStage) -> None:
        """Wait for every rank, or until `GRACE_S` after the first fault."""
        first_fault: float | None = None
        while any(not future.done() for future in self._asked):
            wait(self._asked, _POLL_S)
            while not self._stages.empty():
                on_stage(self._stages.get())
            now = time.monotonic()
            if first_fault is None and any(map(_tells_of_a_fault, self._asked)):
                first_fault = now
            is_late = first_fault is not None and now - first_fault > GRACE_S
            if is_late or now > deadline.at + _SLACK_S:
                break
        if first_fault is not None:
            self.seconds_to_agree = time.monotonic() - first_fault

    def _opened(self, rank: int, opening: Future[DeviceFacts]) -> DeviceFacts:
        error = opening.exception()
        if error is None:
            return opening.result()
        self.drop()
        if isinstance(error, DeviceFull | DeviceUnavailable):
            raise type(error)(f"rank {rank}: {error}") from error
        if isinstance(error, WorkerFailed):
            raise WorkerFailed(f"rank {rank}: {error}") from error
        raise error


def device_of_rank(asked: str | None, world: World) -> str | None:
    """Return the device of a rank: the GPU with its local rank, or the host.

    Raises:
        InvalidRequest: one GPU is asked for, and there are several ranks.
    """
    from torch.cuda import device_count

    name = None if asked is None else str(asked)
    if name is not None and name.startswith("cuda:"):
        raise InvalidRequest(
            f"device={name!r} names one GPU, and there are {world.size} ranks: give cuda, and each "
            "rank takes the GPU of its local rank"
        )
    if name == "cpu" or (name is None and not device_count()):
        return "cpu"
    return f"cuda:{world.local_rank}"


def _join(session: Session, host: str, port: int, name: str) -> None:
    """Join the process group of this generation of workers."""
    join(session.builder.world, session.builder.device.torch_device, host, port, name)


def _tells_of_a_fault(asked: Future[Reply]) -> bool:
    if not asked.done():
        return False
    reply = _read(asked)
    if not isinstance(reply, Reply):
        return True
    seen = reply.value
    ended_badly = isinstance(seen, Measurement) and not seen.outcome.ran
    return reply.exception is not None or ended_badly


def _read(asked: Future[Reply]) -> Reply | NoReply | SearchTimedOut:
    """Return the reply of a rank that answered, or what its channel raised instead."""
    error = asked.exception()
    if isinstance(error, NoReply | SearchTimedOut):
        return error
    if error is not None:
        return Reply(exception=error, spent=True)
    return asked.result()


def _of_rank(reply: Reply | NoReply | None) -> RankReply:
    """Return the part of a rank's reply that the ranks' agreement needs."""
    if reply is None:
        return RankReply()
    if isinstance(reply, NoReply):
        return RankReply(Measurement(reply.outcome, reply.detail))
    seen = reply.value or Measurement(Outcome.CRASHED, str(reply.exception))
    return RankReply(seen, reply.is_consequence)


def _must_go(reply: Reply) -> bool:
    """Return whether all workers are replaced after this: after every fault, of whatever kind."""
    return reply.spent or reply.value is None or not reply.value.outcome.ran
