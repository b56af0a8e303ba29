"""One optimizer step: split gradients equal whole ones, and the user's own parts are honoured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument, is_users
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.watch import BatchWatch
from tests.plugin import Plugin

CPU = torch.device("cpu")
IGNORED = -100


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def _training(
    model: nn.Module, recipe: Recipe, micro_batch: int, optimizer: Any = None, **more: Any
) -> Training:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, optimizer, recipe, ResolvedPlan(Plan(micro_batch, **more)), device=CPU)


def _norm_of_gradients(model: nn.Module) -> float:
    return math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))


def _classes(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 6), torch.randint(0, 5, (samples,))


CROSS_ENTROPY = Recipe(criterion=nn.functional.cross_entropy)


def _masked_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of 8 tokens whose valid lengths differ, one of them empty."""
    torch.manual_seed(2)
    targets = torch.randint(0, 5, (7, 8))
    for sample, length in enumerate((8, 1, 3, 0, 8, 2, 5)):
        targets[sample, length:] = IGNORED
    return torch.randn(7, 8, 6), targets


def _token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _valid_tokens(batch: Any) -> float:
    return float((batch[1] != IGNORED).sum())


def test_a_micro_batch_without_one_valid_token_does_not_spoil_the_others() -> None:
    inputs, targets = _masked_batch()
    alone = (inputs[3:4], targets[3:4])
    assert torch.isnan(_token_loss(_mlp(), alone))
    weighted = Recipe(loss_fn=_token_loss, loss_weight=_valid_tokens)
    training = _training(_mlp(), weighted, 1)
    shares = [weight for _, weight in training.micro_batches((inputs, targets))]
    assert len(shares) == 6
    assert sum(shares) == pytest.approx(1.0)
    assert torch.isfinite(training.step((inputs, targets)))
    nothing = (inputs, torch.full_like(targets, IGNORED))
    for size in (7, 2):  # as the whole batch would
        assert torch.isnan(_training(_mlp(), weighted, size).step(nothing))


def test_a_step_is_what_a_user_would_write() -> None:
    batch = _classes(6)
    ours, theirs = _mlp(), _mlp()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    training = _training(ours, CROSS_ENTROPY, 6, torch.optim.AdamW(ours.parameters(), lr=0.01))
    for _ in range(3):
        loss = training.step(batch)
        expected: Any = nn.functional.cross_entropy(theirs(batch[0]), batch[1])
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert not loss.requires_grad
        assert torch.equal(loss, expected)
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, yours)
        assert mine.grad is None


def test_gradients_are_clipped_over_all_micro_batches_and_then_shown_to_before_step() -> None:
    norms: list[float] = []
    recipe = Recipe(
        criterion=lambda y, t: 100 * nn.functional.cross_entropy(y, t),
        clip_grad_norm=0.5,
        before_step=lambda model, optimizer: norms.append(_norm_of_gradients(model)),
    )
    model, before = _mlp(), _mlp()
    _training(model, recipe, 3).step(_classes(10))
    assert norms == [pytest.approx(0.5, rel=1e-4)]
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    moved = math.hypot(*(float((old - new).detach().norm()) for new, old in pairs))
    assert moved == pytest.approx(0.1 * 0.5, rel=1e-3)


def test_micro_batches_are_placed_one_by_one() -> None:
    placed: list[int] = []

    def place(tensor: torch.Tensor) -> torch.Tensor:
        placed.append(len(tensor))
        return tensor.clone()

    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters())
    training = Training(model, optimizer, Recipe(), ResolvedPlan(Plan(2)), device=CPU, place=place)
    cut = training.micro_batches(torch.randn(6, 6))
    next(cut)
    assert placed == [2]
    list(cut)
    assert placed == [2, 2, 2]


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 6)
        self.critic = nn.Linear(6, 1)


def _gan_step(training: Training, batch: Any) -> torch.Tensor:
    """Critic and generator in turn, from the training's public parts."""
    gan: Any = training.model
    real = batch
    fake = gan.generator(real[:, :2])
    critic_loss = gan.critic(fake.detach()).mean() - gan.critic(real).mean()
    training.backward(critic_loss)
    training.optimizer_step("critic")
    loss = -gan.critic(fake).mean()
    training.backward(loss)
    training.optimizer_step("generator")
    return critic_loss + loss


def _gan_by_hand(gan: _Gan, optimizers: Any, real: torch.Tensor) -> torch.Tensor:
    """The same under autocast, each forward in a region of its own."""
    gan.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fake = gan.generator(real[:, :2])
        critic_loss = gan.critic(fake.detach()).mean() - gan.critic(real).mean()
    critic_loss.backward()
    optimizers["critic"].step()
    optimizers["critic"].zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = -gan.critic(fake).mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    optimizers["generator"].step()
    return critic_loss + loss


