"""What a GPU's kernels and libraries take beyond tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from autofit.devices.gpu_catalogue import find_gpu
from autofit.memory.allocator import ignored_options
from autofit.memory.replay import replay, required_bytes
from autofit.prediction.cuda.tracer import CudaTracer, ShapeCache
from autofit.prediction.cuda.values import NeedsValues
from autofit.prediction.dry_run import stage
from autofit.units import MIB


def traced(run: Callable[[], object], gpu: str = "H100") -> CudaTracer:
    tracer = CudaTracer(find_gpu(gpu))
    with stage(tracer):
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


def test_the_workspace_that_the_environment_chooses_is_taken_and_not_said_to_be_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    taken = traced(lambda: on_device(8, 8) @ on_device(8, 8)).allocator.allocated_bytes
    assert 8 * MIB + 2**17 <= taken < 10 * MIB
    assert ignored_options() is None


def test_the_workspace_of_a_convolution_is_dispensable() -> None:
    half: Any = {"device": "cuda", "dtype": torch.bfloat16}
    recording = traced(
        lambda: nn.Conv2d(64, 64, 3, padding=1, **half)(torch.randn(256, 64, 32, 32, **half))
    ).recording
    assert len(recording.optional) == 1
    required = required_bytes(recording)
    assert required < replay(recording).peak_allocated_bytes
    assert replay(recording, limit_bytes=required).late_retries == 0


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


@pytest.mark.usefixtures("tracer")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_groups_have_the_shapes_of_gradients(dtype: torch.dtype) -> None:
    tokens: Any = torch.randn(64, 16, device="cuda", dtype=dtype, requires_grad=True)
    experts: Any = torch.randn(4, 16, 32, device="cuda", dtype=dtype, requires_grad=True)
    ends = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
    product = torch._grouped_mm(tokens, experts, offs=ends)
    product.sum().backward()  # type: ignore[no-untyped-call]  # torch's
    shapes = product.shape, tokens.grad.shape, experts.grad.shape
    assert shapes == ((64, 32), tokens.shape, experts.shape)


# The cache of what operators return.

aten: Any = torch.ops.aten


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def running() -> Mock:
    """Return what runs operators, and counts."""
    return Mock(side_effect=lambda func, args, kwargs: func(*args, **kwargs))


def looks(result: Any) -> list[Any]:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [(t.shape, t.stride(), t.dtype, t.device) if t is not None else None for t in tensors]


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.add.Tensor, (on_meta(4, 8).t(), on_meta(1, 4))),
        (aten.native_layer_norm.default, (on_meta(2, 3, 8), [8], on_meta(8), on_meta(8), 1e-5)),
        (aten.native_layer_norm_backward.default,
         (on_meta(3, 8), on_meta(3, 8), [8], on_meta(3, 1), on_meta(3, 1), None, None,
          [True, False, False])),
        (aten.sum.dim_IntList, (on_meta(4, 8, dtype=torch.bfloat16), [0])),
    ],
    ids=["add", "normalize", "some results", "sum"],
)  # fmt: skip
def test_a_second_time_nothing_is_run_and_the_result_looks_the_same(func: Any, args: Any) -> None:
    shapes, run = ShapeCache(), running()
    first, again = (shapes.result(func, args, {}, run) for _ in range(2))
    assert run.call_count == 1
    assert looks(again) == looks(first) == looks(func(*args))
    assert type(again) is type(first)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten._unsafe_view.default, (on_meta(4, 8), [8, 4])),
        (aten.unsafe_split.Tensor, (on_meta(4, 8), 2)),
        (aten.t.default, (on_meta(4, 8),)),
        (aten.add_.Tensor, (on_meta(4), on_meta(4))),
        (aten.add.Tensor, (torch.ones(4), torch.ones(4))),
    ],
    ids=["quiet alias", "quiet views", "view", "in place", "on the host"],
)
def test_what_makes_no_new_tensors_on_the_device_is_always_run(func: Any, args: Any) -> None:
    shapes, run = ShapeCache(), running()
    for _ in range(2):
        shapes.result(func, args, {}, run)
    assert run.call_count == 2


def test_arguments_that_are_equal_and_of_another_type_are_distinguished() -> None:
    shapes, run, whole = ShapeCache(), running(), on_meta(4, dtype=torch.int64)
    types = [shapes.result(aten.add.Tensor, (whole, one), {}, run).dtype for one in (1, 1.0, True)]
    assert types == [torch.int64, torch.float32, torch.int64]
