"""A rank of a training on the CPU device: what it holds at most, in each mode.

    python -m tests.gloo_rank RANK RANKS FILE

joins the others over gloo, which meet at that file, and prints one line of JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autofit.devices.cpu import CpuDevice
from autofit.dimension import payloads_of
from autofit.equivalence.steps import StrategyContext
from autofit.memory.tracer import MemoryTracer
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import collect_dimensions, load_strategies
from autofit.strategy import World
from autofit.training.builder import TrainingBuilder
from autofit.training.workload import Workload
from autofit.units import GIB

WORDS, WIDTH = 1001, 128
"""An odd number of words: shards of the embedding are uneven."""
MICRO_BATCH = 4
STEPS = 3
REPEATS = 2
MODES = ("ddp_view", "zero1", "fsdp2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + added


class Tied(nn.Module):
    """Repeated blocks between an embedding and a head that share their weight."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def workload() -> Workload:
    """The same on every rank; its optimizer takes no temporaries that a CPU would not take."""
    torch.manual_seed(0)
    words, targets = torch.randint(0, WORDS, (2, MICRO_BATCH, 16)).unbind()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Workload(
        Tied(),
        (words, targets),
        loss_fn=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    )


def cases() -> Iterator[tuple[str, Plan]]:
    """Yield every mode, one micro-batch, and the other way to share the gradients of two."""
    twice = [(mode, 2, "once") for mode in MODES]
    for mode, steps, accumulation in [*twice, ("ddp", 1, "once"), ("fsdp2", 2, "each")]:
        settings = {"parallel.mode": mode, "parallel.accumulation": accumulation}
        name = f"{mode} {steps} {accumulation}"
        yield name, Plan(MICRO_BATCH, accumulation_steps=steps, settings=settings)


def _uses(tensor: torch.Tensor) -> int:
    """Return how many hold the tensor, among them threads of C++."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]  # torch does not declare it
    return count


@contextmanager
def nothing_held_after(tracer: MemoryTracer) -> Iterator[None]:
    """Have sharding's collectives return when gloo holds nothing of what they were given or made.

    Gloo's threads let go of it at times of their own after the wait for them, on a busy machine
    much later, so that what sharding has freed still counts. Libraries of GPUs hold nothing then.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def after(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            tensors: list[Any] = [v for v in named.values() if isinstance(v, torch.Tensor)]
            assert tensors, "sharding gives them by name"
            uses, last = [_uses(each) for each in tensors], tracer.last_number
            work = call(*given, **named)
            while uses != [_uses(each) for each in tensors] or any(
                number > last for number in tracer.live_numbers()
            ):
                time.sleep(0.001)
            return work

        return called

    with ExitStack() as stack:
        for kind in (collectives.DefaultAllGather, collectives.DefaultReduceScatter):
            stack.enter_context(patch.object(kind, "__call__", after(kind.__call__)))
        yield


def peak_bytes(world: World, plan: Plan) -> int:
    """Return the most bytes that this rank holds in a few steps; it is in a group already."""
    (strategy,) = load_strategies(["parallel"])
    device = CpuDevice()
    device.limit(GIB)
    builder = TrainingBuilder(workload, device, 0, world)
    dimensions = collect_dimensions([strategy], StrategyContext(builder, []))
    resolved = ResolvedPlan(plan, payloads_of(dimensions, plan.settings), (strategy,))
    batch = workload().batch(MICRO_BATCH * plan.accumulation_steps)
    device = CpuDevice()
    device.limit(GIB)
    builder = TrainingBuilder(workload, device, 0, world)
    with (
        nothing_held_after(device.tracer),
        device.accounting(),
        builder.training(workload(), resolved) as training,
    ):
        for _ in range(STEPS):
            training.step(batch)
        return device.read().peak_allocated_bytes


def main(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    world = World(rank, rank, size)
    # What gloo's threads still hold of buckets when these are laid out anew only ever adds.
    found = {name: min(peak_bytes(world, plan) for _ in range(REPEATS)) for name, plan in cases()}
    print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads abort some processes that exit by themselves


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
