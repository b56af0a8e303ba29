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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from autofit.devices.base import Device
from autofit.devices.open import notes_on_choice, open_device
from autofit.errors import DeviceUnavailable
from autofit.measurement import Outcome
from autofit.probing.faults import fault_of, text_of
from autofit.probing.messages import (
    STACK_SIGNAL,
    DeviceFacts,
    Reply,
    reply_to_dict,
    request_from_dict,
    send,
)
from autofit.probing.serialization import read_payload
from autofit.probing.session import Session
from autofit.snapshot import process
from autofit.strategy import World


def main(requests_fd: int, replies_fd: int) -> None:
    """Serve requests until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    faulthandler.enable()
    _tell_of_exits()
    faulthandler.register(STACK_SIGNAL, file=os.dup(sys.stderr.fileno()), all_threads=False)
    with os.fdopen(requests_fd) as requests, os.fdopen(replies_fd, "w") as replies:
        _serve(requests, replies)


def _tell_of_exits() -> None:
    """Have an `os._exit` of the user's code print where it is: it leaves nothing else behind."""
    leave, own_pid = os._exit, os.getpid()

    def leave_with_words(status: int) -> NoReturn:
        if os.getpid() == own_pid:  # a process that was forked, as for a loader, ends so by nature
            faulthandler.dump_traceback(all_threads=False)
        leave(status)

    os._exit = leave_with_words


def _serve(requests: IO[str], replies: IO[str]) -> None:
    own_pid = os.getpid()
    session: Session | None = None
    is_dead = False
    answer: dict[str, Any]
    answered = 0
    for line in requests:
        message = json.loads(line)
        if "warm" in message:
            _import_slow_parts()
            continue
        try:
            if session is None:
                session, device = _open(message["open"])
                answer = {"device": device, "exception": None}
            else:
                request = request_from_dict(message, session.strategies)
                on_stage = partial(_send_stage, replies, message["number"])
                reply = session.answer(request, on_stage)
                is_dead = reply.device_fault is not None
                answer = reply_to_dict(reply)
        # The device could not be opened, a result does not pickle, or unpickling the workload ended
        except (Exception, SystemExit) as error:
            answer = reply_to_dict(Reply(exception=error))
        if os.getpid() != own_pid:
            os._exit(0)  # the user's code forked, and this is the twin
        send(replies, {**answer, "number": message["number"]})
        if is_dead:
            os._exit(0)  # what a dead context leaves behind can only be freed by an abort
        answered += 1
        if answered <= 2:  # opened; then trained for the first time
            _spare_collections()


def _import_slow_parts(*, of_ranks: bool = True) -> None:
    """Import what the first optimizer, and the first sharded model, import in any case.

    Here, later garbage collections pass over it.
    """
    importlib.import_module("torch._dynamo")
    if of_ranks:
        importlib.import_module("torch.distributed.fsdp")


def _send_stage(replies: IO[str], number: int, stage: str) -> None:
    send(replies, {"stage": stage, "number": number})


def _open(opening: Mapping[str, Any]) -> tuple[Session, dict[str, Any]]:
    path = Path(opening["payload"])
    payload = read_payload(path)
    process.restore(payload.computing)
    if opening["threads"] is not None:
        torch.set_num_threads(opening["threads"])
    world = World(**opening["world"])
    _import_slow_parts(of_ranks=world.size > 1)
    device = _open_device(opening["device"])
    session = Session(
        lambda: read_payload(path, device.torch_device).workload,
        payload.strategies,
        device,
        seed=opening["seed"],
        world=world,
        notes=notes_on_choice(opening["device"]),
    )
    return session, asdict(DeviceFacts.of(device))


def _open_device(name: str | None) -> Device:
    """Open the device; where it is too full, raise torch's error, which the parent understands."""
    try:
        return open_device(name)
    except RuntimeError as error:
        if fault_of(error).outcome is Outcome.OOM:
            raise
        words = text_of(error).strip().partition("\n")[0]
        raise DeviceUnavailable(f"{name or 'the device'} cannot be opened: {words}") from error


def _spare_collections() -> None:
    """Have later garbage collections pass over what is there now: torch's own many objects.

    It imports them when it is opened, and more of them when it trains for the first time.
    """
    gc.collect()
    gc.freeze()
