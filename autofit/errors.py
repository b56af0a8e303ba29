"""The errors that autofit raises on purpose, and how to let go of any exception that was caught.

Each error says what went wrong, which value it was, and what to do about it; `exit_code` is what
the command line returns for it. An exception raised by the user's own code is never wrapped in one
of these: it reaches the user with its own type (see `autofit.probing.messages`), and
`is_users` distinguishes it from a fault of autofit's.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autofit.plan import Plan


class AutofitError(Exception):
    """The root of autofit's own errors."""

    exit_code = 4


class InvalidRequest(AutofitError, ValueError):
    """An argument, a sample batch, a budget or a file that cannot mean what was asked."""

    exit_code = 2


class StudyRefused(InvalidRequest):
    """A study that belongs to another search, is in use, or cannot be read or written."""


class NoFeasiblePlan(AutofitError):
    """Not one plan fits the VRAM budget.

    Attributes:
        plan: the smallest plan that was tried; None where the weights alone are too large, and
            none was.
        required_bytes: what it (or the weights) needed, as far as it could be told; None where it
            ran out of memory before it said.
        allowed_bytes: the VRAM budget.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, plan: Plan | None, required_bytes: int | None, allowed_bytes: int
    ) -> None:
        super().__init__(message)
        self.plan = plan
        self.required_bytes = required_bytes
        self.allowed_bytes = allowed_bytes


class WorkloadFailed(AutofitError):
    """The user's code failed and left no exception to hand on; its text is in the message."""

    exit_code = 3


class DeviceUnavailable(AutofitError):
    """The device that was asked for is not there, or it does not answer."""


class WorkerFailed(AutofitError):
    """The worker process could not be started, or kept dying whatever it was given."""


class CannotTell(AutofitError):
    """A question that could be answered neither by tracing nor by running."""

    exit_code = 5


def mark_users(error: BaseException) -> None:
    """Note, where it is known, that the user's own code raised it; autofit's errors are its own."""
    if not isinstance(error, AutofitError):
        vars(error)["_raised_by_users_code"] = True  # past any __setattr__ of its class


def is_users(error: BaseException) -> bool:
    """Whether it was noted that the user's own code raised it."""
    return "_raised_by_users_code" in vars(error)


@contextmanager
def users_code() -> Iterator[None]:
    """Mark what is raised inside, `sys.exit` included, as the user's, but for autofit's errors."""
    try:
        yield
    except (Exception, SystemExit) as error:
        mark_users(error)
        raise


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
    links = list(chain_of(exception))
    _forget_in_interpreter(links)
    for link in links:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = link.__cause__ = link.__context__ = None
    links.clear()
    collect_garbage()


def collect_garbage() -> None:
    """Collect twice: finalizers that ran the first time may free more the second."""
    gc.collect()
    gc.collect()


_INTERPRETER_MEMORIES = ("last_exc", "last_value", "last_traceback", "last_type")


def _forget_in_interpreter(links: list[BaseException]) -> None:
    """Remove the exception that an interactive session remembers as the last one printed."""
    known = {id(link) for link in links}
    if any(id(getattr(sys, name, None)) in known for name in ("last_exc", "last_value")):
        for name in _INTERPRETER_MEMORIES:
            if hasattr(sys, name):
                delattr(sys, name)
