"""Every error autofit raises on purpose.

Each says what went wrong, which value it was, and what to do about it; `exit_code` is what the
command line returns for it. An exception that the user's own code raised is never wrapped in one
of these: it reaches the user with its own type (see `autofit.probing.client`), and `is_users` tells
it from a fault of autofit's.
"""

from __future__ import annotations

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
    """What is raised inside is the user's, but for autofit's own errors."""
    try:
        yield
    except Exception as error:
        mark_users(error)
        raise
