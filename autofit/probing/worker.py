"""The worker process: holds the device and the model, and answers requests until its parent ends.

It never outlives its parent (`autofit.probing.process_lifetime`), and it answers on a pipe of its
own, so user code may print what it likes.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from autofit.devices.base import Device
from autofit.devices.cuda import notes_on_choice, open_device
from autofit.errors import DeviceUnavailable
from autofit.measurement import Outcome
from autofit.probing.faults import fault_of, text_of
from autofit.probing.messages import (
    STACK_SIGNAL,
    DeviceFacts,
    ProbeRequest,
    Reply,
    message_of_reply,
    request_of,
    send,
)
from autofit.probing.process_lifetime import die_with_parent
from autofit.probing.serialization import read_payload
from autofit.probing.session import Session
from autofit.snapshot import process
from autofit.strategy import World


def main(
    parent_pid: int, *, lifeline_fd: int, requests_fd: int, replies_fd: int, is_rank: bool
) -> None:
    """Serve requests until the pipe is closed at its other end.

    Args:
        parent_pid, lifeline_fd: see `die_with_parent`.
        requests_fd, replies_fd: descriptors of pipes.
        is_rank: whether it will be one of several ranks.
    """
    die_with_parent(parent_pid, lifeline_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    faulthandler.enable()
    _tell_of_exits()
    faulthandler.register(STACK_SIGNAL, file=os.dup(sys.stderr.fileno()), all_threads=False)
    # A probe trains on one batch from its first step on. Where a softmax saturates, small values
    # are denormal numbers, with which processors compute several times more slowly
    # (benchmarks/results/denormals-2026-11-28.md). The threads that torch starts later inherit it.
    torch.set_flush_denormal(True)
    # What the first optimizer, and the first sharded model, import in any case
    importlib.import_module("torch._dynamo")
    if is_rank:
        importlib.import_module("torch.distributed.fsdp")
    gc.freeze()
    gc.enable()
    own_pid, answered = os.getpid(), 0
    session: Session | None = None
    with os.fdopen(requests_fd) as requests, os.fdopen(replies_fd, "w") as replies:
        for line in requests:
            message = json.loads(line)
            number, reply = message["number"], Reply()
            try:
                if session is None:
                    session, device = _open(message["open"])
                    reply = Reply(device)
                else:
                    session.on_stage = partial(_send_stage, replies, number)
                    request = request_of(message, session.strategies)
                    if isinstance(request, ProbeRequest):
                        reply = session.probe(request)
                    else:
                        reply = session.run(request)
                answer = message_of_reply(reply)
            # The device could not be opened, a result does not pickle, or unpickling the workload
            # ended
            except (Exception, SystemExit) as error:
                answer = message_of_reply(Reply(exception=error))
            if os.getpid() != own_pid:
                os._exit(0)  # the user's code forked, and this is the twin
            send(replies, {**answer, "number": number})
            if reply.device_fault is not None:
                os._exit(0)  # what a dead context leaves behind can only be freed by an abort
            answered += 1
            if answered <= 2:
                # Later collections pass over torch's own many objects: it imports them when it is
                # opened, and more of them when it trains for the first time
                gc.collect()
                gc.freeze()


def _tell_of_exits() -> None:
    """Have an `os._exit` of the user's code print where it is: it leaves nothing else behind."""
    leave, own_pid = os._exit, os.getpid()

    def leave_with_words(status: int) -> NoReturn:
        if os.getpid() == own_pid:  # a process that was forked, as for a loader, ends so by nature
            faulthandler.dump_traceback(all_threads=False)
        leave(status)

    os._exit = leave_with_words


def _send_stage(replies: IO[str], number: int, stage: str) -> None:
    send(replies, {"stage": stage, "number": number})


def _open(opening: Mapping[str, Any]) -> tuple[Session, DeviceFacts]:
    path = Path(opening["payload"])
    payload = read_payload(path)
    process.restore(payload.computing)
    if opening["threads"] is not None:
        torch.set_num_threads(opening["threads"])
    world = World(**opening["world"])
    device = _open_device(opening["device"])
    session = Session(
        lambda: read_payload(path, device.torch_device).workload,
        payload.strategies,
        device,
        seed=opening["seed"],
        world=world,
        notes=notes_on_choice(opening["device"]),
    )
    return session, DeviceFacts(device.total_bytes, device.free_bytes, device.exclusive_key)


def _open_device(name: str | None) -> Device:
    """Open the device; where it is too full, raise torch's error, which the parent understands."""
    try:
        return open_device(name)
    except RuntimeError as error:
        if fault_of(error).outcome is Outcome.OOM:
            raise
        words = text_of(error).strip().partition("\n")[0]
        raise DeviceUnavailable(f"{name or 'the device'} cannot be opened: {words}") from error
