"""Compare training steps that start alike: with some settings applied, and without.

A `StepComparer` steps one live training again and again, each time from the same weights, buffers,
attributes and random numbers, and records the results. What a forward keeps outside the modules
(in helper objects, classes, globals) is the user's: it is neither put back nor compared.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from autofit.devices.base import Device
from autofit.equivalence.comparison import (
    MAX_NOISE,
    NotRepeatable,
    StepTrace,
    Tolerance,
    compare,
    distance,
    seed_everything,
    traced_step,
)
from autofit.errors import InvalidArgument, Unsupported, release_exception
from autofit.plan import Plan, ResolvedPlan, Settings
from autofit.snapshot import process
from autofit.snapshot.snapshot import Snapshot, generator_access
from autofit.strategy import (
    NUMPY,
    PYTHON,
    Capabilities,
    Comparison,
    Strategy,
    World,
    calls_watched,
)
from autofit.torch_private import gone_in, pytree
from autofit.training.builder import TrainingBuilder
from autofit.training.evaluation import checksum
from autofit.training.training import Training
from autofit.training.workload import Workload

Apply: TypeAlias = Callable[[Training], AbstractContextManager[Any]]
"""Applies some settings to a training; leaving the context undoes them."""

_RANDOM = {"random": PYTHON, "numpy.random": NUMPY, "torch.random": "torch's random state"}
REPEATS = 3
"""Steps repeated to tell whether a difference is noise, which does not show each time."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, deque, OrderedDict, defaultdict)
_OF_TORCH = frozenset(nn.Module().__dict__)


class StepComparer:
    """Compares steps of one training over one batch.

    Args:
        training: a plain one; its model and optimizer are put back before each step.
        batch: samples of one step.
        is_exact: whether the device repeats a step to the bit; None: a CPU does, in one thread.
    """

    def __init__(self, training: Training, batch: Any, is_exact: bool | None = None) -> None:
        self.micro_batch = training.plan.micro_batch
        """Samples of a step."""
        self._training = training
        self._batch = batch
        self._is_exact = training.device.type == "cpu" if is_exact is None else is_exact
        model = training.model
        # Parameters seldom change where updates are left out, so that a sum of their bits saves
        # copying them each time; their values are kept on the host.
        self._parameters = [
            (p, checksum(p), p.detach().to("cpu", copy=True)) for p in model.parameters()
        ]
        live = {"model": model, "optimizer": training.optimizer}
        with one_thread(self._is_exact):  # which a snapshot would put back, too
            self._start = Snapshot(live, but=model.parameters())
        self._tolerance = Tolerance(most=0.0 if self._is_exact else MAX_NOISE)
        self._reference: StepTrace | None = None
        self._key: object = None
        self._changes: frozenset[str] = frozenset()
        self._was_repeated = False

    def compare(
        self, apply: Apply, reference: Apply, key: object, *, seed: int, update: bool
    ) -> Comparison:
        """Return how a step under `apply` compares with one under `reference`.

        Args:
            apply, reference: the same object compares the reference with itself.
            key: equal for equal references; the last one's step is kept.
            seed, update: as for `autofit.strategy.Context.compare`.

        Raises:
            torch.OutOfMemoryError: one of the steps does not fit into memory.
            Exception: whatever else the reference step raises.
        """
        with one_thread(self._is_exact):
            if self._reference is None or self._key != (key, seed, update):
                self._reference = None  # frees its device memory for its successor
                self._reference = self._step(reference, seed, update)
                self._key, self._was_repeated = (key, seed, update), False
                self._changes = self._changed(seed, self._reference)
            try:
                found = self._compare(self._reference, apply, reference, seed, update)
            except NotRepeatable as why:
                nothing = Comparison(0.0, 0.0, 0.0, differences=(str(why),), is_repeatable=False)
                found = replace(nothing, ran=self._reference.ran)
        return replace(found, changes=self._changes)

    def _compare(
        self, first: StepTrace, apply: Apply, reference: Apply, seed: int, update: bool
    ) -> Comparison:
        try:
            second = self._step(apply, seed, update)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it raises, the reference step did not
            release_exception(error)
            line = str(error).strip().split("\n")[0][:160]
            why = f"it raises {type(error).__name__}: {line}"
            return Comparison(float("inf"), float("inf"), 0.0, differences=(why,), ran=first.ran)
        found = compare(first, second, self._tolerance)
        apart, most = max(found.loss, found.gradient), self._tolerance.most_explained(first)
        for _ in range(REPEATS if 0 < apart <= most else int(not self._was_repeated)):
            if found.equal:
                break
            again = second if apply is reference else self._step(reference, seed, update)
            self._tolerance.learn(first, again)
            self._was_repeated = True
            found = compare(first, second, self._tolerance)
        return found

    def _step(self, apply: Apply, seed: int, update: bool) -> StepTrace:
        self._restore()
        seed_everything(seed)
        model, ran = self._training.model, set[nn.Module]()
        watch = calls_watched(model, model.modules(), lambda own, *_: ran.add(own), lambda *_: None)
        with apply(self._training), watch:
            step = traced_step(self._training, self._batch, update=update)
        names = frozenset(name for name, module in model.named_modules() if module in ran)
        return replace(step, state=dict(state_of(model, updated=update)), ran=names)

    def _restore(self) -> None:
        """Put model, optimizer and random states back where the comparison began."""
        self._start.restore()
        self._training.model.zero_grad(set_to_none=True)
        for parameter, sum_before, values in self._parameters:
            if checksum(parameter) != sum_before:
                parameter.data.copy_(values)

    def _changed(self, seed: int, step: StepTrace) -> frozenset[str]:
        """Return what a step changed, as `Comparison.changes`.

        All buffers of a module of which one has changed: the others may change now and then.
        """
        self._restore()
        seed_everything(seed)
        left, random = step.state, _random_states()
        buffers = self._training.model.named_buffers(remove_duplicate=False)
        moved = {name: distance(each, left.get(f"buffer {name}")) for name, each in buffers}
        owners = {name.rpartition(".")[0] for name in filter(moved.get, moved)}
        changed = {name for name in (PYTHON, NUMPY) if left.get(name) != random.get(name)}
        return frozenset(changed.union(n for n in moved if n.rpartition(".")[0] in owners))


