"""What parent and worker say to each other: one JSON object a line, exceptions by value in it."""

from __future__ import annotations

import base64
import json
import pickle
import signal
from collections.abc import Mapping
from typing import IO, Any

from autofit.errors import AutofitError, WorkloadFailed
from autofit.plan import Plan
from autofit.probing.payload import dumps
from autofit.probing.prober import ProbeRequest

STACK_SIGNAL = signal.SIGUSR1
"""At this signal the worker prints its main thread's stack."""


class WorkerTraceback(Exception):
    """The traceback of an exception that was raised in the worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def send(stream: IO[str], message: Mapping[str, Any]) -> None:
    """Write one message."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def request_to_dict(request: ProbeRequest) -> dict[str, Any]:
    """The JSON form of a probe request."""
    return {
        "plan": request.plan.to_dict(),
        "payloads": dict(request.payloads),
        "incumbent_samples_per_second": request.incumbent_samples_per_second,
        "full_accumulation": request.full_accumulation,
    }


def request_from_dict(data: Mapping[str, Any]) -> ProbeRequest:
    """The request that `request_to_dict` wrote."""
    return ProbeRequest(
        Plan.from_dict(data["plan"]),
        payloads=data["payloads"],
        incumbent_samples_per_second=data["incumbent_samples_per_second"],
        full_accumulation=data["full_accumulation"],
    )


def exception_to_dict(exception: BaseException, traceback: str | None) -> dict[str, Any]:
    """An exception as data: by value where it can be, as text always."""
    try:
        pickled = base64.b64encode(dumps(exception)).decode()
    except Exception:  # an exception may hold anything; its text is kept all the same
        pickled = None
    return {
        "type": f"{type(exception).__module__}.{type(exception).__qualname__}",
        "message": str(exception)[:4096],
        "traceback": (traceback or "")[-16384:],
        "pickled": pickled,
    }


def exception_from_dict(data: Mapping[str, Any]) -> BaseException:
    """The exception with its own type, its worker's traceback as its cause.

    Where it could not travel by value: `WorkloadFailed` with its type and text.
    """
    exception: BaseException | None = None
    if data["pickled"] is not None:
        try:
            loaded = pickle.loads(base64.b64decode(data["pickled"]))
        except Exception:  # say, a class whose __init__ wants more than its args
            loaded = None
        exception = loaded if isinstance(loaded, BaseException) else None
    if exception is None:
        exception = WorkloadFailed(f"{data['type']}: {data['message']}")
    if data["traceback"] and not isinstance(exception, AutofitError):
        exception.__cause__ = WorkerTraceback(data["traceback"])
    return exception
