"""Makes trainings of a workload on a device, one at a time.

A caller drops one before it builds the next: a model that fills more than half of the device must
still be surveyed, compared and probed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autofit.devices.base import Device
from autofit.errors import InvalidArgument, collect_garbage, release_exception
from autofit.plan import Plan, ResolvedPlan
from autofit.strategy import ALONE, World
from autofit.training.loss import Recipe
from autofit.training.samples import Made, Rows, Samples
from autofit.training.training import Training
from autofit.training.workload import Workload, check_has_values


@dataclass(frozen=True)
class TrainingBuilder:
    """A workload and the device that it trains on.

    Attributes:
        fresh_workload: returns a copy of the workload that may be trained and dropped.
        device: held by this process.
        seed: of initial weights, dropout and other random numbers.
        world: the ranks that train together, of which this process is one.
    """

    fresh_workload: Callable[[], Workload]
    device: Device
    seed: int
    world: World = ALONE

    def training(
        self, workload: Workload, resolved: ResolvedPlan, samples: Samples | None = None
    ) -> Training:
        """Move the workload to the device and return a training of it.

        Args:
            workload, resolved: what is trained, and how.
            samples: how what its steps are given becomes micro-batches; None: as the workload says.
        """
        torch.manual_seed(self.seed)
        model = workload.build_model()
        if not self._is_dry:
            check_has_values(model)
        model.zero_grad(set_to_none=True)  # else the user's gradients move to the device too
        training = Training(
            model,
            partial(workload.build_optimizer, place=self.device.place),
            self._placed(workload.recipe),
            resolved,
            device=self.device.torch_device,
            place=self.device.place if self._is_dry else self._placed_with_values,
            samples=samples or workload.samples,
            in_host_memory=self.device.in_host_memory,
            place_model=self.device.place_model,
            world=self.world,
        )
        if training.ranks is not None:  # the same weights, and dropout of each rank's own
            torch.manual_seed(self.seed + self.world.rank)
        return training

    def with_training(self, run: Callable[[Training, Any], Any], micro_batch: int) -> Any:
        """Return `run(training, batch)` for a training of one micro-batch, all at its default."""
        workload = self.fresh_workload()
        with self.training_of_one(workload, micro_batch) as training:
            ((batch, _),) = training.micro_batches(workload.batch(micro_batch))
            return run(training, batch)

    def training_of_one(self, workload: Workload, micro_batch: int) -> Training:
        """Return a training whose steps take a batch of one micro-batch, made already."""
        samples = workload.samples
        whole = samples if isinstance(samples, Rows) else Made()
        return self.training(workload, ResolvedPlan(Plan(micro_batch)), whole)

    @property
    def _is_dry(self) -> bool:
        """Whether a prediction runs the training, which needs no values."""
        return self.device.torch_device.type == "meta"

    def _placed_with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            raise InvalidArgument(
                f"a tensor of the batch, {list(tensor.shape)}, is on the meta device, without "
                'values to train with: make batches outside torch.device("meta")'
            )
        return self.device.place(tensor)

    def _placed(self, recipe: Recipe) -> Recipe:
        """Move losses that are modules: they may hold tensors such as class weights."""
        modules: dict[str, Any] = {
            name: self.device.place_model(function)
            for name in ("loss_fn", "criterion")
            if isinstance(function := getattr(recipe, name), torch.nn.Module)
        }
        return replace(recipe, **modules)

    def reclaim(self) -> None:
        """Collect garbage and return cached memory to the device."""
        collect_garbage()
        self.device.synchronize()
        self.device.release_cache()

    def reclaim_or_not(self) -> None:
        """Reclaim; ignore errors, since a health check reports a broken device better."""
        try:
            self.reclaim()
        except Exception as error:
            release_exception(error)
