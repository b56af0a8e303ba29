"""Activations in the host's memory: the same gradients, fewer bytes on the device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.errors import InvalidRequest
from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.testing import check_strategy
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

offload = import_module("autofit.strategies.offload")  # lies elsewhere in the tree
SETTING: str = offload.SETTING
WIDTH, SAMPLES = 128, 512


def deep() -> Workload:
    """Eight layers whose activations are 256 KiB each, with dropout."""
    torch.manual_seed(0)
    layers = [
        part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
    ]
    batch = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    return Workload(nn.Sequential(*layers), batch, criterion=nn.functional.mse_loss)


def probed(workload: Workload, value: bool, device: str = "cpu") -> Measurement:
    plan = Plan(SAMPLES, settings={SETTING: value})
    trial = autofit.probe(
        workload, plan=plan, device=device, strategies=["offload"], isolation="inprocess"
    )
    return trial.measurement


def test_it_keeps_the_contract() -> None:
    assert check_strategy("offload", workloads=[deep]) > 1


def test_gradients_are_the_same_to_the_bit_and_saved_tensors_are_shared() -> None:
    model = deep().build_model()
    first = next(model.children())
    given = torch.randn(SAMPLES, WIDTH)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.random.fork_rng():
            (model(given) * first(given).t().contiguous().t()).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with offload.offloaded(model):
        moved = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


def test_parameters_and_buffers_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every forward, which the time of a step would show."""
    asked = []
    parameters = nn.Module.parameters

    def noted(model: nn.Module, recurse: bool = True) -> Any:
        asked.append(model)
        return parameters(model, recurse)

    view = ResolvedPlan(Plan(4, settings={SETTING: True}), {}, load_strategies(["offload"]))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with Training(model, optimizer, Recipe(), view, device=torch.device("cpu")) as live:
        monkeypatch.setattr(nn.Module, "parameters", noted)
        for _ in range(2):
            live.accumulate(torch.randn(4, 8))
    assert asked == []


def check_fewer_bytes(device: str) -> None:
    plain, moved = probed(deep(), False, device), probed(deep(), True, device)
    assert plain.ok, plain.detail
    assert moved.ok, moved.detail
    assert plain.peak_allocated_bytes is not None
    assert moved.peak_allocated_bytes is not None
    activation = 4 * SAMPLES * WIDTH
    # tanh and dropout keep their outputs, and dropout its mask: of eight layers two stay at a time
    assert plain.peak_allocated_bytes - moved.peak_allocated_bytes > 8 * activation


def test_a_step_holds_fewer_bytes_of_the_device() -> None:
    check_fewer_bytes("cpu")


@pytest.mark.cuda
def test_a_step_holds_fewer_bytes_of_a_gpu() -> None:
    check_fewer_bytes("cuda")


@pytest.mark.cuda
def test_gradients_on_a_gpu_are_the_same() -> None:
    workload = deep()
    model, (given, _) = workload.build_model().cuda().eval(), workload.batch(SAMPLES)
    given = given.cuda()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(given).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with offload.offloaded(model):
        moved = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))


@pytest.mark.cuda
def test_one_tensor_is_back_before_it_is_asked_for() -> None:
    """Of a chain, as backward goes; what is not asked for is dropped."""
    host = offload._Host()
    first, second, third = (
        host.move(torch.full((WIDTH, WIDTH), value, device="cuda")) for value in (1.0, 2.0, 3.0)
    )
    assert float(host.bring_back(third).mean()) == 3.0
    assert second.ahead is not None
    assert first.ahead is None
    ahead = second.ahead.tensor
    assert host.bring_back(second) is ahead
    assert first.ahead is not None
    fourth, fifth = (host.move(torch.zeros(WIDTH, WIDTH, device="cuda")) for _ in range(2))
    host.bring_back(fifth)
    assert fourth.ahead is not None
    assert first.ahead is None  # one at a time
    assert float(host.bring_back(first).mean()) == 1.0


def test_a_host_without_room_is_the_hosts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "host_available_bytes", 2 * offload.LEAST_BYTES)
    measured = probed(deep(), True)
    assert measured.outcome is Outcome.HOST_OOM
    assert "the host's available memory" in (measured.detail or "")


def small() -> Workload:
    return Workload(nn.Linear(8, 8), torch.randn(4, 8))


def test_a_model_that_saves_little_has_nothing_to_choose() -> None:
    with pytest.raises(InvalidRequest, match=SETTING):
        probed(small(), True)


@pytest.mark.parametrize("strategies", [None, ["offload"]])
def test_a_search_offers_it_only_where_it_is_named(strategies: list[str] | None) -> None:
    report = autofit.search(
        deep(),
        device="cpu",
        vram_budget="64MiB",
        isolation="inprocess",
        max_micro_batch=SAMPLES,
        max_probes=4,
        strategies=strategies,
    )
    assert (SETTING in report.record.dimensions) is (strategies is not None)


def test_a_model_that_only_a_train_step_can_call_is_looked_at_too() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

    def train_step(training: Training, batch: torch.Tensor) -> torch.Tensor:
        loss = batch.new_zeros(())
        for part, weight in training.micro_batches(batch):
            loss = training.model.get_submodule("first")(part).tanh().square().mean()
            training.backward(loss, weight)
        training.optimizer_step()
        return loss

    workload = Workload(Pair, torch.randn(SAMPLES, WIDTH), train_step=train_step)
    assert probed(workload, True).ok