def state_of(model: nn.Module, *, updated: bool) -> Iterator[tuple[str, Any]]:
    """Yield what a step left in the model and the random states, under readable names.

    Of parameters their values where they are `updated`, else the sum of their bits.
    """
    for name, parameter in model.named_parameters():
        values = parameter.detach().clone() if updated else checksum(parameter)
        yield f"parameter {name}", values
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"buffer {name}", buffer.detach().clone()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                yield from _visible(f"attribute {path}.{name}".replace(" .", " "), value)
    yield from _random_states().items()


def _visible(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and random generators in a value or container; plain values together."""
    others: list[tuple[str, object]] = []
    opened: set[int] = set()

    def is_leaf(part: object) -> bool:
        """Return whether it is not a container, or one already visited (some hold themselves)."""
        if type(part) not in _CONTAINERS or id(part) in opened:
            return True
        opened.add(id(part))
        return False

    for path, leaf in pytree.tree_leaves_with_path(value, is_leaf):
        part = pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            yield name + part, leaf.detach().clone()
        elif access := generator_access(leaf):
            state = access[0]()  # torch's is a tensor, of which a text shows little
            is_tensor = isinstance(state, torch.Tensor)
            yield f"{name}{part} (its random state)", state if is_tensor else repr(state)
        elif isinstance(leaf, set):
            others.append((part, len(leaf)))
        else:  # as text, since NaN is not itself
            others.append((part, repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf)))
    if others:
        yield name, others


def _random_states() -> dict[str, Any]:
    states = process.random_states()
    return {_RANDOM.get(name, name): state for name, state in states.items()}


@contextmanager
def one_thread(is_exact: bool = True) -> Iterator[None]:
    """Compute in one thread where that is reproducible; several threads add in any order."""
    threads = torch.get_num_threads()
    if is_exact:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class StrategyContext:
    """A model on the builder's device, and profiles of fresh copies of it, one at a time.

    Args:
        builder: builds the trainings.
        notes: where `note` appends.

    Attributes:
        notes: the strategy's notes for the reader of a report.
    """

    def __init__(self, builder: TrainingBuilder, notes: list[str]) -> None:
        self.notes = notes
        self._builder = builder
        self._training: Training | None = None
        self._comparer: StepComparer | None = None

    @property
    def device(self) -> torch.device:
        return self._builder.device.torch_device

    @property
    def capabilities(self) -> Capabilities:
        return self._builder.device.capabilities

    @property
    def clock(self) -> Callable[[], float] | None:
        return self._builder.device.clock

    @cached_property
    def samples_per_step(self) -> int:
        workload = self._builder.fresh_workload()
        return workload.global_batch or workload.sample_batch_size

    @property
    def world(self) -> World:
        return self._builder.world

    @cached_property
    def unused_parameters(self) -> Mapping[str, frozenset[int]]:
        """The parameters without a gradient; see `autofit.strategy.Context.unused_parameters`."""
        is_joined = self.world.size > 1 and torch.distributed.is_initialized()
        if not is_joined or torch.distributed.get_backend() == "fake":  # the others are not here
            return {}
        from autofit.equivalence.ranks import unused_parameters  # most searches are of one device

        self.close()  # a large model fits on the device once
        return unused_parameters(self._builder)

    @property
    def model(self) -> torch.nn.Module:
        """A copy of the user's model; another one after `profile`, stepped by `compare`."""
        if self._training is None:
            plain = ResolvedPlan(Plan(1))
            self._training = self._builder.training(self._builder.fresh_workload(), plain)
        return self._training.model

    def with_training(self, run: Callable[[Any, Any], Any], micro_batch: int) -> Any:
        self.close()  # a large model fits on the device once
        self._builder.reclaim()
        try:
            return self._builder.with_training(run, micro_batch)
        except (AttributeError, ImportError) as error:
            if (gone := gone_in(error)) is None:
                raise
            raise Unsupported(gone) from error

    def compare(
        self,
        settings: Settings,
        payloads: Mapping[str, Any],
        strategy: Strategy,
        *,
        reference: tuple[Settings, Mapping[str, Any]] = ({}, {}),
        micro_batch: int = 2,
        seed: int = 0,
        update: bool = False,
    ) -> Comparison:
        """Return how a step with these settings compares; see `autofit.strategy.Context.compare`.

        The training and the last reference step are kept for the next comparison.
        """
        if self.device.type == "meta":
            raise InvalidArgument("steps cannot be compared on the meta device: it has no values")

        def applied(settings: Settings, payloads: Mapping[str, Any]) -> Apply:
            if not settings:
                return nullcontext
            return lambda training: strategy.apply(training, settings, payloads)

        plain = applied(*reference)
        apply = plain if (settings, payloads) == reference else applied(settings, payloads)
        key = strategy.name, reference
        return self._comparer_at(micro_batch).compare(apply, plain, key, seed=seed, update=update)

    def _comparer_at(self, micro_batch: int) -> StepComparer:
        if self._comparer is None or self._comparer.micro_batch != micro_batch:
            self.close()  # a large model fits on the device once
            self._builder.reclaim()
            workload = self._builder.fresh_workload()
            self._training = self._builder.training_of_one(workload, micro_batch)
            ((batch, _),) = self._training.micro_batches(workload.batch(micro_batch))
            self._comparer = StepComparer(self._training, batch)
        return self._comparer

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        """Drop the model; the next use of `model` builds it again."""
        self._comparer = None
        if self._training is not None:
            self._training.undo()
            self._training = None


class PlainContext(StrategyContext):
    """A context in this process without a VRAM budget, to test a strategy with.

    Args:
        build: builds the workload, alike on each call.
        device: where its model is put: "cpu", "cuda" or "meta".
        capabilities: of the device; None: all of them.
    """

    def __init__(
        self,
        build: Callable[[], Workload],
        device: str | torch.device = "cpu",
        capabilities: Capabilities | None = None,
    ) -> None:
        plain = _PlainDevice(torch.device(device), capabilities)
        super().__init__(TrainingBuilder(build, plain, seed=0), [])


class _PlainDevice(Device):
    """A device of which nothing is counted or measured."""

    def __init__(self, torch_device: torch.device, capabilities: Capabilities | None) -> None:
        self.torch_device = torch_device
        self._capabilities = capabilities or Capabilities(
            torch_device.type, bfloat16=True, float16=True, tf32=True
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities
