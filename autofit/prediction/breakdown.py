"""Attribute bytes to kinds (weights, gradients, ...) and to modules, at a peak or over a step."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch

from autofit.memory.allocator import Block, CachingAllocator, expandable_segments
from autofit.memory.replay import Event, Recording
from autofit.memory.tracer import MemoryTracer, tensors_in
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.cuda.values import Obstacle
from autofit.strategy import attributes_kept
from autofit.training.optimizers import by_name
from autofit.training.training import Training

KINDS = ("weights", "gradients", "optimizer_state", "activations", "temporaries")
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
# Moments of a step that are kept; each is the largest of its part of the step.
MOMENTS = 240
# Parts into which a model is divided.
MAX_PARTS = 12
# The kind of an allocation, and the name of the module that owns it.
Owner: TypeAlias = tuple[str, str]


class Labels:
    """Finds out, while a training runs, the owner of each of the tracer's allocations.

    Attributes:
        tracer: of the training.
    """

    def __init__(self, tracer: MemoryTracer) -> None:
        self.tracer = tracer
        self._noted: dict[int, Owner] = {}
        self._at_micro_batch = 0
        self._classes: dict[str, str] = {}
        self._phases: list[tuple[int, str]] = [(0, FORWARD)]
        # Which module was running from a certain allocation on.
        self._running: list[str] = []
        self._first_numbers, self._modules = [0], [""]

    @contextmanager
    def watching(self, training: Training, *, by_module: bool = False) -> Iterator[None]:
        """Note weights now, and gradients as they appear, or before they are used.

        Sparse gradients are unsupported: whether PyTorch merges rows that repeat depends on values,
        and an optimizer that keeps them grows from step to step.

        Args:
            training: that runs inside.
            by_module: note also which module runs when, and in which phase; see `last_step`.
        """

        def note_gradients(step: Callable[[], None]) -> None:
            for name, parameter in training.model.named_parameters():
                if parameter.grad is not None:
                    self._note_gradient(name, parameter)
            step()

        model = training.model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._note("weights", name, tensor)
        with ExitStack() as stack:
            for name, parameter in training.model.named_parameters():
                self._await_gradient(stack, name, parameter)
            for name, module in model.named_modules():
                self._await_sparse_rows(stack, name, module)
            stack.callback(training.wrap_optimizer_step(note_gradients))
            if training.world.size > 1 and isinstance(self.tracer, CudaTracer):
                self._watch_shards(training, self.tracer, stack)
            if by_module:
                self._watch_modules(training, stack)
            yield

    def _await_gradient(self, stack: ExitStack, name: str, parameter: torch.Tensor) -> None:
        if parameter.requires_grad:
            note = partial(self._note_gradient, name)
            stack.enter_context(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]  # torch's

    def _await_sparse_rows(self, stack: ExitStack, name: str, module: torch.nn.Module) -> None:
        """Note a gradient that will be sparse: for one without padding torch needs values."""
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:

            def note(module: torch.nn.Module, args: Any, rows: torch.Tensor) -> None:
                if rows.requires_grad:
                    self._note_sparse(f"{name}.weight".strip("."))

            stack.enter_context(module.register_forward_hook(note))

    def _watch_shards(self, training: Training, tracer: CudaTracer, stack: ExitStack) -> None:
        """Note what is gathered of sharded parameters.

        What wrapping made before the first forward is no activation.
        """
        tracer.forward.clear()
        noted = {id(parameter) for parameter in training.model.parameters()}

        def note_gathered(name: str, module: torch.nn.Module, args: Any) -> None:
            for last, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in noted:
                    noted.add(id(parameter))
                    self._note("weights", f"{name}.{last}", parameter)
                    self._await_gradient(stack, f"{name}.{last}", parameter)

        for name, module in training.model.named_modules():
            stack.enter_context(module.register_forward_pre_hook(partial(note_gathered, name)))
        stack.callback(training.before_micro_batch(partial(self._note_survivors, tracer)))

    def _watch_modules(self, training: Training, stack: ExitStack) -> None:
        for name, module in training.model.named_modules():
            self._classes[name] = type(module).__name__
            stack.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
            stack.enter_context(module.register_forward_hook(self._leave, always_call=True))
        # A training_step calls these itself, so they are wrapped rather than called from here.
        for method, phase in (("backward", BACKWARD), ("optimizer_step", UPDATE)):
            stack.enter_context(attributes_kept(training, method))
            setattr(training, method, partial(self._in_phase, phase, getattr(training, method)))

    def _in_phase(self, phase: str, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._begin(phase)
        try:
            run(*args, **kwargs)
        finally:
            self._begin(FORWARD)

    def _begin(self, phase: str) -> None:
        is_updated_next = [name for _, name in self._phases[-2:]] == [BACKWARD, FORWARD]
        if phase == UPDATE and is_updated_next:  # what is freed in between is the backward's
            self._phases.pop()
        self._phases.append((len(self.tracer.events), phase))

    def _enter(self, name: str, *_: Any) -> None:
        self._running.append(name)
        self._mark()

    def _leave(self, *_: Any) -> None:
        self._running.pop()
        self._mark()

    def _mark(self) -> None:
        self._first_numbers.append(self.tracer.last_number + 1)
        self._modules.append(self._running[-1] if self._running else "")

    def note_sent(self, tensor: torch.Tensor) -> None:
        """Note a tensor that ranks add up: a bucket of gradients."""
        self._note("gradients", "", tensor)

    def _note_survivors(self, tracer: CudaTracer, is_last: bool) -> None:
        """Note what a backward made and left for the next one: gradients that add up.

        What was only resized is of the kind that it was: parameters are gathered into the storages
        of the last time, which stay when they are freed.
        """
        for number in tracer.live_numbers():
            is_new = number > self._at_micro_batch and number not in tracer.resized
            if is_new and number not in tracer.forward:
                self._noted.setdefault(number, ("gradients", ""))
        self._at_micro_batch = tracer.last_number

    def note_state(self, training: Training) -> None:
        """Note the current state of the optimizers."""
        owner = {id(parameter): name for name, parameter in training.model.named_parameters()}
        for optimizer in by_name(training.optimizer).values():
            # ZeroRedundancyOptimizer holds an optimizer of its share of the parameters.
            inner = getattr(optimizer, "optim", optimizer)
            for parameter, state in inner.state.items():
                for tensor in tensors_in(dict(state) if isinstance(state, Mapping) else state):
                    self._note("optimizer_state", owner.get(id(parameter), ""), tensor)

    def _note_gradient(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            self._note_sparse(name)
        self._note("gradients", name, gradient)

    def _note_sparse(self, name: str) -> None:
        if isinstance(self.tracer, CudaTracer):
            self.tracer.note_obstacle(
                Obstacle(
                    "the memory of a sparse gradient depends on which rows repeat and on the "
                    "number of steps",
                    f"the gradient of {name!r}: a dense one, as of Embedding(sparse=False), can be "
                    "predicted",
                )
            )

    def _note(self, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        """Note a tensor that belongs to the parameter or buffer of that name."""
        number = self.tracer.number_of(tensor) if tensor is not None else None
        if number is not None:
            self._noted.setdefault(number, (kind, name.rpartition(".")[0]))

    def _owner_of(self, number: int) -> Owner:
        kind = "activations" if number in self.tracer.forward else "temporaries"
        running = self._modules[bisect_right(self._first_numbers, number) - 1]
        while number not in self._noted and number in self.tracer.resized:
            number = self.tracer.resized[number]
        return self._noted.get(number, (kind, running))

    def _walk(
        self, events: Iterable[Event], largest_number: int
    ) -> Iterator[tuple[int, dict[str, int], Iterable[tuple[Owner, Block]]]]:
        """Yield after each event the allocated bytes, those of each kind, and the live blocks.

        The rounding of a block counts with its allocation. Numbers beyond the largest are those of
        repeated steps.
        """
        allocator = CachingAllocator(expandable_segments=expandable_segments())
        bytes_by_kind = dict.fromkeys(KINDS, 0)
        live: dict[int, tuple[Owner, Block]] = {}
        for event, size in events:
            if event > 0 and size:
                owner = self._owner_of((event - 1) % largest_number + 1)
                live[event] = owner, allocator.allocate(size)
                bytes_by_kind[owner[0]] += live[event][1].size
            elif -event in live:
                (kind, _), block = live.pop(-event)
                bytes_by_kind[kind] -= block.size
                allocator.free(block)
            yield allocator.allocated_bytes, bytes_by_kind, live.values()

    def at_peak(self, recording: Recording) -> Mapping[str, int]:
        """Return bytes by kind at the moment of peak allocated; they add up to it."""
        best, most = dict.fromkeys(KINDS, 0), 0
        events = chain.from_iterable(recording.replayed)
        for total, bytes_by_kind, _ in self._walk(events, recording.largest_number):
            if total > most:
                most, best = total, dict(bytes_by_kind)
        return best

    def last_step(self, how: str) -> dict[str, Any]:
        """Return the memory over the last step, as a report holds it.

        Args:
            how: "dry run" or "real steps".
        """
        begin, end = self.tracer.step_ends[-2:]
        parts = min(MOMENTS, end - begin)
        moments: list[tuple[int, dict[str, int]]] = []
        most, peak, at_peak = -1, 0, list[tuple[Owner, int]]()
        walked = self._walk(self.tracer.events[:end], self.tracer.last_number)
        for index, (total, bytes_by_kind, live) in enumerate(walked, start=-begin):
            if index < 0:
                continue
            if index * parts // (end - begin) == len(moments):
                moments.append((total, dict(bytes_by_kind)))
            elif total > moments[-1][0]:
                moments[-1] = total, dict(bytes_by_kind)
            if total > most:
                most, peak = total, len(moments) - 1
                at_peak = [(owner, block.size) for owner, block in live]
        by_module = Counter[Owner]()
        for owner, size in at_peak:
            by_module[owner] += size
        return {
            "how": how,
            "phases": self._phases_of(begin, end, len(moments)),
            "bytes": {kind: [each[kind] for _, each in moments] for kind in KINDS},
            "peak": peak,
            "modules": divided(by_module, self._classes),
        }

    def _phases_of(self, begin: int, end: int, moments: int) -> list[dict[str, Any]]:
        """Return the phases of the step that have any moment, with the first of each."""
        inside = [(max(at, begin), phase) for at, phase in self._phases if at < end]
        if inside[-1][1] == FORWARD:  # what follows the last update
            inside.pop()
        # Of phases that begin at one moment the last is kept.
        starts = {(at - begin) * moments // (end - begin): phase for at, phase in inside}
        return [{"name": phase, "first": at} for at, phase in sorted(starts.items())]


# The model in parts: modules in a list that are of one class are one part.


def divided(by_module: Mapping[Owner, int], classes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the model in parts with their bytes by kind, the largest first.

    All names are cut at one depth, the largest that leaves no more than `MAX_PARTS`.

    Args:
        by_module: (kind, name of a module) -> bytes that it holds itself.
        classes: name of a module -> its class.
    """
    paths = {name: _path(name, classes) for name in classes}
    holding = {paths[module] for _, module in by_module}
    depth = max(
        depth
        for depth in range(1 + max(map(len, holding), default=0))
        if depth == 0 or len({path[:depth] for path in holding}) <= MAX_PARTS
    )
    parts: dict[tuple[str, ...], dict[str, int]] = {}
    for (kind, module), size in by_module.items():
        bytes_by_kind = parts.setdefault(paths[module][:depth], dict.fromkeys(KINDS, 0))
        bytes_by_kind[kind] += size
    counts = Counter(paths.values())
    class_of = {path: classes[name] for name, path in paths.items()}
    rows = [
        {
            "name": ".".join("*" if each.startswith("*") else each for each in part),
            "class": class_of[part],
            "count": counts[part],
            "bytes": {kind: size for kind, size in bytes_by_kind.items() if size},
        }
        for part, bytes_by_kind in parts.items()
    ]
    return sorted(rows, key=lambda row: -sum(row["bytes"].values()))


def _path(name: str, classes: Mapping[str, str]) -> tuple[str, ...]:
    """Return a name in parts; "*Block" stands for all numbers whose modules are Blocks."""
    parts = name.split(".") if name else []
    ends = enumerate(parts, start=1)
    return tuple(
        f"*{classes['.'.join(parts[:end])]}" if part.isdecimal() else part for end, part in ends
    )
