"""The errors that autofit raises on purpose, and how to let go of any exception that was caught.

Each error says what went wrong, which value it was, and what to do about it; `exit_code` is what
the command line returns for it. An exception raised by the user's own code is never wrapped in one
of these: it reaches the user with its own type (see `autofit.probing.wire`), and
`is_users` distinguishes it from a fault of autofit's.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar


class AutofitError(Exception):
    """The root of autofit's own errors."""

    exit_code = 4


class InvalidArgument(AutofitError, ValueError):
    """An argument, a sample batch, a budget or a file that cannot mean what was asked."""

    exit_code = 2


class StudyError(InvalidArgument):
    """A study that belongs to another search, is in use, or cannot be read or written."""


class WorkloadFailed(AutofitError):
    """The user's code failed and left no exception to hand on; its text is in the message."""

    exit_code = 3


class DeviceUnavailable(AutofitError):
    """The device that was asked for is not there, or it does not answer."""


class WorkerFailed(AutofitError):
    """The worker process could not be started, or kept dying whatever it was given."""


class Unsupported(AutofitError):
    """The model or the device cannot run with these settings.

    What a strategy raises while it is applied or in a step; it ends a probe as `unsupported`. Of
    several ranks, a strategy that shares their training raises it on all or on none.
    """

    exit_code = 2


class PredictionUnavailable(AutofitError):
    """A question that could be answered neither by tracing nor by running."""

    exit_code = 5


class SearchTimedOut(PredictionUnavailable):
    """The search's timeout was reached before any plan that fits had been measured."""


def mark_users(error: BaseException) -> None:
    """Note, where it is known, that the user's own code raised it; autofit's errors are its own."""
    if not isinstance(error, AutofitError):
        vars(error)["_raised_by_users_code"] = True  # past any __setattr__ of its class


def is_users(error: BaseException) -> bool:
    """Whether it was noted that the user's own code raised it."""
    return "_raised_by_users_code" in vars(error)


class WorkerTraceback(Exception):
    """The traceback of an exception that was raised in the worker, as text.

    Attributes:
        tried: what autofit tried meanwhile, which is said before the traceback; None: unknown.
    """

    tried: str | None = None

    def __str__(self) -> str:
        first = f"your code raised this while autofit was {self.tried}:" if self.tried else ""
        return f"{first}\n{self.args[0]}"


def note_tried(error: BaseException, tried: str) -> None:
    """Note what autofit tried when the user's code raised it; what was noted first stays."""
    if not isinstance(error, AutofitError) and "_tried" not in vars(error):
        vars(error)["_tried"] = tried
        if isinstance(error.__cause__, WorkerTraceback):
            error.__cause__.tried = tried
        else:
            error.add_note(f"raised while autofit was {tried}")


def tried_when(error: BaseException) -> str | None:
    """Return what autofit tried when it was raised, or None if nobody noted that."""
    tried: str | None = vars(error).get("_tried")
    return tried


def blame(error: BaseException, setting: str, value: bool | float | str) -> None:
    """Note the value of a setting that caused an error, for callers that can do without it."""
    vars(error)["_raised_under"] = setting, value


def blamed(error: BaseException) -> tuple[str, bool | float | str] | None:
    """Return the setting and the value that `blame` noted, or None if it did not."""
    noted: tuple[str, bool | float | str] | None = vars(error).get("_raised_under")
    return noted


def in_one_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its text."""
    return with_type(error).partition("\n")[0]


def with_type(error: BaseException) -> str:
    """Return the type of an exception and the beginning of its text, which may hold a batch."""
    return f"{type(error).__name__}: {str(error)[:2000]}"


def raised_here(error: BaseException) -> bool:
    """Whether autofit's own code raised it, or passed to C what that refused."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename in _own_files()


def is_users_class(named: Any) -> bool:
    """Whether a class or function is not from torch, numpy, autofit or the standard library.

    The library's namespaces, containers and generators are as good as the user's.
    """
    return (named.__module__ or "").partition(".")[0] not in _NOT_THE_USERS


_HOLDERS = {"argparse", "collections", "functools", "random", "types"}
_NOT_THE_USERS = {"torch", "numpy", "autofit", *sys.stdlib_module_names} - _HOLDERS


