"""Profile a step at one micro-batch: saved tensors, and the time that each module takes."""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from autofit.strategy import Context, TrainingView, calls_watched

from ..calls import run_step
from .products import ProductsWatch
from .saved_tensors import Recorder, Recording, saving_by
from .units import Unit

# Limits of the steps that modules are timed in, and the seconds after which they suffice.
MIN_STEPS, MAX_STEPS, ENOUGH_S = 3, 25, 0.5

# Usual and largest number of recorded steps where a model skips modules at random.
LOOKS, MAX_LOOKS = 8, 24

# Cost of a step in forward passes: a backward pass computes two products for each of theirs.
FORWARDS_IN_A_STEP = 3

Result = TypeVar("Result")
Mark: TypeAlias = Any  # a moment on the device's clock


@dataclass(frozen=True)
class StepProfile:
    """Saved tensors and duration of one step.

    Attributes:
        micro_batch: samples in it.
        recording: what it saved and called.
        step_s: seconds of one step, too noisy to compare steps by.
        draws: whether the step draws numbers of the generators that a seed sets.
    """

    micro_batch: int
    recording: Recording
    step_s: float
    draws: bool


@dataclass(frozen=True)
class Times:
    """Durations of the modules in a step.

    Attributes:
        seconds: module -> forward seconds over all its calls.
        step_s: seconds of the whole step.
        products: module -> share of its products in its seconds.
    """

    seconds: Mapping[str, float]
    step_s: float
    products: Mapping[str, float] = field(default_factory=dict)

    def of(self, unit: str, model: nn.Module) -> float:
        """Return the seconds that recomputing a unit takes; of a segment, the sum of its children.

        Not of the products that it keeps.
        """
        parsed = Unit.parse(unit)
        whole = sum(self.seconds.get(name, 0.0) for name in parsed.modules(model))
        return whole * (1 - self.products.get(parsed.module, 0.0) * parsed.keeps_products)


@dataclass(frozen=True)
class _Pass:
    """A pass that can be run again and again: a step, or a forward alone.

    Attributes:
        training: runs it.
        batch: its samples.
        keep: whether a backward pass follows; else no saved tensor is kept.
        clock: the computed time of a device that runs nothing; None: time is measured.
    """

    training: TrainingView
    batch: Any
    keep: bool
    clock: Callable[[], float] | None = None

    def run(self) -> None:
        if self.keep:
            run_step(self.training, self.batch)
        else:
            self.training.loss(self.batch)

    def timed(self, names: Collection[str] = (), *, products: bool = False) -> Stopwatch:
        """Run once; return the stopwatch of these modules, and of their products if asked for."""
        stopwatch = Stopwatch(self.training.model, names, self.training.device, self.clock)
        dropping = saving_by(self.training, lambda tensor: None, lambda nothing: nothing)
        with (
            nullcontext() if self.keep else dropping,
            stopwatch.running(),
            ProductsWatch(stopwatch.product) if products else nullcontext(),
        ):
            self.run()
        return stopwatch


def profile_step(context: Context, micro_batch: int) -> StepProfile:
    """Record one step at this micro-batch and time another; the weights do not change.

    Where a step does not fit, a forward pass that keeps no saved tensors is recorded instead.

    Raises:
        torch.OutOfMemoryError: not even the forward pass fits.
        NeedsSavedTensors: a step does not fit, and the forward pass needs its saved tensors.
    """

    def look(one: _Pass) -> StepProfile:
        before = _random_states(one.training.device)
        recording = _recorded_whole(one)
        draws = before != _random_states(one.training.device)
        return StepProfile(micro_batch, recording, _step_s([one.timed()], one), draws)

    return _of_a_step_or_a_forward(context, micro_batch, look)


def time_modules(
    context: Context, micro_batch: int, names: Collection[str], keeping: Collection[str] = ()
) -> Times:
    """Time these modules in repeated steps at this micro-batch, and the products of `keeping`.

    Other processes and falling clocks slow all of a step alike, so the share of a module in its
    own step is less noisy than its seconds: the fastest step is divided by the median shares.

    Raises:
        torch.OutOfMemoryError, NeedsSavedTensors: as `profile_step` does.
    """

    def look(one: _Pass) -> Times:
        enough = time.monotonic() + ENOUGH_S  # waiting, for files or others, takes no thread time
        least, most = (MIN_STEPS, MAX_STEPS) if one.clock is None else (1, 1)  # they are alike
        steps = [one.timed(names) for _ in range(least)]
        while len(steps) < most and time.monotonic() < enough:
            steps.append(one.timed(names))
        fastest_s = min(step.whole_s() for step in steps)
        shares = _medians([step.shares() for step in steps])
        seconds = {name: fastest_s * share for name, share in shares.items()}
        # Watching operators makes those between products slower: their share is rather too small
        watched = [one.timed(keeping, products=True) for _ in range(least if keeping else 0)]
        products = _medians([step.shares_of_products() for step in watched])
        return Times(seconds, _step_s(steps, one), products)

    return _of_a_step_or_a_forward(context, micro_batch, look)