def _gan_and_optimizers() -> tuple[_Gan, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(3)
    gan = _Gan()
    return gan, {
        "generator": torch.optim.Adam(gan.generator.parameters(), lr=0.01),
        "critic": torch.optim.SGD(gan.critic.parameters(), lr=0.1),
    }


def test_a_gan_under_autocast_runs_its_second_forward_with_the_updated_critic() -> None:
    (ours, our_optimizers), (theirs, their_optimizers) = (
        _gan_and_optimizers(),
        _gan_and_optimizers(),
    )
    recipe = Recipe(training_step=_gan_step)
    real = torch.randn(8, 6)
    with _in(BFLOAT16, ours, recipe, our_optimizers) as training:
        for _ in range(3):
            by_hand = _gan_by_hand(theirs, their_optimizers, real)
            assert torch.equal(training.step(real), by_hand)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda training, batch: None, "training_step.*None"),
        (lambda training, batch: batch, r"training_step.*\[8, 6\]"),
        (
            lambda training, batch: training.optimizer_step("other"),
            "'other'.*generator, critic",
        ),
    ],
)
def test_a_train_step_that_goes_wrong_gets_an_error_that_says_how(step: Any, message: str) -> None:
    gan, optimizers = _gan_and_optimizers()
    with pytest.raises(InvalidArgument, match=message):
        _training(gan, Recipe(training_step=step), 8, optimizers).step(torch.randn(8, 6))


FLOAT16, BFLOAT16 = {"precision.dtype": "float16"}, {"precision.dtype": "bfloat16"}


def _in(settings: Any, model: nn.Module, recipe: Recipe, optimizer: Any) -> Any:
    strategies = load_strategies(["precision"])
    plan = Plan(5, settings=settings)
    return Training(model, optimizer, recipe, ResolvedPlan(plan, strategies=strategies), device=CPU)


def test_float16_scales_the_loss_and_clips_what_was_unscaled() -> None:
    seen: list[float] = []
    model, exact, batch = _mlp(), _mlp(), _classes(10)
    _training(exact, CROSS_ENTROPY, 10).accumulate(batch)
    recipe = Recipe(
        criterion=nn.functional.cross_entropy,
        before_step=lambda model, optimizer: seen.append(_norm_of_gradients(model)),
    )
    with _in(FLOAT16, model, recipe, torch.optim.SGD(model.parameters(), lr=0.1)) as training:
        scale = training.scaler.get_scale()
        training.step(batch)
        assert training.scaler.get_scale() == scale
    assert seen == [pytest.approx(_norm_of_gradients(exact), rel=0.01)]
    assert training.scaler is None


@pytest.mark.parametrize("names", [[None], ["a", "b"], ["a", "again", "b"]])
def test_gradients_are_unscaled_by_the_scale_they_have(names: list[str | None]) -> None:
    """The first one overflows; were the scale halved before the second, that would move double."""
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    model = nn.ModuleList([a, b])
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=1.0) for n, m in (("a", a), ("b", b))}

    def training_step(training: Training, batch: Any) -> torch.Tensor:
        loss = a.weight.sum() * float("inf") + b.weight.sum() * 0.5
        training.backward(loss)
        for name in names:
            if name == "again":
                training.backward(a.weight.sum() * 0.25)
            training.optimizer_step("a" if name == "again" else name)
        return loss

    before = [module.weight.detach().clone() for module in (a, b)]
    with _in(FLOAT16, model, Recipe(training_step=training_step), optimizers) as training:
        scale = training.scaler.get_scale()
        training.step(torch.ones(1, 1))
        assert training.scaler.get_scale() == scale / 2
    moved = [float((old - m.weight.detach()).sum()) for old, m in zip(before, (a, b), strict=True)]
    assert moved == [0.25 if "again" in names else 0.0, 0.5]


def test_the_scale_is_updated_when_a_step_ends_though_gradients_are_left() -> None:
    gan, optimizers = _gan_and_optimizers()

    def training_step(training: Training, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = gan.critic(gan.generator(batch[:, :2])).sum() * float("inf")
        training.backward(loss)
        training.optimizer_step("generator")
        return loss

    with _in(FLOAT16, gan, Recipe(training_step=training_step), optimizers) as training:
        scale = training.scaler.get_scale()
        training.step(torch.randn(8, 6))
        assert training.scaler.get_scale() == scale / 2


def test_a_train_step_that_forgets_the_scaler_is_refused() -> None:
    def training_step(training: Training, batch: Any) -> torch.Tensor:
        loss = training.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        training.optimizer.step()  # type: ignore[union-attr]  # there is one
        return loss

    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters())
    training = _in(FLOAT16, model, Recipe(training_step=training_step), optimizer)
    with pytest.raises(InvalidArgument, match="gradient scaler"):
        training.step(torch.randn(2, 6))
    training.undo()


