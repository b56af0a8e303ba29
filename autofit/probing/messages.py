"""What parent and worker say to each other: one JSON object a line, exceptions by value in it."""

from __future__ import annotations

import base64
import io
import json
import pickle
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import cloudpickle

from autofit.errors import AutofitError, WorkloadFailed, mark_users
from autofit.plan import ResolvedPlan
from autofit.probing.faults import text_of
from autofit.probing.prober import ProbeRequest
from autofit.probing.serialization import dumps
from autofit.strategy import Strategy

STACK_SIGNAL = signal.SIGUSR1
"""At this signal the worker prints its main thread's stack."""
_MOST_PICKLED_BYTES = 2**20


class WorkerTraceback(Exception):
    """The traceback of an exception that was raised in the worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def send(stream: IO[str], message: Mapping[str, Any]) -> None:
    """Write one message."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def reply_to(number: int, line: str) -> dict[str, Any] | None:
    """The reply to the request of that number; None: the line is another's, or no message."""
    try:
        message = json.loads(line)
    except ValueError:  # code that writes to every descriptor it finds
        return None
    is_it = isinstance(message, dict) and message.get("number") == number
    return message if is_it else None


def request_to_dict(request: ProbeRequest) -> dict[str, Any]:
    """The JSON form of a probe request."""
    return {
        "resolved": request.resolved.to_dict(),
        "incumbent_samples_per_second": request.incumbent_samples_per_second,
        "full_accumulation": request.full_accumulation,
        "steps": request.steps,
    }


def request_from_dict(data: Mapping[str, Any], strategies: Sequence[Strategy]) -> ProbeRequest:
    """The request that `request_to_dict` wrote, its strategies taken from those given."""
    return ProbeRequest(
        ResolvedPlan.from_dict(data["resolved"], strategies),
        incumbent_samples_per_second=data["incumbent_samples_per_second"],
        full_accumulation=data["full_accumulation"],
        steps=data["steps"],
    )


def exception_to_dict(exception: BaseException, traceback: str | None) -> dict[str, Any]:
    """An exception as data: by value where it can be, as text always."""
    return {
        "type": f"{type(exception).__module__}.{type(exception).__qualname__}",
        "message": text_of(exception)[:4096],
        "traceback": (traceback or "")[-16384:],
        "pickled": _pickled(exception),
    }


def exception_from_dict(data: Mapping[str, Any]) -> BaseException:
    """The exception with its own type, its worker's traceback as its cause.

    Where it could not travel by value: `WorkloadFailed` with its type and text.
    """
    exception: BaseException | None = None
    if data["pickled"] is not None:
        try:
            exception = _loads(base64.b64decode(data["pickled"]))
        except Exception:  # its class is the user's: unpickling it may do anything
            exception = None
    if exception is None:
        exception = WorkloadFailed(f"{data['type']}: {data['message']}")
    mark_users(exception)
    if data["traceback"] and not isinstance(exception, AutofitError):
        exception.__cause__ = WorkerTraceback(data["traceback"])
    return exception


def _pickled(exception: BaseException) -> str | None:
    """As much of an exception as can be read back, None where not even its class can.

    Many classes want more in `__init__` than `args` holds; those are made without calling it. What
    an exception holds beside its text may be a whole batch, or may not pickle.
    """
    for state in (None, vars(exception), {}):
        try:
            whole = exception if state is None else _Bare(type(exception), exception.args, state)
            data = dumps(whole)
            if len(data) <= _MOST_PICKLED_BYTES and type(_loads(data)) is type(exception):
                return base64.b64encode(data).decode()
        except Exception:  # an exception may hold anything
            continue
    return None


@dataclass(frozen=True)
class _Bare:
    """An exception in parts."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    def rebuild(self) -> BaseException:
        exception = self.kind.__new__(self.kind, *self.args)
        exception.args = self.args
        vars(exception).update(self.state)
        return exception


class _Unpickler(pickle.Unpickler):
    """Leaves classes alone that came from here: cloudpickle would set all their members anew."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _fill_class if found is cloudpickle.cloudpickle._class_setstate else found


def _fill_class(kind: type, state: Any) -> Any:
    is_filled = all(name in vars(kind) for name in state[0])
    return kind if is_filled else cloudpickle.cloudpickle._class_setstate(kind, state)


def _loads(data: bytes) -> BaseException:
    loaded = _Unpickler(io.BytesIO(data)).load()
    exception = loaded.rebuild() if isinstance(loaded, _Bare) else loaded
    if not isinstance(exception, BaseException):
        raise TypeError(f"a {type(exception).__name__} was sent for an exception")
    return exception
