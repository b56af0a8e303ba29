"""What a user's functions reach is found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.snapshot.snapshot import reachable
from autofit.training.workload import Workload

CRITIC = nn.Linear(4, 1)
DATA = [torch.zeros(4)]


def batch() -> torch.Tensor:
    return torch.randn(4, 8)


def judged_by_a_global(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    return CRITIC(model(samples)).mean()


def judged_by_a_helper(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    return judged_by_a_global(model, samples)


class Judge:
    def __init__(self, critic: nn.Module) -> None:
        self.critic = critic

    def __call__(self, model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        return self.critic(model(samples)).mean()

    def method(self, model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        return self(model, samples)


def critic_and_loss(kind: str) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    critic = nn.Linear(4, 1)
    judge = Judge(critic)

    def partly(critic: nn.Module, model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        return Judge(critic)(model, samples)

    losses: dict[str, tuple[nn.Module, Callable[..., torch.Tensor]]] = {
        "closure": (critic, lambda model, samples: critic(model(samples)).mean()),
        "default": (critic, lambda model, samples, critic=critic: critic(model(samples)).mean()),
        "partial": (critic, functools.partial(partly, critic)),
        "object": (critic, judge),
        "method": (critic, judge.method),
        "global": (CRITIC, judged_by_a_global),
        "helper": (CRITIC, judged_by_a_helper),
    }
    return losses[kind]


KINDS = ["closure", "default", "partial", "object", "method", "global", "helper"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_is_reached(kind: str) -> None:
    critic, loss_fn = critic_and_loss(kind)
    assert any(each is critic for each in reachable(loss_fn, "loss_fn").values())


def test_the_network_that_a_function_hands_out_is_not_trained() -> None:
    network = nn.Linear(8, 4)
    before = network.weight.detach().clone()
    autofit.predict(Workload(lambda: network, batch()), gpu="H100")
    assert torch.equal(network.weight, before)


KEPT: dict[str, list[Any]] = {"losses": []}


def counts_in_globals(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(samples).mean()
    KEPT["losses"].append(0.0)
    return loss


def test_a_prediction_leaves_the_globals_of_a_loss_alone() -> None:
    autofit.predict(Workload(nn.Linear(8, 4), batch(), loss_fn=counts_in_globals), gpu="H100")
    assert KEPT == {"losses": []}


def test_members_of_containers_are_reached() -> None:
    judges: dict[str, list[nn.Module]] = {"of images": [nn.Linear(1, 1)], "of nothing": []}

    def loss_fn(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        return judges["of images"][0](model(samples)).mean()

    assert list(reachable(loss_fn, "loss_fn").values()) == judges["of images"]


def test_a_global_data_set_is_not_copied() -> None:
    def loss_fn(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        return model(samples).mean() * len(DATA)

    assert not any(node is DATA[0] for node in reachable(loss_fn, "loss_fn").values())


def test_a_function_that_calls_itself_ends() -> None:
    def down(n: int) -> int:
        return down(n - 1) if n else 0

    assert reachable(down, "down") == {}
