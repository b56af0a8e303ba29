"""Others' estimates: what they are asked about, and what their formulas come to by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.estimators import (
    ESTIMATORS,
    Subject,
    deepspeed_zero2,
    deepspeed_zero3,
    put,
    tracked,
    tracked_as_fsdp,
    usual_formula,
)
from benchmarks.traces.trainings import TRAININGS
from benchmarks.versus_predictions import CARD, RECORDED, Guess, on_card, recorded_subject, table

SMALL = Subject(
    lambda: nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5)),
    lambda device: torch.randn(3, 10, device=device),
    lambda model, batch: model(batch).sum(),
    lambda parameters: torch.optim.SGD(parameters, 0.1),
)
N = 10 * 20 + 20 + 20 * 5 + 5
WIDE = replace(
    SMALL,
    build=lambda: nn.Linear(1000, 1000, bias=False),
    batch=lambda device: torch.randn(2, 1000, device=device),
)


def test_deepspeed_formulas_come_to_their_bytes() -> None:
    assert deepspeed_zero2(SMALL) == 2 * N + 18 * N
    assert deepspeed_zero3(SMALL) == 18 * N + 4 * (10 * 20 + 20)


def test_the_usual_formula_counts_what_leaf_modules_return_twice() -> None:
    assert usual_formula(SMALL) == 16 * N + 2 * 4 * 3 * (20 + 5)


@pytest.mark.cuda
def test_memtracker_sees_weights_gradients_and_momentum() -> None:
    """And the fused update of SGD needs no copy of them."""
    plain = tracked(WIDE)
    with_momentum = replace(
        WIDE, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)
    )
    assert 2 * 4e6 <= plain < 3 * 4e6
    assert 4e6 <= tracked(with_momentum) - plain < 2 * 4e6


@pytest.mark.cuda
def test_memtracker_takes_several_micro_batches() -> None:
    assert tracked(replace(WIDE, accumulation_steps=3)) >= tracked(WIDE)


@pytest.mark.cuda
def test_fsdp_memtracker_holds_weights_whole_beside_their_shards() -> None:
    """On one rank the shard is all of a weight, and what is gathered is a second one."""
    assert tracked(WIDE) + 4e6 <= tracked_as_fsdp(WIDE) < tracked(WIDE) + 4 * 4e6
    assert not torch.distributed.is_initialized()


def test_tensors_that_are_put_elsewhere_stay_what_they_were() -> None:
    model: Any = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Conv2d(2, 3, 3)}
    )
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    model.to(memory_format=torch.channels_last)
    strides = model["c"].weight.stride()
    moved: Any = put(model.to(torch.bfloat16), "meta")
    assert moved["b"].weight is moved["a"].weight
    assert {p.device.type for p in moved.parameters()} == {"meta"}
    assert {p.dtype for p in moved.parameters()} == {torch.bfloat16}
    assert [n for n, p in moved.named_parameters() if not p.requires_grad] == ["a.bias"]
    assert moved["c"].weight.stride() == strides


def test_recurrent_layers_compute_with_what_they_were_given() -> None:
    """They keep a list of their weights."""
    moved: Any = put(nn.LSTM(4, 4, batch_first=True), "meta")
    pairs = zip(moved._flat_weights, moved.parameters(), strict=True)
    assert all(kept is weight for kept, weight in pairs)


def test_recorded_trainings_keep_type_and_layout() -> None:
    pure = recorded_subject(TRAININGS["gpt_pure_bf16"]).build()
    assert {p.dtype for p in pure.parameters()} == {torch.bfloat16}
    images = recorded_subject(TRAININGS["resnet_bf16_cl"])
    tensors = [*images.build().parameters(), *images.batch("meta")]
    kernels = [tensor for tensor in tensors if tensor.dim() == 4]
    assert len(kernels) > 10
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in kernels)


def test_the_card_is_what_the_newest_results_say() -> None:
    """Batches of some models were smaller in the first ones."""
    results = on_card()
    assert len(results) == len({result.case for result in results}) > 50
    assert all(result.emulated for result in results)
    alexnet = next(each for each in results if each.case.model == "alexnet")
    assert alexnet.estimates, "the first results name none"


def test_a_table_compares_what_every_estimator_was_asked_about() -> None:
    guesses = [Guess(CARD, name, "a", 0.1, 0.2, 1.0) for name in ESTIMATORS]
    guesses += [Guess(CARD, name, "b", -0.3, -0.4, 3.0) for name in ESTIMATORS]
    first, *_ = ESTIMATORS
    guesses += [Guess(CARD, first, "c", 9.0, 9.0, 9.0)]
    guesses += [Guess(RECORDED, first, "d", 9.0, 9.0, 9.0)]
    guesses[0] = replace(guesses[0], allocated_error=None, required_error=None, refused="no")
    lines = list(table(guesses))
    assert lines[0] == "Models on the emulated card:"
    rows = {row.split(" | ")[0]: row for row in lines if row.startswith("| ")}
    assert rows[f"| {first}"].startswith(f"| {first} | 2 | 1 | - | - |")
    other = list(ESTIMATORS)[1]
    assert rows[f"| {other}"] == f"| {other} | 2 | 0 | 20.00% | 28.00% | 30.00% | 38.00% | 2.00 |"
    assert not any("Recorded" in line for line in lines)
