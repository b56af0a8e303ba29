"""The emulation runs the very operators that CUDA ran, in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.devices.gpus import find_gpu
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import STEPS, stage
from benchmarks.traces.recorded import recorded_trainings
from benchmarks.traces.trainings import TRAININGS

RECORDED = {recorded.name: recorded for recorded in recorded_trainings()}
# Bookkeeping that touches no memory of the device, and moves between versions of torch.
_IGNORED = ("profiler", "aten.lift_fresh", "aten.detach", "aten._local_scalar_dense")


class _Listening(CudaTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    def __init__(self) -> None:
        super().__init__(find_gpu("H200"))
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def counted(operators: list[str] | tuple[str, ...]) -> list[str]:
    views = (operator.replace("aten._unsafe_view", "aten.view") for operator in operators)
    return [operator for operator in views if not operator.startswith(_IGNORED)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt_fp32", marks=pytest.mark.slow),
        "gpt_bf16",
        pytest.param("gpt_fp16_scaler_clip", marks=pytest.mark.slow),
        pytest.param("gpt_bf16_dropout", marks=pytest.mark.slow),
        pytest.param("gpt_bf16_fused", marks=pytest.mark.slow),
        pytest.param("gpt_bf16_math", marks=pytest.mark.slow),
        pytest.param("gpt_pure_bf16", marks=pytest.mark.slow),
        "lora_bf16",
        "resnet_bf16_cl",
        pytest.param("vit_bf16", marks=pytest.mark.slow),
        pytest.param(
            "unet_bf16_cl",
            marks=pytest.mark.skipif(
                torch.__version__ >= "2.14", reason="group_norm copies in its kernel, if at all"
            ),
        ),
    ],
)
def test_the_same_operators_run_in_the_same_order(name: str) -> None:
    tracer = _Listening()
    with stage(tracer):
        steps = TRAININGS[name].steps("cuda")
        for _ in range(STEPS):
            next(steps)
        del steps
    assert counted(tracer.operators) == counted(RECORDED[name].operators)
