"""The suite for strategies lets an honest one pass and names what each kind of breach did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from autofit import Dimension, Numerics, Workload
from autofit.plan import Scalar
from autofit.strategy import Context, TrainingView, undone
from autofit.testing import NotConformant, check_strategy
from autofit.testing.conformance import attention
from tests.plugin import Changing, Plugin

SETTING = "plugin.on"


def perceptron() -> Workload:
    """A training that takes little time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("body", torch.nn.Linear(8, 8))
    model.add_module("head", torch.nn.Linear(8, 4))
    batch = torch.randn(4, 8), torch.randn(4, 4)
    return Workload(model, batch, criterion=torch.nn.functional.mse_loss)


def checked(strategy: Any) -> int:
    return check_strategy(strategy, workloads=[perceptron])


def head_of(training: TrainingView) -> Any:
    return training.model.get_parameter("head.weight")


@contextmanager
def wraps_the_forward(training: TrainingView) -> Iterator[None]:
    with undone(training.wrap_forward(nullcontext)):
        yield


@contextmanager
def removes_its_hooks(training: TrainingView) -> Iterator[None]:
    """Of each kind that a tensor takes."""
    with (
        head_of(training).register_hook(lambda gradient: gradient),
        head_of(training).register_post_accumulate_grad_hook(lambda parameter: None),
    ):
        yield


@pytest.mark.parametrize("change", [wraps_the_forward, removes_its_hooks])
def test_an_honest_strategy_passes(change: Any) -> None:
    assert checked(Changing(change)) == 2


def leaves_an_attribute(training: TrainingView) -> None:
    training.model.__dict__["scaled"] = True


def leaves_a_hook(training: TrainingView) -> None:
    training.model.register_forward_pre_hook(lambda *_: None)


def leaves_a_hook_on_a_gradient(training: TrainingView) -> None:
    head_of(training).register_post_accumulate_grad_hook(lambda parameter: None)


@contextmanager
def forgets_when_the_body_raises(training: TrainingView) -> Iterator[None]:
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


def replaces_a_parameter(training: TrainingView) -> None:
    head: Any = training.model.get_submodule("head")
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def multiplies_gradients(factor: float, numerics: Numerics = Numerics.EXACT) -> Changing:
    @contextmanager
    def change(training: TrainingView) -> Iterator[None]:
        with head_of(training).register_hook(lambda gradient: gradient * factor):
            yield

    strategy = Changing(change)
    strategy.numerics = numerics
    return strategy


class Accumulating:
    """Counts the micro-batches of a step, of which it lets a change know."""

    def __init__(self, training: TrainingView) -> None:
        self.training, self.count, self.is_last = training, 0, False

    def watched(self, stack: ExitStack) -> None:
        stack.enter_context(undone(self.training.before_micro_batch(self.notice)))
        stack.enter_context(undone(self.training.wrap_optimizer_step(self.begin_anew)))

    def notice(self, is_last: bool) -> None:
        self.count, self.is_last = self.count + 1, is_last

    def begin_anew(self, step: Callable[[], None]) -> None:
        step()
        self.count = 0


def micro_batches_counted(
    change: Callable[[Accumulating, ExitStack], None], numerics: Numerics
) -> Changing:
    @contextmanager
    def changed(training: TrainingView) -> Iterator[None]:
        with ExitStack() as stack:
            seen = Accumulating(training)
            change(seen, stack)
            seen.watched(stack)
            yield

    strategy = Changing(changed)
    strategy.numerics = numerics
    return strategy


