"""Whether cuDNN times its algorithms for each convolution and takes the fastest.

`convolution.benchmark` starts at False: heuristics choose, from the shapes alone. With True the
first step with a shape tries every algorithm, each with as much workspace as it asks for. That is
why a probe of it has a worker of its own: cuDNN remembers, and in a process that has seen the
shapes the peak of the first step, which a training meets, would not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autofit.errors import Unsupported
from autofit.plan import Dimension
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .calls import Calls, run_step
from .one_setting import OneSetting

SETTING = "convolution.benchmark"
_SAMPLES = 2
# Of cuDNN's trials: with ResNet-50 on an H100 they took 14 s, and 4 s in later workers
# (benchmarks/results/gpu-h100-2026-11-27.md). Starting a probe's own worker comes on top.
_TRIAL_COST_S = 14.0
_CONVOLUTIONS = {
    f"{name}{dimensions}d" for name in ("conv", "conv_transpose") for dimensions in (1, 2, 3)
}


class ConvolutionBenchmark(OneSetting):
    """How cuDNN's algorithms are chosen."""

    name = "convolution"
    setting, plain = SETTING, False
    phase = Phase.STEP
    numerics = Numerics.ROUNDING

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the choice where the model calls convolutions, on an NVIDIA GPU."""
        cudnn = torch.backends.cudnn
        is_free = cudnn.enabled and not cudnn.benchmark and not cudnn.deterministic
        if context.capabilities.compute_capability is None or not is_free:
            return {}
        if not context.with_training(_convolves, _SAMPLES):
            return {}
        if context.device.type == "meta":
            context.note(f"{SETTING} skipped: its memory can only be measured, not predicted")
            return {SETTING: Dimension([False])}
        dimension = Dimension(
            [False, True],
            trial_cost_s=_TRIAL_COST_S,
            fresh_worker=True,
        )
        return {SETTING: dimension}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Let cuDNN time its algorithms.

        Raises:
            Unsupported: on the meta device, where the workspaces of its trials are not known.
        """
        if training.device.type == "meta":
            raise Unsupported(f"{SETTING}=True: its memory can only be measured, not predicted")
        return _benchmarked()

    def lines(self, value: Any, payload: Any) -> list[str]:
        return ["import torch", "torch.backends.cudnn.benchmark = True"]


@contextmanager
def _benchmarked() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _convolves(training: TrainingView, batch: Any) -> bool:
    names: set[str] = set()
    with Calls(lambda function, _: names.add(getattr(function, "__name__", ""))):
        run_step(training, batch)  # not `loss`: a training_step of its own may have no other way
    return bool(names & _CONVOLUTIONS)
