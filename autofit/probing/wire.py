"""Requests and replies as bytes: exceptions and results travel by value, strategies by name."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import IO, Any

import cloudpickle

from autofit.errors import (
    AutofitError,
    WorkerTraceback,
    WorkloadFailed,
    is_users,
    mark_users,
    text_of,
    traceback_text,
)
from autofit.probing.requests import Call, Reply, Request
from autofit.probing.serialization import dumps, unreachable_by_value
from autofit.strategy import Strategy

_MAX_PICKLED_BYTES = 2**20


def message_of_request(request: Request, strategies: Sequence[Strategy]) -> bytes:
    """Return a request as bytes; these strategies are named in it, not contained."""
    by_value = unreachable_by_value() if isinstance(request, Call) else nullcontext()
    with by_value:
        return dumps(request, {id(each): each.name for each in strategies})


def request_of(message: bytes, strategies: Sequence[Strategy]) -> Request:
    """Return the request in a message, with those of the strategies here."""
    request: Request = _RequestReader(io.BytesIO(message), strategies).load()
    return request


class _RequestReader(pickle.Unpickler):
    """Reads a request in which strategies stand by their names.

    A subclass, because Python 3.13 takes no assignment to `persistent_load`.
    """

    def __init__(self, written: IO[bytes], strategies: Sequence[Strategy]) -> None:
        super().__init__(written)
        self._by_name = {strategy.name: strategy for strategy in strategies}

    def persistent_load(self, pid: str) -> Strategy:
        return self._by_name[pid]


def message_of_reply(reply: Reply) -> bytes:
    """Return a reply as bytes; its exception by value where that is possible, always as text."""
    error, traceback = reply.exception, reply.traceback
    if error is None:
        return dumps((reply, None))
    if traceback is None and error.__traceback__ is not None:
        traceback = traceback_text(error)
    words = f"{type(error).__module__}.{type(error).__qualname__}: {text_of(error)}"
    raised = words, _pickled(error), is_users(error)
    return dumps((replace(reply, exception=None, traceback=traceback), raised))


def reply_of(message: bytes) -> Reply:
    """Return the reply in a message; `WorkloadFailed` for an exception that could not travel.

    The text of its traceback is its cause, for the user to see.
    """
    reply: Reply
    reply, raised = pickle.loads(message)
    if raised is None:
        return reply
    words, pickled, is_of_user = raised
    error: BaseException = WorkloadFailed(words)
    if pickled is not None:
        with suppress(Exception):  # its class is the user's: unpickling it may do anything
            error = _loads(pickled)
    if is_of_user:
        mark_users(error)
    if reply.traceback and not isinstance(error, AutofitError):
        error.__cause__ = WorkerTraceback(reply.traceback)
    return replace(reply, exception=error)


# Exceptions by value.


def _pickled(exception: BaseException) -> bytes | None:
    """Return as much of an exception as can be read back; None where not even its class can.

    The `__init__` of many classes takes more than `args` holds; those are made without calling it.
    The attributes of an exception may hold a whole batch, or may not pickle.
    """
    kind, args = type(exception), exception.args
    for contents in (exception, (kind, args, vars(exception)), (kind, args, {})):
        try:
            data = dumps(contents)
            if len(data) <= _MAX_PICKLED_BYTES and type(_loads(data)) is kind:
                return data
        except Exception:  # an exception may hold anything
            continue
    return None


def _rebuilt(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    exception = kind.__new__(kind, *args)
    exception.args = args
    vars(exception).update(state)
    return exception


class _Unpickler(pickle.Unpickler):
    """Leaves classes alone that already exist here; cloudpickle would overwrite their members."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _fill_class if found is cloudpickle.cloudpickle._class_setstate else found


def _fill_class(kind: type, state: Any) -> Any:
    is_filled = all(name in vars(kind) for name in state[0])
    return kind if is_filled else cloudpickle.cloudpickle._class_setstate(kind, state)


def _loads(data: bytes) -> BaseException:
    loaded = _Unpickler(io.BytesIO(data)).load()
    exception = _rebuilt(*loaded) if isinstance(loaded, tuple) else loaded
    if not isinstance(exception, BaseException):
        raise TypeError(f"expected an exception, got a {type(exception).__name__}")
    return exception
