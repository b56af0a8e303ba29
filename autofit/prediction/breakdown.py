"""What the bytes of a rehearsal are for: weights, gradients, optimizer state, activations, rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from autofit.memory.blocks import ROUNDING_BYTES, round_up
from autofit.memory.replay import Recording
from autofit.memory.storages import tensors_in
from autofit.prediction.cuda_tracer import CudaTracer
from autofit.training import Training

KINDS = ("weights", "gradients", "optimizer_state", "activations", "temporaries")


class Labels:
    """Finds out, while a training runs, what the tracer's allocations are for."""

    def __init__(self, tracer: CudaTracer) -> None:
        self._tracer = tracer
        self._kinds: dict[int, str] = {}

    @contextmanager
    def watching(self, training: Training) -> Iterator[None]:
        """Note weights now, and gradients as they appear."""
        self._note("weights", [*training.model.parameters(), *training.model.buffers()])
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]  # torch's
            for parameter in training.model.parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def note_state(self, training: Training) -> None:
        """Note the optimizers' state as it is now."""
        for optimizer in _optimizers(training.optimizer):
            self._note("optimizer_state", tensors_in(dict(optimizer.state)))

    def at_peak(self, recording: Recording) -> Mapping[str, int]:
        """Bytes of each kind at the moment when most was allocated, in all recorded steps."""
        held = dict.fromkeys(KINDS, 0)
        best = dict(held)
        live: dict[int, tuple[str, int]] = {}
        total = most = 0
        for event, size in recording.events[: recording.step_ends[-1]]:
            if event > 0:
                kind, nbytes = self.kind_of(event), round_up(size, ROUNDING_BYTES)
                live[event] = kind, nbytes
            else:
                kind, nbytes = live.pop(-event)
                nbytes = -nbytes
            held[kind] += nbytes
            total += nbytes
            if total > most:
                most, best = total, dict(held)
        return best

    def kind_of(self, number: int) -> str:
        """What an allocation is for; what the forward pass made is taken for activations."""
        known = self._kinds.get(number)
        if known is not None:
            return known
        return "activations" if number in self._tracer.forward else "temporaries"

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        self._note("gradients", [parameter.grad])

    def _note(self, kind: str, tensors: Any) -> None:
        for tensor in tensors:
            number = self._tracer.number_of(tensor) if tensor is not None else None
            if number is not None:
                self._kinds.setdefault(number, kind)


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    return list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
