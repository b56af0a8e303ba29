"""What CUDA ran and allocated in trainings recorded on an H200: operators, and scratch memory."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch

from autofit.devices.gpu_catalogue import Gpu, find_gpu
from autofit.prediction.cuda.operators import ORDERS
from autofit.prediction.cuda.scratch import Reduction, Size, bytes_on, scratch
from autofit.prediction.dry_run import STEPS, stage
from benchmarks.traces.recorded import RecordedTraining, recorded_trainings
from benchmarks.traces.trainings import TRAININGS
from tests.prediction.cuda.listening import Listening

H200 = find_gpu("H200")
EXACT = {
    "gpt_fp32": ["_scaled_dot_product_efficient_attention_backward", "sum"],
    "gpt_bf16_b24": ["sum"],
    "gpt_bf16_math": ["_softmax_backward_data"],
    "gpt_wide_bf16": ["sum"],
    "vit_fp32": ["native_layer_norm", "native_layer_norm_backward", "sum"],
    "lstm_fp32": ["sum"],
}
ALIKE = [
    pytest.param(name, marks=[pytest.mark.slow] * (name != "gpt_fp32"))
    for name in sorted(EXACT.keys() - {"lstm_fp32"})  # cuDNN lays its weights out in one
]


@cache
def trainings() -> dict[str, RecordedTraining]:
    return {each.name: each for each in recorded_trainings()}


def taken(sizes: list[Size], gpu: Gpu = H200) -> list[int]:
    """Return the sizes on a GPU of the buffers that are taken there."""
    return [nbytes for size in sizes if (nbytes := bytes_on(gpu, size))]


class _Weighing(Listening):  # type: ignore[no-untyped-call]  # torch's own hook
    """Notes the scratch memory of each call of an operator, too."""

    def __init__(self) -> None:
        super().__init__(H200)
        self.scratch: dict[str, list[list[int]]] = defaultdict(list)

    def account(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        order = ORDERS[name](args, result) if name in ORDERS else []
        before = [size for size in order if isinstance(size, int)]
        self.scratch[name].append(before + taken(scratch(name, args)))
        super().account(func, args, kwargs, result)


@cache
def ran(training: str) -> _Weighing:
    tracer = _Weighing()
    with stage(tracer):
        steps = TRAININGS[training].steps("cuda")
        for _ in range(STEPS):
            next(steps)
        del steps
    return tracer


def recorded(training: str, operator: str) -> list[list[int]]:
    return [
        sizes
        for name, sizes in zip(
            trainings()[training].operators, trainings()[training].scratch_sizes, strict=True
        )
        if name.split(".")[1] == operator
    ]


@pytest.mark.parametrize("training", ["lstm_fp32", *ALIKE])
def test_kernels_allocate_what_was_recorded(training: str) -> None:
    found = ran(training).scratch
    for operator in EXACT[training]:
        sizes = recorded(training, operator)
        assert any(sizes)
        if operator == "sum":  # the second holds semaphores, which are left out
            sizes = [each[:1] for each in sizes]
        assert found[operator] == sizes


@pytest.mark.parametrize(
    ("shape", "dims", "nbytes"),
    [
        ((8, 32, 192, 192), {0, 2, 3}, 2176),  # the gradient of a convolution's bias, as recorded
        ((8, 8), {0}, 0),
        ((0, 8), {0}, 0),
    ],
)
def test_a_reduction_needs_a_buffer_where_it_is_large(
    shape: tuple[int, ...], dims: set[int], nbytes: int
) -> None:
    tensor = torch.empty(shape, device="meta")
    assert Reduction.of(tensor, frozenset(dims)).bytes_on(H200) == nbytes


# -- The emulation runs the very operators that CUDA ran, in the same order

# Bookkeeping that touches no memory of the device, and moves between versions of torch.
_IGNORED = ("profiler", "aten.lift_fresh", "aten.detach", "aten._local_scalar_dense")


def counted(operators: list[str] | tuple[str, ...]) -> list[str]:
    views = (operator.replace("aten._unsafe_view", "aten.view") for operator in operators)
    return [operator for operator in views if not operator.startswith(_IGNORED)]


@pytest.mark.parametrize(
    "name",
    [
        *ALIKE,
        pytest.param("gpt_fp16_scaler_clip", marks=pytest.mark.slow),
        pytest.param("gpt_bf16_dropout", marks=pytest.mark.slow),
        pytest.param("gpt_bf16_fused", marks=pytest.mark.slow),
        pytest.param("gpt_pure_bf16", marks=pytest.mark.slow),
        pytest.param(
            "lora_bf16",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.9", reason="attention is not of cuDNN on any GPU"
            ),
        ),
        pytest.param("resnet_bf16_cl", marks=pytest.mark.slow),
        pytest.param(
            "unet_bf16_cl",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    torch.__version__ >= "2.14", reason="group_norm copies in its kernel, if at all"
                ),
            ],
        ),
    ],
)
def test_the_same_operators_run_in_the_same_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)  # of the recordings
    assert counted(ran(name).operators) == counted(trainings()[name].operators)