def brought_by_samples(small: StepProfile, large: StepProfile) -> Recording:
    """Return the large profile's recording, with only the bytes that grow with the micro-batch.

    Storages that do not grow (masks, weights computed in the forward pass) are not activations:
    counted, they would make the wrong units look worth checkpointing.
    """
    few, timeline = small.recording.timeline.storages, large.recording.timeline
    added = large.micro_batch - small.micro_batch
    if not added or [s.first for s in few] != [s.first for s in timeline.storages]:
        return large.recording
    storages = [
        replace(more, nbytes=round(max(0, more.nbytes - less.nbytes) * large.micro_batch / added))
        for less, more in zip(few, timeline.storages, strict=True)
    ]
    return replace(large.recording, timeline=replace(timeline, storages=storages))


class Stopwatch:
    """Time each module over all its forward calls, and the body as a whole, on the device's clock.

    Args:
        model: holds the modules.
        names: which of them to time, as `named_modules` names them.
        device: where they run; the host does not wait for it while it is timed.
        clock: its time, where that is computed; None: it is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Collection[str],
        device: torch.device,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._model = model
        self._modules = {name: model.get_submodule(name) for name in names}
        self._device = device
        self._clock = clock
        self._open: list[tuple[nn.Module, Mark]] = []
        self._calls: dict[nn.Module, list[tuple[Mark, Mark]]] = defaultdict(list)
        self._products: dict[nn.Module, list[tuple[Mark, Mark]]] = defaultdict(list)
        self._whole: list[tuple[Mark, Mark]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what runs in the body, and leave no hook behind."""
        with calls_watched(self._model, {*self._modules.values()}, self._begin, self._end):
            start = self._mark()
            yield
            self._whole.append((start, self._mark()))

    def whole_s(self) -> float:
        """Return the seconds of the body; waits for the device."""
        return self._seconds(self._whole)

    def shares(self) -> dict[str, float]:
        """Return the share of each module's forward in the body; waits for the device."""
        whole_s = self.whole_s() or 1.0  # where a coarse clock sees none, modules have none, too
        return {name: self._seconds(self._calls[m]) / whole_s for name, m in self._modules.items()}

    def shares_of_products(self) -> dict[str, float]:
        """Return the share of each module's seconds that `product` ran; waits for the device."""
        return {
            name: self._seconds(self._products[module]) / all_s
            for name, module in self._modules.items()
            if (all_s := self._seconds(self._calls[module]))
        }

    def product(self, op: Any, run: Callable[[], Any]) -> Any:
        """Run a product, and time it for the modules that run."""
        begin = self._mark()
        made = run()
        marks = begin, self._mark()
        for module in {module for module, _ in self._open}:
            self._products[module].append(marks)
        return made

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _is_forward():
            self._open.append((module, self._mark()))

    def _end(self, module: nn.Module, output: Any) -> None:
        if _is_forward() and self._open:
            module, begin = self._open.pop()
            self._calls[module].append((begin, self._mark()))

    def _mark(self) -> Mark:
        if self._clock is not None:
            return self._clock()
        if self._device.type != "cuda":  # where one thread works, without other processes
            return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not annotate it
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, spans: Sequence[tuple[Mark, Mark]]) -> float:
        if self._device.type != "cuda":
            return float(sum(end - begin for begin, end in spans))
        for _, end in spans:
            end.synchronize()
        return sum(float(begin.elapsed_time(end)) for begin, end in spans) / 1000


def clock_of(context: Context) -> Callable[[], float] | None:
    """Return the computed time of the context's device; None: it is measured, if it runs at all."""
    return getattr(context, "clock", None)


def _of_a_step_or_a_forward(
    context: Context, micro_batch: int, look: Callable[[_Pass], Result]
) -> Result:
    def looked(keep: bool) -> Result:
        result: Result = context.with_training(
            lambda training, batch: look(_Pass(training, batch, keep, clock_of(context))),
            micro_batch,
        )
        return result

    try:
        return looked(keep=True)
    except torch.OutOfMemoryError:
        pass  # tried again out here, where the failed step's tensors are gone
    return looked(keep=False)


def _recorded_whole(one: _Pass) -> Recording:
    """Record a step; where steps skip modules at random (LayerDrop), one that skips fewest."""
    recordings: list[Recording] = []
    modules: list[frozenset[str]] = []
    for number in range(1, MAX_LOOKS + 1):
        recorder = Recorder(one.training, one.batch, keep=one.keep)
        with recorder.watching():
            one.run()
        recordings.append(recorder.recording())
        modules.append(frozenset(recordings[-1].timeline.calls_of))
        is_whole = max(modules, key=len) == frozenset[str]().union(*modules)
        if is_whole and number >= (2 if len({*modules}) == 1 else LOOKS):
            break
    return max(recordings, key=lambda recording: len(recording.timeline.calls_of))


def _step_s(steps: Sequence[Stopwatch], one: _Pass) -> float:
    fastest_s = min(step.whole_s() for step in steps)
    return fastest_s if one.keep else FORWARDS_IN_A_STEP * fastest_s


def _medians(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for each in shares for name in each}
    return {name: median(each[name] for each in shares if name in each) for name in names}


def _random_states(device: torch.device) -> list[Any]:
    """Return the states of the generators that a seed sets, as values that compare."""
    numpy = sys.modules.get("numpy")
    return [
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None,
        random.getstate(),
        repr(numpy.random.get_state(legacy=False)["state"]) if numpy else None,
    ]


def _is_forward() -> bool:
    """Return whether no backward pass is under way: there, only recomputations call modules."""
    return torch._C._current_graph_task_id() == -1
