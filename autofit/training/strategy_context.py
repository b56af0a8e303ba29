"""What a strategy sees of a workload while it makes its dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autofit.plan import Plan, ResolvedPlan
from autofit.strategy import Capabilities
from autofit.training.builder import TrainingBuilder
from autofit.training.training import Training


class BenchContext:
    """Trainings of a bench, one at a time; implements `autofit.strategy.Context`.

    Args:
        bench: where the workload is trained.
        notes: what the strategy says is added to it.
    """

    def __init__(self, bench: TrainingBuilder, notes: list[str]) -> None:
        self._bench = bench
        self._notes = notes
        self._training: Training | None = None

    @property
    def device(self) -> torch.device:
        return self._bench.device.torch_device

    @property
    def capabilities(self) -> Capabilities:
        return self._bench.device.capabilities

    @property
    def model(self) -> torch.nn.Module:
        if self._training is None:
            self._training = self._bench.training(
                self._bench.fresh_workload(), ResolvedPlan(Plan(1))
            )
        return self._training.model

    def profile(self, run: Callable[[Any, Any], Any], micro_batch: int) -> Any:
        self.close()
        self._bench.reclaim()
        return self._bench.profile(run, micro_batch)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def close(self) -> None:
        """Let go of the model; it is built again when it is asked for."""
        if self._training is not None:
            self._training.undo()
            self._training = None