class _Recording(Plugin):
    """A strategy that writes down when it is applied and undone, and wraps what can be wrapped."""

    def __init__(self, name: str, phase: Any, told: list[str]) -> None:
        self.name, self.phase, self._told = name, phase, told

    @contextmanager
    def apply(self, training: Any, settings: Any, payloads: Any) -> Iterator[None]:
        self._told.append(f"{self.name} {dict(settings)} {dict(payloads)}")
        unwrap = training.wrap_forward(self._forward)
        unwrap_step = training.wrap_optimizer_step(self._step)
        try:
            yield
        finally:
            unwrap()
            unwrap_step()
            self._told.append(f"undo {self.name}")

    @contextmanager
    def _forward(self) -> Iterator[None]:
        self._told.append(f"{self.name} forward")
        yield

    def _step(self, update: Any) -> None:
        self._told.append(f"{self.name} update")
        update()


def test_strategies_are_applied_by_phase_with_their_own_settings_and_undone_backwards() -> None:
    told: list[str] = []
    strategies: Any = [_Recording("late", 2, told), _Recording("early", 0, told)]
    plan = Plan(4, settings={"late.x": 1, "early.y": 2, "lately.z": 3})
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters())
    training = Training(
        model,
        optimizer,
        CROSS_ENTROPY,
        ResolvedPlan(plan, {"early.y": "p"}, strategies),
        device=CPU,
    )
    assert told == ["early {'early.y': 2} {'early.y': 'p'}", "late {'late.x': 1} {}"]
    told.clear()
    with training:
        training.step(_classes(4))
    assert told == [
        "early forward",
        "late forward",
        "late update",
        "early update",
        "undo late",
        "undo early",
    ]
    training.undo()
    assert told[-1] == "undo early"
    with pytest.raises(InvalidArgument, match="ended"):
        training.step(_classes(4))


class _Broken(_Recording):
    """Its `apply` returns no context manager, or one that raises."""

    def __init__(self, applied: Any) -> None:
        super().__init__("second", 1, [])
        self.applied = applied

    def apply(self, training: Any, settings: Any, payloads: Any) -> Any:
        return self.applied


@contextmanager
def _raising() -> Iterator[None]:
    raise RuntimeError("not here")
    yield


@pytest.mark.parametrize(
    ("applied", "error", "words"),
    [
        (5, InvalidArgument, r"'second'.*context manager.*int"),
        (_raising(), RuntimeError, "not here"),
    ],
)
def test_strategies_already_applied_are_undone_where_a_later_one_is_broken(
    applied: Any, error: type[Exception], words: str
) -> None:
    told: list[str] = []
    strategies: Any = [_Recording("first", 0, told), _Broken(applied)]
    plan, model = Plan(1, settings={"first.x": 1, "second.x": 1}), _mlp()
    resolved = ResolvedPlan(plan, strategies=strategies)
    with pytest.raises(error, match=words):
        Training(model, torch.optim.SGD(model.parameters()), Recipe(), resolved, device=CPU)
    assert told[-1] == "undo first"


@pytest.mark.parametrize(("name", "other"), [("optimizer", None), ("model", nn.Linear(6, 5))])
def test_a_training_step_that_replaces_a_part_is_the_users_error(name: str, other: Any) -> None:
    model = _mlp()
    replaces: Any = lambda training, batch: setattr(training, name, other)  # noqa: E731
    training = _training(model, Recipe(training_step=replaces), 4)
    with pytest.raises(AttributeError, match=rf"training_step.*training\.{name}") as raised:
        training.step(_classes(4))
    assert is_users(raised.value)
    assert training.model is model
    training.model = nn.Linear(6, 5)  # the loop outside is the user's own


class _Island(nn.Module):
    """A layer that runs in float32 whatever surrounds it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        with torch.autocast("cpu", enabled=False):
            head: torch.Tensor = self.head(hidden.float().tanh())
        return head


def _island_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    with torch.autocast("cpu", enabled=False):
        return (output.square()).mean()


def _by_training(training: Any, batch: torch.Tensor, is_loss_too: bool = False) -> torch.Tensor:
    loss = training.loss(batch) if is_loss_too else _island_loss(training.model, batch)
    training.backward(loss)
    training.optimizer_step()
    return loss


def _by_hand(training: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: Any = _island_loss(training.model, batch)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss


def _by_closure(training: Any, batch: torch.Tensor) -> torch.Tensor:
    def closure() -> torch.Tensor:
        loss: Any = _island_loss(training.model, batch)
        loss.backward()
        return loss

    loss: torch.Tensor = training.optimizer.step(closure)
    training.optimizer.zero_grad()
    return loss


def _by_functional_gradients(training: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = _island_loss(training.model, batch)
    parameters = list(training.model.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.detach()
    training.optimizer_step()
    return loss


class _Multiplying(torch.optim.SGD):
    """Notes the type of a matrix product in its step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: set[torch.dtype] = set()

    def step(self, closure: Any = None) -> Any:
        self.seen.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        loss = super().step(closure)
        self.seen.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return loss


