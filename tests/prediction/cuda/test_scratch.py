"""Scratch memory of kernels, against what recorded trainings show on an H200."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from autofit.devices.gpus import Gpu, find_gpu
from autofit.prediction.cuda.scratch import RULES, Reduction, Size, bytes_on, scratch
from autofit.prediction.cuda.tracer import CudaTracer
from autofit.prediction.dry_run import STEPS, stage
from benchmarks.traces.recorded import recorded_trainings
from benchmarks.traces.trainings import TRAININGS

H200 = find_gpu("H200")
RECORDED = {recorded.name: recorded for recorded in recorded_trainings()}
EXACT = {
    "gpt_fp32": ["sum"],
    "gpt_bf16_b24": ["sum"],
    "gpt_bf16_math": ["_softmax_backward_data"],
    "gpt_wide_bf16": ["sum"],
    "vit_fp32": ["sum"],
    "lstm_fp32": ["sum"],
}


def taken(sizes: list[Size], gpu: Gpu = H200) -> list[int]:
    """Return the sizes on a GPU of the buffers that are taken there."""
    return [nbytes for size in sizes if (nbytes := bytes_on(gpu, size))]


class _Listening(CudaTracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """Notes the scratch memory of each call of an operator."""

    def __init__(self) -> None:
        super().__init__(H200)
        self.scratch: dict[str, list[list[int]]] = defaultdict(list)

    def account(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in RULES:
            self.scratch[name].append(taken(scratch(name, args)))
        super().account(func, args, kwargs, result)


def predicted(training: str) -> dict[str, list[list[int]]]:
    tracer = _Listening()
    with stage(tracer):
        steps = TRAININGS[training].steps("cuda")
        for _ in range(STEPS):
            next(steps)
        del steps
    return tracer.scratch


def recorded(training: str, operator: str) -> list[list[int]]:
    return [
        sizes
        for name, sizes in zip(
            RECORDED[training].operators, RECORDED[training].scratch_sizes, strict=True
        )
        if name.split(".")[1] == operator
    ]


@pytest.mark.parametrize("training", EXACT)
def test_kernels_allocate_what_was_recorded(training: str) -> None:
    found = predicted(training)
    for operator in EXACT[training]:
        sizes = recorded(training, operator)
        assert any(sizes)
        assert found[operator] == [each[:1] for each in sizes]  # the second holds semaphores


def test_every_rule_is_tested_against_a_recording() -> None:
    tested = {operator for operators in EXACT.values() for operator in operators}
    assert {*RULES} == tested | {"mean"}  # which runs the kernel of sum


def test_an_operator_without_a_rule_takes_nothing() -> None:
    data = torch.empty(8, device="meta")
    assert scratch("relu", (data,)) == []


def test_the_gradient_of_a_convolutions_bias() -> None:
    """A batch of 8 images of 192x192 with 32 channels, as recorded."""
    image = torch.empty(8, 32, 192, 192, device="meta")
    assert Reduction.of(image, frozenset({0, 2, 3})).bytes_on(H200) == 2176


@pytest.mark.parametrize("shape", [(8, 8), (0, 8)])
def test_a_small_reduction_needs_no_buffer(shape: tuple[int, int]) -> None:
    reduction = Reduction.of(torch.empty(shape, device="meta"), frozenset({0}))
    assert reduction.bytes_on(H200) == 0


def test_a_larger_gpu_spreads_a_sum_over_more_blocks() -> None:
    rows = Reduction.of(torch.empty(2**16, 768, device="meta"), frozenset({0}))
    small, large = (rows.bytes_on(find_gpu(name)) for name in ("T4", "B200"))
    assert 0 < small < large
