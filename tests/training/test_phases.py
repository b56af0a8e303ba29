"""Strategies that replace parameters before the optimizer is made, and the optimizer itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.errors import Unsupported
from autofit.plan import Plan, ResolvedPlan, Scalar
from autofit.strategy import Numerics, Phase, Strategy, TrainingView
from autofit.testing import NotConformant, check_strategy
from autofit.training.training import Training
from autofit.training.workload import Workload
from tests.plugin import Plugin

CPU = torch.device("cpu")


class OnOff(Plugin):
    """A strategy whose setting decides what it does."""

    def __init__(self, name: str, phase: Phase) -> None:
        self.name = name
        self.phase = phase

    def apply(self, training: TrainingView, settings: Any, payloads: Any) -> Any:
        return self.applied(training, is_on=bool(settings[f"{self.name}.on"]))

    @contextmanager
    def applied(self, training: TrainingView, *, is_on: bool) -> Iterator[None]:
        yield

    def describe(self, settings: Any, payloads: Any) -> list[str]:
        return [f"# {self.name}"] if settings[f"{self.name}.on"] else []


class Shards(OnOff):
    """Trains other parameters than the model came with, as sharding does."""

    numerics = Numerics.ROUNDING

    @contextmanager
    def applied(self, training: TrainingView, *, is_on: bool) -> Iterator[None]:
        found = {name: p for name, p in training.model.named_parameters() if is_on}
        for name, parameter in found.items():
            _set(training.model, name, nn.Parameter(parameter.detach().clone()))
        try:
            yield
        finally:
            for name, parameter in found.items():
                parameter.data.copy_(training.model.get_parameter(name))
                _set(training.model, name, parameter)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    model.get_submodule(path)._parameters[last] = parameter


class Swaps(OnOff):
    """Steps with SGD in place of the user's optimizer, at the same learning rate."""

    gives_back = True

    @contextmanager
    def applied(self, training: TrainingView, *, is_on: bool) -> Iterator[None]:
        before = training.optimizer
        if is_on:
            (group,) = before.param_groups
            training.optimizer = torch.optim.SGD(group["params"], lr=group["lr"])
        try:
            yield
        finally:
            if self.gives_back:
                training.optimizer = before


def _workload() -> Workload:
    torch.manual_seed(0)
    return Workload(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        torch.randn(4, 6),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )


def _training(strategies: list[OnOff], settings: Mapping[str, Scalar]) -> Training:
    workload = _workload()
    resolved = ResolvedPlan(Plan(4, settings=settings), strategies=strategies)
    return Training(
        workload.build_model(), workload.build_optimizer, workload.recipe, resolved, device=CPU
    )


def test_the_optimizer_is_made_of_what_a_parallel_strategy_left() -> None:
    shards = Shards("shards", Phase.PARALLEL)
    with _training([], {}) as plain, _training([shards], {"shards.on": True}) as training:
        batch = _workload().sample_batch
        own = list(training.model.parameters())
        (group,) = training.optimizer.param_groups  # type: ignore[union-attr]  # there is one
        assert all(a is b for a, b in zip(group["params"], own, strict=True))
        losses = [(float(plain.step(batch)), float(training.step(batch))) for _ in range(3)]
        assert all(one == other for one, other in losses)
        assert losses[2][0] < losses[0][0]
    assert not any(a is b for a, b in zip(training.model.parameters(), own, strict=True))


def test_an_optimizer_is_replaced_and_given_back() -> None:
    swaps, batch = Swaps("swaps", Phase.OPTIMIZER), _workload().sample_batch
    workload = _workload()
    model = workload.build_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    users: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plan = ResolvedPlan(Plan(4, settings={"swaps.on": True}), strategies=[swaps])
    with Training(model, users, workload.recipe, plan, device=CPU) as training:
        training.step(batch)
        assert type(training.optimizer) is torch.optim.SGD
        assert not any(map(torch.equal, model.parameters(), before))
    assert training.optimizer is users
    assert users.state == {}


