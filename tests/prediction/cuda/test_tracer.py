"""What a GPU's kernels and libraries take beyond tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch import nn

from autofit.memory.replay import replay, required_bytes
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.cuda.values import NeedsValues
from autofit.prediction.dry_run import stage
from autofit.prediction.gpus import find_gpu
from autofit.units import MIB


def traced(run: Callable[[], object], gpu: str = "H100") -> CudaTracer:
    tracer = CudaTracer(find_gpu(gpu))
    with stage(tracer.gpu, tracer):
        run()
        tracer.end_step()
    return tracer


def on_device(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=grad)


@pytest.mark.parametrize(("gpu", "workspace"), [("H100", 32 * MIB), ("A100", 8 * MIB + 2**17)])
def test_each_thread_that_multiplies_gets_a_workspace(gpu: str, workspace: int) -> None:
    def held(run: Callable[[], object]) -> int:
        return traced(run, gpu).allocator.allocated_bytes

    def forward() -> None:
        on_device(8, 8) @ on_device(8, 8)

    def forward_and_backward() -> None:
        (on_device(8, 8, grad=True) @ on_device(8, 8)).sum().backward()  # type: ignore[no-untyped-call]  # torch's

    assert workspace <= held(forward) < workspace + 2 * MIB
    assert 2 * workspace <= held(forward_and_backward) < 2 * workspace + 2 * MIB
    assert held(lambda: on_device(8, 8).relu()) == 0


def test_a_bias_takes_cublaslt_which_has_its_own() -> None:
    held = traced(lambda: F.linear(on_device(8, 8), on_device(8, 8), on_device(8)))
    assert held.allocator.allocated_bytes == 33 * MIB


def test_the_workspace_of_a_convolution_is_dispensable() -> None:
    def convolve() -> None:
        layer = nn.Conv2d(64, 64, 3, padding=1, device="cuda", dtype=torch.bfloat16)
        layer(torch.randn(256, 64, 32, 32, device="cuda", dtype=torch.bfloat16))

    recording = traced(convolve).recording
    assert len(recording.optional) == 1
    required = required_bytes(recording)
    assert required < replay(recording).peak_allocated_bytes
    assert replay(recording, limit_bytes=required).late_retries == 0


def test_a_convolutions_result_follows_the_layout_of_its_weight() -> None:
    def convolve() -> None:
        layer = nn.Conv2d(8, 8, 3, device="cuda").to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks it
        result = layer(on_device(2, 8, 16, 16))
        assert result.is_contiguous(memory_format=torch.channels_last)

    traced(convolve)


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch copies no argument any more")
def test_group_normalization_wants_a_contiguous_argument() -> None:
    def normalize() -> None:
        image = on_device(2, 8, 16, 16).to(memory_format=torch.channels_last)
        assert F.group_norm(image, 2).is_contiguous()

    traced(normalize)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
    ],
)
def test_values_are_refused(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((NeedsValues, NotImplementedError)):
        traced(lambda: read(on_device(4, 4)))


def test_values_on_the_host_are_read_as_ever() -> None:
    def read() -> None:
        assert torch.ones(3).sum().item() == 3.0
        assert torch.arange(3).nonzero().numel() == 2

    traced(read)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_groups_have_the_shapes_of_gradients(dtype: torch.dtype) -> None:
    def multiply() -> None:
        tokens = torch.randn(64, 16, device="cuda", dtype=dtype, requires_grad=True)
        experts = torch.randn(4, 16, 32, device="cuda", dtype=dtype, requires_grad=True)
        ends = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
        product = torch._grouped_mm(tokens, experts, offs=ends)
        assert product.shape == (64, 32)
        product.sum().backward()  # type: ignore[no-untyped-call]  # torch's
        assert tokens.grad is not None
        assert experts.grad is not None
        assert (tokens.grad.shape, experts.grad.shape) == (tokens.shape, experts.shape)

    traced(multiply)