@contextmanager
def users_code() -> Iterator[None]:
    """Mark what is raised inside as the user's, except for autofit's errors and Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, or a task that was cancelled
        mark_users(error)
        raise


# Tracebacks as the user is to see them: without autofit's frames.

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def hides_own_frames(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a public function: errors of the user's, and those on purpose, skip our own frames.

    Faults of autofit's own keep theirs, which a bug report needs.
    """

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, AutofitError) or is_users(error):
                part, ours = error.__traceback__, _own_files()
                while part and part.tb_next and part.tb_frame.f_code.co_filename in ours:
                    part = part.tb_next
                error.__traceback__ = part
            raise

    return call


MESSAGE_BYTES = 4096
"""Of an exception's text: it may hold a whole batch."""


def text_of(exception: BaseException) -> str:
    """Return the beginning of an exception's text, whatever its `__str__` does."""
    try:
        return str(exception)[:MESSAGE_BYTES]
    except BaseException:  # the user's __str__ may do anything
        return f"<a {type(exception).__name__} whose text cannot be read>"


def traceback_text(error: BaseException) -> str:
    """Return the traceback as text without autofit's frames; the error stays as it is."""
    shown, ours = traceback.TracebackException.from_exception(error), _own_files()
    waiting = [shown]
    while waiting:
        part = waiting.pop()
        part.stack[:] = [f for f in part.stack if f.filename not in ours] or part.stack[-1:]
        linked = (part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ()))
        waiting.extend(link for link in linked if link is not None)
    return _shortened("".join(shown.format()))


_LONG_LINE = re.compile("(.{2000}).+")
_MAX_TRACEBACK = 2**16
"""Characters: an exception's text may hold a whole batch, and goes as JSON between processes."""


def _shortened(text: str) -> str:
    """Cut long lines, and the middle where there are many."""
    if len(text) <= _MAX_TRACEBACK:
        return text
    lines = _LONG_LINE.sub(r"\1 ... (cut)", text)
    half = _MAX_TRACEBACK // 2
    return lines if len(lines) <= 2 * half else f"{lines[:half]}\n... (cut)\n{lines[-half:]}"


def _own_files() -> frozenset[str]:
    """Return the files of the modules of autofit and its strategies that are loaded."""
    loaded = list(sys.modules.items())
    own = [module for name, module in loaded if name.partition(".")[0] == "autofit"]
    return frozenset(file for module in own if (file := getattr(module, "__file__", None)))


MAX_CHAINED_EXCEPTIONS = 64


def chain_of(exception: BaseException) -> Iterator[BaseException]:
    """Yield `exception`, then its causes, contexts and group members, each once, nearest first.

    Contexts count also where `raise ... from None` hides them from a printed traceback.
    """
    seen: set[int] = set()
    waiting: list[BaseException] = [exception]
    while waiting and len(seen) < MAX_CHAINED_EXCEPTIONS:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        nearby = (*members, link.__cause__, link.__context__)
        waiting.extend(near for near in nearby if near is not None)


def release_exception(exception: BaseException) -> None:
    """Let go of everything that a caught exception keeps alive.

    An exception holds its traceback, the traceback the frames, the frames every local of the
    failed step: activations, a half-built graph, the loss. Clearing the outermost traceback is
    not enough, because causes and contexts hold frames of their own. So clear frames, traceback,
    cause and context of every exception of the chain, and collect garbage. The exception keeps
    its type, text and arguments.

    Frames that are still running keep their locals: hand the work to a function of its own, and
    call this in the `except` block around that call. Do not call it on an exception that is to
    reach the user with its traceback.
    """
    for link in list(chain_of(exception)):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = link.__cause__ = link.__context__ = None
    del link
    collect_garbage()


def never_release(exception: BaseException) -> None:
    """Keep a caught exception, and all that its frames hold, until the process is gone.

    For one that a dead CUDA context is to blame for: the frames hold pinned memory, torch records
    an event in the destructor of that, and a destructor that raises ends the process. This one
    outlives the interpreter's own end too, which a reference in a module would not.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(exception))


def collect_garbage() -> None:
    """Collect twice: finalizers that ran the first time may free more the second."""
    gc.collect()
    gc.collect()
