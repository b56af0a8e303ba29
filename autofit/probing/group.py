"""The channel to several workers at once, one on each rank: the leader's side of a meeting.

Promises: whatever happens on any rank is one reply. The first fault ends the wait: the other ranks
have `GRACE_S` to answer by themselves, then every worker is replaced, since no rank that waits in a
collective can be freed otherwise. So no backend's way of giving up is relied on.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autofit.errors import DeviceUnavailable, InvalidRequest, SearchTimedOut, WorkerFailed
from autofit.interrupts import interrupts_deferred
from autofit.measurement import Measurement, Outcome
from autofit.probing.agreement import RankReply, agree, gravest
from autofit.probing.faults import fault_of
from autofit.probing.meeting import CONNECT_S, Meeting
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
    exception_from_dict,
    exception_to_dict,
    ignore_stage,
    reply_from_dict,
    request_to_dict,
)
from autofit.probing.pulse import Watch, store_lost
from autofit.probing.seat import Seat, result_to_text
from autofit.probing.worker_channel import START_TIMEOUT_S
from autofit.strategy import Strategy
from autofit.training.ranks import join
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports no name

    from autofit.probing.session import Session

GRACE_S = 0.5
"""After the first fault, the time in which the other ranks may still answer by themselves."""
_SLACK_S = 5.0
"""After a deadline, for a seat to find out where its worker hangs, and to say so."""
_END_S = 5.0
"""For the store to take the last command: without one, ranks look for themselves."""
_POLL_S = 0.005


class GroupChannel:
    """A channel to a worker on each rank; implements `autofit.probing.messages.Channel`.

    Args:
        meeting: of this call; this process is its rank 0.
        workload, strategies, device, seed: of rank 0's own seat, see `Seat`.

    Attributes:
        environment: variables that the next workers have besides those of their parents.
        seconds_to_agree: from the first fault to the agreement on it, in the last faulty probe.
        seconds_to_replace: for all ranks to take their next workers, the last time they did.

    Raises:
        InvalidRequest: a rank did not come to the meeting.
    """

    is_replaceable = True

    def __init__(
        self,
        meeting: Meeting,
        workload: Workload,
        strategies: Sequence[Strategy],
        *,
        device: str | None,
        seed: int,
    ) -> None:
        self.environment: Mapping[str, str] = {}
        self.seconds_to_agree = self.seconds_to_replace = 0.0
        self._meeting, self._size = meeting, meeting.world.size
        self._strategies = strategies
        self._store = meeting.store()
        self._generation = 0
        self._facts: DeviceFacts | None = None
        self._is_clean = True  # no rank has a worker
        self._stages: queue.SimpleQueue[str] = queue.SimpleQueue()
        seat = Seat(
            meeting, workload, strategies, device=device, seed=seed, on_stage=self._stages.put
        )
        self._own_seat = threading.Thread(target=_serve, args=(seat,), daemon=True)
        self._own_seat.start()
        try:
            self.hosts = self._hosts()
        except BaseException:
            self._write({"do": "close"})
            self._own_seat.join()
            raise
        others = range(1, self._size)
        self._watch = Watch(self._store, others, dict(enumerate(self.hosts)))

    @property
    def pid(self) -> int | None:
        """Rank 0 while there are workers: they have ids on machines of their own."""
        return None if self._facts is None else 0

    def open(self, ends_at: float = float("inf")) -> DeviceFacts:
        """Have every rank's worker run, hold its device and be one of a process group."""
        if self._facts is None:
            deadline = Deadline.after(START_TIMEOUT_S, ends_at)
            command = {"do": "open", "environment": dict(self.environment)}
            self._is_clean = False
            answers = self._all(command, deadline, until_fault=False)
            opened = [self._opened(rank, answer) for rank, answer in enumerate(answers)]
            self._generation += 1
            joins = partial(
                _join,
                host=self._meeting.host,
                port=self._meeting.port,
                name=f"{self._meeting.name}/generation{self._generation}",
            )
            budget = min(facts.total_bytes for facts in opened)
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
        """End every rank's worker, and have each take its spare and start another."""
        self._facts = None
        if self._is_clean:
            return
        began = time.monotonic()
        self._all({"do": "replace"}, Deadline.after(START_TIMEOUT_S), until_fault=False)
        self.seconds_to_replace = time.monotonic() - began
        self._is_clean = True
        self._write({"do": "warm"})

    def close(self) -> None:
        """End all workers; the other ranks stay until `end_meeting`."""
        self._facts = None
        if self._own_seat.is_alive():
            with suppress(WorkerFailed):  # a rank is gone, or the store, of which own seats know
                self._all({"do": "close"}, Deadline.after(0.0), until_fault=False)
            self._own_seat.join()

    def _agreed_probe(self, request: ProbeRequest, deadline: Deadline, on_stage: OnStage) -> Reply:
        replies = self._ask(request, deadline, on_stage)
        agreed = agree([_of_rank(reply) for reply in replies], self.hosts)
        blamed = None if agreed.failed_rank is None else replies[agreed.failed_rank]
        kept = [reply for reply in replies if isinstance(reply, Reply)]
        if len(kept) < self._size or any(_must_go(reply) for reply in kept):
            self.drop()
        is_users = agreed.outcome is Outcome.USER_ERROR
        raised = blamed if is_users and isinstance(blamed, Reply) else Reply()
        return Reply(
            agreed,
            exception=raised.exception,
            traceback=raised.traceback,
            spent=len(kept) < self._size,
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
            reply or NoReply(Outcome.TIMEOUT, f"rank {rank} ({self.hosts[rank]}) did not answer")
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
        command = {"do": "ask", "message": message, "ends_search": deadline.ends_search}
        answers = self._all(command, deadline, until_fault=True, on_stage=on_stage)
        if any(answer and "timed_out" in answer for answer in answers):
            self.drop()
            raise SearchTimedOut("the time of the search is over")
        return [None if answer is None else _read(answer) for answer in answers]

    def _all(
        self,
        command: Mapping[str, Any],
        deadline: Deadline,
        *,
        until_fault: bool,
        on_stage: OnStage = ignore_stage,
    ) -> list[dict[str, Any] | None]:
        try:
            number = self._write({**command, "seconds": deadline.seconds_left})
            return self._gather(number, deadline, until_fault=until_fault, on_stage=on_stage)
        except BaseException as error:  # Ctrl-C: a rank may answer later, to nobody
            self._facts = None
            if _is_of_store(error):
                raise store_lost(error) from None
            raise

    def _write(self, command: Mapping[str, Any]) -> int:
        return _write(self._store, command)

    def _gather(
        self, number: int, deadline: Deadline, *, until_fault: bool, on_stage: OnStage
    ) -> list[dict[str, Any] | None]:
        """Return the answers by rank: all, or those that came in time, or after a first fault."""
        answers: list[dict[str, Any] | None] = [None] * self._size
        end, first_fault = deadline.at + _SLACK_S, None
        while None in answers and time.monotonic() < end:
            for rank in [rank for rank, answer in enumerate(answers) if answer is None]:
                key = f"answer/{number}/{rank}"
                if not self._store.check([key]):
                    continue
                answers[rank] = answer = json.loads(self._store.get(key))
                self._store.delete_key(key)
                if until_fault and first_fault is None and _tells_of_a_fault(answer):
                    first_fault = time.monotonic()
                    end = min(end, first_fault + GRACE_S)
            self._watch.check()
            while not self._stages.empty():
                on_stage(self._stages.get())
            time.sleep(_POLL_S)
        if first_fault is not None:
            self.seconds_to_agree = time.monotonic() - first_fault
        return answers

    def _opened(self, rank: int, answer: Mapping[str, Any] | None) -> DeviceFacts:
        where = f"rank {rank} ({self.hosts[rank]})"
        if answer is None or "lost" in answer:
            self.drop()
            why = "no answer" if answer is None else answer["lost"][1]
            raise WorkerFailed(f"{where}: the worker could not be started: {why}")
        if "timed_out" in answer:
            raise SearchTimedOut("the time of the search is over")
        if "raised" in answer:
            self.drop()
            error = exception_from_dict(answer["raised"])
            if isinstance(error, DeviceFull | DeviceUnavailable):
                raise type(error)(f"{where}: {error}")
            raise error
        return DeviceFacts(**answer["device"])

    def _hosts(self) -> list[str]:
        """Return the machine of each rank, once all have come.

        Raises:
            InvalidRequest: one has not.
        """
        end = time.monotonic() + CONNECT_S
        missing = list(range(self._size))
        while missing and time.monotonic() < end:
            missing = [rank for rank in missing if not self._store.check([f"here/{rank}"])]
            time.sleep(_POLL_S)
        if missing:
            raise InvalidRequest(
                f"there are {self._size} ranks, and rank {', '.join(map(str, missing))} did not "
                f"call autofit within {CONNECT_S:g} s: every rank has to make the same call"
            )
        return [self._store.get(f"here/{rank}").decode() for rank in range(self._size)]


def end_meeting(meeting: Meeting, error: BaseException | None, result: Any = None) -> None:
    """Say on every rank how the call ended: with an error, or with plain data."""
    raised = None if error is None else exception_to_dict(error, None)
    end = {"do": "end", "raised": raised, "result": result_to_text(result)}
    try:
        _write(meeting.store(_END_S), end)
    except RuntimeError as lost:
        if error is None:
            raise store_lost(lost) from None


def _serve(seat: Seat) -> None:
    """Serve at the leader's own seat, which ends when the store is gone, as the leader does."""
    with suppress(WorkerFailed):
        seat.serve()


def _is_of_store(error: BaseException) -> bool:
    from torch.distributed import DistError

    return isinstance(error, DistError)


def _write(store: Store, command: Mapping[str, Any]) -> int:
    """Write the next command for all ranks; return its number.

    Whole, also under Ctrl-C: seats would wait for ever for a number without its command.
    """
    with interrupts_deferred():
        number = store.add("commands", 1) - 1
        store.set(f"command/{number}", json.dumps(command))
    return number


def _join(session: Session, host: str, port: int, name: str) -> None:
    """Join the process group of this generation of workers."""
    join(session.builder.world, session.builder.device.torch_device, host, port, name)


def _tells_of_a_fault(answer: Mapping[str, Any]) -> bool:
    if "reply" not in answer:
        return True
    reply = reply_from_dict(answer)
    seen = reply.value
    ended_badly = isinstance(seen, Measurement) and not seen.outcome.ran
    return reply.exception is not None or ended_badly


def _read(answer: dict[str, Any]) -> Reply | NoReply:
    if "lost" in answer:
        outcome, detail = answer["lost"]
        return NoReply(Outcome(outcome), detail)
    if "raised" in answer:
        error = exception_from_dict(answer["raised"])
        return Reply(exception=error, traceback=answer["raised"]["traceback"], spent=True)
    return reply_from_dict(answer)


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
