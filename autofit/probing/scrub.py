"""Lets go of everything that a caught exception keeps alive.

An exception holds its traceback, the traceback the frames, the frames every local of the failed
step: activations, a half-built graph, the loss. Clearing the outermost traceback is not enough,
the causes and contexts hold frames of their own.

Call `scrub` after `autofit.probing.faults.fault_of` has kept what is to be told. It may be called
in the `except` block: what the interpreter holds there is the exception alone. But functions that
are still running keep their locals, so whoever catches has handed the work to a function of its
own. An exception that is to reach the user with its traceback must not be scrubbed.
"""

from __future__ import annotations

import gc
import sys
import traceback

from autofit.probing.faults import chain_of

_INTERPRETER_MEMORIES = ("last_exc", "last_value", "last_traceback", "last_type")


def scrub(exception: BaseException) -> None:
    """Clear frames, traceback, cause and context of every exception of the chain; collect twice.

    Frames that are still running are left alone. The exception keeps its type, text and
    arguments.
    """
    links = list(chain_of(exception))
    _forget_in_interpreter(links)
    for link in links:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = link.__cause__ = link.__context__ = None
    links.clear()
    collect()


def collect() -> None:
    """Collect garbage twice: finalizers that ran the first time may free more the second."""
    gc.collect()
    gc.collect()


def _forget_in_interpreter(links: list[BaseException]) -> None:
    """An interactive session remembers the last exception it printed."""
    known = {id(link) for link in links}
    if any(id(getattr(sys, name, None)) in known for name in ("last_exc", "last_value")):
        for name in _INTERPRETER_MEMORIES:
            if hasattr(sys, name):
                delattr(sys, name)
