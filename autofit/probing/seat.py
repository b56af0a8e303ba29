"""A seat: one rank's worker and its warm spare. Does what the leader wrote; answers by itself.

A seat lives in the rank's own process, whose thread that serves it starts the workers, so that they
end with it. While a worker answers, the seat goes on listening: the leader may have it replaced.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidRequest, SearchTimedOut
from autofit.probing.meeting import Meeting, host_name
from autofit.probing.messages import (
    Deadline,
    NoReply,
    OnStage,
    Reply,
    exception_from_dict,
    exception_to_dict,
    ignore_stage,
)
from autofit.probing.pulse import Watch, store_lost
from autofit.probing.worker_channel import WorkerChannel, WorkerProcess
from autofit.strategy import Strategy, World
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports no name

_PICKLING = threading.Lock()
"""Pickling by value registers modules for the whole process, where several seats may live."""
_LISTEN_S = 0.01
"""Between two looks for a command."""


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


class Seat:
    """One rank's place at a meeting.

    Args:
        meeting: of this call.
        workload, strategies: as on every rank.
        device: that this rank's workers open.
        seed: of everything random.
        on_stage: called with the name of each stage that begins in this rank's worker, from
            another thread.
    """

    def __init__(
        self,
        meeting: Meeting,
        workload: Workload,
        strategies: Sequence[Strategy],
        *,
        device: str | None,
        seed: int,
        on_stage: OnStage = ignore_stage,
    ) -> None:
        self._meeting, self._rank, self._on_stage = meeting, meeting.world.rank, on_stage
        self._workload, self._strategies = workload, strategies
        self._device, self._seed = device, seed
        self._channel: SparedChannel | None = None
        self._asking: threading.Thread | None = None

    def serve(self) -> dict[str, Any]:
        """Do what the leader writes until it ends the meeting; return how it ended.

        The leader's own seat is left as soon as there are to be no workers.

        Raises:
            WorkerFailed: the store is gone, or rank 0 is.
        """
        store = self._meeting.store()
        store.set(f"here/{self._rank}", host_name())
        watch = Watch(store, () if self._rank == 0 else (0,))
        number = 0
        try:
            while True:
                command = _next_command(store, number, watch)
                if command["do"] == "end":
                    return command
                self._obey(store, number, command)
                if command["do"] == "close" and self._rank == 0:
                    return {}
                number += 1
        finally:
            self._close()

    def _obey(self, store: Store, number: int, command: Mapping[str, Any]) -> None:
        if command["do"] == "open":
            self._answer(store, number, self._guarded(self._open, command))
        elif command["do"] == "replace":
            self._replace()
            self._answer(store, number, {})
        elif command["do"] == "warm":
            if self._channel is not None:
                self._channel.warm()
        elif command["do"] == "close":
            self._close()
            self._answer(store, number, {})
        else:  # answered by a thread with a client of its own: this one goes on listening
            self._asking = threading.Thread(target=self._ask, args=(number, command), daemon=True)
            self._asking.start()

    def _open(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if self._channel is None:
            with _PICKLING:
                self._channel = SparedChannel(
                    self._workload,
                    self._strategies,
                    device=self._device,
                    seed=self._seed,
                    world=self._meeting.world,
                )
        self._channel.environment = command["environment"]
        facts = self._channel.open(Deadline.after(command["seconds"]).at)
        return {"device": asdict(facts)}

    def _ask(self, number: int, command: Mapping[str, Any]) -> None:
        channel, seconds = self._channel, command["seconds"]
        assert channel is not None  # the leader opens before it asks
        ends_at = Deadline.after(seconds).at if command["ends_search"] else math.inf
        deadline = Deadline.after(math.inf if command["ends_search"] else seconds, ends_at)
        answer = self._guarded(
            lambda asked: channel.exchange(asked["message"], deadline, self._on_stage), command
        )
        with suppress(RuntimeError):  # the leader ended the meeting meanwhile
            self._answer(self._meeting.store(), number, answer)

    def _guarded(
        self, do: Callable[[Mapping[str, Any]], dict[str, Any]], command: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what came of it; the leader decides what an error means."""
        try:
            return do(command)
        except NoReply as lost:
            return {"lost": [lost.outcome.value, lost.detail]}
        except SearchTimedOut:
            return {"timed_out": True}
        except (Exception, SystemExit) as error:
            return {"raised": exception_to_dict(error, None)}

    def _replace(self) -> None:
        if self._channel is not None:
            self._channel.drop()
        self._end_asking()

    def _close(self) -> None:
        self._end_asking()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _end_asking(self) -> None:
        """Wait for the thread that asks: its worker has ended."""
        if self._asking is not None:
            if self._channel is not None:
                self._channel.drop()
            self._asking.join(10.0)
            self._asking = None

    def _answer(self, store: Store, number: int, answer: Mapping[str, Any]) -> None:
        store.set(f"answer/{number}/{self._rank}", json.dumps(answer))


def _next_command(store: Store, number: int, watch: Watch) -> dict[str, Any]:
    key = f"command/{number}"
    try:
        while not store.check([key]):  # not `wait`, in which signals wait too
            watch.check()
            time.sleep(_LISTEN_S)
        command: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:
        raise store_lost(error) from None
    return command


def result_to_text(result: Any) -> str:
    """Return plain data of ours as text, for the ranks that follow."""
    return base64.b64encode(pickle.dumps(result)).decode()


def outcome_of_lead(end: Mapping[str, Any]) -> Any:
    """Return the plain data that rank 0 ended with, or raise its error here too."""
    if end["raised"] is None:
        return pickle.loads(base64.b64decode(end["result"]))
    reply = Reply(
        exception=exception_from_dict(end["raised"]), traceback=end["raised"]["traceback"]
    )
    error = reply.exception_to_raise()
    assert error is not None  # it was given
    vars(error)["said_by_rank_0"] = True  # the command line says it once
    raise error


def device_of_rank(asked: str | None, world: World) -> str | None:
    """Return the device of this rank: the GPU with its local rank, or the host.

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
