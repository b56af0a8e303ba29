"""What autograd does in place on CUDA and not on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses

from autofit.prediction.cuda_tracer import CudaTracer, in_backward
from autofit.prediction.gpus import find_gpu
from autofit.prediction.rehearsal import stage

_WATCHED = ("add.Tensor", "sub.Tensor", "scatter.src", "scatter_add", "index_put", "index_add")


class _Listening(CudaTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """Notes of each watched operator of the backward pass whether it wrote to its argument."""

    def __init__(self) -> None:
        super().__init__(find_gpu("H200"))
        self.in_place: list[bool] = []

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().compute(func, args, kwargs)
        if in_backward() and str(func).removeprefix("aten.").startswith(_WATCHED):
            self.in_place.append(result is args[0])
        return result


def in_place(run: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> list[bool]:
    tracer = _Listening()
    with stage(tracer.gpu, tracer):
        leaf = torch.randn(4, 8, device="cuda", requires_grad=True)
        run(leaf.exp()).sum().backward(**options)  # type: ignore[no-untyped-call]  # torch's
    return tracer.in_place


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor) -> torch.Tensor:
        return data * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1 + gradients[0] * 1


def test_gradients_that_meet_at_a_fork_are_added_to_the_first() -> None:
    assert in_place(lambda x: x.sin() + x.cos()) == [True]
    assert in_place(lambda x: (x + x.sin()).tanh()) == [True]


def test_not_where_somebody_else_holds_the_first() -> None:
    assert in_place(lambda x: torch.cat((*(part.sin() for part in x.chunk(2)), x))) == [False]
    assert in_place(_Twice.apply) == [False]
    assert in_place(lambda x: x.sin() + x.cos(), create_graph=True) == [False]


@pytest.mark.parametrize(
    "selected",
    [
        lambda x: x.max(1)[0],
        lambda x: x.topk(2)[0],
        lambda x: x.gather(1, torch.zeros(4, 2, dtype=torch.long, device="cuda")),
        lambda x: x[torch.zeros(3, dtype=torch.long, device="cuda")],
        lambda x: x.index_select(0, torch.zeros(3, dtype=torch.long, device="cuda")),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    ],
)
def test_zeros_are_written_to(selected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert in_place(selected) == [True]
