"""memory_format.layout: weights are rearranged within their storage, and arranged back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.strategy import Strategy
from autofit.testing import PlainContext
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

SETTINGS = {"memory_format.layout": "channels_last"}


@pytest.fixture
def memory_format() -> Strategy:
    return load_strategies(["memory_format"])[0]


def _training(strategy: Strategy, model: nn.Module, optimizer: Any = None) -> Training:
    return Training(
        model,
        optimizer or torch.optim.AdamW(model.parameters(), 0.01),
        Recipe(),
        ResolvedPlan(Plan(2, settings=SETTINGS), strategies=[strategy]),
        device=torch.device("cpu"),
    )


def _conv(dimensions: int) -> nn.Module:
    kind = nn.Conv2d if dimensions == 2 else nn.Conv3d
    return nn.Sequential(kind(4, 6, 3), nn.ReLU(), kind(6, 4, 3))


def _laid_out(model: nn.Module) -> nn.Module:
    for weight in model.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


@pytest.mark.parametrize(
    ("model", "offered"),
    [
        (_conv(2), True),
        (_conv(3), True),
        (nn.Sequential(weight_norm(nn.Conv2d(4, 6, 3))), True),
        (nn.Conv1d(4, 6, 3), False),
        (nn.Conv2d(4, 6, 1), False),
        (nn.Linear(4, 4), False),
        (_laid_out(_conv(2)), False),
    ],
    ids=["2-d", "3-d", "weight norm", "1-d", "1x1", "no convolution", "already"],
)
def test_it_is_offered_where_there_is_something_to_lay_out(
    memory_format: Strategy, model: nn.Module, offered: bool
) -> None:
    context = PlainContext(lambda: Workload(model, torch.zeros(2, 4)))
    (layouts,) = memory_format.dimensions(context).values()
    assert list(layouts.values) == ["default", *["channels_last"] * offered]


@pytest.mark.parametrize("dimensions", [2, 3])
def test_weights_alone_make_the_activations_follow(
    memory_format: Strategy, dimensions: int
) -> None:
    model = _conv(dimensions)
    wanted = torch.channels_last if dimensions == 2 else torch.channels_last_3d
    with _training(memory_format, model):
        assert model.get_parameter("0.weight").is_contiguous(memory_format=wanted)
        output = model(torch.randn(2, 4, *[7] * dimensions))
        assert output.is_contiguous(memory_format=wanted)
        assert not output.is_contiguous()


def test_training_goes_on_after_it_as_before(memory_format: Strategy) -> None:
    """A live optimizer's state is rearranged with its weight, so both still belong together."""
    model, plain = _conv(2), _conv(2)
    plain.load_state_dict(model.state_dict())
    batches = [torch.randn(2, 4, 7, 7) for _ in range(3)]
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (model, plain)]
    for number, batch in enumerate(batches):
        strategies = [memory_format] if number == 1 else []
        for one, optimizer, chosen in (
            (model, optimizers[0], strategies),
            (plain, optimizers[1], []),
        ):
            with Training(
                one,
                optimizer,
                Recipe(),
                ResolvedPlan(Plan(2, settings=SETTINGS), strategies=chosen),
                device=torch.device("cpu"),
            ) as training:
                training.step(batch)
    for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, other, msg=name)
        state = optimizers[0].state[weight]["exp_avg"]
        torch.testing.assert_close(state, optimizers[1].state[other]["exp_avg"])
        assert state.stride() == weight.stride()
