"""Autocast on meta tensors against CUDA's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses

from autofit.prediction.cuda import autocast
from autofit.prediction.cuda.tracer import CudaTracer


def test_every_name_in_the_lists_is_an_operator_with_an_autocast_kernel() -> None:
    known = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    assert autocast.POLICIES.keys() - known == set()


def on_device(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(shape, device="cuda", **options)


HALF, FLOAT = torch.bfloat16, torch.float32


@pytest.mark.usefixtures("tracer")
@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda x, half: x @ x, HALF),
        (F.linear, HALF),
        (lambda x, half: torch.einsum("ij,jk->ik", x, x), HALF),
        (lambda x, half: half.softmax(-1), FLOAT),
        (lambda x, half: half.exp(), FLOAT),
        (lambda x, half: half.sum(), FLOAT),
        (lambda x, half: half.sum(dtype=HALF), HALF),
        (lambda x, half: half.norm(), FLOAT),
        (lambda x, half: F.layer_norm(half, (8,)), FLOAT),
        (lambda x, half: F.gelu(half), HALF),
        (lambda x, half: half + x, FLOAT),
        (lambda x, half: torch.addcmul(half, x, x), FLOAT),
    ],
)
def test_types_of_results(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x = on_device(8, 8)
    with torch.autocast("cuda", dtype=HALF):
        assert run(x, x.bfloat16()).dtype == dtype
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == FLOAT
    assert (x @ x).dtype == FLOAT


def test_a_weight_is_cast_once_and_its_cast_dies_with_the_region(tracer: CudaTracer) -> None:
    weight = on_device(1024, 1024, requires_grad=True)
    x = on_device(1, 1024)
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        F.linear(x, weight)
        with_cast = tracer.allocator.allocated_bytes
        F.linear(x, weight)
        assert tracer.allocator.allocated_bytes == with_cast
    assert tracer.allocator.allocated_bytes == with_cast - 2 * 1024 * 1024


@pytest.mark.usefixtures("tracer")
def test_what_cuda_refuses_is_refused() -> None:
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(on_device(4), on_device(4))


def test_outside_the_stage_autocast_is_as_it_was() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.randn(4, 4) @ torch.randn(4, 4)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.autocast("meta")
