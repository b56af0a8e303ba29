"""One look at a training at one micro-batch: what it saves, and how long its parts take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from autofit.strategy import Context, TrainingView

from .arguments import take_tensors
from .recorder import Recorder
from .stopwatch import Stopwatch
from .timeline import Timeline
from .units import Unit

LEAST_STEPS, MOST_STEPS, ENOUGH_S = 3, 25, 1.0
"""Steps are timed thoroughly until they are enough, or have taken long enough."""

FORWARDS_IN_A_STEP = 3
"""A backward pass computes two products for each one of the forward pass."""


@dataclass(frozen=True)
class Survey:
    """What was seen.

    Attributes:
        timeline: with the calls of all modules.
        seconds: module -> forward seconds over all its calls.
        step_s: seconds of the whole step.
        checkpointed_itself: modules that checkpoint something on their own.
    """

    timeline: Timeline
    seconds: Mapping[str, float]
    step_s: float
    checkpointed_itself: frozenset[str]

    def seconds_of(self, unit: str, model: torch.nn.Module) -> float:
        """Forward seconds of a unit; a run of children takes what they take together."""
        return sum(self.seconds.get(part, 0.0) for part in Unit.parse(unit).parts(model))


def survey(
    context: Context,
    micro_batch: int,
    timed: Collection[str] | None = None,
    *,
    thorough: bool = False,
) -> Survey:
    """Run a few steps at this micro-batch and watch them; the weights stay as they are.

    Where a step does not fit, a forward pass that lets everything go is watched instead.

    Args:
        timed: modules to time; None: all.
        thorough: time many steps, for parts must be told apart; a few tell how long a step takes.

    Raises:
        torch.OutOfMemoryError: not even the forward pass fits.
        NeedsSavedTensors: a step does not fit, and the forward pass cannot let go of anything.
    """
    steps = MOST_STEPS if thorough else LEAST_STEPS

    def whole_step(training: TrainingView, batch: Any) -> Survey:
        return _watched(training, batch, timed, _step, steps, keep=True)

    def forward_alone(training: TrainingView, batch: Any) -> Survey:
        return _watched(training, batch, timed, _forward, steps, keep=False)

    found: Survey
    try:
        found = context.profile(whole_step, micro_batch)
        return found
    except torch.OutOfMemoryError:
        pass  # tried again out here, where the failed step's tensors are gone
    found = context.profile(forward_alone, micro_batch)
    return found


def _watched(
    training: TrainingView,
    batch: Any,
    timed: Collection[str] | None,
    run: Callable[[TrainingView, Any], None],
    steps: int,
    *,
    keep: bool,
) -> Survey:
    recorder = Recorder(training.model, take_tensors(batch)[0], keep=keep)
    with recorder.watching():
        run(training, batch)
    names = {name for name, _ in training.model.named_modules()} if timed is None else timed
    with nullcontext() if keep else _letting_go():
        seconds, whole_s = _timed(training, names, lambda: run(training, batch), steps)
    return Survey(
        recorder.timeline(),
        seconds,
        whole_s if keep else FORWARDS_IN_A_STEP * whole_s,
        frozenset(recorder.checkpointed_itself),
    )


def _step(training: TrainingView, batch: Any) -> None:
    undo = training.wrap_optimizer_step(lambda update: None)
    try:
        training.step(batch)
    finally:
        undo()


def _forward(training: TrainingView, batch: Any) -> None:
    training.loss(batch)


def _letting_go() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


def _timed(
    training: TrainingView, names: Collection[str], run: Callable[[], None], steps: int
) -> tuple[dict[str, float], float]:
    """Seconds of each module and of the whole: of the fastest run, shared out as in the usual one.

    What slows a whole run down (another process, a clock that falls) slows its parts alike, so a
    part's share of its own run says more than its seconds.
    """
    shares: dict[str, list[float]] = {name: [] for name in names}
    wholes_s: list[float] = []
    for number in range(steps):
        if number >= LEAST_STEPS and sum(wholes_s) >= ENOUGH_S:
            break
        stopwatch = Stopwatch(training.model, names, training.device)
        with stopwatch.running():
            run()
        wholes_s.append(stopwatch.whole_s())
        for name, took_s in stopwatch.seconds().items():
            shares[name].append(took_s / wholes_s[-1] if wholes_s[-1] else 0.0)
    whole_s = min(wholes_s)
    return {name: whole_s * median(each) for name, each in shares.items()}, whole_s
