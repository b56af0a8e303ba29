"""The worker process: holds the device and the model, and does as it is told until told to stop.

It never outlives its parent (`autofit.probing.process_lifetime`), and it answers on a pipe of its
own, so user code may print what it likes.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from autofit.devices.base import Device, budget_bytes
from autofit.devices.open import open_device
from autofit.errors import DeviceUnavailable
from autofit.measurement import Outcome
from autofit.plan import ResolvedPlan
from autofit.probing.faults import fault_of
from autofit.probing.messages import STACK_SIGNAL, exception_to_dict, request_from_dict, send
from autofit.probing.serialization import read_payload
from autofit.probing.session import Session
from autofit.snapshot import process


def main(requests_fd: int, replies_fd: int) -> None:
    """Serve requests until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=os.dup(sys.stderr.fileno()), all_threads=False)
    with os.fdopen(requests_fd) as requests, os.fdopen(replies_fd, "w") as replies:
        _serve(requests, replies)


def _serve(requests: IO[str], replies: IO[str]) -> None:
    session: Session | None = None
    spares_collections, own_pid = False, os.getpid()
    reply: dict[str, Any]
    for line in requests:
        message = json.loads(line)
        try:
            if message["do"] == "open":
                session, reply = _open(message)
            else:
                assert session is not None  # a client opens before it asks
                reply = _ANSWERS[message["do"]](session, message)
        except Exception as error:
            reply = {"raised": exception_to_dict(error, traceback.format_exc())}
        if os.getpid() != own_pid:
            os._exit(0)  # the user's code forked, and this is the twin
        if "spent" not in reply:  # a survey notes a fault and goes on, also one that killed it
            reply["spent"] = session is not None and session.broken_by() is not None
        send(replies, {**reply, "number": message["number"]})
        if not spares_collections:
            spares_collections = message["do"] in _TRAIN
            _spare_collections()


def _open(message: Mapping[str, Any]) -> tuple[Session, dict[str, Any]]:
    path = Path(message["payload"])
    payload = read_payload(path)
    process.restore(payload.computing)
    device = _open_device(message["device"])
    budget = budget_bytes(
        message["vram_budget"], total_bytes=device.total_bytes, free_bytes=device.free_bytes
    )

    session = Session(
        lambda: read_payload(path, device.torch_device).workload,
        payload.strategies,
        device,
        vram_budget_bytes=budget,
        seed=message["seed"],
    )
    return session, {"exclusive_key": device.exclusive_key, "spent": False}


def _open_device(name: str | None) -> Device:
    """The device; one that is too full says so in torch's words, which the client understands."""
    try:
        return open_device(name, owns_process=True)
    except RuntimeError as error:
        fault = fault_of(error)
        if fault.outcome is Outcome.OOM:
            raise
        raise DeviceUnavailable(
            f"{name or 'the device'} cannot be opened: {fault.detail}"
        ) from error


def _spare_collections() -> None:
    """Have later garbage collections pass over what is there now: torch's own many objects.

    It imports them when it is opened, and more of them when it trains for the first time.
    """
    gc.collect()
    gc.freeze()


def _survey(session: Session, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"survey": session.survey().to_dict()}


def _probe(session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
    reply = session.probe(request_from_dict(message["request"], session.strategies))
    raised = reply.exception
    return {
        "measurement": reply.measurement.to_dict(),
        "user_exception": exception_to_dict(raised, reply.traceback) if raised else None,
        "spent": reply.spent,
    }


def _compare(session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
    first, second = (ResolvedPlan.from_dict(p, session.strategies) for p in message["plans"])
    comparison = session.compare(first, second, message["samples"])
    return {"comparison": comparison.to_dict()}


def _rebudget(session: Session, message: Mapping[str, Any]) -> dict[str, Any]:
    session.vram_budget_bytes = message["vram_budget_bytes"]
    return {}


_ANSWERS: dict[str, Callable[[Session, Mapping[str, Any]], dict[str, Any]]] = {
    "survey": _survey,
    "probe": _probe,
    "compare": _compare,
    "rebudget": _rebudget,
}
_TRAIN = ("survey", "probe", "compare")
