"""The cost of operations: floating-point operations and traffic, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.devices.gpu_catalogue import Rates, find_gpu
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.cuda.fake_cuda import replaced
from autofit.prediction.cuda.roofline import LAUNCH_S, Operation, cost_on
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import dry_run, stage
from autofit.prediction.predict import predict
from autofit.training.workload import Workload

INFINITE = float("inf")
H200 = find_gpu("H200")
COUNTS_FLOPS = Rates(1.0, 1.0, 1.0, INFINITE)
"""A second is one floating-point operation of any type."""
COUNTS_BYTES = Rates(INFINITE, INFINITE, INFINITE, 1.0)


def cost(run: Callable[..., object], rates: Rates, *, prepare: Any = None) -> Any:
    """Return the cost of a function's operations on an H200 with these rates."""
    gpu = replace(H200, rates=rates)
    tracer = CudaTracer(gpu)
    with stage(tracer):
        made = prepare() if prepare is not None else ()
        operations: list[Operation] = []
        tracer.operations = operations
        run(*made)
        return cost_on(gpu, operations)


def ones(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def backward(output: torch.Tensor) -> None:
    output.sum().backward()  # type: ignore[no-untyped-call]  # torch's


HALF = torch.bfloat16
LINEAR_FLOPS = 2 * 16 * 32 * 64


@pytest.mark.parametrize(
    ("run", "prepare", "flops"),
    [
        (
            lambda layer, x: layer(x),
            lambda: (nn.Linear(32, 64, device="cuda"), ones(16, 32, grad=True)),
            LINEAR_FLOPS,
        ),
        (  # once forward and twice backward
            lambda layer, x: backward(layer(x)),
            lambda: (nn.Linear(32, 64, device="cuda"), ones(16, 32, grad=True)),
            3 * LINEAR_FLOPS,
        ),
        (  # each output with a window
            lambda layer, x: backward(layer(x)),
            lambda: (
                nn.Conv2d(8, 16, 3, padding=1, bias=False, device="cuda"),
                ones(4, 8, 10, 12, grad=True),
            ),
            3 * 2 * (4 * 16 * 10 * 12) * (8 * 3 * 3),
        ),
        (  # queries with keys and weights with values
            F.scaled_dot_product_attention,
            lambda: [ones(2, 4, 128, 64, dtype=HALF) for _ in range(3)],
            2 * (2 * 2 * 4 * 128 * 128 * 64),
        ),
        (  # each step with the layer's matrices
            lambda layer, x: backward(layer(x)[0]),
            lambda: (nn.LSTM(16, 32, device="cuda"), ones(10, 4, 16, grad=True)),
            3 * 2 * (10 * 4) * (4 * 32 * 16 + 4 * 32 * 32),
        ),
        (  # each row with the matrix of its group
            lambda left, right, ends: torch._grouped_mm(left, right, offs=ends),
            lambda: (
                ones(64, 32, dtype=HALF),
                ones(4, 32, 16, dtype=HALF),
                ones(4, dtype=torch.int32),
            ),
            2 * 64 * 32 * 16,
        ),
    ],
    ids=["linear", "linear and back", "convolution", "attention", "recurrent", "groups"],
)
def test_what_multiplies_counts_its_multiplications(run: Any, prepare: Any, flops: int) -> None:
    assert cost(run, COUNTS_FLOPS, prepare=prepare).kernel_seconds == flops


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda x, y: x + y, 3),
        (lambda x, y: x.add_(y), 3),
        (lambda x, y: x.copy_(y), 2),
        (lambda x, y: x.zero_(), 1),
        (lambda x, y: x.view(-1).detach(), 0),
        (lambda x, y: torch._foreach_add_([x], [y]), 3),
        (lambda x, y: x + y[:1].expand(16, 16), 2 + 1 / 16),
    ],
    ids=["add", "in place", "copy", "zero", "views", "foreach", "expanded"],
)
def test_an_operator_moves_what_it_reads_and_writes(
    run: Callable[[torch.Tensor, torch.Tensor], object], moved: float
) -> None:
    found = cost(run, COUNTS_BYTES, prepare=lambda: (ones(16, 16), ones(16, 16)))
    assert found.kernel_seconds == moved * 16 * 16 * 4
    assert found.launch_seconds == (LAUNCH_S if moved else 0)


