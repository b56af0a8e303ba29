"""Where a loss comes from, and what is no loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument
from autofit.training.loss import LossSource, Recipe, call_model


class Says(nn.Module):
    """Returns what `answer` makes of a layer's output."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.answer = answer

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        return self.answer(self.layer(x))


X = torch.randn(4, 3)


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
    "answer", [lambda y: y.argmax(1), lambda y: None, lambda y: {"labels": torch.arange(4)}]
)
def test_an_output_that_cannot_be_averaged_is_refused_with_both_ways_out(answer: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"loss_fn=.*criterion="):
        Recipe().loss_and_source(Says(answer), X)


def test_a_loss_of_many_numbers_is_refused_by_the_name_of_who_made_it() -> None:
    model = Says(lambda y: {"loss": y.mean(1)})
    with pytest.raises(InvalidArgument, match=r"output\.loss.*\[4\]"):
        Recipe().loss_and_source(model, X)
    with pytest.raises(InvalidArgument, match=r"loss_fn.*float"):
        Recipe(loss_fn=lambda m, b: 3.0).loss_and_source(model, X)  # type: ignore[arg-type,return-value]  # wrong on purpose
    with pytest.raises(InvalidArgument, match=r"criterion.*\[4, 2\]"):
        Recipe(criterion=lambda y, t: y - y).loss_and_source(Says(lambda y: y), (X, X))


def test_a_criterion_gets_output_and_target() -> None:
    model, target = nn.Linear(3, 2), torch.randn(4, 2)
    loss, source = Recipe(criterion=nn.functional.mse_loss).loss_and_source(model, (X, target))
    assert source is LossSource.CRITERION
    assert torch.equal(loss, nn.functional.mse_loss(model(X), target))


def test_a_criterion_takes_inputs_by_name() -> None:
    model = Says(lambda y: y)
    loss, _ = Recipe(criterion=lambda y, t: (y - t).mean()).loss_and_source(
        model, ({"x": X}, torch.zeros(4, 2))
    )
    assert torch.equal(loss, model.layer(X).mean())


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
