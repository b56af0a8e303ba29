"""What a rehearsal cannot do, and the line of the user's that asked for it.

A rehearsal has no values. Where the user's code reads one, or calls an operator that has no shape
function for the meta device, an exception is raised; user code may catch it (`try: ... except
Exception`) and go on as it never would on a GPU. So the first such lack is noted where it occurs,
and a rehearsal that lacked anything has no answer.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import lbfgs

import autofit

_TORCH, _OURS = (f"{Path(str(module.__file__)).parent}/" for module in (torch, autofit))
_OPTIMIZERS = f"{_TORCH}optim/"
_UTILITIES = (
    "/_compile.py",
    "/_contextlib.py",
    "/_python_dispatch.py",
    "/contextlib.py",
    "/eval_frame.py",
)


class NeedsValues(Exception):
    """The values of a tensor were asked for, and a rehearsal has none.

    Args:
        question: what was asked of them.
    """

    def __init__(self, question: str) -> None:
        super().__init__(f"{question}, which takes the values of a tensor, and there are none")


@dataclass(frozen=True)
class Lack:
    """Something that a rehearsal could not do.

    Attributes:
        reason: what.
        line: the line of the user's that asked for it, as "file:number: text"; or what of the
            model did.
    """

    reason: str
    line: str

    @classmethod
    def here(cls, error: Exception) -> Lack:
        """From the very place where it is raised: the line is looked for among the callers."""
        frames = traceback.extract_stack()
        inside = [at for at, frame in enumerate(frames) if frame.filename.startswith(_OURS)]
        return cls(_first_line(error), _users_line(frames[inside[0] :]))

    @classmethod
    def of(cls, error: Exception) -> Lack:
        """From where it was caught: the line is looked for in its traceback."""
        return cls(_first_line(error), _users_line(traceback.extract_tb(error.__traceback__)))


def is_lack(error: Exception) -> bool:
    """Whether the meta device is to blame, and not the user's code."""
    if isinstance(error, (NeedsValues, NotImplementedError)):
        return True
    return "meta" in str(error) or "Tensor.__format__" in str(error)  # f"{loss:.3f}"


def asked_by_an_optimizer() -> bool:
    """Whether an optimizer of PyTorch's asks, and not the user: it scales an update by the value.

    What the update takes is the same for any value (`ASGD` copies where mu is 1, which it is for
    its first million steps). LBFGS decides by values what to do.
    """
    frame = sys._getframe()
    while frame.f_back is not None and _passes_on(frame.f_code.co_filename):
        frame = frame.f_back
    asker = frame.f_code.co_filename
    return asker.startswith(_OPTIMIZERS) and asker != lbfgs.__file__


def _passes_on(file: str) -> bool:
    """Whether a file's code only stands between who asks and who answers."""
    return file.startswith(_OURS) or file.endswith(_UTILITIES)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _users_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line that is neither torch's nor autofit's."""
    files = [(frame, frame.filename) for frame in frames]
    others = [frame for frame, file in files if not _passes_on(file) and not file.startswith("<")]
    users = [frame for frame in others if not frame.filename.startswith(_TORCH)]
    for frame in reversed(users or others):
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "in the backward pass"