def tf32() -> AbstractContextManager[None]:
    return replaced(torch.backends.cuda.matmul, "allow_tf32", True)


@pytest.mark.parametrize(
    ("how", "rate"),
    [
        (nullcontext, 1.0),
        (tf32, 2.0),
        (lambda: torch.autocast("cuda", torch.bfloat16), 4.0),
        (lambda: torch.autocast("cuda", torch.float16), 4.0),
    ],
    ids=["float32", "tf32", "bfloat16", "float16"],
)
def test_a_product_has_the_rate_of_the_type_it_runs_in(how: Any, rate: float) -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        with how():
            x @ y

    rates = Rates(4.0, 2.0, 1.0, INFINITE)
    found = cost(run, rates, prepare=lambda: (ones(16, 16), ones(16, 16)))
    assert found.kernel_seconds == 2 * 16**3 / rate


def moved(make: Callable[[], nn.Module], layout: torch.memory_format, dtype: torch.dtype) -> Any:
    """Return the bytes that a layer moves of a batch of images."""

    def prepare() -> tuple[nn.Module, torch.Tensor]:
        return make(), ones(8, 64, 32, 32, dtype=dtype).to(memory_format=layout)

    return cost(lambda layer, x: layer(x), COUNTS_BYTES, prepare=prepare).kernel_seconds


def test_tensor_cores_convolve_faster_in_channels_last() -> None:
    def bytes_in(layout: torch.memory_format) -> Any:
        return moved(
            lambda: nn.Conv2d(64, 64, 3, padding=1, device="cuda", dtype=HALF), layout, HALF
        )

    assert bytes_in(torch.channels_last) < bytes_in(torch.contiguous_format)


def test_batch_normalization_reads_data_once_where_cudnn_keeps_it() -> None:
    def seconds(layout: torch.memory_format, dtype: torch.dtype, *, train: bool = True) -> Any:
        return moved(lambda: nn.BatchNorm2d(64, device="cuda").train(train), layout, dtype)

    last, contiguous, half = torch.channels_last, torch.contiguous_format, torch.float16
    data = 2 * 8 * 64 * 32 * 32
    assert seconds(contiguous, half) - seconds(last, half) == data
    assert seconds(last, torch.bfloat16) - seconds(last, half) == data
    assert seconds(contiguous, half) - seconds(contiguous, half, train=False) == pytest.approx(
        data, rel=0.01
    )


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.body = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return x.square().mean()


def flops_of_a_step(model: Callable[[], nn.Module]) -> Any:
    workload = Workload(model, torch.ones(4, 512), optimizer=lambda ps: torch.optim.SGD(ps, 0.1))
    gpu = replace(H200, rates=COUNTS_FLOPS)
    cost: Any = dry_run(workload, ResolvedPlan(Plan(64)), gpu).micro_batch_cost_on(gpu)
    return cost.kernel_seconds


def test_a_step_counts_what_checkpointing_recomputes() -> None:
    forward = 2 * 64 * 512 * 2048 * 2
    first_input_needs_no_gradient = forward / 2
    plain = flops_of_a_step(Net)
    assert plain == 3 * forward - first_input_needs_no_gradient
    recomputed = flops_of_a_step(lambda: Net(checkpointed=True))
    last_output_is_not_needed_again = forward / 2
    assert recomputed == plain + forward - last_output_is_not_needed_again


def test_a_prediction_costs_a_large_model_by_type_and_a_small_one_by_launches() -> None:
    def cost_of(dtype: str, width: int, gpu: str = "H200") -> Any:
        workload = Workload(lambda: nn.Linear(width, width), torch.ones(4, width))
        plan = Plan(width, settings={"precision.dtype": dtype})
        return predict(workload, plan=plan, gpu=gpu).micro_batch_cost

    large = {name: cost_of(name, 8192).seconds for name in ("default", "tf32", "bfloat16")}
    assert large["bfloat16"] < large["tf32"] < large["default"]
    small = cost_of("default", 8)
    assert small.seconds == small.launch_seconds > small.kernel_seconds > 0
    assert cost_of("default", 8, gpu="24GiB") is None, "its rates are not known"
