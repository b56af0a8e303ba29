"""The training that every tool is given, and the loop that its user would write."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autofit import Workload
from benchmarks import workloads
from benchmarks.versus.place import Memory, bounded, count_ooms

LEVERS = ("fused", "channels_last", "compiled")
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@cache
def workload_of(name: str, seed: int) -> Workload:
    """Return the workload of that name, whose samples and models follow from the seed."""
    torch.manual_seed(seed)
    made: Workload = getattr(workloads, name)()
    return made


@dataclass(frozen=True)
class Task:
    """One training under one budget.

    Attributes:
        workload: a name in `benchmarks.workloads`.
        place: "cpu" or "cuda".
        budget_bytes: of device memory.
        precision: that the user has chosen: float32, or autocast to bfloat16 or float16.
        seconds: that a tool searches whose user decides that.
        seed: of the samples, the model, and a tool that draws at random.
        levers: what the user has turned on by hand besides: of `LEVERS`.
    """

    workload: str
    place: str
    budget_bytes: int
    precision: str = "float32"
    seconds: float = 60.0
    seed: int = 0
    levers: Sequence[str] = ()

    @property
    def definition(self) -> Workload:
        """The workload, which is made once in a process."""
        return workload_of(self.workload, self.seed)

    @property
    def global_batch(self) -> int | None:
        """Samples per optimizer step, if the user has decided on that."""
        return self.definition.global_batch

    def bounded(self) -> Memory:
        """Let this process's memory end at the budget."""
        return bounded(self.place, self.budget_bytes)

    def build(self) -> nn.Module:
        """Return a new model, on the host."""
        return self.definition.build_model()

    def build_on_device(self) -> nn.Module:
        """Return a new model in training mode, made where it trains."""
        with torch.device(self.place):
            model = self.build().to(self.place).train()
        if "channels_last" in self.levers:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch: undeclared
        if "compiled" in self.levers:
            model.compile()
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model."""
        made: Any = self.definition.optimizer
        return made(model.parameters(), **({"fused": True} if "fused" in self.levers else {}))  # type: ignore[no-any-return]

    def batch(self, samples: int) -> Any:
        """Return that many samples on the host."""
        return self.definition.batch(samples)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        dtype = DTYPES[self.precision]
        return torch.autocast(self.place, dtype=dtype) if dtype else nullcontext()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss, as the user computes it: in any process, whose OOMs are counted."""
        count_ooms(self.place)
        criterion = self.definition.criterion
        if criterion is not None:
            return criterion(model(batch[0]), batch[1])
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        found: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return found

    def on_device(self, batch: Any) -> Any:
        """Return a batch copied to the device."""
        return tree_map(lambda leaf: leaf.to(self.place, copy=True), batch)

    def train(self, micro_batch: int, steps: int, accumulation_steps: int = 1) -> list[float]:
        """Train a new model by the plain loop, and return the seconds of each optimizer step."""
        return list(islice(self.step_seconds(micro_batch, accumulation_steps), steps))

    def speed(self, micro_batch: int, steps: int) -> float:
        """Return samples per second of the fastest of so many steps, after as many that fitted."""
        memory = self.bounded()
        self.train(micro_batch, steps)
        with memory.unobserved():
            return micro_batch / min(self.train(micro_batch, steps))

    def step_seconds(self, micro_batch: int, accumulation_steps: int = 1) -> Iterator[float]:
        """Train a new model by the plain loop; yield the seconds of each optimizer step."""
        model = self.build_on_device()
        optimizer = self.optimizer(model)
        scaler = torch.amp.GradScaler(self.place, enabled=self.precision == "float16")
        batch = self.batch(micro_batch)
        while True:
            began = time.perf_counter()
            for _ in range(accumulation_steps):
                with self.autocast():
                    loss = self.loss(model, self.on_device(batch)) / accumulation_steps
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch left it so
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if self.place == "cuda":
                torch.cuda.synchronize()
            yield time.perf_counter() - began
