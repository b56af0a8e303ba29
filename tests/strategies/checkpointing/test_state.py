"""A model and what lies beside it are put back, and nothing of the rest of the process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

NAMES = [0] * 10
"""Small enough to be put back."""

SAMPLES = list(range(100_000))
"""A data set, in the file of the model."""


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = logging.getLogger(__name__)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_loggers_made_in_a_step_stay(part: Callable[[str], Any]) -> None:
    """A logger refers to all others of the process."""
    model = Logs()
    name = f"{__name__}.made_in_a_step"
    state = part("state").State(model)
    made = logging.getLogger(name)
    model.seen.append(1)
    state.restore()
    assert logging.getLogger(name) is made
    assert model.seen == []


def test_what_is_large_beside_a_model_is_not_copied(part: Callable[[str], Any]) -> None:
    """Its length is seen, and no more; what is small is put back."""
    model = Logs()
    state = part("state").State(model)
    traces = dict(part("state").traces(model))
    assert traces["global SAMPLES (its length)"] == len(SAMPLES)
    assert "global SAMPLES (its values)" not in traces
    assert traces["global NAMES (its values)"] == list(enumerate(NAMES))
    NAMES[0] += 1
    SAMPLES[0] += 1
    state.restore()
    assert (NAMES[0], SAMPLES[0]) == (0, 1)


def _operations(run: Callable[[], Any]) -> int:
    """How many instructions of Python's are run."""
    found = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal found
        frame.f_trace_opcodes = True
        found += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return found


def test_work_grows_with_the_modules_and_not_with_their_square(part: Callable[[str], Any]) -> None:
    def operations(modules: int) -> int:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(modules)))
        return _operations(part("state").State(model).changed_attributes)

    assert operations(80) < 5 * operations(20)
