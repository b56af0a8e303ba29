"""One look at a plan in a worker on an emulated GPU: the steps of a probe, under a limit.

Torch's own caching allocator decides whether the plan runs. Where operators compute nothing, the
look ends as soon as the training asks for a value: what it would be told means nothing.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.amp import grad_scaler
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.devices.base import MemoryReading
from autofit.errors import release_exception
from autofit.measurement import Outcome
from autofit.memory.replay import STEADY_STEPS
from autofit.plan import ResolvedPlan
from autofit.prediction.cuda.values import is_an_optimizer, passes_on, users_line
from autofit.probing.faults import fault_of
from autofit.probing.measure import micro_batches_to_run, samples_on, warm_up
from autofit.training import evaluation
from emulated_gpu import driver, estimates, reads_watched

if TYPE_CHECKING:
    from autofit.probing.session import Session

_OF_INTEGERS = ("transformers/masking_utils.py",)
"""Files that read values of integers and booleans alone: whether a mask is of ones, whether
positions start anew. The card computes those where it computes nothing else."""
_PATIENCE_S = 0.05
_LARGE_ELEMENTS = 2**16


class ValuesAsked(Exception):
    """The training asked for a value, and operators compute none here.

    Args:
        line: that asked, as "file:number: text".
    """

    def __init__(self, line: str = "") -> None:
        super().__init__(line)
        self.line = line


def _asker() -> FrameType:
    """Return the frame that reads a value now."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_between(file: str) -> bool:
    return file in (__file__, driver.__file__) or passes_on(file)


def _is_harmless(asker: FrameType) -> bool:
    """Return whether what is read is known, or changes no allocation.

    A gradient scaler asks whether gradients overflowed, and is told that they did not; autofit asks
    whether an evaluation changed the model.
    """
    file = asker.f_code.co_filename
    torchs_or_ours = (grad_scaler.__file__, evaluation.__file__)
    return file in torchs_or_ours or is_an_optimizer(file) or file.endswith(_OF_INTEGERS)


@dataclass(frozen=True)
class Look:
    """How a plan ran under a limit.

    Attributes:
        failure: the allocator's words where it ran out of memory; None: it ran.
        late_retries: flushes of the allocator's cache in the last two steps.
        peak_allocated_bytes, peak_reserved_bytes: as the allocator counts them.
        estimates: which sizes it was told are not NVIDIA's.
    """

    failure: str | None
    late_retries: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    estimates: tuple[str, ...]

    @property
    def is_steady(self) -> bool:
        """Whether it ran, its last steps without a flush."""
        return self.failure is None and not self.late_retries


def look(
    session: Session,
    *,
    resolved: ResolvedPlan,
    limit_bytes: int | None,
    values: bool,
) -> Look:
    """Run four optimizer steps of a plan (more where a loss scale overflows), as a probe does.

    Args:
        session: of a worker on an emulated GPU.
        resolved: the plan.
        limit_bytes: the most that the allocator may reserve; None: all there is.
        values: whether operators compute.

    Raises:
        ValuesAsked: the training asked for a value, and operators compute none.
        Exception: raised by the user's own code.
    """
    device = session.builder.device
    session.builder.reclaim()
    before = device.read()
    whole = device.total_bytes if limit_bytes is None else limit_bytes
    device.limit(whole + before.non_torch_bytes)
    device.reset_peaks()
    failure, retries = None, [before.allocator_retries]
    with nullcontext() if values else _values_refused():
        try:
            after = _train(session, resolved, retries, values=values)
        except Exception as error:
            fault = fault_of(error)
            if fault.outcome is not Outcome.OOM:
                raise
            failure = fault.detail
            release_exception(error)
            after = device.read()
    session.builder.reclaim_or_not()
    return Look(
        failure,
        retries[-1] - retries[-1 - STEADY_STEPS] if failure is None else 0,
        after.peak_allocated_bytes,
        after.peak_reserved_bytes,
        estimates(),
    )


def _train(
    session: Session,
    resolved: ResolvedPlan,
    retries: list[int],
    *,
    values: bool,
) -> MemoryReading:
    """Run the steps, noting the allocator's retries at the end of each; return the counters."""
    builder, plan = session.builder, resolved.plan
    device, workload = builder.device, builder.fresh_workload()
    unfilled = nullcontext() if values else _Unfilled()  # type: ignore[no-untyped-call]  # torch's
    with unfilled:
        if not values:
            workload = replace(workload, model=workload.build_model())
        places = micro_batches_to_run(workload, plan, full_accumulation=False)
        batch = samples_on(builder, workload, plan, places)
    with builder.training(workload, resolved) as training:

        def step() -> None:
            training.step(batch)
            device.synchronize()
            retries.append(device.read().allocator_retries)

        for _ in warm_up(training):
            step()
        for _ in range(STEADY_STEPS):
            step()
        return device.read()


class _Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Leaves large new weights and samples on the CPU as they are: they mean nothing here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS and args[0].device.type == "cpu" and args[0].numel() > _LARGE_ELEMENTS:
            return args[0]
        if func is _ATEN.index_select.default and args[0].is_floating_point():
            chosen, dim, index = args
            return chosen.new_empty([*chosen.shape[:dim], len(index), *chosen.shape[dim + 1 :]])
        return func(*args, **(kwargs or {}))


_ATEN = torch.ops.aten
_FILLS = (_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.erfinv_.default)


@contextmanager
def _values_refused() -> Iterator[None]:
    """Raise ValuesAsked if anything inside asks for a value that decides what the training does.

    The code that asks goes on with a zero until the exception reaches its thread, and may fail of
    it, or catch the exception: it counts anyway.
    """
    lines: list[str] = []
    thread = threading.get_ident()
    ended = threading.Event()

    def seen() -> bool:  # below the code that asks: what is raised here would be swallowed
        if ended.is_set() or _is_harmless(asker := _asker()):
            return True
        lines.append(users_line(traceback.extract_stack(asker)))
        threading.Timer(_PATIENCE_S, stop).start()
        return False

    def stop() -> None:
        if not ended.is_set():
            asked = ctypes.py_object(ValuesAsked)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), asked)

    try:
        with reads_watched(seen):
            try:
                yield
            finally:
                ended.set()
    except BaseException as error:
        if lines and not isinstance(error, KeyboardInterrupt):
            release_exception(error)
            raise ValuesAsked(lines[0]) from None
        raise
    if lines:
        raise ValuesAsked(lines[0])
