"""The worker process: holds the device and the model, and answers requests until its owner ends.

It is started, and ended, by a process beside it (`autofit.probing.supervisor`). It answers on a
connection of its own, so user code may print what it likes.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch

from autofit.devices.base import Device, notes_on_torch
from autofit.devices.cuda import notes_on_choice, open_device
from autofit.errors import DeviceUnavailable, text_of
from autofit.measurement import Outcome
from autofit.probing.faults import fault_of
from autofit.probing.requests import (
    STACK_SIGNAL,
    DeviceFacts,
    DeviceFull,
    Opening,
    ProbeRequest,
    Reply,
)
from autofit.probing.serialization import read_payload
from autofit.probing.session import Session
from autofit.probing.wire import message_of_reply, request_of
from autofit.torch_flags import compute_as


def main(wire: Connection, output: Connection) -> None:
    """Serve requests until the connection is closed at its other end.

    Args:
        wire: the owner sends an `Opening` and then requests, one at a time; it gets a reply to
            each, and before it the names of stages.
        output: takes what is printed.
    """
    _set_up(output)
    own_pid, answered = os.getpid(), 0
    session: Session | None = None
    while (message := _received(wire)) is not None:
        reply = Reply()
        try:
            if session is None:
                session, device = _open(pickle.loads(message))
                session.on_stage = wire.send
                reply = Reply(device)
            else:
                request = request_of(message, session.strategies)
                if isinstance(request, ProbeRequest):
                    reply = session.probe(request)
                else:
                    reply = session.run(request)
            answer = message_of_reply(reply)
        # The device could not be opened, a result does not pickle, or unpickling the workload ended
        except (Exception, SystemExit) as error:
            answer = message_of_reply(Reply(exception=error))
        if os.getpid() != own_pid:
            os._exit(0)  # the user's code forked, and this is the twin
        wire.send(answer)
        if reply.device_fault is not None:
            os._exit(0)  # what a dead context leaves behind can only be freed by an abort
        answered += 1
        if answered <= 2:
            # Later collections pass over torch's own many objects: it imports them when it is
            # opened, and more of them when it trains for the first time
            gc.collect()
            gc.freeze()


def _set_up(output: Connection) -> None:
    """Report this process's output and end to the owner, and have torch compute as in training."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    with suppress(OSError):  # so that the kernel kills the worker first when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what Ctrl-C means
    faulthandler.enable()
    _tell_of_exits()
    faulthandler.register(STACK_SIGNAL, file=os.dup(sys.stderr.fileno()), all_threads=False)
    # A probe trains on one batch from its first step on. Where a softmax saturates, small values
    # are denormal numbers, with which processors compute several times more slowly
    # (measured on 2026-11-28). The threads that torch starts later inherit it.
    torch.set_flush_denormal(True)
    importlib.import_module("torch._dynamo")  # what the first optimizer imports in any case
    gc.freeze()
    gc.enable()


def _received(wire: Connection) -> bytes | None:
    """Return the next request, or None if there will be none."""
    with suppress(EOFError):
        return wire.recv_bytes()
    return None


def _tell_of_exits() -> None:
    """Have the user's `os._exit` print where it was called, since it leaves no other trace."""
    leave, own_pid = os._exit, os.getpid()

    def leave_with_words(status: int) -> NoReturn:
        if os.getpid() == own_pid:  # a process that was forked, as for a loader, ends so by nature
            faulthandler.dump_traceback(all_threads=False)
        leave(status)

    os._exit = leave_with_words


def _open(opening: Opening) -> tuple[Session, DeviceFacts]:
    opening.enter()
    if opening.world.size > 1:
        importlib.import_module("torch.distributed.fsdp")  # what the first sharded model imports
        gc.freeze()
    payload = read_payload(opening.payload)
    compute_as(payload.computing)
    if opening.threads is not None:
        torch.set_num_threads(opening.threads)
    device = _open_device(opening.device)
    session = Session(
        lambda: read_payload(opening.payload, device.torch_device).workload,
        payload.strategies,
        device,
        seed=opening.seed,
        world=opening.world,
        notes=(*notes_on_choice(opening.device), *notes_on_torch()),
    )
    return session, DeviceFacts(device.total_bytes, device.free_bytes, device.exclusive_key)


def _open_device(name: str | None) -> Device:
    """Open the device; raise `DeviceFull` where others hold its memory."""
    try:
        return open_device(name)
    except RuntimeError as error:
        fault = fault_of(error)
        if fault.outcome is Outcome.OOM:
            raise DeviceFull(
                f"the device has no room for a worker: {fault.detail}. Other processes hold "
                "nearly all of its memory: end them, or choose another device"
            ) from None
        words = text_of(error).strip().partition("\n")[0]
        raise DeviceUnavailable(f"{name or 'the device'} cannot be opened: {words}") from error
