"""memory_format.layout: activations are channels-last, and the weights stay as they are."""

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
def test_activations_are_channels_last(memory_format: Strategy, dimensions: int) -> None:
    model: Any = _conv(dimensions)
    wanted = torch.channels_last if dimensions == 2 else torch.channels_last_3d
    batch, plain = torch.randn(2, 4, *[7] * dimensions), {*vars(model[0])["_forward_pre_hooks"]}
    with _training(memory_format, model):
        assert model(batch).is_contiguous(memory_format=wanted)
        assert not model(batch).is_contiguous()
        assert model[0](input=batch).is_contiguous(memory_format=wanted)
        torch.testing.assert_close(model(batch[0]), model(batch)[0])  # an image without a batch
    assert model(batch).is_contiguous()
    assert {*vars(model[0])["_forward_pre_hooks"]} == plain


class _TiedByData(nn.Module):
    """Two convolutions of one memory, and a third that lies in one flat storage with its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.other.weight.data = self.one.weight.data
        self.flat = nn.Conv2d(4, 4, 3)
        self.memory = torch.randn(4 * 4 * 3 * 3 + 4)
        self.flat.weight.data = self.memory[:-4].view(4, 4, 3, 3)
        self.flat.bias = nn.Parameter(self.memory[-4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flat(self.other(self.one(x)))


def test_all_that_shares_memory_with_a_weight_sees_it_trained(memory_format: Strategy) -> None:
    torch.manual_seed(0)
    model, plain = _TiedByData(), _TiedByData()
    plain.load_state_dict(model.state_dict())
    taken = model.state_dict()
    aliases = {name: parameter.detach() for name, parameter in model.named_parameters()}
    batches = [torch.randn(2, 4, 9, 9) for _ in range(3)]
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    with _training(memory_format, model, torch.optim.SGD(model.parameters(), 0.01)) as training:
        for batch in batches:
            training.step(batch)
            plain(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter, plain.get_parameter(name), msg=name)
                assert torch.equal(taken[name], parameter)
                assert torch.equal(aliases[name], parameter)
            torch.testing.assert_close(model.memory, plain.memory)


def test_a_live_optimizer_goes_on_with_its_state(memory_format: Strategy) -> None:
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
