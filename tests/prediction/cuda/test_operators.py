"""Composite operators in the form that CUDA has of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses

from autofit.devices.gpu_catalogue import find_gpu
from autofit.memory.tracer import in_backward
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import stage

ROWS, WIDTH = 1024, 1024
WHOLE = ROWS * WIDTH * 4


@pytest.fixture
def kept(tracer: CudaTracer) -> Callable[[Callable[[torch.Tensor], torch.Tensor]], int]:
    """Bytes that are held between forward and backward, the argument and the result included."""

    def kept(run: Callable[[torch.Tensor], torch.Tensor]) -> int:
        data: Any = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        result = run(data)
        held = tracer.allocator.allocated_bytes
        result.float().sum().backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        assert data.grad.shape == data.shape
        return held

    return kept


def taken(tracer: CudaTracer, run: Callable[[], Any]) -> int:
    """Bytes that a call takes at most beside what is held before it."""
    before = tracer.allocator.allocated_bytes
    tracer.allocator.reset_peaks()
    run()
    return tracer.allocator.peak_allocated_bytes - before


@pytest.mark.usefixtures("tracer")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cudnn_normalizes_a_batch_without_gaps(dtype: torch.dtype) -> None:
    """Steps first and channels last, as layers of sequences have them."""
    norm = torch.nn.BatchNorm1d(8, device="cuda")
    result = norm(torch.randn(4, 16, 8, device="cuda", dtype=dtype).transpose(1, 2))
    assert result.is_contiguous() is (dtype == torch.float32)


def test_layer_norm_copies_what_is_not_contiguous(tracer: CudaTracer) -> None:
    rows = torch.randn(ROWS, WIDTH, device="cuda")
    for data, wholes in ((rows, 1), (rows.t(), 2)):
        assert round(taken(tracer, partial(F.layer_norm, data, (WIDTH,))) / WHOLE) == wholes


def test_group_norm_copies_what_is_not_contiguous(tracer: CudaTracer) -> None:
    """As torch's own CUDA allocator counts it in the kernels up to torch 2.14."""
    aten, weight = torch.ops.aten, torch.ones(32, device="cuda")
    image = torch.randn(8, 32, 64, 64, device="cuda")
    images = (image, image.to(memory_format=torch.channels_last))
    for copies, (data, gradient) in zip((0, 1, 1, 2), product(images, images), strict=True):
        _, *rest = aten.native_group_norm(data, weight, weight, 8, 32, 4096, 8, 1e-5)
        of = (gradient, data, *rest, weight, 8, 32, 4096, 8, [True, True, True])
        backward = partial(aten.native_group_norm_backward, *of)
        assert round(taken(tracer, backward) / image.nbytes) - 1 == copies
        assert backward()[0].is_contiguous()


@pytest.mark.parametrize(
    ("run", "more"),
    [
        (lambda x: F.dropout(x, 0.1), WHOLE // 4),  # a mask of bytes
        (lambda x: F.rms_norm(x, (WIDTH,)), 4 * ROWS),  # a number for each row
        (F.logsigmoid, 0),
    ],
    ids=["dropout", "rms_norm", "logsigmoid"],
)
def test_an_operator_keeps_no_more_than_its_kernel_needs(kept: Any, run: Any, more: int) -> None:
    assert kept(run) == 2 * WHOLE + more


def test_rms_norm_of_two_types_is_not_fused(kept: Any) -> None:
    def normalize(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return F.rms_norm(x, (WIDTH,), weight)

    assert kept(normalize) > 3 * WHOLE


def test_under_autocast_rms_norm_takes_float32_where_torch_has_it_so(kept: Any) -> None:
    """Left alone, bfloat16 data and a float32 weight are not fused, which keeps float32 copies."""
    cast = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")

    def normalize(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = F.rms_norm(x.bfloat16(), (WIDTH,), weight)
        assert result.dtype == (torch.float32 if cast else torch.bfloat16)
        return result

    assert (kept(normalize) > 3.4 * WHOLE) is not cast


class _Listening(CudaTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """Notes of each watched operator of the backward pass whether it wrote to its argument."""

    def __init__(self) -> None:
        super().__init__(find_gpu("H200"))
        self.in_place: list[bool] = []

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().compute(func, args, kwargs)
        if in_backward() and str(func) == "aten.add.Tensor":
            self.in_place.append(result is args[0])
        return result


@pytest.mark.parametrize("run", [lambda x: x.sin() + x.cos(), lambda x: (x + x.sin()).tanh()])
def test_gradients_that_meet_at_a_fork_are_added_to_the_first(
    run: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tracer = _Listening()
    with stage(tracer):
        leaf = torch.randn(4, 8, device="cuda", requires_grad=True)
        run(leaf.exp()).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    assert tracer.in_place == [True]