def test_the_suite_runs_over_strategies_of_both_kinds() -> None:
    for strategy in (Swaps("swaps", Phase.OPTIMIZER), Shards("shards", Phase.PARALLEL)):
        assert check_strategy(strategy, workloads=[_workload]) == 2


def test_the_suite_notices_an_optimizer_that_is_not_given_back() -> None:
    swaps = Swaps("swaps", Phase.OPTIMIZER)
    swaps.gives_back = False
    with pytest.raises(NotConformant, match="optimizer"):
        check_strategy(swaps, workloads=[_workload])


@pytest.mark.slow
def test_a_search_runs_both_kinds() -> None:
    strategies: list[Strategy | str] = [
        Swaps("swaps", Phase.OPTIMIZER),
        Shards("shards", Phase.PARALLEL),
        "memory_format",
    ]
    report = autofit.search(
        _workload(),
        device="cpu",
        vram_budget="64MiB",
        strategies=strategies,
        max_probes=6,
        options=autofit.SearchOptions(max_micro_batch=8),
    )
    tried = {name for trial in report.trials for name, on in trial.plan.settings.items() if on}
    assert tried >= {"swaps.on", "shards.on"}
    assert all(trial.measurement.ok for trial in report.trials if trial.kind != "vetoed")


class Wraps(OnOff):
    """Wraps the model, deals with the optimizer's making, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__("wraps", Phase.PARALLEL)
        self.seen: list[object] = []

    @contextmanager
    def applied(self, training: TrainingView, *, is_on: bool) -> Iterator[None]:
        plain = training.model
        self.seen.append(plain.get_parameter("0.weight").device.type)
        if is_on:
            training.place_model()
        training.model = nn.Sequential(plain)
        undo = training.wrap_optimizer_factory(lambda make: lambda p: self._made(make, p))
        undo_notes = training.before_micro_batch(self.seen.append)
        try:
            yield
        finally:
            undo()
            undo_notes()
            training.model = plain

    def _made(self, make: Any, parameters: Any) -> torch.optim.Optimizer:
        self.seen.append(parameters[0].device.type)
        return make(parameters[:1])


@pytest.mark.parametrize("is_on", [True, False])
def test_a_parallel_strategy_places_the_model_or_it_is_placed_after(is_on: bool) -> None:
    wraps, workload, placed = Wraps(), _workload(), []
    model = workload.build_model().to("meta")

    def place(model: nn.Module) -> None:
        placed.append(model.to_empty(device="cpu"))

    resolved = ResolvedPlan(Plan(3, settings={"wraps.on": is_on}), strategies=[wraps])
    with Training(
        model, workload.build_optimizer, workload.recipe, resolved, device=CPU, place_model=place
    ) as training:
        assert placed == [model], "once"
        assert training.model is not model
        (group,) = training.optimizer.param_groups  # type: ignore[union-attr]  # there is one
        assert [each is model[0].weight for each in group["params"]] == [True]  # type: ignore[index]  # a Sequential
        training.step(torch.ones(8, 6))
    assert training.model is model
    assert wraps.seen == ["meta", "cpu", False, False, True]


@pytest.mark.parametrize("strategy", [Shards("shards", Phase.PARALLEL), Wraps()])
def test_a_live_optimizer_cannot_be_of_replaced_parameters_nor_dealt_out(strategy: OnOff) -> None:
    model = _workload().build_model()
    workload = Workload(model, torch.randn(4, 6), optimizer=torch.optim.SGD(model.parameters(), 1))
    settings = {f"{strategy.name}.on": True}
    resolved = ResolvedPlan(Plan(4, settings=settings), strategies=[strategy])
    with pytest.raises(Unsupported, match="pass optimizer= as a function"):
        Training(model, workload.build_optimizer, workload.recipe, resolved, device=CPU)
