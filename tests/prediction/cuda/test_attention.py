"""Which kernel `scaled_dot_product_attention` takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from autofit.devices.gpu_catalogue import find_gpu
from autofit.prediction.cuda import attention
from autofit.prediction.cuda.attention import Call, chosen_kernel
from autofit.prediction.dry_run import stage
from tests.prediction.cuda.listening import Listening

BF16, FP32 = torch.bfloat16, torch.float32


def call(
    dtype: torch.dtype = BF16,
    *,
    width: int = 64,
    heads: int = 8,
    key_heads: int | None = None,
    length: int = 128,
    key_length: int | None = None,
    **options: Any,
) -> Call:
    shape = (2, heads, length, width)
    key_shape = (2, key_heads or heads, key_length or length, width)
    query = torch.empty(shape, dtype=dtype, device="meta")
    key = torch.empty(key_shape, dtype=dtype, device="meta")
    given = {"mask": None, "dropout": 0.0, "causal": False, "scale": None, "grouped": False}
    return Call(query, key, key, **(given | options))


@pytest.fixture
def new_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch be built with a cuDNN that it prefers; builds for CUDA 12 have an older one."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


def skip_before_2_9(kernel: SDPBackend) -> None:
    if kernel is SDPBackend.CUDNN_ATTENTION and torch.__version__ < "2.9":
        pytest.skip("torch 2.8 prefers cuDNN's kernel on no GPU")


MASK = torch.empty(128, 128, dtype=BF16, device="meta")


@pytest.mark.parametrize(
    ("gpu", "made", "kernel"),
    [
        ("H100", call(), SDPBackend.CUDNN_ATTENTION),
        ("A100", call(), SDPBackend.FLASH_ATTENTION),
        ("L4", call(causal=True), SDPBackend.FLASH_ATTENTION),
        ("A100", call(FP32), SDPBackend.EFFICIENT_ATTENTION),
        ("H100", call(FP32), SDPBackend.EFFICIENT_ATTENTION),
        ("H100", call(torch.float64), SDPBackend.MATH),
        ("T4", call(torch.float16), SDPBackend.EFFICIENT_ATTENTION),
        ("T4", call(BF16), SDPBackend.MATH),
        ("A100", call(mask=MASK), SDPBackend.EFFICIENT_ATTENTION),
        ("H100", call(mask=MASK), SDPBackend.CUDNN_ATTENTION),
        ("H100", call(mask=MASK[None]), SDPBackend.EFFICIENT_ATTENTION),
        ("H100", call(width=320), SDPBackend.EFFICIENT_ATTENTION),
        ("A100", call(width=100), SDPBackend.FLASH_ATTENTION),
        ("H100", call(width=100), SDPBackend.FLASH_ATTENTION),
        ("A100", call(FP32, width=66), SDPBackend.MATH),
        ("A100", call(key_heads=2, grouped=True), SDPBackend.FLASH_ATTENTION),
        ("A100", call(FP32, key_heads=2, grouped=True), SDPBackend.MATH),
        ("A100", call(causal=True, key_length=64), SDPBackend.EFFICIENT_ATTENTION),
    ],
)
@pytest.mark.usefixtures("new_cudnn")
def test_the_kernel(gpu: str, made: Call, kernel: SDPBackend) -> None:
    skip_before_2_9(kernel)
    assert chosen_kernel(made, find_gpu(gpu)) == kernel


def test_cudnn_comes_first_only_where_it_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)  # of CUDA 12.8's wheels
    assert chosen_kernel(call(), find_gpu("H100")) == SDPBackend.FLASH_ATTENTION
    assert chosen_kernel(call(mask=MASK), find_gpu("H100")) == SDPBackend.EFFICIENT_ATTENTION


@pytest.mark.parametrize(("length", "stored"), [(64, 64), (60, 64), (132, 136)])
def test_the_rows_of_a_mask_are_padded_to_multiples_of_eight(length: int, stored: int) -> None:
    mask = torch.empty(length, length, device="meta")
    made = call(FP32, length=length, mask=mask)
    assert attention._aligned(mask, made).stride(-2) == stored


@pytest.mark.parametrize(
    ("gpu", "kernels", "in_order"),
    [
        ("H100", [SDPBackend.EFFICIENT_ATTENTION], False),
        ("A100", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], True),
        ("H100", [SDPBackend.MATH], False),
    ],
)
def test_the_users_switch_is_heeded(gpu: str, kernels: list[SDPBackend], in_order: bool) -> None:
    with sdpa_kernel(kernels, set_priority=in_order):
        assert chosen_kernel(call(), find_gpu(gpu)) == kernels[0]


def run(gpu: str, dtype: torch.dtype, *, checkpointed: bool, mask: bool = False) -> list[str]:
    tracer = Listening(find_gpu(gpu))
    with stage(tracer):
        query: Any = torch.randn(2, 8, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
        bias = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril() if mask else None

        def attend(x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)

        out = checkpoint(attend, query, use_reentrant=False) if checkpointed else attend(query)
        out.sum().backward()
        assert out.shape == query.grad.shape == query.shape
        del query, out
    attention_alone = (name for name in tracer.operators if "attention" in name)
    return [name.split(".")[1].removeprefix("_scaled_dot_product_") for name in attention_alone]


@pytest.mark.parametrize(
    ("gpu", "dtype", "kernel"),
    [("H100", BF16, "cudnn"), ("A100", BF16, "flash"), ("A100", FP32, "efficient")],
)
@pytest.mark.usefixtures("new_cudnn")
def test_forward_recomputation_and_backward_use_it(
    gpu: str, dtype: torch.dtype, kernel: str
) -> None:
    skip_before_2_9(getattr(SDPBackend, f"{kernel.upper()}_ATTENTION"))
    name = f"{kernel}_attention"
    assert run(gpu, dtype, checkpointed=False) == [name, f"{name}_backward"]
    if dtype == FP32:  # a boolean mask becomes an additive one
        assert run(gpu, dtype, checkpointed=False, mask=True) == [name, f"{name}_backward"]
    assert run(gpu, dtype, checkpointed=True) == [name, name, f"{name}_backward"]
