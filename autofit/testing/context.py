"""What a strategy sees while it looks for its dimensions, without a worker around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autofit.plan import Plan, ResolvedPlan
from autofit.strategy import Capabilities, TrainingView
from autofit.training.training import Training
from autofit.training.workload import Workload


class PlainContext:
    """An `autofit.strategy.Context` in this process.

    Args:
        build: builds the workload, alike each time it is called.
        device: where its model is put.
        capabilities: what the device can do; None: everything.

    Attributes:
        model: a model of its own.
        notes: what the strategy told the reader of the report.
    """

    def __init__(
        self,
        build: Callable[[], Workload],
        device: str | torch.device = "cpu",
        capabilities: Capabilities | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.capabilities = capabilities or Capabilities(
            self.device.type, bfloat16=True, float16=True, tf32=True
        )
        self.model = build().build_model().to(self.device)
        self.notes: list[str] = []
        self._build = build

    def profile(self, run: Callable[[TrainingView, Any], Any], micro_batch: int) -> Any:
        """What `run(training, batch)` returns for a plain training of a model built anew."""
        workload = self._build()
        model = workload.build_model().to(self.device)
        optimizer, plan = workload.build_optimizer(model), ResolvedPlan(Plan(micro_batch))
        with Training(model, optimizer, workload.recipe, plan, device=self.device) as training:
            ((batch, _),) = training.micro_batches(workload.batch(micro_batch))
            return run(training, batch)

    def note(self, text: str) -> None:
        """Keep the text."""
        self.notes.append(text)
