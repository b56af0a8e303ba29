"""Whatever stands for an optimizer becomes one for the model, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument
from autofit.plan import Plan, ResolvedPlan
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

X = torch.randn(4, 3)


def _step(training: Any, batch: Any) -> torch.Tensor:
    return torch.zeros(())


def _of_another_model() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(3, 2).parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adam"}, "function of the parameters.*'adam'"),
        ({"optimizer": {"": torch.optim.SGD}}, "optimizer.*training_step"),
        ({"optimizer": {"": "adam"}, "training_step": _step}, "'adam'"),
        (
            {"model": lambda: nn.Linear(3, 2), "optimizer": _of_another_model()},
            "live optimizer.*live model",
        ),
        ({"optimizer": _of_another_model()}, "SGD.*parameters"),
        (
            {"optimizer": {"g": _of_another_model()}, "training_step": _step},
            "SGD.*parameters",
        ),
    ],
)
def test_what_can_be_no_optimizer_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Workload(**{"model": nn.Linear(3, 2), "sample_batch": X, **arguments})


def test_a_function_is_believed_only_as_far_as_it_delivers() -> None:
    with pytest.raises(InvalidArgument, match=r"\bstr\b"):
        Workload(nn.Linear(3, 2), X, optimizer=lambda p: "adam").build_optimizer(nn.Linear(3, 2))  # type: ignore[arg-type,return-value]  # wrong on purpose


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
    workload = Workload(model, X, optimizer={"g": adam, "d": sgd}, training_step=_step)
    built: Any = workload.build_optimizer(model)
    assert isinstance(built["g"], adam)
    assert built["d"].param_groups[0]["params"] == list(model["d"].parameters())
    wrong = Workload(model, X, optimizer={"x": adam}, training_step=_step)
    with pytest.raises(InvalidArgument, match=r"submodule.*\['g', 'd'\]"):
        wrong.build_optimizer(model)


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = (model(X) ** 2).mean()
        value.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return value

    return loss


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

        loss = _closure(model, optimizer)
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


def test_an_optimizer_that_calls_a_closure_needs_a_training_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    cpu = torch.device("cpu")
    with pytest.raises(InvalidArgument, match=r"LBFGS.*closure.*training_step"):
        Training(model, optimizer, Recipe(), ResolvedPlan(Plan(4)), device=cpu)

    recipe = Recipe(
        training_step=lambda training, _: training.optimizer.step(_closure(model, optimizer))
    )
    own = Training(model, optimizer, recipe, ResolvedPlan(Plan(4)), device=cpu)
    assert own.step(X) > own.step(X)


def test_a_model_without_parameters_has_nothing_to_train() -> None:
    with pytest.raises(InvalidArgument, match="no parameters"):
        Workload(nn.Identity(), X).build_optimizer(nn.Identity())


@pytest.mark.parametrize("fused", [True, False])
def test_momentum_begins_with_the_first_step_that_a_scaler_lets_pass(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=fused)
    recipe = Recipe(loss_fn=lambda model, batch: 1e3 * model(batch).square().mean())
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan, device = ResolvedPlan(Plan(4)), torch.device("cpu")
    with Training(model, optimizer, recipe, plan, device=device) as training:
        training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        with _never_written_is_nan():
            training.step(X)  # its scaled gradients are infinite
        assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
        training.scaler = None
        gradients = torch.autograd.grad(1e3 * model(X).square().mean(), [*model.parameters()])
        training.step(X)
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), start[name] - 0.1 * gradient)


@contextmanager
def _never_written_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
