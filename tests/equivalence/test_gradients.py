"""How far two passes over the same samples are apart, on models of every kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from autofit.equivalence.comparison import (
    NotRepeatable,
    StepTrace,
    Tolerance,
    compare,
    step_without_update,
)
from autofit.memory.tracer import MemoryTracer
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.strategy import Comparison
from autofit.training.loss import Recipe
from autofit.training.training import Training

CPU = torch.device("cpu")


def _pass(model: nn.Module, batch: Any, micro_batch: int, **recipe: Any) -> StepTrace:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(
        model, optimizer, Recipe(**recipe), ResolvedPlan(Plan(micro_batch)), device=CPU
    )
    return step_without_update(training, batch, seed=0)


def _split_against_whole(model: nn.Module, batch: Any, **recipe: Any) -> Comparison:
    return compare(_pass(model, batch, 5, **recipe), _pass(model, batch, 3, **recipe))


def _body(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 4))


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 3, 1, 1, 2])


@pytest.mark.parametrize(
    "middle",
    [
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.LayerNorm(8),
        nn.BatchNorm1d(8).eval(),
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2), nn.Flatten()),
    ],
)
def test_means_over_independent_samples_are_equal_dropout_or_not(middle: nn.Module) -> None:
    batch = (X, LABELS)
    found = _split_against_whole(_body(middle), batch, criterion=nn.functional.cross_entropy)
    assert found.equal
    assert found.modules == ()
    assert found.gradient < 1e-5


def test_a_loss_that_sets_training_mode_draws_no_random_numbers_either() -> None:
    """As `transformers.Trainer` does, and many a loss function of users."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        model.train()
        model.eval().train()
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)

    model = _body(nn.Dropout(0.5))
    attributes = [set(vars(module)) for module in model.modules()]
    assert _split_against_whole(model, (X, LABELS), loss_fn=loss_fn).equal
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert model.train(False).training is False


@pytest.mark.parametrize(
    "recipe",
    [
        {"criterion": nn.CrossEntropyLoss(reduction="sum")},
        {"criterion": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 2.0, 0.1]))},
        {"criterion": nn.CrossEntropyLoss(ignore_index=1)},
        {"criterion": lambda y, t: nn.functional.cross_entropy(y @ y.T, torch.arange(len(y)))},
    ],
    ids=["summed", "weighted", "masked", "contrastive"],
)
def test_losses_that_are_no_mean_over_samples_show(recipe: dict[str, Any]) -> None:
    found = _split_against_whole(_body(nn.Tanh()), (X, LABELS), **recipe)
    assert not found.equal
    assert found.gradient > 0.01
    assert found.modules


def test_recurrent_dropout_is_switched_off_and_put_back() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    model = Recurrent()
    assert _split_against_whole(model, torch.randn(5, 3, 6)).equal
    assert model.lstm.dropout == 0.5
    assert model.lstm.training


def test_sparse_and_complex_gradients_are_compared_too() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(9, 4, sparse=True)
            self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.table(ids) * self.phase).abs()

    ids = torch.arange(5)
    assert _split_against_whole(Odd(), ids).equal
    turned = Odd()
    with torch.no_grad():
        turned.phase.mul_(1j)
    apart = compare(_pass(Odd(), ids, 5), _pass(turned, ids, 5))
    assert apart.loss < 1e-6
    assert apart.gradient > 0.1


def test_a_gradient_that_only_one_pass_has_counts() -> None:
    first = StepTrace(1.0, {"a.weight": torch.ones(4)}, tolerance=1e-3)
    second = StepTrace(1.0, {"a.weight": torch.ones(4), "b.weight": torch.ones(4)}, 1e-3)
    assert compare(first, second).gradient == pytest.approx(1.0)
    assert compare(first, second).modules == ("b",)
    assert compare(second, first).gradient == pytest.approx(2**-0.5)
    own = StepTrace(1.0, {"scale": torch.ones(1)}, 1e-3)
    assert compare(own, StepTrace(1.0, {}, 1e-3)).modules == ("scale",)


@pytest.mark.parametrize("shape", [(3 * 2**20,), (3, 2**20), (2**20, 3), (2, 3, 2**19)])
def test_a_large_gradient_is_compared_in_little_memory(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape)
    first, second = (StepTrace(1.0, {"w": each}) for each in (gradient, gradient * 1.001))
    tracer = MemoryTracer()
    with tracer:
        found = compare(first, second, Tolerance())
    assert tracer.allocator.peak_allocated_bytes < 3 * gradient.nbytes
    assert found.gradient == pytest.approx(1e-3, rel=1e-3)


