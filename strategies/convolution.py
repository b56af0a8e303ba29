"""Whether cuDNN times its algorithms for each convolution and takes the fastest.

`convolution.benchmark` starts at False: heuristics choose, from the shapes alone. With True the
first step with a shape tries every algorithm, each with as much workspace as it asks for. That is
why a probe of it has a worker of its own: cuDNN remembers, and in a process that has seen the
shapes the peak of the first step, which a training meets, would not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autofit.strategy import Context, Numerics, Phase, TrainingView

from .calls import Calls, run_step
from .one_setting import SwitchOfGpu

SETTING = "convolution.benchmark"
_SAMPLES = 2
_CONVOLUTIONS = {
    f"{name}{dimensions}d" for name in ("conv", "conv_transpose") for dimensions in (1, 2, 3)
}


class ConvolutionBenchmark(SwitchOfGpu):
    """How cuDNN's algorithms are chosen."""

    name = "convolution"
    setting = SETTING
    phase = Phase.STEP
    numerics = Numerics.ROUNDING
    devices = ("cpu", "cuda")  # on a CPU it does nothing
    # Of cuDNN's trials: with ResNet-50 on an H100 they took 14 s, and 4 s in later workers
    # (benchmarks/results/gpu-h100-2026-11-27.md). Starting a probe's own worker comes on top.
    trial_cost_s = 14.0

    def is_free(self, context: Context) -> bool:
        """Return whether a step calls convolutions, for which the user has chosen nothing."""
        cudnn = torch.backends.cudnn
        if not cudnn.enabled or cudnn.benchmark or cudnn.deterministic:
            return False
        convolves: bool = context.with_training(_convolves, _SAMPLES)
        return convolves

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let cuDNN time its algorithms."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def lines(self, value: Any, payload: Any) -> list[str]:
        return ["import torch", "torch.backends.cudnn.benchmark = True"]


def _convolves(training: TrainingView, batch: Any) -> bool:
    names: set[str] = set()
    with Calls(lambda function, _: names.add(getattr(function, "__name__", ""))):
        run_step(training, batch)
    return bool(names & _CONVOLUTIONS)
