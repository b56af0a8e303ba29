"""Estimates of a training's peak memory by tools that others wrote, each as its own code has it.

In goes a `Subject`, a training as a plain loop; out come bytes, or whatever the tool raised.
 - torch's MemTracker runs two steps of the loop on fake tensors of the card.
 - torch's FSDPMemTracker takes models of FSDP alone: it is given the model as one FSDP unit on the
   only rank of a fake process group, so it tells the memory of that and not of the plain loop.
 - accelerate's command knows weights, gradients and Adam's states, and no activations: its own
   functions are called (accelerate/commands/estimate.py).
 - DeepSpeed's estimate_zero2_ and estimate_zero3_model_states_mem_needs, on one GPU and without
   offload, are expressed anew (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, as of commits
   02aa38c3 and 007cca6a of github.com/deepspeedai/DeepSpeed).
 - "The usual formula" is 16 bytes a parameter and twice the bytes of what the leaf modules return,
   as torchinfo counts activations.
Both trackers get what a user can do for them: a model whose tensors were replaced by fake ones
after all conversions, their statistics reset after each micro-batch, and no gradient scaler, which
reads a value that fake tensors do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map_only

STEPS = 2  # the second one has Adam's states from its beginning


@dataclass(frozen=True)
class Subject:
    """A training that is estimated.

    Attributes:
        build: makes the model, on the CPU or on the meta device, in its final types and layouts.
        batch: makes a batch for a device.
        loss_fn: the loss of model and batch.
        optimizer: makes one of parameters.
        autocast: the type of autocast, or None.
        clipped: with gradients clipped to norm 1.
        accumulation_steps: micro-batches in one step.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[str], Any]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    autocast: torch.dtype | None = None
    clipped: bool = False
    accumulation_steps: int = 1

    def loss(self, model: nn.Module, device: str) -> Tensor:
        """Return the loss of a batch."""
        casts = torch.autocast("cuda", dtype=self.autocast) if self.autocast else nullcontext()
        with casts:
            return self.loss_fn(model, self.batch(device)) / self.accumulation_steps

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, tracker: MemTracker) -> None:
        """Make one optimizer step on the card."""
        for _ in range(self.accumulation_steps):
            self.loss(model, "cuda").backward()  # type: ignore[no-untyped-call]  # torch lacks it
            tracker.reset_mod_stats()
        if self.clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def to(batch: Any, device: str) -> Any:
    """Return the batch with its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def put(model: nn.Module, device: str) -> nn.Module:
    """Replace the tensors of a model by empty ones of a device; those that are shared stay so.

    `Module.to` cannot do it: fake parameters do not pass through it (torch 2.11).
    """
    made: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device=device, requires_grad=False)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        held: Any
        for held in (module._parameters, module._buffers):
            held.update({name: moved(t) for name, t in held.items() if t is not None})
        if isinstance(module, nn.RNNBase):  # it keeps its parameters a second time
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    return model


def tracked(subject: Subject) -> float:
    """Return the peak that torch's MemTracker sees."""
    built = subject.build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = put(built, "cuda")
        optimizer = subject.optimizer([p for p in model.parameters() if p.requires_grad])
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        return peak_of(tracker, subject, model, optimizer)


def tracked_as_fsdp(subject: Subject) -> float:
    """Return the peak that torch's FSDPMemTracker sees with the model as one unit on one rank."""
    from torch.distributed.fsdp import fully_shard  # loads much

    built = subject.build()
    with one_fake_rank() as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = put(built, "cuda")
        fully_shard(model, mesh=mesh)
        optimizer = subject.optimizer([p for p in model.parameters() if p.requires_grad])
        tracker = FSDPMemTracker(model, optimizer)
        return peak_of(tracker, subject, model, optimizer)


def peak_of(
    tracker: MemTracker, subject: Subject, model: nn.Module, optimizer: torch.optim.Optimizer
) -> float:
    """Return the bytes of the card that are the peak of some steps."""
    with tracker:
        for _ in range(STEPS):
            subject.step(model, optimizer, tracker)
    peaks = tracker.get_tracker_snapshot("peak")
    totals = [int(its["Total"]) for device, its in peaks.items() if device.type == "cuda"]
    return float(sum(totals))


@contextmanager
def one_fake_rank() -> Iterator[DeviceMesh]:
    """Hold a mesh of one rank that communicates nothing; it cannot be made of fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        torch.distributed.destroy_process_group()


def accelerate_told(subject: Subject) -> float:
    """Return the "Training using Adam" of accelerate's command; the import raises without it."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils.modeling import calculate_maximum_sizes

    precision = str(subject.autocast or torch.float32).removeprefix("torch.")
    size, _ = calculate_maximum_sizes(put(subject.build(), "meta"))
    return float(max(estimate_training_usage(size, precision).values()))


def deepspeed_zero2(subject: Subject) -> float:
    """Return 2 N + 18 N bytes of N parameters."""
    return 20.0 * sum(p.numel() for p in subject.build().parameters())


def deepspeed_zero3(subject: Subject) -> float:
    """Return 18 N bytes, and 4 for each parameter of the largest module's own."""
    model = subject.build()
    own = (sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    return 4.0 * max(own) + 18.0 * sum(p.numel() for p in model.parameters())


def usual_formula(subject: Subject) -> float:
    """Return 16 bytes a parameter, and twice what leaf modules return in a forward."""
    model = put(subject.build(), "meta")
    returned = 0

    def add(module: nn.Module, given: Any, output: Any) -> None:
        nonlocal returned
        returned += sum(t.nbytes for t in tree_leaves(output) if isinstance(t, Tensor))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(add)
    with torch.device("meta"):
        subject.loss_fn(model, subject.batch("meta"))
    return 16.0 * sum(p.numel() for p in model.parameters()) + 2.0 * returned


ESTIMATORS: Mapping[str, Callable[[Subject], float]] = {
    "torch MemTracker, fake tensors": tracked,
    "torch FSDPMemTracker, one unit on one rank": tracked_as_fsdp,
    "the usual formula": usual_formula,
    "accelerate estimate-memory": accelerate_told,
    "DeepSpeed ZeRO-2 formula": deepspeed_zero2,
    "DeepSpeed ZeRO-3 formula": deepspeed_zero3,
}
