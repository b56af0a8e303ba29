"""optimizer.when: updates in the backward pass end as those after it, to the bit, and hold less."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from autofit import InvalidArgument, Plan, Workload
from autofit.devices.cpu import CpuDevice
from autofit.errors import Unsupported
from autofit.integrations.applied import on_model
from autofit.plan import ResolvedPlan
from autofit.registry import load_strategies
from autofit.testing import PlainContext, check_strategy
from autofit.testing.conformance import attention, convolutions
from tests.strategies.trainings import offered, training
from tests.wide import LAYERS, PARAMETER_BYTES, WIDTH, assert_predicted, peaks, wide

WHEN = "optimizer.when"
(UPDATE,) = load_strategies(["optimizer"])
sgd = partial(torch.optim.SGD, lr=0.1)


class Tied(nn.Module):
    """ids (n, 4) -> logits; one weight is used twice, one is frozen and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.head.weight = self.embedding.weight
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.unused = nn.Linear(2, 2)
        self.layers[1].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids))).flatten(0, 1)


def tied() -> Workload:
    torch.manual_seed(0)
    ids = torch.randint(32, (2, 4))
    return Workload(Tied(), (ids, ids), criterion=of_tokens)


def of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets.flatten())


def begun(value: str, make: Any = torch.optim.AdamW, build: Any = wide, size: int = 0) -> Any:
    """Return a training by the optimizer that is made of the model's parameters."""
    workload = build()
    model, samples = workload.build_model(), workload.sample_batch_size
    return training(
        model,
        UPDATE,
        plan=Plan.split(samples, size or samples, settings={WHEN: value}),
        optimizer=make(list(model.parameters())),
        recipe=workload.recipe,
    )


def check_equal(act: Callable[[Any], Any], *given: Any, **named: Any) -> tuple[str, ...]:
    """Compare what is done in a training with either value; `given` is as for `begun`.

    Returns:
        The notes of updates in the backward pass.
    """
    ends = []
    for value in ("step", "backward"):
        with begun(value, *given, **named) as live:
            torch.manual_seed(1)
            found, notes = act(live), live.notes()
        state = live.optimizer.state_dict()["state"]
        ends.append((found, dict(live.model.state_dict()), state))
    torch.testing.assert_close(*ends, rtol=0, atol=0, equal_nan=True)
    return notes


def step(live: Any) -> Any:
    return live.step(wide().sample_batch)


def in_groups(make: Any, parameters: list[Tensor]) -> Any:
    """The second half learns at another rate, and a scheduler changes both."""
    half = len(parameters) // 2
    made = make([{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.01}])
    made.schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    return made


def three_steps(build: Any, live: Any) -> list[Tensor]:
    losses = []
    for _ in range(3):
        losses.append(live.step(build().sample_batch))
        live.optimizer.schedule.step()
    return losses


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "by lists": partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "fused": partial(torch.optim.Adam, fused=True),
    "sgd": partial(sgd, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "radam": torch.optim.RAdam,
}


@pytest.mark.parametrize(
    ("build", "name"),
    [*((tied, name) for name in OPTIMIZERS), (attention, "adamw"), (convolutions, "sgd")],
)
def test_three_steps_end_alike_to_the_bit(build: Any, name: str) -> None:
    make = partial(in_groups, OPTIMIZERS[name])
    assert check_equal(partial(three_steps, build), make, build) == ()


def test_with_accumulation_the_update_follows_all_micro_batches() -> None:
    make = partial(in_groups, torch.optim.AdamW)
    (note,) = check_equal(partial(three_steps, wide), make, size=2)
    assert "no parameter was updated in the backward pass" in note


def test_groups_in_another_order_keep_their_hyperparameters() -> None:
    def act(live: Any) -> None:
        live.optimizer.param_groups.reverse()
        step(live)

    check_equal(act, partial(in_groups, torch.optim.AdamW))


def test_hyperparameters_that_are_loaded_in_a_training_count() -> None:
    def act(live: Any) -> None:
        step(live)
        saved = live.optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.5
        live.optimizer.load_state_dict(saved)
        step(live)

    check_equal(act)


@pytest.mark.slow
def test_conformance() -> None:
    (strategy,) = load_strategies(["optimizer"], numerics="exact")
    assert check_strategy(strategy, workloads=[wide, tied]) == 4


NORMS: list[float] = []


def log_norm(model: nn.Module, optimizer: Any) -> None:
    NORMS.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))


