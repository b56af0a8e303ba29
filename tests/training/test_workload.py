"""What is trained, and its loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from autofit.errors import InvalidArgument
from autofit.plan import Plan
from autofit.training.loss import LossSource, Recipe, call_model
from autofit.training.samples import Rows
from autofit.training.workload import Workload

X = torch.randn(4, 3)


def test_a_function_makes_batches_from_two_samples_on() -> None:
    workload = Workload(nn.Linear(3, 2), lambda n: torch.ones(n, 3))
    assert workload.sample_batch_size == 2
    assert workload.batch(7).shape == (7, 3)
    assert Workload(nn.Linear(3, 2), (X, torch.ones(9))).samples == Rows(
        frozenset({"[0]"}), frozenset({"[1]"})
    )


def test_a_module_that_can_be_called_is_the_model_and_not_its_builder() -> None:
    model = nn.Linear(3, 2)
    assert Workload(model, X).build_model() is model
    assert isinstance(Workload(nn.Identity, X).build_model(), nn.Identity)


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
        (None, {"micro_batch": 8, "global_batch": 100}, Plan.split(100, 8)),  # the largest has 8
    ],
)
def test_what_a_plans_words_leave_out_is_the_workloads_own(
    global_batch: int | None, said: dict[str, Any], meant: Plan
) -> None:
    assert Workload(nn.Linear(3, 2), X, global_batch=global_batch).plan(**said) == meant


@pytest.mark.parametrize(
    ("global_batch", "said", "words"),
    [
        (None, (4, 3, 9), r"3.*4"),
        (32, (64,), r"64.*32"),  # larger than the global batch
        (None, (8, None, 12), r"12.* 8.*micro_batch=6.*global_batch=16"),
    ],
)
def test_counts_that_make_no_plan_are_refused(
    global_batch: int | None, said: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Workload(nn.Linear(3, 2), X, global_batch=global_batch).plan(*said)


# -- Where a loss comes from, and what is no loss


class Says(nn.Module):
    """Returns what `answer` makes of a layer's output."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.answer = answer

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        return self.answer(self.layer(x))


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        (lambda y: SimpleNamespace(loss=y.mean(), logits=y), LossSource.MODEL),
        (lambda y: {"loss": y.mean(), "logits": y}, LossSource.MODEL),
        (lambda y: y.mean(), LossSource.MODEL),
        (lambda y: y.mean().reshape(1), LossSource.MODEL),
        (lambda y: y, LossSource.STAND_IN),
        (lambda y: {"logits": y, "labels": torch.arange(4)}, LossSource.STAND_IN),
        (lambda y: (y.mean(0), [y]), LossSource.STAND_IN),
    ],
)
def test_a_model_says_its_loss_or_its_outputs_stand_in(answer: Any, source: LossSource) -> None:
    model = Says(answer)
    loss, told = Recipe().loss_and_source(model, X)
    assert told is source
    assert loss.shape == ()
    torch.testing.assert_close(loss, model.layer(X).mean())
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize(
    ("recipe", "answer", "words"),
    [
        # no output that can be averaged: with both ways out
        ({}, lambda y: y.argmax(1), r"loss_fn=.*criterion="),
        ({}, lambda y: None, r"loss_fn=.*criterion="),
        ({}, lambda y: {"labels": torch.arange(4)}, r"loss_fn=.*criterion="),
        # a loss of many numbers: by the name of who made it
        ({}, lambda y: {"loss": y.mean(1)}, r"output\.loss.*\[4\]"),
        ({"loss_fn": lambda m, b: 3.0}, lambda y: y, r"loss_fn.*a float: leave .item"),
        ({"loss_fn": lambda m, b: X}, lambda y: y, r"one of shape \[4, 3\]: return its mean"),
        ({"criterion": lambda y, t: y - y}, lambda y: y, r"criterion.*\[4, 2\]"),
    ],
)
def test_what_is_no_loss_is_refused(recipe: dict[str, Any], answer: Any, words: str) -> None:
    batch = (X, X) if "criterion" in recipe else X
    with pytest.raises(InvalidArgument, match=words):
        Recipe(**recipe).loss_and_source(Says(answer), batch)


def test_a_data_set_is_not_taken_for_a_batch() -> None:
    rows = TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1))
    given: dict[str, Any] = {"criterion": nn.functional.mse_loss}
    for not_a_batch in (rows, DataLoader(rows, batch_size=4)):
        with pytest.raises(InvalidArgument, match=r"not a batch: .*next.*loader.*collate"):
            Workload(nn.Linear(4, 1), not_a_batch, **given)
    collated = Workload(nn.Linear(4, 1), rows, collate_fn=default_collate, **given)
    assert collated.collate_fn is default_collate


@pytest.mark.parametrize("inputs", [X, {"x": X}])
def test_a_criterion_gets_output_and_target_and_inputs_by_name(inputs: Any) -> None:
    model, target = Says(lambda y: y), torch.randn(4, 2)
    recipe = Recipe(criterion=nn.functional.mse_loss)
    loss, source = recipe.loss_and_source(model, (inputs, target))
    assert source is LossSource.CRITERION
    assert torch.equal(loss, nn.functional.mse_loss(model(X), target))


def test_models_are_called_as_their_batches_ask_for() -> None:
    bilinear = nn.Bilinear(3, 3, 2)
    assert torch.equal(call_model(bilinear, (X, X)), bilinear(X, X))
    assert torch.equal(call_model(bilinear, {"input1": X, "input2": -X}), bilinear(X, -X))


def test_a_batch_weighs_its_samples_unless_the_user_weighs_it() -> None:
    assert Recipe().weight(X, 4) == 4.0
    assert Recipe(loss_weight=lambda batch: (batch > 1e9).sum()).weight(X, 4) == 0.0


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), None, "x"])
def test_a_weight_that_no_mean_can_be_over_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="loss_weight"):
        Recipe(loss_weight=lambda batch: wrong).weight(X, 4)
