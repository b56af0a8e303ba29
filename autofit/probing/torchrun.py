"""One call of autofit by every process that torchrun started: rank 0's owns it, all end alike.

The other processes wait for its result, and have no part in what it runs. A process that is alone
does the same call by itself.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from autofit.errors import InvalidArgument, WorkerFailed
from autofit.interrupts import interruptible, interrupts_deferred
from autofit.plan import Plan, check_count
from autofit.probing.requests import Reply
from autofit.probing.wire import message_of_reply, reply_of
from autofit.strategy import World
from autofit.world import check_ranks, world_of_environment

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports no name

# For the store of torchrun to answer, and for rank 0 to make the call.
_CONNECT_S = 60.0
_POLL_S = 0.05
_times_called = 0  # in this process: every rank calls in the same order
_Result = TypeVar("_Result")


def ranks_meant(asked: Any, plan: Plan | None = None) -> int:
    """Return how many ranks train together: as asked or as a plan says, else as torchrun started.

    Raises:
        InvalidArgument: what was asked is no whole number above zero.
    """
    if asked is None and plan is not None and plan.ranks > 1:
        return plan.ranks
    return world_of_environment().size if asked is None else check_count("ranks", asked)


def owned_by_rank_0(
    lead: Callable[[int], _Result], *, ranks: int | None = None, ends_at: float = math.inf
) -> _Result:
    """Return what `lead` does in the process of rank 0, or raise what it raises, on every rank.

    Args:
        lead: called with the number of ranks, whose workers it owns; what it returns is plain data.
        ranks: how many are asked for; None: as many as torchrun started, or one.
        ends_at: until when the processes try to reach one another, by `time.monotonic`.

    Raises:
        InvalidArgument: torchrun started another number of ranks, or ranks on several machines; or
            this process is one of several that torchrun did not start.
    """
    world = world_of_environment()
    if world.size == 1:
        _refuse_a_group_that_torchrun_did_not_start()
        return lead(ranks or 1)
    _check_one_machine(world)
    store = _store(world, ends_at)
    if world.rank > 0:
        atexit.register(_wait_for_owner, store)
        try:
            reply = reply_of(_awaited(store))
        finally:
            with suppress(RuntimeError):  # the store may have gone
                store.add("waits_no_more", 1)
        if reply.exception is not None:
            vars(reply.exception)["said_by_rank_0"] = True  # the command line says it once
        told: _Result = reply.value_or_raise()
        return told
    atexit.register(_leave, store, world.size - 1)
    store.set("owner", "")
    try:
        check_ranks(ranks or world.size, world)  # here, so that all ranks end alike
        result = lead(world.size)
    except BaseException as error:
        _publish(store, Reply(exception=error))
        raise
    _publish(store, Reply(result))
    return result


def _check_one_machine(world: World, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse ranks on several machines: their workers could not have one owner."""
    here = environment.get("LOCAL_WORLD_SIZE", str(world.size))
    if here != str(world.size):
        raise InvalidArgument(
            f"{here} of {world.size} ranks are on this machine, but a search runs on one machine: "
            "start as many ranks as it has GPUs. predict and check take any number of "
            "ranks (--ranks)"
        )


def _refuse_a_group_that_torchrun_did_not_start() -> None:
    """Each of its ranks would search alone, on the same devices and at the same time."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if (size := distributed.get_world_size()) > 1:
        raise InvalidArgument(
            f"this process is rank {distributed.get_rank()} of a process group of {size} that "
            "torchrun did not start: start the ranks with torchrun, or call autofit in one process "
            "before init_process_group"
        )


def _store(world: World, ends_at: float = math.inf) -> Store:
    """Return the store of this call, through which the processes of the ranks speak.

    It is the one that `init_process_group` would use: torchrun's, or rank 0's.

    Raises:
        InvalidArgument: the environment does not say where it is, or nothing answers there.
    """
    global _times_called
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # likewise
    from torch.distributed.rendezvous import rendezvous

    _times_called += 1
    tries = 1 if world.rank == 0 else 2  # torch's own: only rank 0 may serve the store
    wait = timedelta(seconds=max(0.1, min(_CONNECT_S, ends_at - time.monotonic()) / tries))
    meeting = rendezvous("env://", world.rank, world.size, timeout=wait)
    try:
        store, _, _ = interruptible(partial(next, meeting))
    except (RuntimeError, ValueError) as error:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise InvalidArgument(
            f"there are {world.size} ranks, and rank {world.rank} cannot reach the others at "
            f"{where} (MASTER_ADDR and MASTER_PORT): start the ranks with torchrun, or pass "
            f"--ranks, and make the same call on every rank ({error})"
        ) from None
    return PrefixStore(f"autofit/{_times_called}", store)


def _publish(store: Store, reply: Reply) -> None:
    """Say how the call ended: with an error, or with plain data."""
    with interrupts_deferred(), suppress(RuntimeError):  # who waits sees that the store is gone
        store.set("ended", message_of_reply(reply))  # type: ignore[arg-type]  # bytes, too


def _awaited(store: Store) -> bytes:
    """Wait for rank 0's process, and return the message of how its call ended.

    Where that process dies, torchrun ends this one, or rank 0's store goes with it.

    Raises:
        InvalidArgument: it did not make the call.
        WorkerFailed: the store is gone.
    """
    until = time.monotonic() + _CONNECT_S
    try:
        while not store.check(["ended"]):  # not `wait`, in which signals wait too
            if time.monotonic() > until and not store.check(["owner"]):
                raise InvalidArgument(
                    f"rank 0 did not call autofit within {_CONNECT_S:g} s: every rank must make "
                    "the same call"
                )
            time.sleep(_POLL_S)
        ended: bytes = store.get("ended")
        return ended
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise WorkerFailed(f"the store of torchrun is no longer reachable ({reason})") from None


# torchrun ends all ranks as soon as one has failed. Rank 0 first gets to show why, and each ends
# with its own exit code: by then there is nothing left that a signal would have to end.

# For rank 0 to say that it leaves.
_LEAVING_S = 5.0


def _leave(store: Store, others: int) -> None:
    """Say that this process leaves; a store that it serves stays until the others have read it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = time.monotonic() + _LEAVING_S
    with suppress(RuntimeError):  # the store may have gone
        store.set("left", "")
        while store.add("waits_no_more", 0) < others and time.monotonic() < end:
            time.sleep(_POLL_S)


def _wait_for_owner(store: Store) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = time.monotonic() + _LEAVING_S
    with suppress(RuntimeError):
        while not store.check(["left"]) and time.monotonic() < end:
            time.sleep(_POLL_S)