def double(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in [each for each in group["params"] if each.grad is not None]:
            parameter.grad.mul_(2)


def scaled(live: Any) -> None:
    live.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step(live)


def hooked(live: Any) -> None:
    live.optimizer.register_step_pre_hook(double)
    step(live)


@pytest.mark.parametrize(
    ("given", "act"),
    [
        ({"clip_grad_norm": 1e-3}, step),
        ({"before_step": log_norm}, step),
        ({}, scaled),
        ({}, hooked),
    ],
)
def test_what_uses_whole_gradients_gets_them(given: Any, act: Any) -> None:
    NORMS.clear()
    check_equal(act, sgd, partial(wide, **given))
    assert len(set(NORMS)) == ("before_step" in given)


@pytest.fixture
def _global_hook() -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(double)
    yield
    handle.remove()


@pytest.mark.usefixtures("_global_hook")
def test_hooks_of_all_optimizers_get_whole_gradients() -> None:
    assert not is_offered(wide)
    check_equal(step, sgd)


class Noting(torch.optim.SGD):
    """Keeps the largest gradient in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            found = [float(each.grad.max()) for each in group["params"] if each.grad is not None]
            group["largest"] = max([group.get("largest", 0.0), *found])
        return super().step(closure)


def test_what_an_optimizer_writes_to_its_groups_stays() -> None:
    def end(value: str) -> float:
        with begun(value, partial(Noting, lr=0.1)) as live:
            step(live)
        (group,) = live.optimizer.param_groups
        assert len(group["params"]) == 2 * LAYERS
        return group["largest"]

    assert end("backward") == end("step") > 0


def test_a_loop_of_the_users_own_has_whole_gradients() -> None:
    with begun("backward", sgd) as live:
        for batch, weight in live.micro_batches(wide().sample_batch):
            live.backward(live.loss(batch), weight)
        norm = nn.utils.clip_grad_norm_(live.model.parameters(), 1e9)
        live.optimizer_step()
    assert norm > 0


class Nested(nn.Module):
    """Checkpointed by torch's older way, which runs a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        once = checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.inner, once, use_reentrant=True)


def nested() -> Workload:
    batch = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    return Workload(Nested, batch, criterion=functional.mse_loss)


def test_a_second_gradient_after_the_update_raises() -> None:
    """A checkpoint that begins after the search: what it leaves would be no plain training."""
    with (
        begun("backward", build=nested) as live,
        pytest.raises(Unsupported, match=r"'inner\.(weight|bias)' was updated"),
    ):
        live.step(nested().sample_batch)


def with_a_penalty(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].detach().requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return output.square().mean() + gradient.square().mean()


def penalized() -> Workload:
    plain = wide()
    return Workload(plain.model, plain.sample_batch, loss_fn=with_a_penalty)


class Counting(torch.optim.AdamW):
    """Keeps what is of all parameters."""


def of_a_users_step(training: Any, batch: Any) -> Tensor:
    loss: Tensor = training.loss(batch)
    training.backward(loss)
    training.optimizer_step()
    return loss


def is_offered(build: Callable[[], Workload]) -> bool:
    return offered(UPDATE, WHEN, build)[0] is not None


def test_it_is_offered_where_gradients_take_much() -> None:
    """Without recomputation, which would read what is updated."""
    dimension, _ = offered(UPDATE, WHEN, wide)
    assert list(dimension.when["checkpointing.level"]) == [0, None]
    assert is_offered(tied)
    assert is_offered(penalized)
    assert not is_offered(convolutions)  # one more sample takes more


@pytest.mark.parametrize(
    "build",
    [
        nested,
        partial(wide, clip_grad_norm=1.0),
        partial(wide, before_step=log_norm),
        partial(wide, optimizer=Counting),
        partial(wide, training_step=of_a_users_step),
    ],
)
def test_it_is_not_offered_where_it_would_train_otherwise(build: Any) -> None:
    assert not is_offered(build)


def test_momentum_of_sparse_gradients_is_looked_at() -> None:
    def build() -> Workload:
        model = nn.Sequential(nn.Embedding(512, 8, sparse=True), nn.Linear(8, 8))
        batch = torch.randint(512, (2, 4)), torch.randn(2, 4, 8)
        make = partial(sgd, momentum=0.9)
        return Workload(model, batch, criterion=functional.mse_loss, optimizer=make)

    is_offered(build)


def test_a_search_that_must_be_exact_has_it_alone() -> None:
    (exact,) = load_strategies(["optimizer"], numerics="exact")
    assert list(exact.dimensions(PlainContext(wide))) == [WHEN]


def test_another_librarys_loop_is_not_offered_it_and_refuses_it() -> None:
    (narrowed,) = load_strategies([UPDATE.in_anothers_loop()], numerics="rounding")  # type: ignore[attr-defined]  # its own
    assert WHEN not in narrowed.dimensions(PlainContext(wide))
    model = wide().build_model()
    plan = ResolvedPlan(Plan(4, settings={WHEN: "backward"}), {}, (UPDATE,))
    with (
        pytest.raises(InvalidArgument, match="update_in_backward"),
        on_model(plan, model, sgd(model.parameters())),
    ):
        pass


def test_a_described_script_trains_alike() -> None:
    """The lines that `describe` gives, in a plain loop."""

    def end(value: str) -> dict[str, Tensor]:
        workload = tied()
        model = workload.build_model()
        optimizer = torch.optim.AdamW(model.parameters())
        lines = UPDATE.describe({WHEN: value}, {})
        exec("\n".join(lines), {"model": model, "optimizer": optimizer})
        ids, targets = workload.batch(2)
        for _ in range(2):
            optimizer.zero_grad()
            of_tokens(model(ids), targets).backward()  # type: ignore[no-untyped-call]  # torch's
            assert (value == "backward") is (next(model.parameters()).grad is None)
            optimizer.step()
        return dict(model.state_dict())

    torch.testing.assert_close(end("backward"), end("step"), rtol=0, atol=0)


@pytest.mark.slow
def test_a_training_holds_less_by_most_of_its_gradients() -> None:
    at_step, in_backward = peaks(WHEN, ["step", "backward"], "cpu", vram_budget="64MiB")
    assert at_step - in_backward > 0.8 * PARAMETER_BYTES


@pytest.mark.cuda
def test_its_memory_is_predicted() -> None:
    at_step, in_backward = assert_predicted(WHEN, ["step", "backward"])
    assert at_step - in_backward > 0.8 * PARAMETER_BYTES


def test_looking_at_a_training_leaves_nothing_of_it_in_memory() -> None:
    """Softmax saves its own output, which must not come to hold itself."""
    share_held = import_module("autofit.strategies.update_in_backward").share_held
    device = CpuDevice()
    device.limit(2**30)

    def look() -> None:
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Softmax(-1))
        model, batch = device.place_model(layers), (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
        with training(model, device=device.torch_device, recipe=wide().recipe) as live:
            assert share_held(4, live, batch)

    with device.accounting():
        before = device.allocated_bytes()
        look()
        gc.collect()
        assert device.allocated_bytes() == before
