"""optimizer.state: half the bytes, the same losses within one percent, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import autofit
from autofit import Plan, Workload
from autofit.integrations.applied import on_model
from autofit.plan import ResolvedPlan
from autofit.registry import load_strategies
from autofit.testing import check_strategy
from tests.strategies.trainings import offered, training
from tests.wide import PARAMETER_BYTES, WIDTH, adamw, assert_predicted, peaks, wide

state_in_bfloat16: Any = import_module("autofit.strategies.optimizer_state").state_in_bfloat16
STATE, WHEN = "optimizer.state", "optimizer.when"
(UPDATE,) = load_strategies(["optimizer"])
STATE_BYTES = 2 * PARAMETER_BYTES
PAYLOADS = {STATE: {"optimizers": [""]}}

sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def by_adamw() -> Workload:
    return wide(optimizer=adamw)


def trained(
    model: nn.Module, optimizer: Any, value: str = "bfloat16", *, size: int = 4, when: str = "step"
) -> Any:
    """Return a training with the setting."""
    plan = Plan.split(4, size, settings={STATE: value, WHEN: when})
    return training(
        model, UPDATE, plan=plan, payloads=PAYLOADS, optimizer=optimizer, recipe=wide().recipe
    )


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and value is not None
    ]


def types(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    return {each.dtype for each in states(optimizer)}


def begun(make: Any = adamw) -> tuple[Any, nn.Module, Any]:
    """Return a batch, a model, and an optimizer of that."""
    workload = by_adamw()
    model = workload.build_model()
    return workload.batch(4), model, make(model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("any_time_is_worth_it")
def test_conformance() -> None:
    assert check_strategy("optimizer", workloads=[by_adamw]) == 4  # plain, fused, when, state


@pytest.mark.slow
def test_200_steps_have_the_losses_of_plain_training() -> None:
    """Each step sees fresh samples, so means over 50 steps are compared."""

    def losses(value: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        draw, found = torch.Generator().manual_seed(1), []
        with trained(model, optimizer, value) as live:
            for _ in range(200):
                x = torch.randn(4, WIDTH, generator=draw)
                found.append(live.step((x, x.tanh())))
        return torch.stack(found).unfold(0, 50, 1).mean(1)

    rounded, plain = losses("bfloat16"), losses("default")
    assert not torch.equal(rounded, plain)
    assert float((rounded / plain - 1).abs().max()) < 0.01


@pytest.mark.parametrize(
    ("optimizer", "is_offered"),
    [
        (adamw, True),
        (sgd, True),
        (partial(torch.optim.SGD, lr=0.01), False),  # which has none
        (torch.optim.RMSprop, False),
    ],
)
def test_it_is_offered_where_state_can_be_halved(optimizer: Any, is_offered: bool) -> None:
    dimension, _ = offered(UPDATE, STATE, partial(wide, optimizer=optimizer))
    assert (dimension is not None) is is_offered
    assert dimension is None or dimension.opt_in  # a search has it only where its strategy is named


@pytest.mark.parametrize("make", [adamw, sgd, partial(torch.optim.Adam, fused=True, amsgrad=True)])
def test_state_is_in_bfloat16_between_steps_and_in_float32_after_the_training(make: Any) -> None:
    batch, model, optimizer = begun(make)
    with trained(model, optimizer) as live:
        for _ in range(2):
            live.step(batch)
            assert types(optimizer) == {torch.bfloat16}
    assert types(optimizer) == {torch.float32}
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_entering_and_leaving_leaves_the_state_of_a_live_optimizer() -> None:
    _, model, optimizer = begun()
    model(torch.randn(4, WIDTH)).mean().backward()
    optimizer.step()
    before = [each.clone() for each in states(optimizer)]
    with trained(model, optimizer):
        pass
    assert all(map(torch.equal, states(optimizer), before))


def test_the_second_moment_follows_gradients_that_shrink() -> None:
    """Rounded to the nearest, it would stay where it was: it changes by a thousandth in a step."""
    parameter = nn.Parameter(torch.zeros(512))
    optimizer = torch.optim.AdamW([parameter])
    with state_in_bfloat16(optimizer):
        for size in [1.0] * 50 + [0.01] * 500:
            parameter.grad = torch.full((512,), size)
            optimizer.step()
    (state,) = optimizer.state.values()
    exact = (1 - 0.999**50) * 0.999**500
    assert float(state["exp_avg_sq"].mean()) == pytest.approx(exact, rel=0.05)


NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # as a GPU writes it


@pytest.mark.parametrize("value", [NAN, torch.tensor(torch.inf)])
def test_a_moment_that_is_not_finite_stays_so(value: Tensor) -> None:
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = sgd([parameter])
    with state_in_bfloat16(optimizer):
        parameter.grad = value.expand(64).clone()
        optimizer.step()
        torch.testing.assert_close(
            states(optimizer)[0].float(), parameter.grad, equal_nan=True, rtol=0, atol=0
        )


def scale(live: Any) -> None:
    live.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


@pytest.mark.parametrize(
    ("given", "prepare"),
    [({"size": 2}, id), ({}, scale), ({"when": "backward"}, id)],
    ids=["accumulated", "scaled", "in the backward pass"],
)
def test_other_ways_to_step_go_from_the_same_state(
    given: dict[str, Any], prepare: Callable[[Any], Any]
) -> None:
    def losses(prepare: Callable[[Any], Any], **given: Any) -> Tensor:
        batch, model, optimizer = begun()
        with trained(model, optimizer, **given) as live:
            prepare(live)
            found = [live.step(batch) for _ in range(3)]
        assert types(optimizer) == {torch.float32}
        return torch.stack(found)

    torch.testing.assert_close(losses(prepare, **given), losses(id), rtol=1e-4, atol=1e-6)


def check_equal(step: Callable[[Any, Any, Callable[[], AbstractContextManager[Any]]], Any]) -> None:
    """Compare what a step does to a parameter with state in bfloat16, and without."""
    ends = []
    for inside in (True, False):
        parameter = nn.Parameter(torch.zeros(4))
        optimizer = sgd([parameter])
        entered = partial(state_in_bfloat16, optimizer) if inside else nullcontext
        ends.append((step(parameter, optimizer, entered), parameter.detach()))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_hooks_of_a_step_see_and_change_its_gradients() -> None:
    def step(parameter: Any, optimizer: Any, entered: Any) -> list[Tensor]:
        seen: list[Tensor] = []

        def double(*_: Any) -> None:
            seen.append(parameter.grad.mul_(2).clone())

        optimizer.register_step_post_hook(double)
        with entered(), ExitStack() as stack:
            optimizer.register_step_pre_hook(double)
            for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
                stack.callback(register(double).remove)
            parameter.grad = torch.ones(4)
            optimizer.step()
        return seen

    check_equal(step)


def test_a_closure_is_called_by_the_step() -> None:
    def step(parameter: Any, optimizer: Any, entered: Any) -> float:
        def closure() -> float:
            parameter.grad = torch.ones(4)
            return 1.0

        with entered():
            return optimizer.step(closure)

    check_equal(step)


@pytest.mark.parametrize("value", ["bfloat16", "default"])
def test_a_saved_state_is_loaded_with_the_setting_and_without(value: str) -> None:
    batch, model, optimizer = begun()
    with trained(model, optimizer) as live:
        live.step(batch)
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["state"][0]["exp_avg"].dtype == torch.bfloat16
        other = copy.deepcopy(model)
        expected = live.step(batch), live.step(batch)
    resumed = adamw(other.parameters())
    resumed.load_state_dict(saved)
    with trained(other, resumed, value) as live:
        found = live.step(batch), live.step(batch)
        assert types(resumed) == {torch.bfloat16 if value == "bfloat16" else torch.float32}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_another_librarys_loop_and_a_described_script_have_it() -> None:
    found: list[list[Tensor]] = []

    def step(model: nn.Module, optimizer: Any) -> None:
        model(batch[0]).square().mean().backward()
        optimizer.step()
        assert types(optimizer) == {torch.bfloat16}
        found.append([each.float() for each in states(optimizer)])

    batch, made, optimizer = begun()
    plan = ResolvedPlan(Plan(4, settings={STATE: "bfloat16"}), PAYLOADS, (UPDATE,))
    with on_model(plan, made, optimizer):
        step(made, optimizer)
    _, made, optimizer = begun()
    *lines, opening = UPDATE.describe({STATE: "bfloat16"}, PAYLOADS)
    script = "\n".join([*lines, opening, "    step(model, optimizer)"])
    exec(script, {"model": made, "optimizer": optimizer, "step": step})
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_a_training_holds_half_the_state() -> None:
    default, bfloat16 = peaks(STATE, ["default", "bfloat16"], "cpu", vram_budget="64MiB")
    assert default - bfloat16 > 0.4 * STATE_BYTES


@pytest.mark.cuda
def test_its_memory_is_predicted() -> None:
    default, bfloat16 = assert_predicted(STATE, ["default", "bfloat16"])
    assert default - bfloat16 > 0.4 * STATE_BYTES


class Slow(torch.optim.SGD):
    """A step of it is one of all parameters."""


def test_an_optimizer_that_came_after_the_search_is_refused_in_words() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(autofit.AutofitError, match="Slow"):
        trained(model, Slow(model.parameters(), 0.01, momentum=0.9))
    named = {"all": torch.optim.AdamW(model.parameters())}
    with pytest.raises(autofit.AutofitError, match="optimizers"):
        trained(model, named)
