"""Functions that user code compiles, in a dry run: they run as they are written.

A trace of operators does not see a compiled kernel, and the compiler does not know the stand-ins
of a dry run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from autofit.prediction.cuda.fake_cuda import replaced
from autofit.prediction.cuda.values import IN_BACKWARD, users_line
from autofit.torch_private import missing


@contextmanager
def uncompiled(note: Callable[[str], None]) -> Iterator[None]:
    """Run compiled functions as they are written.

    Args:
        note: called with the line that calls one, each time; never where this torch does not say.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if missing("calls of compiled functions") is None:
            stack.enter_context(_calls_noted(note))
        yield


def _calls_noted(note: Callable[[str], None]) -> Any:
    from torch._dynamo import eval_frame  # an optimizer imports it in any case

    choose = eval_frame._callback_from_stance

    def noted(callback: Any) -> Any:
        if callable(callback):  # else a function that is never compiled
            line = users_line(traceback.extract_stack())
            note("a function of the workload" if line == IN_BACKWARD else line)
        return choose(callback)

    return replaced(eval_frame, "_callback_from_stance", noted)
