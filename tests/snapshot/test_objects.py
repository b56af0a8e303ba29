"""What a user's functions reach is found, so that probing in their process puts it back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.snapshot.objects import reachable
from autofit.training.workload import Workload

HERE: dict[str, Any] = {
    "device": "cpu",
    "vram_budget": "32MiB",
    "isolation": "inprocess",
    "strategies": [],
    "max_probes": 2,
    "max_micro_batch": 8,
}
CRITIC = nn.Linear(4, 1)
DATA = [torch.zeros(4)]


def batch() -> torch.Tensor:
    return torch.randn(4, 8)


def judged_by_a_global(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = CRITIC(model(samples)).mean()
    return loss


def judged_by_a_helper(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    return judged_by_a_global(model, samples)


class Judge:
    def __init__(self, critic: nn.Module) -> None:
        self.critic = critic

    def __call__(self, model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.critic(model(samples)).mean()
        return loss

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


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_has_no_gradients_after_a_search(kind: str) -> None:
    critic, loss_fn = critic_and_loss(kind)
    autofit.search(nn.Linear(8, 4), batch(), loss_fn=loss_fn, **HERE)
    assert all(parameter.grad is None for parameter in critic.parameters())


def test_the_network_that_a_function_hands_out_is_not_trained() -> None:
    network = nn.Linear(8, 4)
    before = network.weight.detach().clone()
    autofit.search(lambda: network, batch(), **HERE)
    assert torch.equal(network.weight, before)


KEPT: dict[str, list[Any]] = {"before": [1.0], "losses": []}
TIMES_CALLED = 0


def counts_in_globals(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    global TIMES_CALLED
    TIMES_CALLED += 1
    loss: torch.Tensor = model(samples).mean()
    KEPT["losses"].append(0.0)
    KEPT[f"call {TIMES_CALLED}"] = []
    return loss


RUNS: dict[str, Callable[[Workload], object]] = {
    "search": lambda workload: autofit.search(workload, **HERE),
    "probe": lambda workload: autofit.probe(
        workload, device="cpu", vram_budget="32MiB", isolation="inprocess", strategies=[]
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_what_a_loss_writes_to_globals_is_the_users(run: str) -> None:
    """A dict in the loss's own file keeps its entries, and its counters run on."""
    KEPT["before"], called = [run], TIMES_CALLED
    RUNS[run](Workload(nn.Linear(8, 4), batch(), loss_fn=counts_in_globals))
    assert called < TIMES_CALLED
    assert KEPT["before"] == [run]
    assert len(KEPT["losses"]) == TIMES_CALLED
    assert f"call {TIMES_CALLED}" in KEPT


def test_a_list_of_losses_in_an_enclosing_function_keeps_them() -> None:
    kept: list[float] = []

    def loss_fn(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(samples).mean()
        kept.append(loss.item())
        return loss

    autofit.search(nn.Linear(8, 4), batch(), loss_fn=loss_fn, **HERE)
    assert len(kept) > 1


def test_members_of_containers_are_reached() -> None:
    judges: dict[str, list[nn.Module]] = {"of images": [nn.Linear(1, 1)], "of nothing": []}

    def loss_fn(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = judges["of images"][0](model(samples)).mean()
        return loss

    assert list(reachable(loss_fn, "loss_fn").values()) == judges["of images"]


def test_a_global_data_set_is_not_copied() -> None:
    def loss_fn(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(samples).mean() * len(DATA)
        return loss

    assert not any(node is DATA[0] for node in reachable(loss_fn, "loss_fn").values())


def test_a_function_that_calls_itself_ends() -> None:
    def down(n: int) -> int:
        return down(n - 1) if n else 0

    assert reachable(down, "down") == {}


def test_a_library_s_functions_are_not_entered() -> None:
    assert reachable(torch.nn.functional.mse_loss, "criterion") == {}
    assert reachable(torch.optim.AdamW, "optimizer") == {}
