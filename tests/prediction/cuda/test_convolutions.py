"""Workspaces of convolutions, against sizes recorded on an H200."""

from __future__ import annotations

import pytest
import torch

from autofit.devices.gpu_catalogue import find_gpu
from autofit.prediction.cuda.convolutions import Convolution, Direction, workspace_bytes
from autofit.prediction.cuda.tracer import CudaTracer

H200 = find_gpu("H200")
BF16, FP32 = torch.bfloat16, torch.float32
FORWARD = Direction.FORWARD
SLACK = 1024
"""cuDNN adds up to a few hundred bytes of its own."""


@pytest.fixture(params=[False, True])
def tf32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", request.param)
    return bool(request.param)


def convolution(
    data: tuple[int, ...],
    out: int,
    kernel: int,
    dtype: torch.dtype,
    *,
    stride: int = 1,
    channels_last: bool = False,
    groups: int = 1,
) -> Convolution:
    size = -(-data[2] // stride)
    weight = (out, data[1] // groups, kernel, kernel)
    result = (data[0], out, size, size)
    return Convolution(data, weight, result, dtype, channels_last, (stride, stride), (1, 1), groups)


@pytest.mark.parametrize(
    ("direction", "case", "recorded"),
    [
        # tensor cores copy what lies in another layout
        (FORWARD, convolution((96, 3, 160, 160), 64, 7, BF16, stride=2), 118014992),
        (FORWARD, convolution((96, 128, 40, 40), 128, 3, BF16, stride=2), 49447059),
        (FORWARD, convolution((96, 512, 5, 5), 512, 3, BF16), 9633808),
        (
            FORWARD,
            convolution((96, 3, 160, 160), 64, 7, BF16, stride=2, channels_last=True),
            39371792,
        ),
        (FORWARD, convolution((96, 64, 40, 40), 64, 3, BF16, channels_last=True), 131),
        (FORWARD, convolution((96, 64, 40, 40), 256, 1, BF16), 272),
        # windows side by side copy nothing, and depthwise convolutions are PyTorch's own
        (FORWARD, convolution((64, 3, 192, 192), 384, 16, BF16, stride=16), 0),
        (FORWARD, convolution((8, 64, 40, 40), 64, 3, BF16, groups=64), 0),
        # the gradient of a pointwise weight sums products of samples
        (Direction.WEIGHT, convolution((96, 512, 20, 20), 128, 1, BF16), 25166096),
        # and that of others parts of the samples
        (Direction.WEIGHT, convolution((96, 64, 40, 40), 64, 3, BF16), 41312935),
        (Direction.WEIGHT, convolution((96, 512, 20, 20), 1024, 1, BF16, stride=2), 63177007),
    ],
)
def test_a_workspace_is_as_large_as_it_was_recorded(
    direction: Direction, case: Convolution, recorded: int
) -> None:
    slack = SLACK if recorded else 0
    assert workspace_bytes(case, direction, H200) == pytest.approx(recorded, abs=slack)


@pytest.mark.parametrize(
    ("direction", "case", "in_tf32", "in_float32"),
    [
        (FORWARD, convolution((32, 256, 20, 20), 256, 3, FP32, stride=2), 18743312, 0),
        (Direction.WEIGHT, convolution((32, 64, 40, 40), 64, 3, FP32), None, 59572224),
        (Direction.DATA, convolution((32, 64, 40, 40), 64, 3, FP32), None, 0),
        (
            FORWARD,
            convolution((32, 256, 40, 40), 64, 1, FP32, channels_last=True),
            None,
            65536016,
        ),
    ],
    ids=["strided", "transformed tiles", "none for data", "copied channels last"],
)
def test_float32_runs_on_tensor_cores_where_tf32_is_allowed(
    direction: Direction, case: Convolution, in_tf32: int | None, in_float32: int, tf32: bool
) -> None:
    expected = in_tf32 if tf32 else in_float32
    if expected is not None:
        slack = SLACK if expected else 0
        assert workspace_bytes(case, direction, H200) == pytest.approx(expected, abs=slack)


@pytest.mark.usefixtures("tracer")
def test_gradients_take_the_layout_of_data_and_weight_whatever_the_results_gradient_has() -> None:
    weight = torch.randn(8, 16, 3, 3, device="cuda", requires_grad=True)
    data = torch.randn(2, 32, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    half = data[:, :16].requires_grad_()  # with gaps, and still channels last
    result = torch.nn.functional.conv2d(half, weight)
    gradients = torch.autograd.grad(result, (half, weight), torch.randn_like(result))
    layout = torch.channels_last
    assert all(each.is_contiguous(memory_format=layout) for each in (result, *gradients))


def test_a_transposed_convolution_takes_the_workspace_of_a_data_gradient(
    tracer: CudaTracer,
) -> None:
    """cuDNN runs its forward pass as the gradient of another's data: 3x3 needs nothing then."""
    torch.backends.cudnn.allow_tf32 = False
    layer = torch.nn.ConvTranspose2d(64, 64, 3, padding=1, bias=False).cuda()
    layer(torch.empty(8, 64, 56, 56, device="cuda"))
    assert list(tracer.recording.optional) == []
