"""Where copies of a workload become trainings on the device, one at a time.

Whoever builds one lets go of it before the next is built: a model that fills more than half of the
device must still be surveyed, compared and probed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from autofit.devices.base import Device
from autofit.errors import collect_garbage, release_exception
from autofit.plan import Plan, ResolvedPlan
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload


@dataclass(frozen=True)
class TrainingBuilder:
    """A workload, a device and what trainings are built with.

    Attributes:
        fresh_workload: a copy of the workload that may be trained and thrown away, each time.
        device: held by this process.
        seed: for initial weights of built models, dropout and the like.
    """

    fresh_workload: Callable[[], Workload]
    device: Device
    seed: int

    def training(self, workload: Workload, resolved: ResolvedPlan) -> Training:
        """The workload, moved to the device and ready to step."""
        torch.manual_seed(self.seed)
        model = workload.build_model()
        model.zero_grad(set_to_none=True)  # or the user's gradients would come to the device too
        self.device.place_model(model)
        return Training(
            model,
            workload.build_optimizer(model, self.device.place),
            self._placed(workload.recipe),
            resolved,
            device=self.device.torch_device,
            place=self.device.place,
            batched=workload.batched_places,
        )

    def profile(self, run: Callable[[Training, Any], Any], micro_batch: int) -> Any:
        """What `run(training, batch)` returns of a plain training, as strategies ask for it."""
        workload = self.fresh_workload()
        with self.training(workload, ResolvedPlan(Plan(micro_batch))) as training:
            ((batch, _),) = training.micro_batches(workload.batch(micro_batch))
            return run(training, batch)

    def _placed(self, recipe: Recipe) -> Recipe:
        """A loss that is a module may hold tensors (the weights of its classes, say)."""
        modules: dict[str, Any] = {
            name: self.device.place_model(function)
            for name in ("loss_fn", "criterion")
            if isinstance(function := getattr(recipe, name), torch.nn.Module)
        }
        return replace(recipe, **modules)

    def reclaim(self) -> None:
        """Collect what is unreachable, and hand cached memory back."""
        collect_garbage()
        self.device.synchronize()
        self.device.release_cache()

    def reclaim_or_not(self) -> None:
        """After a fault even emptying the cache may raise; a health check then says so."""
        try:
            self.reclaim()
        except Exception as error:
            release_exception(error)