def test_what_is_not_a_number_in_a_large_gradient_equals_itself() -> None:
    gradient = torch.randn(3 * 2**20)
    gradient[[5, -5]] = torch.tensor([math.nan, math.inf])
    other = gradient.clone()
    first, second = (StepTrace(1.0, {"w": each}) for each in (gradient, other))
    assert compare(first, second, Tolerance()).equal
    other[7] += 1
    norm = float(gradient.nan_to_num(0, 0, 0).norm())
    assert compare(first, second).gradient == pytest.approx(1 / norm, rel=1e-3)
    other[5] = 1.0
    assert not math.isfinite(compare(first, second).gradient)


def test_a_value_may_differ_by_some_times_what_it_does_between_runs_and_no_more() -> None:
    def step(large: float, small: float, calls: int = 1) -> StepTrace:
        gradients = {"large": large * torch.ones(4), "small": 1e-3 * small * torch.ones(4)}
        return StepTrace(1.0, gradients, state={"calls": calls, "time": small})

    first, tolerance = step(1.0, 1.0), Tolerance(most=0.05)
    assert set(tolerance.differences(first, step(1.0, 1.5))) == {"the gradient of small", "time"}
    tolerance.learn(first, step(1.0, 1.5))
    assert compare(first, step(1.001, 4.0), tolerance).equal
    assert compare(first, step(1.0, 9.0), tolerance).differences == ("the gradient of small",)
    assert compare(first, step(1.1, 1.0), tolerance).differences == ("the gradient of large",)
    assert compare(first, step(1.0, 1.0, calls=2), tolerance).differences == ("calls",)
    with pytest.raises(NotRepeatable, match="gradients"):
        tolerance.learn(first, step(1.1, 1.0))


def test_a_gradient_that_is_zero_but_for_roundings_may_differ_by_those_of_all() -> None:
    first, second, third = (
        StepTrace(1.0, {"large": torch.ones(4), "zero": tiny * torch.ones(4)})
        for tiny in (0.0, 1e-7, 1e-5)
    )
    assert not Tolerance(1e-3, roundings=10).differences(first, second)
    assert set(Tolerance(1e-3, roundings=10).differences(first, third)) == {"the gradient of zero"}
    assert Tolerance(1e-3).differences(first, second)


def test_losses_that_are_not_a_number_agree() -> None:
    nan, number = (StepTrace(loss, {"w": torch.ones(3)}) for loss in (math.nan, 1.0))
    for tolerance in (None, Tolerance()):
        assert compare(nan, nan, tolerance).equal
        assert not compare(nan, number, tolerance).equal
        assert not compare(number, nan, tolerance).equal


def test_the_tolerance_is_what_the_coarsest_type_explains() -> None:
    fine, coarse = nn.Linear(6, 8), nn.Linear(8, 4).bfloat16()
    model = nn.ModuleList([nn.Linear(6, 8).double(), fine])
    step = _pass(model, X, 5, loss_fn=lambda model, batch: fine(batch).mean())
    assert step.tolerance == pytest.approx(2**-23 * 8192)
    mixed = nn.Sequential(fine, coarse)
    step = _pass(mixed, X, 5, loss_fn=lambda m, b: coarse(fine(b).bfloat16()).float().mean())
    assert step.tolerance == pytest.approx(2**-7 * 4)


def _in_bfloat16(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_the_users_own_autocast_explains_its_roundings_and_no_more() -> None:
    batch = (X, LABELS)
    found = _split_against_whole(_body(nn.Tanh()), batch, loss_fn=_in_bfloat16)
    assert found.gradient > 1e-3
    assert found.equal
    normalized = _split_against_whole(_body(nn.BatchNorm1d(8)), batch, loss_fn=_in_bfloat16)
    assert not normalized.equal
    assert normalized.modules == ("1",)


def test_float16_is_compared_at_a_scale_that_does_not_overflow() -> None:
    class Steep(nn.Module):
        """Its activations' gradients overflow float16 at the usual first scale of 2**16."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 40 * self.second(self.first(x)).float().sum(1)

    model = Steep()
    plan = Plan(5, settings={"precision.dtype": "float16"})
    optimizer = torch.optim.SGD(model.parameters())
    strategies = load_strategies(["precision"])
    with Training(
        model, optimizer, Recipe(), ResolvedPlan(plan, strategies=strategies), device=CPU
    ) as training:
        half = step_without_update(training, X, seed=0)
        assert training.scaler is not None
        assert training.scaler.get_scale() < 2**16
    found = compare(_pass(model, X, 5), half)
    assert 0 < found.gradient < 0.01


def test_gradients_are_compared_before_they_are_clipped_and_shown_to_before_step() -> None:
    """A sum differs from a mean by its length alone, which clipping takes away."""

    def never(model: nn.Module, optimizer: Any) -> None:
        raise AssertionError

    criterion = nn.CrossEntropyLoss(reduction="sum")
    more: dict[str, Any] = {"clip_grad_norm": 1e-3, "before_step": never}
    found = _split_against_whole(_body(nn.Tanh()), (X, LABELS), criterion=criterion, **more)
    assert found.gradient > 0.1
