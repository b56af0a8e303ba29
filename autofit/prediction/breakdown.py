"""Attribute the bytes of a dry run to weights, gradients, optimizer state, activations, rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from autofit.memory.allocator import CachingAllocator
from autofit.memory.blocks import Block
from autofit.memory.replay import Recording
from autofit.memory.tracer import MemoryTracer, tensors_in
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.cuda.values import Unsupported
from autofit.training.optimizers import by_name
from autofit.training.training import Training

KINDS = ("weights", "gradients", "optimizer_state", "activations", "temporaries")


class Labels:
    """Finds out, while a training runs, the kind of each of the tracer's allocations.

    Attributes:
        tracer: of the training.
    """

    def __init__(self, tracer: MemoryTracer) -> None:
        self.tracer = tracer
        self._noted: dict[int, tuple[str, str]] = {}
        self._at_micro_batch = 0

    @contextmanager
    def watching(self, training: Training) -> Iterator[None]:
        """Note weights now, and gradients as they appear, or before they are used.

        Sparse gradients are unsupported: whether PyTorch merges rows that repeat depends on values,
        and an optimizer that keeps them grows from step to step.
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
            yield

    def _await_gradient(self, stack: ExitStack, name: str, parameter: torch.Tensor) -> None:
        if parameter.requires_grad:
            note = partial(self._note_gradient, name)
            hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]  # torch's
            stack.callback(hook.remove)

    def _await_sparse_rows(self, stack: ExitStack, name: str, module: torch.nn.Module) -> None:
        """Note a gradient that will be sparse: for one without padding torch needs values."""
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:

            def note(module: torch.nn.Module, given: Any, rows: torch.Tensor) -> None:
                if rows.requires_grad:
                    self._note_sparse(f"{name}.weight".strip("."))

            stack.callback(module.register_forward_hook(note).remove)

    def _watch_shards(self, training: Training, tracer: CudaTracer, stack: ExitStack) -> None:
        """Note what is gathered of sharded parameters.

        What wrapping made before the first forward is no activation.
        """
        tracer.forward.clear()
        seen = {id(parameter) for parameter in training.model.parameters()}

        def note_gathered(name: str, module: torch.nn.Module, given: Any) -> None:
            for last, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self._note("weights", f"{name}.{last}", parameter)
                    self._await_gradient(stack, f"{name}.{last}", parameter)

        for name, module in training.model.named_modules():
            hook = module.register_forward_pre_hook(partial(note_gathered, name))
            stack.callback(hook.remove)
        stack.callback(training.before_micro_batch(partial(self._note_survivors, tracer)))

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
            own = getattr(optimizer, "optim", optimizer)
            for parameter, state in own.state.items():
                for tensor in tensors_in(dict(state) if isinstance(state, Mapping) else state):
                    self._note("optimizer_state", owner.get(id(parameter), ""), tensor)

    def at_peak(
        self, recording: Recording, *, expandable_segments: bool = False
    ) -> Mapping[str, int]:
        """Return bytes by kind at the moment of peak allocated; they add up to it.

        The rounding of a block counts with its allocation.

        Args:
            recording: the allocations.
            expandable_segments: whether the process uses them.
        """
        allocator = CachingAllocator(expandable_segments=expandable_segments)
        held = dict.fromkeys(KINDS, 0)
        best, most = dict(held), 0
        live: dict[int, tuple[str, Block]] = {}
        for event, size in chain.from_iterable(recording.replayed):
            if event > 0:
                kind, _ = self.noted((event - 1) % recording.largest_number + 1, "")
                live[event] = kind, (block := allocator.allocate(size))
                held[kind] += block.size
                if allocator.allocated_bytes > most:
                    most, best = allocator.allocated_bytes, dict(held)
            else:
                kind, block = live.pop(-event)
                held[kind] -= block.size
                allocator.free(block)
        return best

    def noted(self, number: int, module: str) -> tuple[str, str]:
        """Return the kind of an allocation and the module that owns it, else the one given."""
        kind = "activations" if number in self.tracer.forward else "temporaries"
        while number not in self._noted and number in self.tracer.resized:
            number = self.tracer.resized[number]
        return self._noted.get(number, (kind, module))

    def _note_gradient(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            self._note_sparse(name)
        self._note("gradients", name, gradient)

    def _note_sparse(self, name: str) -> None:
        if isinstance(self.tracer, CudaTracer):
            self.tracer.note_unsupported(
                Unsupported(
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
