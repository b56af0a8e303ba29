"""The context in which a strategy finds its dimensions: `autofit.strategy.Context`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch

from autofit.equivalence.steps import Apply, StepComparer
from autofit.errors import InvalidArgument, Unsupported
from autofit.plan import Plan, ResolvedPlan, Settings
from autofit.strategy import Capabilities, Comparison, Strategy, World
from autofit.torch_private import gone_in
from autofit.training.builder import TrainingBuilder
from autofit.training.training import Training
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from autofit.devices.base import Device


class StrategyContext:
    """A model on the builder's device, and profiles of fresh copies of it, one at a time.

    Args:
        builder: builds the trainings.
        notes: where `note` appends.
        most_samples: see `autofit.strategy.Context.most_samples`.

    Attributes:
        notes: the strategy's notes for the reader of a report.
        samples_run: the most that a profile or comparison was to run so far.
    """

    def __init__(
        self, builder: TrainingBuilder, notes: list[str], most_samples: int | None = None
    ) -> None:
        self.notes, self.most_samples = notes, most_samples
        self.samples_run = 0
        self._builder = builder
        self._training: Training | None = None
        self._comparer: StepComparer | None = None

    @property
    def device(self) -> torch.device:
        return self._builder.device.torch_device

    @property
    def capabilities(self) -> Capabilities:
        return self._builder.device.capabilities

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
        self._check_allowed(micro_batch)
        self.close()  # a large model fits on the device once
        self._builder.reclaim()
        try:
            return self._builder.with_training(run, micro_batch)
        except (AttributeError, ImportError) as error:
            if (gone := gone_in(error)) is None:
                raise
            raise Unsupported(gone) from error

    def _check_allowed(self, micro_batch: int) -> None:
        if self.most_samples is not None and micro_batch > self.most_samples:
            raise Unsupported(f"cannot run {micro_batch} samples here: at most {self.most_samples}")
        self.samples_run = max(self.samples_run, micro_batch)

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
        self._check_allowed(micro_batch)
        if self._comparer is None or self._comparer.micro_batch != micro_batch:
            self.close()  # a large model fits on the device once
            self._builder.reclaim()
            workload = self._builder.fresh_workload()
            plain = ResolvedPlan(Plan(micro_batch))
            self._training = self._builder.training(workload, plain)
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
        # Building and profiling use no other part of a device.
        plain = cast("Device", _PlainDevice(torch.device(device), capabilities))
        super().__init__(TrainingBuilder(build, plain, seed=0), [])


class _PlainDevice:
    """The part of `autofit.devices.base.Device` that trainings are built with."""

    def __init__(self, torch_device: torch.device, capabilities: Capabilities | None) -> None:
        self.torch_device = torch_device
        self.capabilities = capabilities or Capabilities(
            torch_device.type, bfloat16=True, float16=True, tf32=True
        )

    def in_host_memory(self) -> AbstractContextManager[None]:
        return nullcontext()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device)

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.to(self.torch_device)

    def synchronize(self) -> None: ...

    def release_cache(self) -> None: ...
