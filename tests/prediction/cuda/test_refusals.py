"""What CUDA takes and refuses: reductions of scalars, masks and biases, and casts that are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit import Prediction, Workload, predict


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(64, 64), function

    def forward(self, data: Tensor) -> Tensor:
        return self.function(self.layer(data), self.layer.weight)


def predicted(function: Callable[[Tensor, Tensor], Tensor]) -> Prediction:
    workload = Workload(
        lambda: Called(function), torch.randn(4, 16, 64), loss_fn=lambda m, b: m(b).square().mean()
    )
    return predict(workload, gpu="H200")


def attention(data: Tensor, mask: Tensor) -> Tensor:
    heads = data.view(*data.shape[:2], 4, -1).transpose(1, 2)
    with sdpa_kernel([SDPBackend.MATH]):
        return functional.scaled_dot_product_attention(heads, heads, heads, mask)


@pytest.mark.parametrize(
    "function",
    [
        lambda data, weight: data + torch.linalg.vector_norm(data.sum(), dim=0),
        lambda data, weight: data + torch.norm(data.sum(), dim=-1, keepdim=True),
        lambda data, weight: data + data.sum().sum(dim=0),
        lambda data, weight: data + torch._safe_softmax(data.sum(), 0),
    ],
)
def test_a_single_number_is_reduced_over_a_dimension(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert predicted(function).required_bytes > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda data, weight: attention(data, torch.zeros(16, 99, device=data.device)),
        lambda data, weight: attention(data, torch.zeros(16, 16, device="cpu")),
        lambda data, weight: functional.linear(
            data.transpose(0, 1), weight, torch.zeros(64, device="cpu")
        ),
    ],
)
def test_a_mask_or_bias_that_cuda_refuses_is_refused(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    with pytest.raises(Exception, match=r"broadcast|CPU|99"):
        predicted(function)


def test_a_mask_larger_than_the_scores_is_not_added_in_their_memory() -> None:
    def widened(data: Tensor, weight: Tensor) -> Tensor:
        found = attention(data[:1], torch.zeros(4, 1, 16, 16, device=data.device))
        if len(found) != 4:
            raise ValueError(f"the mask has 4 samples, the result {len(found)}")
        return found

    assert predicted(widened).required_bytes > 0


def test_casts_are_kept_over_attention_where_autocast_is_on_without_a_context() -> None:
    def peak(between: bool) -> int:
        def twice(model: nn.Module, data: Tensor) -> Tensor:
            wide = data.repeat(1, 1, 1024)
            torch.set_autocast_enabled("cuda", True)
            try:
                heads = model(wide)
                if between:
                    heads = attention(heads, torch.zeros(16, 16, device=heads.device))
                return (model(wide) + heads.sum()).float().square().mean()
            finally:
                torch.set_autocast_enabled("cuda", False)
                torch.clear_autocast_cache()

        wide = Workload(
            lambda: nn.Linear(64 * 1024, 64, bias=False), torch.randn(1, 16, 64), loss_fn=twice
        )
        return predict(wide, gpu="H200").peak_allocated_bytes

    cast = 64 * 64 * 1024 * 2
    assert peak(between=True) - peak(between=False) < cast / 2
