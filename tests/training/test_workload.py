"""Contradictions are refused at once; everything else becomes model, batch and optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.training.batch import Samples
from autofit.training.workload import Workload

X = torch.randn(4, 3)


def test_functions_are_believed_only_as_far_as_they_deliver() -> None:
    with pytest.raises(InvalidArgument, match=r"nn\.Module.*\bstr\b"):
        Workload(lambda: "model", X).build_model()  # type: ignore[arg-type,return-value]  # wrong on purpose
    with pytest.raises(InvalidArgument, match=r"5 samples.*4"):
        Workload(nn.Linear(3, 2), lambda n: X).batch(5)


def test_a_function_makes_batches_from_two_samples_on() -> None:
    workload = Workload(nn.Linear(3, 2), lambda n: torch.ones(n, 3))
    assert workload.sample_batch_size == 2
    assert workload.batch(7).shape == (7, 3)
    assert Workload(nn.Linear(3, 2), (X, torch.ones(9))).samples == Samples(
        frozenset({"[0]"}), frozenset({"[1]"})
    )


def test_a_module_that_can_be_called_is_the_model_and_not_its_builder() -> None:
    model = nn.Linear(3, 2)
    assert Workload(model, X).build_model() is model
    assert isinstance(Workload(nn.Identity, X).build_model(), nn.Identity)


def test_a_workload_is_not_changed_by_asking_it() -> None:
    model = nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    workload = Workload(model, (X, X[:, 0]))
    workload.batch(9)
    workload.build_optimizer(workload.build_model())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


SET = {"naming.word": "Anna"}


@pytest.mark.parametrize(
    ("global_batch", "said", "meant"),
    [
        (None, {}, Plan(4)),
        (None, {"micro_batch": 3, "settings": SET}, Plan(3, settings=SET)),
        (None, {"accumulation_steps": 2}, Plan(4, accumulation_steps=2)),
        (None, {"global_batch": 10}, Plan.split(10, 4)),
        (10, {}, Plan.split(10, 4)),
        (3, {"settings": SET}, Plan.split(3, 3, SET)),
        (10, {"micro_batch": 5}, Plan.split(10, 5)),
        (10, {"micro_batch": 5, "global_batch": 20}, Plan.split(20, 5)),
        (10, {"micro_batch": 5, "accumulation_steps": 3}, Plan(5, accumulation_steps=3)),
    ],
)
def test_what_a_plans_words_leave_out_is_the_workloads_own(
    global_batch: int | None, said: dict[str, Any], meant: Plan
) -> None:
    assert Workload(nn.Linear(3, 2), X, global_batch=global_batch).plan(**said) == meant


def test_counts_that_make_no_plan_are_refused() -> None:
    workload = Workload(nn.Linear(3, 2), X)
    with pytest.raises(InvalidArgument, match=r"3.*4"):
        workload.plan(4, 3, 9)


def test_a_micro_batch_larger_than_the_global_batch_is_refused() -> None:
    workload = Workload(nn.Linear(3, 2), X, global_batch=32)
    with pytest.raises(InvalidArgument, match=r"64.*32"):
        workload.plan(64)


@pytest.mark.parametrize("global_batch", [12, 100])
def test_a_micro_batch_is_never_made_smaller_without_a_word(global_batch: int) -> None:
    workload = Workload(nn.Linear(3, 2), X)
    if global_batch == 100:  # 13 micro-batches, the largest of 8
        assert workload.plan(8, None, global_batch).micro_batch == 8
        return
    with pytest.raises(InvalidArgument, match=r"12.* 8.*micro_batch=6.*global_batch=16"):
        workload.plan(8, None, global_batch)
