"""Profile a step at one micro-batch: saved tensors, and the time that each module takes."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from autofit.strategy import Context, TrainingView, calls_watched

from ..calls import run_step
from .products import around_products
from .saved_tensors import Recorder, Timeline, saving_by
from .units import Unit

# Limits of the steps that parts are timed in, and the seconds after which they suffice.
LEAST_STEPS, MOST_STEPS, ENOUGH_S = 3, 25, 0.5

# Usual and largest number of recorded steps where a model skips parts at random.
LOOKS, MOST_LOOKS = 8, 24

# Cost of a step in forward passes: a backward pass computes two products for each of theirs.
FORWARDS_IN_A_STEP = 3

Seen = TypeVar("Seen")
Run = Callable[[TrainingView, Any], object]


@dataclass(frozen=True)
class StepProfile:
    """Saved tensors and duration of one step.

    Attributes:
        micro_batch: samples in it.
        timeline: of the calls of all modules.
        step_s: seconds of one step, too noisy to compare steps by; None: not timed.
        checkpointing: modules whose own code checkpoints something.
        around_checkpoints: these and all modules that run them.
        overwritten: modules of which an input is changed in place.
        draws: whether the step draws numbers of the generators that a seed sets.
    """

    micro_batch: int
    timeline: Timeline
    step_s: float | None
    checkpointing: frozenset[str]
    around_checkpoints: frozenset[str]
    overwritten: frozenset[str]
    draws: bool


@dataclass(frozen=True)
class Times:
    """Durations of the parts of a step.

    Attributes:
        seconds: module -> forward seconds over all its calls.
        step_s: seconds of the whole step.
        products: module -> share of its products in its seconds.
    """

    seconds: Mapping[str, float]
    step_s: float
    products: Mapping[str, float] = field(default_factory=dict)

    def of(self, unit: str, model: torch.nn.Module) -> float:
        """Return the seconds that recomputing a unit takes; of a run, the sum of its children."""
        parsed = Unit.parse(unit)
        whole = sum(self.seconds.get(part, 0.0) for part in parsed.parts(model))
        return whole * (1 - self.products.get(parsed.module, 0.0) * parsed.keeps_products)


def profile_step(
    context: Context, micro_batch: int, like: StepProfile | None = None, timed: bool = True
) -> StepProfile:
    """Record one step at this micro-batch and time another; the weights do not change.

    Where a step does not fit, a forward pass that keeps no saved tensors is recorded instead.

    Args:
        context: holds the model.
        micro_batch: samples of a step.
        like: an earlier profile; a step that calls the same modules is a whole one.
        timed: whether to time a step.

    Raises:
        torch.OutOfMemoryError: not even the forward pass fits.
        NeedsSavedTensors: a step does not fit, and the forward pass needs its saved tensors.
    """

    def look(run: Run, keep: bool, training: TrainingView, batch: Any) -> StepProfile:
        before = _random_states(training.device)
        known = frozenset(like.timeline.calls_of if like else ())
        recorder = _of_a_whole_step(training, batch, partial(run, training, batch), keep, known)
        draws = before != _random_states(training.device)
        once = partial(_timed, training, (), partial(run, training, batch), keep, steps=1)
        step_s = once().step_s if timed else None
        return StepProfile(
            micro_batch,
            recorder.timeline(),
            step_s,
            frozenset(recorder.checkpointing),
            frozenset(recorder.around_checkpoints),
            frozenset(recorder.overwritten),
            draws,
        )

    return _of_a_step_or_a_forward(context, micro_batch, look)


def time_parts(
    context: Context, micro_batch: int, names: Collection[str], keeping: Collection[str] = ()
) -> Times:
    """Time these modules in repeated steps at this micro-batch, and the products of `keeping`.

    Raises:
        torch.OutOfMemoryError, NeedsSavedTensors: as `profile_step` does.
    """

    def look(run: Run, keep: bool, training: TrainingView, batch: Any) -> Times:
        once = partial(run, training, batch)
        times = _timed(training, names, once, keep, steps=MOST_STEPS)
        return replace(times, products=_of_products(training, keeping, once, keep))

    return _of_a_step_or_a_forward(context, micro_batch, look)


def brought_by_samples(small: StepProfile, large: StepProfile) -> Timeline:
    """Return the large profile's timeline, with only the bytes that grow with the micro-batch.

    Storages that do not grow (masks, weights computed in the forward pass) are not activations:
    counted, they would make the wrong parts look worth checkpointing.
    """
    few, many = small.timeline.storages, large.timeline.storages
    added = large.micro_batch - small.micro_batch
    if not added or [s.first for s in few] != [s.first for s in many]:
        return large.timeline
    storages = [
        replace(more, nbytes=round(max(0, more.nbytes - less.nbytes) * large.micro_batch / added))
        for less, more in zip(few, many, strict=True)
    ]
    return replace(large.timeline, storages=storages)


class Stopwatch:
    """Time each module over all its forward calls, and the body as a whole, on the device's clock.

    Args:
        model: holds the modules.
        names: which of them to time, as `named_modules` names them.
        device: where they run; the host does not wait for it while it is timed.
    """

    def __init__(self, model: nn.Module, names: Collection[str], device: torch.device) -> None:
        self._model = model
        self._names: dict[nn.Module, list[str]] = {}
        for name in names:
            self._names.setdefault(model.get_submodule(name), []).append(name)
        self._device = device
        self._begun: dict[str, list[Any]] = {name: [] for name in names}
        self._calls: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
        self._products: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
        self._whole: tuple[Any, Any] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what runs in the body, and leave no hook behind."""
        with calls_watched(self._model, self._names, self._begin, self._end):
            start = self._mark()
            yield
            self._whole = (start, self._mark())

    def seconds(self) -> dict[str, float]:
        """Return the forward seconds of each module; waits for the device."""
        return {name: sum(map(self._between, calls)) for name, calls in self._calls.items()}

    def shares_of_products(self) -> dict[str, float]:
        """Return the share of each module's seconds that `product` ran; waits for the device."""
        seconds = self.seconds()
        products = {name: sum(map(self._between, c)) for name, c in self._products.items()}
        return {name: products[name] / all_s for name, all_s in seconds.items() if all_s}

    def product(self, op: Any, run: Callable[[], Any]) -> Any:
        """Run a product, and time it for the modules that run."""
        begin = self._mark()
        made = run()
        marks = begin, self._mark()
        for name, begun in self._begun.items():
            if begun:
                self._products[name].append(marks)
        return made

    def whole_s(self) -> float:
        """Return the seconds of the body; waits for the device."""
        return self._between(self._whole) if self._whole else 0.0

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _is_forward():
            for name in self._names[module]:
                self._begun[name].append(self._mark())

    def _end(self, module: nn.Module, output: Any) -> None:
        for name in self._names[module]:
            if _is_forward() and self._begun[name]:
                self._calls[name].append((self._begun[name].pop(), self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":  # where one thread works, without other processes
            return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not annotate it
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, marks: tuple[Any, Any]) -> float:
        begin, end = marks
        if self._device.type != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def _of_a_step_or_a_forward(
    context: Context, micro_batch: int, look: Callable[[Run, bool, TrainingView, Any], Seen]
) -> Seen:
    def look_at(run: Run, keep: bool) -> Seen:
        seen: Seen = context.with_training(partial(look, run, keep), micro_batch)
        return seen

    try:
        return look_at(run_step, True)
    except torch.OutOfMemoryError:
        pass  # tried again out here, where the failed step's tensors are gone
    return look_at(lambda training, batch: training.loss(batch), False)


def _of_a_whole_step(
    training: TrainingView, batch: Any, run: Callable[[], object], keep: bool, known: frozenset[str]
) -> Recorder:
    """Record a step; where steps skip parts at random (LayerDrop), one that skips fewest.

    A step is enough if it calls exactly the modules of an earlier one that was chosen so.
    """
    looks: list[tuple[set[str], Recorder]] = []
    for number in range(1, MOST_LOOKS + 1):
        recorder = Recorder(training, batch, keep=keep)
        with recorder.watching():
            run()
        looks.append((set(recorder.timeline().calls_of), recorder))
        called = [units for units, _ in looks]
        if called[-1] == known:
            return recorder
        is_whole = max(map(len, called)) == len(set.union(*called))
        is_alike = number > 1 and all(units == called[0] for units in called)
        if is_alike or (is_whole and number >= LOOKS):
            break
    return max(looks, key=lambda look: len(look[0]))[1]


def _timed(
    training: TrainingView,
    names: Collection[str],
    run: Callable[[], object],
    keep: bool,
    steps: int,
) -> Times:
    """Return the seconds of the fastest run, divided among the modules by their median shares.

    Other processes and falling clocks slow all parts of a run alike, so the share of a part in
    its own run is less noisy than its seconds.
    """
    shares: dict[str, list[float]] = {name: [] for name in names}
    wholes_s: list[float] = []
    began = time.monotonic()  # steps that wait, for files or other processes, use no thread time
    for number in range(steps):
        if number >= LEAST_STEPS and time.monotonic() - began >= ENOUGH_S:
            break
        stopwatch = _watched(training, names, run, keep)
        wholes_s.append(stopwatch.whole_s())
        for name, took_s in stopwatch.seconds().items():
            shares[name].append(took_s / wholes_s[-1] if wholes_s[-1] else 0.0)
    whole_s = min(wholes_s)
    seconds = {name: whole_s * median(each) for name, each in shares.items()}
    return Times(seconds, whole_s if keep else FORWARDS_IN_A_STEP * whole_s)


def _watched(
    training: TrainingView,
    names: Collection[str],
    run: Callable[[], object],
    keep: bool,
    *,
    products: bool = False,
) -> Stopwatch:
    """Run once; return the stopwatch of these modules, and of their products if asked for."""
    stopwatch = Stopwatch(training.model, names, training.device)
    dropping = saving_by(training, lambda tensor: None, lambda nothing: nothing)
    with (
        nullcontext() if keep else dropping,
        stopwatch.running(),
        around_products(stopwatch.product) if products else nullcontext(),
    ):
        run()
    return stopwatch


def _of_products(
    training: TrainingView, names: Collection[str], run: Callable[[], object], keep: bool
) -> dict[str, float]:
    """Return the share of each module's products in its seconds, the median of a few steps.

    Watching operators makes those between products slower, so the share is rather too small.
    """
    shares: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(LEAST_STEPS if names else 0):
        stopwatch = _watched(training, names, run, keep, products=True)
        for name, share in stopwatch.shares_of_products().items():
            shares[name].append(share)
    return {name: median(each) for name, each in shares.items() if each}


def _random_states(device: torch.device) -> list[Any]:
    """Return the states of the generators that a seed sets, as values that compare."""
    states: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).tolist())
    if numpy := sys.modules.get("numpy"):
        states.append(repr(numpy.random.get_state(legacy=False)["state"]))
    return states


def _is_forward() -> bool:
    """Return whether no backward pass is under way: there, only recomputations call modules."""
    return torch._C._current_graph_task_id() == -1