@pytest.mark.parametrize(
    "training_step",
    [
        _by_training,
        partial(_by_training, is_loss_too=True),
        _by_hand,
        _by_closure,
        _by_functional_gradients,
    ],
)
def test_backward_and_update_of_a_training_step_leave_autocast(training_step: Any) -> None:
    torch.manual_seed(1)
    batch = torch.randn(5, 6)  # one micro-batch of the plan

    def trained(recipe: Recipe) -> tuple[list[torch.Tensor], set[torch.dtype]]:
        model = _Island()
        optimizer = _Multiplying(model.parameters())
        with _in(BFLOAT16, model, recipe, optimizer) as training:
            training.step(batch)
        return [parameter.detach() for parameter in model.parameters()], optimizer.seen

    wanted, _ = trained(Recipe(loss_fn=_island_loss))
    own = Recipe(loss_fn=_island_loss, training_step=training_step)
    found, types = trained(own)
    assert types == {torch.float32}
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_loop_of_ones_own_may_step_within_the_context() -> None:
    model, batch = _Island(), torch.ones(8, 6)
    optimizer = _Multiplying(model.parameters())
    with _in(BFLOAT16, model, Recipe(loss_fn=_island_loss), optimizer) as training:
        with training.context():
            training.backward(_island_loss(model, batch))
            training.optimizer_step()
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")
    assert optimizer.seen == {torch.float32}


def test_autocast_of_the_users_own_around_a_backward_stays() -> None:
    seen: list[bool] = []

    def training_step(training: Any, batch: torch.Tensor) -> torch.Tensor:
        loss: Any = _island_loss(training.model, batch)
        loss.register_hook(lambda gradient: seen.append(torch.is_autocast_enabled("cpu")))
        with torch.autocast("cpu", dtype=torch.float16):
            training.backward(loss)
        assert torch.is_autocast_enabled("cpu")
        return torch.as_tensor(loss)

    model = _Island()
    optimizer = torch.optim.SGD(model.parameters())
    with _in(BFLOAT16, model, Recipe(training_step=training_step), optimizer) as training:
        training.step(torch.ones(8, 6))
    assert seen == [True]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_float16_steps_optimizers_without_a_gradient(clip: float | None, is_sparse: bool) -> None:
    model: Any = nn.ModuleDict(
        {"a": nn.Embedding(5, 4, sparse=is_sparse), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)}
    )
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in model.items()}

    def training_step(training: Training, batch: Any) -> torch.Tensor:
        names = next(turns)
        loss: torch.Tensor = sum(
            model[name](batch if name == "a" else torch.ones(2, 4)).square().mean()
            for name in names
        ) + torch.zeros((), requires_grad=True)
        training.backward(loss)
        training.optimizer_step()
        return loss

    turns = iter([("b",), ("a", "b"), (), ("a",)])
    recipe = Recipe(training_step=training_step, clip_grad_norm=None if is_sparse else clip)
    with _in(FLOAT16, model, recipe, optimizers) as training:
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(4):
            assert training.step(torch.tensor([0, 1])).isfinite()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [True, True, True, False, False]


class _CountedWatch(BatchWatch):
    looks = 0

    def look(self, *given: Any, **named: Any) -> None:
        self.looks += 1
        super().look(*given, **named)


def _of_micro_batches(training: Training, batch: Any) -> torch.Tensor:
    for micro_batch, weight in training.micro_batches(batch):
        loss = training.loss(micro_batch)
        training.backward(loss, weight)
    training.optimizer_step()
    return loss


@pytest.mark.parametrize("step", [None, _of_micro_batches])
def test_a_batch_is_looked_at_once_in_a_step(step: Any) -> None:
    """Of several ranks all gather at each look."""
    model, watch = _mlp(), _CountedWatch(Plan(4), {"batch": "float32[4, 6]"})
    recipe = Recipe(loss_fn=lambda model, batch: model(batch).mean(), training_step=step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = ResolvedPlan(Plan(4))
    with Training(model, optimizer, recipe, plan, device=CPU, watch=watch) as training:
        training.step(torch.randn(4, 6))
        assert watch.looks == 1
        for _ in training.micro_batches(torch.randn(4, 6)):
            pass
        assert watch.looks == 2
