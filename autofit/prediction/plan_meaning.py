"""Which strategies a plan's settings belong to, and what the settings mean, found out on meta.

What takes a run to find (checkpointing compares gradients and measures) cannot be told here: a
strategy offers the values that it can tell, and notes that there may be more. For the others the
payloads must be given, as a report has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autofit.errors import CannotTell, InvalidRequest
from autofit.plan import Plan, settings_of
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import stage
from autofit.prediction.gpus import Gpu
from autofit.prediction.meta_copy import twin_of, without_twin
from autofit.prediction.meta_device import MetaDevice
from autofit.registry import collect_dimensions, load_strategies
from autofit.space import Space
from autofit.strategy import Capabilities, Strategy
from autofit.training.builder import Workbench
from autofit.training.workload import Workload


def strategies_of(
    plan: Plan, strategies: Iterable[str | Strategy] | None = None
) -> tuple[Strategy, ...]:
    """Those that the plan has settings of; by name where None were given."""
    named = {setting.partition(".")[0] for setting in plan.settings}
    if strategies is None:
        return load_strategies(sorted(named))
    return tuple(s for s in load_strategies(strategies) if s.name in named)


def meaning_of(
    plan: Plan,
    workload: Workload,
    gpu: Gpu,
    strategies: Iterable[Strategy],
    payloads: Mapping[str, Any] | None,
) -> tuple[Plan, dict[str, Any]]:
    """The plan with every setting of those strategies, and the settings' payloads.

    A setting that is left out has its first value, which is plain PyTorch.

    Raises:
        InvalidRequest: a setting or a value that there is not on that GPU.
        CannotTell: what a setting means can only be found by running the model.
    """
    meanings = dict(payloads or {})
    settings = dict(plan.settings)
    for strategy in strategies:
        if settings_of(strategy.name, meanings):
            continue
        space, notes = _told(strategy, workload, gpu)
        try:
            complete = space.complete(settings_of(strategy.name, plan.settings))
        except InvalidRequest as error:
            if notes:
                raise _takes_a_run(f"{error}; {'; '.join(notes)}") from error
            raise
        settings |= complete
        meanings |= space.payloads(complete)
    return replace(plan, settings=settings), meanings


def _told(strategy: Strategy, workload: Workload, gpu: Gpu) -> tuple[Space, list[str]]:
    """What the strategy offers without a run, and what it says of that."""
    tracer = CudaTracer(gpu)
    context = _Context(workload, gpu, tracer)
    try:
        with stage(gpu, tracer, without_twin(workload)):
            dimensions = collect_dimensions([strategy], context)
    except Exception as error:
        why = str(error) if isinstance(error, CannotTell) else f"{type(error).__name__}: {error}"
        raise _takes_a_run(f"what a setting of {strategy.name!r} means: {why}") from error
    return Space(dimensions, workload.sample_batch_size), context.notes


def _takes_a_run(why: str) -> CannotTell:
    return CannotTell(f"{why}. Give payloads= as a report has them, or probe")


class _Context:
    """Implements `autofit.strategy.Context` on the meta device."""

    def __init__(self, workload: Workload, gpu: Gpu, tracer: CudaTracer) -> None:
        self._device = MetaDevice(gpu, tracer)
        self._fresh: Callable[[], Workload] = lambda: twin_of(workload, tracer)
        self._bench = Workbench(self._fresh, (), self._device, seed=0)
        self.notes: list[str] = []

    @property
    def model(self) -> torch.nn.Module:
        return self._device.place_model(self._fresh().build_model())

    @property
    def device(self) -> torch.device:
        return self._device.torch_device

    @property
    def capabilities(self) -> Capabilities:
        return self._device.capabilities

    def profile(self, run: Callable[[Any, Any], Any], micro_batch: int) -> Any:
        return self._bench.profile(run, micro_batch)

    def note(self, text: str) -> None:
        """Kept for the message where the plan asks for more than was offered."""
        self.notes.append(text)
