"""Scratch memory of kernels, against sizes recorded on an H200."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses

from autofit.prediction.cuda.scratch import scratch_bytes
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import stage
from autofit.prediction.gpus import find_gpu

H200 = find_gpu("H200")
BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_an_operator_without_a_rule_takes_nothing() -> None:
    assert scratch_bytes("relu", (meta(8),), meta(8), H200) == []


def test_the_gradient_of_an_embedding_sums_segments() -> None:
    gradient, ids = meta(8, 512, 512), meta(8, 512, dtype=torch.int64)
    sizes = scratch_bytes("embedding_dense_backward", (gradient, ids, 32000, -1, False), None, H200)
    assert max(sizes) == 9226240
    assert sizes.count(32768) >= 4
    few = meta(1, 512, 512), meta(512, dtype=torch.int64)
    assert scratch_bytes("embedding_dense_backward", (*few, 512, -1, False), None, H200) == []


def test_the_gradient_of_an_embedding_bag_sums_segments_however_few() -> None:
    def sizes(mode: int) -> list[int]:
        few = meta(64, 16), meta(640, dtype=torch.int64), None, None, None
        return scratch_bytes("_embedding_bag_dense_backward", (*few, 99, False, mode), None, H200)

    assert sizes(0) == [5120] * 4 + [792, 792, 8 * 163, 4 * 163 * 16]
    assert sizes(2) == []


@pytest.mark.parametrize(("batch", "recorded"), [(8, 8519936), (24, 25559296)])
def test_the_backward_pass_of_cudnns_attention(batch: int, recorded: int) -> None:
    query = meta(batch, 8, 512, 64, dtype=BF16)
    args = (query, query, query, query)
    name = "_scaled_dot_product_cudnn_attention_backward"
    assert scratch_bytes(name, args, None, H200) == [recorded]


@pytest.mark.parametrize(
    ("shape", "recorded"),
    [
        ((8, 8, 512, 64), [131072, 8388608, 131072, 8396800]),
        ((24, 6, 145, 64), [83520, 5345280, 83520, 7084800]),
    ],
)
def test_the_backward_pass_of_efficient_attention(
    shape: tuple[int, ...], recorded: list[int]
) -> None:
    query = meta(*shape)
    name = "_scaled_dot_product_efficient_attention_backward"
    assert scratch_bytes(name, (query, query, query, query), None, H200) == recorded


def test_the_backward_pass_of_a_softmax_multiplies_first() -> None:
    weights = meta(8, 8, 512, 512)
    sizes = scratch_bytes("_softmax_backward_data", (weights, weights, -1), weights, H200)
    assert sizes == [67108864]


def test_the_softmax_of_plain_attention_looks_for_rows_without_any_key() -> None:
    scores = meta(2, 4, 64, 64, dtype=BF16)
    sizes = scratch_bytes("_safe_softmax", (scores, -1), scores, H200)
    assert sizes == [32768, 512]


def test_norms_over_lists_have_a_number_for_each_chunk() -> None:
    tensors = [meta(32000, 512), *(meta(512) for _ in range(99))]
    assert scratch_bytes("_foreach_norm", (tensors, 2), tensors, H200) == [100000]


def test_group_normalization_has_a_scale_and_a_shift() -> None:
    args = (meta(8, 32, 192, 192), None, None, 8, 32, 192 * 192, 8, 1e-5)
    assert scratch_bytes("native_group_norm", args, None, H200) == [1024, 1024]


def test_an_argument_in_pieces_is_copied() -> None:
    sliced = meta(4, 96, 192, 192)[:, 32:96]
    args = (sliced, [192, 192], [4, 64, 96, 96])
    assert scratch_bytes("upsample_nearest2d_backward", args, None, H200) == [37748736]
    whole = (meta(4, 64, 192, 192), *args[1:])
    assert scratch_bytes("upsample_nearest2d_backward", whole, None, H200) == []


def test_a_sum_is_told_by_the_shapes_it_goes_between() -> None:
    gradient = meta(4096, 512, dtype=BF16)
    assert scratch_bytes("sum", (gradient, [0]), meta(1, 512), H200) == [16777216, 16]
    assert scratch_bytes("sum", (gradient, [0]), meta(512), H200) == [16777216, 16]
    assert scratch_bytes("sum", (meta(0, 8),), meta(), H200) == []


def test_a_loss_has_the_losses_of_all_elements() -> None:
    data = meta(64, 1024)
    for name in ("mse_loss", "binary_cross_entropy"):
        assert scratch_bytes(name, (data, data, None, 0), data, H200) == []
    assert scratch_bytes("mse_loss", (data, data), meta(), H200)[0] == 64 * 1024 * 4
    assert scratch_bytes("binary_cross_entropy", (data, data), meta(), H200)[0] == 4
    name = "binary_cross_entropy_with_logits"
    assert scratch_bytes(name, (data, data), meta(), H200) == [64 * 1024 * 4] * 2
    weighted = data, data, None, meta(1024)
    assert scratch_bytes(name, weighted, meta(), H200) == [64 * 1024 * 4] * 3


def test_the_losses_of_an_image_as_recorded() -> None:
    """8 images of 192x192 with one channel."""
    image = meta(8, 1, 192, 192)
    assert scratch_bytes("mse_loss", (image, image), meta(), H200) == [1179648, 144, 4]


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy])
def test_a_mean_loss_stays_in_memory_for_all_elements(loss: Callable[..., torch.Tensor]) -> None:
    tracer = CudaTracer(H200)
    with stage(H200, tracer):
        data, target = (torch.zeros(64, 1024, device="cuda") for _ in range(2))
        before = tracer.allocator.allocated_bytes
        mean = loss(data, target)
        assert mean.shape == ()
        assert tracer.allocator.allocated_bytes - before == 64 * 1024 * 4
        del mean
        assert tracer.allocator.allocated_bytes == before
        del data, target


@pytest.mark.parametrize(
    ("matrix", "copied"),
    [
        (meta(64, 32), 0),
        (meta(32, 64).t(), 0),
        (meta(64, 96)[:, :32], 0),
        (meta(1).expand(64, 32), 64 * 32 * 4),
        (meta(64, 64)[:, ::2], 64 * 32 * 4),
    ],
)
def test_a_product_copies_what_has_neither_rows_nor_columns_in_one_piece(
    matrix: torch.Tensor, copied: int
) -> None:
    sizes = [copied] if copied else []
    assert scratch_bytes("mm", (matrix, meta(32, 8)), None, H200) == sizes
    assert scratch_bytes("addmm", (meta(8), matrix, meta(32, 8)), None, H200) == sizes
    assert scratch_bytes("bmm", (matrix[None], meta(1, 32, 8)), None, H200) == sizes


def test_values_put_where_they_meet_are_sorted_by_place() -> None:
    rows = meta(1000, dtype=torch.int64)
    args = (meta(64, 32), [rows], meta(1000, 32))
    assert scratch_bytes("index_put", (*args, True), None, H200) == [8000] * 5
    assert scratch_bytes("index_put", args, None, H200) == []


def test_each_further_dimension_of_a_roll_is_another_pass() -> None:
    image = meta(4, 8, 8, 16)
    assert scratch_bytes("roll", (image, [1, 1], [1, 2]), image, H200) == [4 * 8 * 8 * 16 * 4]
    assert scratch_bytes("roll", (image, [1], [1]), image, H200) == []


def test_a_fourier_transform_has_a_work_area_and_its_inverse_a_copy() -> None:
    real, spectrum = meta(4, 64, 64), meta(4, 64, 33, dtype=torch.complex64)
    assert scratch_bytes("_fft_r2c", (real, [1, 2], 0, True), spectrum, H200) == [4 * 64 * 33 * 8]
    assert scratch_bytes("_fft_c2r", (spectrum, [1, 2], 2, 64), real, H200) == [4 * 64 * 33 * 8] * 2


def test_a_softmax_copies_an_image_with_channels_last_and_pooling_does_not() -> None:
    image = torch.empty_like(meta(2, 8, 4, 4), memory_format=torch.channels_last)
    assert scratch_bytes("_log_softmax", (image, 1, False), image, H200) == [2 * 8 * 4 * 4 * 4]
    assert scratch_bytes("avg_pool2d", (image, [2, 2]), image, H200) == []


def test_very_many_short_rows_are_normalized_backwards_in_parts_of_the_weights_type() -> None:
    data, weight = meta(2**17, 64, dtype=BF16), meta(64, dtype=BF16)
    args = (data, data, [64], None, None, weight, weight)
    assert scratch_bytes("native_layer_norm_backward", args, None, H200) == [4096 * 64 * 2] * 2
