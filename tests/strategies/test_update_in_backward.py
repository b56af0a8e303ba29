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

import autofit
from autofit.devices.cpu import CpuDevice
from autofit.errors import Unsupported
from autofit.integrations.applied import on_model
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import collect_dimensions, load_strategies
from autofit.testing import PlainContext, check_strategy
from autofit.testing.conformance import attention, convolutions
from autofit.training.training import Training
from autofit.training.workload import Workload
from tests.wide import LAYERS, PARAMETER_BYTES, WIDTH, assert_predicted, peaks, wide

WHEN = "optimizer.when"
(UPDATE,) = load_strategies(["optimizer"])


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
        logits: Tensor = self.head(self.layers(self.embedding(ids))).flatten(0, 1)
        return logits


def tied(**given: Any) -> Workload:
    torch.manual_seed(0)
    ids = torch.randint(32, (2, 4))
    return Workload(Tied(), (ids, ids), criterion=of_tokens, **given)


def of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets.flatten())


def offered(build: Callable[[], Workload]) -> bool:
    context = PlainContext(build, "cpu")
    return WHEN in collect_dimensions([UPDATE], context)


def test_a_recomputation_would_read_what_is_updated() -> None:
    dimension: Any = collect_dimensions([UPDATE], PlainContext(wide, "cpu"))[WHEN]
    assert list(dimension.when["checkpointing.level"]) == [0, None]


def test_momentum_of_sparse_gradients_is_looked_at() -> None:
    def build() -> Workload:
        model = nn.Sequential(nn.Embedding(512, 8, sparse=True), nn.Linear(8, 8))
        batch = torch.randint(512, (2, 4)), torch.randn(2, 4, 8)
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        return Workload(model, batch, criterion=functional.mse_loss, optimizer=make)

    collect_dimensions([UPDATE], PlainContext(build, "cpu"))


def begun(
    make: Any, settings: dict[str, Any], workload: Workload | None = None, plan: Any = None
) -> Any:
    """Return a training on the CPU by the optimizer that is made of the model's parameters."""
    workload = workload or wide()
    resolved = ResolvedPlan(plan or Plan(4, settings=settings), {}, (UPDATE,))
    model = workload.build_model()
    optimizer = make(list(model.parameters()))
    return Training(model, optimizer, workload.recipe, resolved, device=torch.device("cpu"))


def test_groups_in_another_order_keep_their_hyperparameters() -> None:
    def ends(settings: dict[str, Any]) -> dict[str, Tensor]:
        with begun(partial(in_groups, torch.optim.AdamW), settings) as live:
            live.optimizer.param_groups.reverse()
            live.step(wide().sample_batch)
        return live.model.state_dict()

    assert_equal(ends({}), ends({WHEN: "backward"}))


@pytest.mark.slow
def test_conformance() -> None:
    strategy = load_strategies(["optimizer"], numerics="exact")[0]
    assert check_strategy(strategy, workloads=[wide, tied]) == 4


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "by lists": partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "fused": partial(torch.optim.Adam, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "radam": torch.optim.RAdam,
}