def drops_the_last_micro_batch(seen: Accumulating, stack: ExitStack) -> None:
    """As a hook of a gradient does that is removed too early."""

    def dropped(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0 if seen.is_last and seen.count > 1 else gradient

    parameters: Any = seen.training.model.parameters()
    for parameter in parameters:
        stack.enter_context(parameter.register_hook(dropped))


def keeps_only_the_last_micro_batch(seen: Accumulating, stack: ExitStack) -> None:
    """As `zero_grad` before every forward does."""

    def emptied(is_last: bool) -> None:
        seen.training.model.zero_grad()

    stack.enter_context(undone(seen.training.before_micro_batch(emptied)))


def averages_again(seen: Accumulating, stack: ExitStack) -> None:
    """Divides gradients by the two micro-batches, whose losses are weighted already."""

    def divided(gradient: torch.Tensor) -> torch.Tensor:
        return gradient if seen.is_last and seen.count == 1 else gradient / 2

    parameters: Any = seen.training.model.parameters()
    for parameter in parameters:
        stack.enter_context(parameter.register_hook(divided))


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize(
    "change", [drops_the_last_micro_batch, keeps_only_the_last_micro_batch, averages_again]
)
def test_a_breach_with_accumulation_alone_is_named(change: Any, numerics: Numerics) -> None:
    with pytest.raises(NotConformant, match=r"differs.* with accumulation$"):
        checked(micro_batches_counted(change, numerics))


@pytest.mark.parametrize("numerics", Numerics)
def test_a_strategy_that_counts_micro_batches_and_changes_nothing_passes(numerics: Any) -> None:
    assert checked(micro_batches_counted(lambda seen, stack: None, numerics)) == 2


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_value_is_tried_in_the_ways_that_it_allows(accumulates: bool) -> None:
    steps: list[int] = []

    @contextmanager
    def counted(training: TrainingView) -> Iterator[None]:
        steps.append(0)

        def count(is_last: bool) -> None:
            steps[-1] += 1

        with undone(training.before_micro_batch(count)):
            yield

    strategy = Offering({SETTING: Dimension([False, True], accumulation={True: accumulates})})
    strategy.change = counted
    assert checked(strategy) == 2
    assert max(steps) == (6 if accumulates else 3)


class ChangesTheFirstValue(Plugin):
    @contextmanager
    def rounded(self, training: TrainingView) -> Iterator[None]:
        with undone(training.wrap_forward(lambda: torch.autocast("cpu", dtype=torch.bfloat16))):
            yield

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        return self.rounded(training)


class Offering(Changing):
    """Offers what a test says, and keeps the values that it described."""

    def __init__(self, dimensions: dict[str, Dimension]) -> None:
        super().__init__(wraps_the_forward)
        self.offered, self.described = dimensions, list[Scalar]()

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return self.offered

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        self.described.append(settings[SETTING])
        return super().describe(settings, payloads)


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (Changing(leaves_an_attribute), "model keys"),
        (Changing(leaves_a_hook), "_forward_pre_hooks"),
        (Changing(leaves_a_hook_on_a_gradient), "_post_accumulate_grad_hooks"),
        (Changing(forgets_when_the_body_raises), "raises.*cudnn.benchmark"),
        (Changing(replaces_a_parameter), "head.weight"),
        (multiplies_gradients(1.001), "gradient.*head.weight"),
        (multiplies_gradients(1 + 1e-6), "gradient.*head.weight"),
        (ChangesTheFirstValue(), "'plugin.on': False.*loss"),
        (Plugin(), "describe"),  # nothing
        (
            Offering({SETTING: Dimension([False, True], payloads={True: torch.float32})}),
            "plugin.on.*JSON",
        ),
        (Offering({}), "workloads"),
        (Offering({SETTING: Dimension([False])}), "workloads"),
    ],
    ids=[
        "attribute",
        "hook",
        "hook on a gradient",
        "raises",
        "parameter",
        "gradients",
        "roundings",
        "first value",
        "lines",
        "payload",
        "offers nothing",
        "offers no choice",
    ],
)
def test_a_breach_is_named(strategy: Plugin, complaint: str) -> None:
    with pytest.raises(NotConformant, match=complaint):
        checked(strategy)


def test_a_long_setting_is_tried_at_both_ends_and_in_between() -> None:
    strategy = Offering({SETTING: Dimension(range(13))})
    assert checked(strategy) == 6
    assert strategy.described == [0, 1, 4, 7, 9, 12]


@pytest.mark.slow
def test_a_buffer_that_holds_infinities_is_no_rounding() -> None:
    strategy = multiplies_gradients(1.0, Numerics.ROUNDING)
    assert check_strategy(strategy, workloads=[attention]) == 2


def test_roundings_are_allowed_where_they_are_announced() -> None:
    assert checked(multiplies_gradients(1 + 1e-6, Numerics.ROUNDING)) == 2
