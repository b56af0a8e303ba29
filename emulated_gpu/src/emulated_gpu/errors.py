"""What is raised on purpose: each error says what is wrong, which value it was, and what to do."""

from __future__ import annotations


class EmulatedGpuError(Exception):
    """The root of the errors of this package.

    Attributes:
        exit_code: what the command returns for it.
    """

    exit_code = 4


class InvalidArgument(EmulatedGpuError, ValueError):
    """An argument that cannot mean what was asked."""

    exit_code = 2


class Unavailable(EmulatedGpuError):
    """There is no emulated GPU here: the message says what is missing and how to get it."""