def in_groups(make: Any, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The second half learns at another rate."""
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.01}]
    made: torch.optim.Optimizer = make(groups)
    return made


def trained(build: Any, make: Any, settings: dict[str, Any], batches: int = 1) -> dict[str, Any]:
    """Return what three steps leave, with a scheduler between them."""
    workload = build()
    size = workload.sample_batch_size // batches
    plan = Plan.split(size * batches, size, settings=settings)
    schedules, losses = list[Any](), []

    def scheduled(parameters: list[Tensor]) -> torch.optim.Optimizer:
        optimizer = in_groups(make, parameters)
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return optimizer

    with begun(scheduled, settings, workload, plan) as live:
        torch.manual_seed(1)
        for _ in range(3):
            losses.append(live.step(workload.sample_batch))
            schedules[0].step()
        notes = live.notes()
    state = live.optimizer.state_dict()["state"]
    return {"losses": losses, "model": live.model.state_dict(), "state": state, "notes": notes}


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("build", "name"),
    [*((tied, name) for name in OPTIMIZERS), (attention, "adamw"), (convolutions, "sgd")],
)
def test_three_steps_end_alike_to_the_bit(build: Any, name: str) -> None:
    plain = trained(build, OPTIMIZERS[name], {})
    other = trained(build, OPTIMIZERS[name], {WHEN: "backward"})
    assert other.pop("notes") == plain.pop("notes") == ()
    assert plain["model"].keys() == other["model"].keys()
    assert_equal(other, plain)


def test_with_accumulation_the_update_follows_all_micro_batches() -> None:
    plain = trained(wide, torch.optim.AdamW, {}, batches=2)
    other = trained(wide, torch.optim.AdamW, {WHEN: "backward"}, batches=2)
    (note,) = other.pop("notes")
    assert "no parameter was updated in the backward pass" in note
    plain.pop("notes")
    assert_equal(other, plain)


def stepped(settings: dict[str, Any], prepare: Any, **given: Any) -> dict[str, Tensor]:
    with begun(partial(torch.optim.SGD, lr=0.1), settings, wide(**given)) as live:
        prepare(live)
        live.step(wide().sample_batch)
    return live.model.state_dict()


NORMS: list[float] = []


def log_norm(model: nn.Module, optimizer: Any) -> None:
    NORMS.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))


def double(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in [each for each in group["params"] if each.grad is not None]:
            parameter.grad.mul_(2)


def scale(live: Training) -> None:
    live.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


def hook(live: Training) -> None:
    optimizer: Any = live.optimizer
    optimizer.register_step_pre_hook(double)


@pytest.fixture
def global_hook() -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(double)
    yield
    handle.remove()


@pytest.mark.usefixtures("global_hook")
def test_hooks_of_all_optimizers_get_whole_gradients() -> None:
    assert not offered(wide)
    plain = stepped({}, lambda live: None)
    assert_equal(stepped({WHEN: "backward"}, lambda live: None), plain)


class Noting(torch.optim.SGD):
    """Keeps the largest gradient in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            found = [float(each.grad.max()) for each in group["params"] if each.grad is not None]
            group["largest"] = max([group.get("largest", 0.0), *found])
        return super().step(closure)


def test_what_an_optimizer_writes_to_its_groups_stays() -> None:
    def end(settings: dict[str, Any]) -> float:
        with begun(partial(Noting, lr=0.1), settings) as live:
            live.step(wide().sample_batch)
        (group,) = live.optimizer.param_groups
        assert len(group["params"]) == 2 * LAYERS
        return group["largest"]

    assert end({WHEN: "backward"}) == end({}) > 0


@pytest.mark.parametrize(
    ("given", "prepare"),
    [
        ({"clip_grad_norm": 1e-3}, lambda live: None),
        ({"before_step": log_norm}, lambda live: None),
        ({}, scale),
        ({}, hook),
    ],
)
def test_what_uses_whole_gradients_gets_them(given: Any, prepare: Any) -> None:
    NORMS.clear()
    plain = stepped({}, prepare, **given)
    assert_equal(stepped({WHEN: "backward"}, prepare, **given), plain)
    assert len(set(NORMS)) == ("before_step" in given)


def test_a_loop_of_the_users_own_has_whole_gradients() -> None:
    with begun(partial(torch.optim.SGD, lr=0.1), {WHEN: "backward"}) as live:
        for batch, weight in live.micro_batches(wide().sample_batch):
            live.backward(live.loss(batch), weight)
        norm = nn.utils.clip_grad_norm_(live.model.parameters(), 1e9)
        live.optimizer_step()
    assert norm > 0


def test_hyperparameters_that_are_loaded_in_a_training_count() -> None:
    def end(settings: dict[str, Any]) -> dict[str, Tensor]:
        with begun(torch.optim.AdamW, settings) as live:
            live.step(wide().sample_batch)
            saved = live.optimizer.state_dict()
            saved["param_groups"][0]["lr"] = 0.5
            live.optimizer.load_state_dict(saved)
            live.step(wide().sample_batch)
        return live.model.state_dict()

    assert_equal(end({WHEN: "backward"}), end({}))


class Nested(nn.Module):
    """Checkpointed by torch's older way, which runs a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


def test_a_second_gradient_after_the_update_raises() -> None:
    """A checkpoint that begins after the search: what it leaves would be no plain training."""
    refused = pytest.raises(Unsupported, match=r"'inner\.(weight|bias)' was updated")
    with begun(torch.optim.AdamW, {WHEN: "backward"}, nested()) as live, refused:
        live.step(nested().sample_batch)
    with begun(torch.optim.AdamW, {WHEN: "backward"}) as live:
        for _ in range(2):  # the second step updates each parameter once more
            live.step(wide().sample_batch)


def nested() -> Workload:
    batch = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    return Workload(Nested, batch, criterion=functional.mse_loss)


def with_a_penalty(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].detach().requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    loss: Tensor = output.square().mean() + gradient.square().mean()
    return loss


def test_a_loss_that_differentiates_is_looked_at_too() -> None:
    workload = wide()
    batch = workload.sample_batch
    assert offered(lambda: Workload(workload.model, batch, loss_fn=with_a_penalty))


class Counting(torch.optim.AdamW):
    """Keeps what is of all parameters."""


def of_a_users_step(training: Any, batch: Any) -> Tensor:
    loss: Tensor = training.loss(batch)
    training.backward(loss)
    training.optimizer_step()
    return loss


def test_it_is_offered_where_gradients_take_much() -> None:
    assert offered(wide)
    assert offered(tied)
    assert not offered(convolutions)  # one more sample takes more


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
    assert not offered(build)


def test_a_search_that_must_be_exact_has_it_alone() -> None:
    (exact,) = load_strategies(["optimizer"], numerics="exact")
    assert list(exact.dimensions(PlainContext(wide, "cpu"))) == [WHEN]


def test_a_search_for_another_librarys_loop_does_not_offer_it() -> None:
    (narrowed,) = load_strategies([UPDATE.in_anothers_loop()], numerics="rounding")  # type: ignore[attr-defined]  # its own
    assert WHEN not in narrowed.dimensions(PlainContext(wide, "cpu"))


def test_another_librarys_loop_refuses_it() -> None:
    model = wide().build_model()
    plan = ResolvedPlan(Plan(4, settings={WHEN: "backward"}), {}, (UPDATE,))
    optimizer = torch.optim.SGD(model.parameters())
    with (
        pytest.raises(autofit.InvalidArgument, match="update_in_backward"),
        on_model(plan, model, optimizer),
    ):
        pass


def test_a_described_script_trains_alike() -> None:
    """The lines that `describe` gives, in a plain loop."""

    def end(lines: list[str]) -> dict[str, Tensor]:
        workload = tied()
        model = workload.build_model()
        optimizer = torch.optim.AdamW(model.parameters())
        exec("\n".join(lines), {"model": model, "optimizer": optimizer})
        ids, targets = workload.batch(2)
        for _ in range(2):
            optimizer.zero_grad()
            of_tokens(model(ids), targets).backward()  # type: ignore[no-untyped-call]  # torch's
            assert bool(lines) is (next(model.parameters()).grad is None)
            optimizer.step()
        return model.state_dict()

    assert_equal(end(UPDATE.describe({WHEN: "backward"}, {})), end([]))


@pytest.mark.slow
def test_a_training_holds_less_by_most_of_its_gradients() -> None:
    step, backward = peaks(WHEN, ["step", "backward"], "cpu", vram_budget="64MiB")
    assert step - backward > 0.8 * PARAMETER_BYTES


@pytest.mark.cuda
def test_its_memory_is_predicted() -> None:
    step, backward = assert_predicted(WHEN, ["step", "backward"])
    assert step - backward > 0.8 * PARAMETER_BYTES


def test_looking_at_a_training_leaves_nothing_of_it_in_memory() -> None:
    """Softmax saves its own output, which must not come to hold itself."""
    share_held = import_module("autofit.strategies.update_in_backward").share_held
    device = CpuDevice()
    device.limit(2**30)

    def look() -> None:
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Softmax(-1))
        model = device.place_model(layers)
        optimizer, recipe = torch.optim.AdamW(model.parameters()), wide().recipe
        plan = ResolvedPlan(Plan(4))
        with Training(model, optimizer, recipe, plan, device=device.torch_device) as live:
            assert share_held(4, live, (torch.randn(4, WIDTH), torch.randn(4, WIDTH)))

    with device.accounting():
        before = device.allocated_bytes()
        look()
        gc.collect()
        assert device.allocated_bytes() == before
