"""Autocast on meta tensors against CUDA's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses

from autofit.devices.gpu_catalogue import find_gpu
from autofit.prediction.cuda import autocast
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import stage


@pytest.fixture
def staged():  # type: ignore[no-untyped-def]  # a generator of a tracer
    tracer = CudaTracer(find_gpu("H100"))
    with stage(tracer):
        yield tracer


def test_every_name_in_the_lists_is_an_operator_with_an_autocast_kernel() -> None:
    known = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    assert autocast.POLICIES.keys() - known == set()


def on_device(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(shape, device="cuda", **options)


@pytest.mark.usefixtures("staged")
def test_types_of_results() -> None:
    x, w = on_device(4, 8), on_device(8, 8)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = x @ w
        assert product.dtype == torch.bfloat16
        assert F.linear(x, w).dtype == torch.bfloat16
        assert torch.einsum("ij,jk->ik", x, w).dtype == torch.bfloat16
        assert product.softmax(-1).dtype == torch.float32
        assert product.exp().dtype == torch.float32
        assert product.sum().dtype == torch.float32
        assert product.norm().dtype == torch.float32
        assert F.layer_norm(product, (8,)).dtype == torch.float32
        assert F.gelu(product).dtype == torch.bfloat16
        assert (product + x).dtype == torch.float32
        assert torch.addcmul(product, x, x).dtype == torch.float32
        assert product.sum(dtype=torch.bfloat16).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert (x @ w).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


def test_a_weight_is_cast_once_and_its_cast_dies_with_the_region(staged: CudaTracer) -> None:
    weight = on_device(1024, 1024, requires_grad=True)
    x = on_device(1, 1024)
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        F.linear(x, weight)
        with_cast = staged.allocator.allocated_bytes
        F.linear(x, weight)
        assert staged.allocator.allocated_bytes == with_cast
    assert staged.allocator.allocated_bytes == with_cast - 2 * 1024 * 1024


@pytest.mark.usefixtures("staged")
def test_what_cuda_refuses_is_refused() -> None:
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(on_device(4), on_device(4))


def test_outside_the_stage_autocast_is_as_it_was() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.randn(4, 4) @ torch.randn(4, 4)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.autocast("meta")
