"""The suite for strategies lets an honest one pass and names what each kind of breach did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from autofit.plan import Dimension, Scalar
from autofit.strategy import Context, Numerics, TrainingView
from autofit.testing import NotConformant, check_strategy
from autofit.testing.conformance import attention
from autofit.training.workload import Workload
from tests.plugin import Plugin

SETTING = "scaling.factor"


def perceptron() -> Workload:
    """A training that takes little time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("body", torch.nn.Linear(8, 8))
    model.add_module("head", torch.nn.Linear(8, 4))
    batch = torch.randn(4, 8), torch.randn(4, 4)
    return Workload(model, batch, criterion=torch.nn.functional.mse_loss)


class Scaling(Plugin):
    """Multiplies every loss by a power of two and every gradient back: exact, and takes it back."""

    name = "scaling"

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {SETTING: Dimension([1, 4], payloads={4: {"shift": 2}})}

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        return nullcontext() if settings[SETTING] == 1 else self.change(training)

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        return [] if settings[SETTING] == 1 else ["loss = loss * 4 / 4"]

    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        unwrap = training.wrap_forward(nullcontext)
        try:
            yield
        finally:
            unwrap()


class LeavesAnAttribute(Scaling):
    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        training.model.__dict__["scaled"] = True
        yield


class LeavesAHook(Scaling):
    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        training.model.register_forward_pre_hook(lambda *_: None)
        yield


class ForgetsWhenTheBodyRaises(Scaling):
    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        yield
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


class ReplacesAParameter(Scaling):
    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        head = training.model.get_submodule("head")
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # type: ignore[operator]  # a Linear
        yield


class ChangesGradients(Scaling):
    factor = 1.001

    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        weight: Any = training.model.get_parameter("head.weight")
        handle = weight.register_hook(lambda gradient: gradient * self.factor)
        try:
            yield
        finally:
            handle.remove()


class RemovesItsHooks(Scaling):
    """Registers each kind of hook that a tensor takes, and removes it."""

    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        weight: Any = training.model.get_parameter("head.weight")
        handles = [
            weight.register_hook(lambda gradient: gradient),
            weight.register_post_accumulate_grad_hook(lambda parameter: None),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class LeavesAHookOnAGradient(Scaling):
    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        weight: Any = training.model.get_parameter("head.weight")
        weight.register_post_accumulate_grad_hook(lambda parameter: None)
        yield


class ChangesTheFirstValue(Scaling):
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        return self.change(training)

    @contextmanager
    def change(self, training: TrainingView) -> Iterator[None]:
        unwrap = training.wrap_forward(lambda: torch.autocast("cpu", dtype=torch.bfloat16))
        yield
        unwrap()


class DescribesNothing(Scaling):
    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        return []


class HasAPayloadThatIsNoJson(Scaling):
    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {SETTING: Dimension([1, 4], payloads={4: torch.float32})}


def test_an_honest_strategy_passes() -> None:
    assert check_strategy(Scaling(), workloads=[perceptron]) == 2
    assert check_strategy(RemovesItsHooks(), workloads=[perceptron]) == 2


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (LeavesAnAttribute(), "model keys"),
        (LeavesAHook(), "_forward_pre_hooks"),
        (LeavesAHookOnAGradient(), "_post_accumulate_grad_hooks"),
        (ForgetsWhenTheBodyRaises(), "raises.*cudnn.benchmark"),
        (ReplacesAParameter(), "head.weight"),
        (ChangesGradients(), "gradient.*head.weight"),
        (ChangesTheFirstValue(), "'scaling.factor': 1.*loss"),
        (DescribesNothing(), "describe"),
        (HasAPayloadThatIsNoJson(), "scaling.factor.*JSON"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Scaling) else "",
)
def test_a_breach_is_named(strategy: Scaling, complaint: str) -> None:
    with pytest.raises(NotConformant, match=complaint):
        check_strategy(strategy, workloads=[perceptron])


class HasManyValues(Scaling):
    tried: list[Scalar]

    def __init__(self) -> None:
        self.tried = []

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {SETTING: Dimension(range(1, 14))}

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        self.tried.append(settings[SETTING])
        return super().describe(settings, payloads)


def test_a_long_setting_is_tried_at_both_ends_and_in_between() -> None:
    strategy = HasManyValues()
    assert check_strategy(strategy, workloads=[perceptron]) == 6
    assert strategy.tried == [1, 2, 5, 8, 10, 13]


@pytest.mark.slow
def test_a_buffer_that_holds_infinities_is_no_rounding() -> None:
    strategy = ChangesGradients()
    strategy.factor, strategy.numerics = 1.0, Numerics.ROUNDING
    assert check_strategy(strategy, workloads=[attention]) == 2


def test_roundings_are_allowed_where_they_are_announced() -> None:
    strategy = ChangesGradients()
    strategy.factor, strategy.numerics = 1 + 1e-6, Numerics.ROUNDING
    assert check_strategy(strategy, workloads=[perceptron]) == 2
    strategy.numerics = Numerics.EXACT
    with pytest.raises(NotConformant, match=r"gradient.*head\.weight"):
        check_strategy(strategy, workloads=[perceptron])


@pytest.mark.parametrize("offered", [{}, {SETTING: Dimension([1])}])
def test_a_strategy_that_had_nothing_to_choose_was_not_tried(
    offered: dict[str, Dimension], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaling, "dimensions", lambda self, context: offered)
    with pytest.raises(NotConformant, match="workloads"):
        check_strategy(Scaling(), workloads=[perceptron])
