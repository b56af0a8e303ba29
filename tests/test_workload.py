"""Contradictions are refused at once; everything else becomes model, batch and optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidRequest
from autofit.plan import Plan
from autofit.workload import Workload

X = torch.randn(4, 3)


def _step(training: Any, batch: Any) -> torch.Tensor:
    return torch.zeros(())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "resnet50"}, "model must be an nn.Module or a function"),
        ({"global_batch": 0}, "global_batch must be at least 1, got 0"),
        ({"sample_batch": {"text": "no tensor"}}, "pass a callable n -> batch"),
        ({"sample_batch": (X[:1], X[:1])}, "2 of its tensors have size 1"),
        ({"clip_grad_norm": 0}, "clip_grad_norm must be above zero"),
        ({"loss_fn": _step, "criterion": _step}, "not both"),
        ({"optimizer": {"": torch.optim.SGD}}, "a mapping of optimizers needs train_step"),
        (
            {
                "model": lambda: nn.Linear(3, 2),
                "optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters()),
            },
            "a live optimizer belongs to the parameters of a live model",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Workload(**{"model": nn.Linear(3, 2), "sample_batch": X, **arguments})


def test_functions_are_believed_only_as_far_as_they_deliver() -> None:
    with pytest.raises(InvalidRequest, match="model function returned a str"):
        Workload(lambda: "model", X).build_model()  # type: ignore[arg-type,return-value]  # wrong on purpose
    with pytest.raises(InvalidRequest, match="asked for 5 samples and returned 4"):
        Workload(nn.Linear(3, 2), lambda n: X).batch(5)
    with pytest.raises(InvalidRequest, match="got a str"):
        Workload(nn.Linear(3, 2), X, optimizer=lambda p: "adam").build_optimizer(nn.Linear(3, 2))  # type: ignore[arg-type,return-value]  # wrong on purpose


def test_a_function_makes_batches_from_two_samples_on() -> None:
    workload = Workload(nn.Linear(3, 2), lambda n: torch.ones(n, 3))
    assert workload.sample_batch_size == 2
    assert workload.batch(7).shape == (7, 3)
    assert workload.batched_places is None
    assert Workload(nn.Linear(3, 2), (X, torch.ones(9))).batched_places == frozenset({0})


def test_a_module_that_can_be_called_is_the_model_and_not_its_builder() -> None:
    model = nn.Linear(3, 2)
    assert Workload(model, X).build_model() is model
    assert isinstance(Workload(nn.Identity, X).build_model(), nn.Identity)


def test_frozen_parameters_and_tied_weights_reach_the_optimizer_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    optimizer = Workload(model, X).build_optimizer(model)
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert len(group["params"]) == 3
    assert group["params"][0] is model[1].weight


def test_functions_in_a_mapping_take_the_parameters_of_the_submodule_they_name() -> None:
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    workload = Workload(model, X, optimizer={"g": adam, "d": sgd}, train_step=_step)
    built = workload.build_optimizer(model)
    assert isinstance(built, dict)
    assert isinstance(built["g"], adam)
    assert built["d"].param_groups[0]["params"] == list(model["d"].parameters())
    wrong = Workload(model, X, optimizer={"x": adam}, train_step=_step)
    with pytest.raises(InvalidRequest, match=r"must name the submodule.*\['g', 'd'\]"):
        wrong.build_optimizer(model)


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SGD]
)
def test_a_live_optimizers_state_is_placed_and_trains_on_as_before(kind: Any) -> None:
    def trained(place: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(
            model.parameters(), **({"momentum": 0.9} if kind is torch.optim.SGD else {})
        )

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = (model(X) ** 2).mean()
            value.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            return value

        optimizer.step(loss)
        workload = Workload(model, X, optimizer=optimizer)
        built: Any = workload.build_optimizer(model, place)
        assert built is optimizer
        built.step(loss)
        return [parameter.detach().clone() for parameter in model.parameters()]

    placed: list[torch.Tensor] = []

    def place(tensor: torch.Tensor) -> torch.Tensor:
        placed.append(tensor)
        return tensor.clone()

    for moved, left in zip(trained(place), trained(None), strict=True):
        assert torch.equal(moved, left)
    assert placed
    assert all(tensor.dim() > 0 for tensor in placed)


def test_a_states_type_is_not_changed_by_placing_it() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(2, 3, dtype=torch.float32)
    Workload(model, X, optimizer=optimizer).build_optimizer(model, torch.clone)
    assert optimizer.state[model.weight]["momentum_buffer"].dtype == torch.float32


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
    with pytest.raises(InvalidRequest, match="micro-batches of 3, not 4"):
        workload.plan(4, 3, 9)
