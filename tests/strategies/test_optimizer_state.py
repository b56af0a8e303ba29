"""optimizer.state: half the bytes, the same losses within one percent, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
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
from autofit.integrations.applied import on_model
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import collect_dimensions, load_strategies
from autofit.testing import PlainContext, check_strategy
from autofit.training.training import Training
from autofit.training.workload import Workload
from tests.wide import PARAMETER_BYTES, WIDTH, adamw, assert_predicted, peaks, wide

state_in_bfloat16: Any = import_module("autofit.strategies.optimizer_state").state_in_bfloat16
STATE, WHEN = "optimizer.state", "optimizer.when"
(UPDATE,) = load_strategies(["optimizer"])
STATE_BYTES = 2 * PARAMETER_BYTES
PAYLOADS = {STATE: {"optimizers": [""]}}

sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def training(model: nn.Module, optimizer: Any, *, size: int = 4, **settings: Any) -> Training:
    plan = ResolvedPlan(
        Plan.split(4, size, settings={STATE: "bfloat16", **settings}), PAYLOADS, (UPDATE,)
    )
    recipe = by_adamw().recipe
    return Training(model, optimizer, recipe, plan, device=torch.device("cpu"))


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and value is not None
    ]


def offered(optimizer: Any) -> bool:
    return STATE in collect_dimensions([UPDATE], PlainContext(partial(wide, optimizer=optimizer)))


def by_adamw() -> Workload:
    return wide(optimizer=adamw)


def begun(make: Any = adamw) -> tuple[Workload, nn.Module, Any]:
    """Return a workload, its model, and an optimizer of that."""
    workload = by_adamw()
    model = workload.build_model()
    return workload, model, make(model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("any_time_is_worth_it")
def test_conformance() -> None:
    assert check_strategy("optimizer", workloads=[by_adamw]) == 4  # plain, fused, when, state


@pytest.mark.slow
def test_200_steps_have_the_losses_of_plain_training() -> None:
    """Each step sees fresh samples, so means over 50 steps are compared."""

    def losses(settings: dict[str, Any]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        draw = torch.Generator().manual_seed(1)
        with training(model, optimizer, **settings) as live:
            found = []
            for _ in range(200):
                x = torch.randn(4, WIDTH, generator=draw)
                found.append(live.step((x, x.tanh())))
        return torch.stack(found).unfold(0, 50, 1).mean(1)

    rounded, plain = losses({}), losses({STATE: "default"})
    assert not torch.equal(rounded, plain)
    assert float((rounded / plain - 1).abs().max()) < 0.01


def test_it_is_offered_where_state_can_be_halved() -> None:
    assert offered(adamw)
    assert offered(sgd)
    assert not offered(partial(torch.optim.SGD, lr=0.01))  # which has none
    assert not offered(torch.optim.RMSprop)


@pytest.mark.slow
def test_a_search_has_it_only_where_its_strategy_is_named() -> None:
    def tried(strategies: Any) -> bool:
        report = autofit.search(
            by_adamw(),
            device="cpu",
            vram_budget="64MiB",
            strategies=strategies,
            max_probes=1,
        )
        return STATE in report.record.dimensions

    assert tried(["optimizer"])
    assert not tried(None)


@pytest.mark.parametrize("make", [adamw, sgd, partial(torch.optim.Adam, fused=True, amsgrad=True)])
def test_state_is_in_bfloat16_between_steps_and_in_float32_after_the_training(make: Any) -> None:
    workload, model, optimizer = begun(make)
    with training(model, optimizer) as live:
        for _ in range(2):
            live.step(workload.batch(4))
            assert {each.dtype for each in states(optimizer)} == {torch.bfloat16}
    assert {each.dtype for each in states(optimizer)} == {torch.float32}
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_entering_and_leaving_leaves_the_state_of_a_live_optimizer() -> None:
    _, model, optimizer = begun()
    model(torch.randn(4, WIDTH)).mean().backward()
    optimizer.step()
    before = [each.clone() for each in states(optimizer)]
    with training(model, optimizer):
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


def test_a_moment_that_is_not_finite_stays_so() -> None:
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # as a GPU writes it
    with state_in_bfloat16(optimizer):
        parameter.grad = nan.expand(64).clone()
        optimizer.step()
        assert states(optimizer)[0].isnan().all()
        parameter.grad = torch.full((64,), torch.inf)
        optimizer.state.clear()
        optimizer.step()
        assert states(optimizer)[0].isinf().all()


def stepped(steps: int, **given: Any) -> tuple[nn.Module, Any, list[Tensor]]:
    workload, model, optimizer = begun()
    prepare: Callable[[Training], None] = given.pop("prepare", lambda live: None)
    found = []
    with training(model, optimizer, **given) as live:
        prepare(live)
        for _ in range(steps):
            found.append(live.step(workload.batch(4)))
    return model, optimizer, found


def test_accumulated_checkpointed_and_scaled_steps_go_from_the_same_state() -> None:
    plain = stepped(3)[2]

    def scale(live: Training) -> None:
        live.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    cases: list[dict[str, Any]] = [{"size": 2}, {"prepare": scale}, {WHEN: "backward"}]
    for case in cases:
        _, optimizer, found = stepped(3, **case)
        torch.testing.assert_close(torch.stack(found), torch.stack(plain), rtol=1e-4, atol=1e-6)
        assert {each.dtype for each in states(optimizer)} == {torch.float32}


def doubled_by_hooks(setting: str) -> list[Tensor]:
    """Return gradients that a hook of each kind saw, and the weights after a step."""
    parameter: Any = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    seen: list[Tensor] = []

    def double(*_: Any) -> None:
        seen.append(parameter.grad.mul_(2).clone())

    optimizer.register_step_post_hook(double)
    with ExitStack() as stack:
        if setting == "bfloat16":
            stack.enter_context(state_in_bfloat16(optimizer))
        optimizer.register_step_pre_hook(double)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            stack.callback(register(double).remove)
        parameter.grad = torch.ones(4)
        optimizer.step()
    return [*seen, parameter.detach()]


def test_hooks_of_a_step_see_and_change_its_gradients() -> None:
    plain, bfloat16 = doubled_by_hooks("default"), doubled_by_hooks("bfloat16")
    assert all(map(torch.equal, bfloat16, plain))


def test_a_closure_is_called_by_the_step() -> None:
    def end(setting: str) -> Tensor:
        parameter = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def closure() -> float:
            parameter.grad = torch.ones(4)
            return 1.0

        with state_in_bfloat16(optimizer) if setting == "bfloat16" else nullcontext():
            assert optimizer.step(closure) == 1.0
        return parameter.detach()

    assert torch.equal(end("bfloat16"), end("default"))


@pytest.mark.parametrize("inside", [True, False])
def test_a_saved_state_is_loaded_with_the_setting_and_without(inside: bool) -> None:
    workload, model, optimizer = begun()
    with training(model, optimizer) as live:
        live.step(workload.batch(4))
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["state"][0]["exp_avg"].dtype == torch.bfloat16
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        expected = live.step(workload.batch(4)), live.step(workload.batch(4))
    model.load_state_dict(weights)
    other = adamw(model.parameters())
    other.load_state_dict(saved)
    if inside:
        with training(model, other) as live:
            found = live.step(workload.batch(4)), live.step(workload.batch(4))
            assert {each.dtype for each in states(other)} == {torch.bfloat16}
    else:
        plain = Training(
            model, other, workload.recipe, ResolvedPlan(Plan(4)), device=torch.device("cpu")
        )
        with plain:
            found = plain.step(workload.batch(4)), plain.step(workload.batch(4))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_another_librarys_loop_and_a_described_script_have_it() -> None:
    workload = by_adamw()
    found = []

    def step(model: nn.Module, optimizer: Any) -> None:
        model(workload.batch(4)[0]).square().mean().backward()
        optimizer.step()
        assert {each.dtype for each in states(optimizer)} == {torch.bfloat16}
        found.append([each.float() for each in states(optimizer)])

    _, made, optimizer = begun()
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
        training(model, Slow(model.parameters(), 0.01, momentum=0.9))
    named = {"all": torch.optim.AdamW(model.parameters())}
    with pytest.raises(autofit.AutofitError, match="optimizers"):
        training(model, named)
