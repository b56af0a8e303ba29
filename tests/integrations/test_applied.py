"""What every integration shares: what of a plan goes to the model, and what cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidRequest
from autofit.integrations.applied import library, on_model
from autofit.integrations.workloads import longest_batch
from autofit.plan import Dimension, Plan, ResolvedPlan
from autofit.strategy import Context, Numerics, Phase, TrainingView


class Foreign:
    """A strategy of somebody else's, which does to a training what a test says."""

    name = "foreign"
    phase = Phase.STEP
    numerics = Numerics.EXACT

    def __init__(self, act: Callable[[TrainingView], Any]) -> None:
        self._act = act

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {"foreign.on": Dimension([False, True])}

    @contextmanager
    def apply(self, training: TrainingView, settings: Any, payloads: Any) -> Iterator[None]:
        self._act(training)
        yield

    def describe(self, settings: Any, payloads: Any) -> list[str]:
        return []


def resolved(act: Callable[[TrainingView], Any]) -> ResolvedPlan:
    return ResolvedPlan(Plan(1, settings={"foreign.on": True}), {}, [Foreign(act)])


def test_a_forward_context_is_entered_around_the_models_own_forward() -> None:
    model, entered = nn.Linear(2, 2), []

    @contextmanager
    def counted() -> Iterator[None]:
        entered.append(torch.is_grad_enabled())
        yield

    def wrap(training: TrainingView) -> None:
        training.wrap_forward(counted)

    with on_model(resolved(wrap), model, None):
        model(torch.ones(1, 2))
        assert entered == [True]
    model(torch.ones(1, 2))
    assert entered == [True]
    assert "forward" not in vars(model)


def replace_optimizer(training: TrainingView) -> None:
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)


def wrap_step(training: TrainingView) -> None:
    training.wrap_optimizer_step(lambda step: step())


def scale(training: TrainingView) -> None:
    training.scaler = torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (replace_optimizer, "replaces the optimizer"),
        (wrap_step, "wraps the optimizer's update"),
        (scale, "scales the loss"),
    ],
)
def test_what_only_a_training_of_autofits_can_do_is_refused(
    act: Callable[[TrainingView], Any], words: str
) -> None:
    with (
        pytest.raises(InvalidRequest, match=f"'foreign' {words}.*report.apply"),
        on_model(resolved(act), nn.Linear(2, 2), None),
    ):
        pass


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(InvalidRequest, match="pip install no_such_library"):
        library("no_such_library.part", "nor_this_one")


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.ones(length) for length in (2, 2, 5, 5, 3, 3)])


def test_of_streamed_data_the_longest_of_the_first_batches_is_taken() -> None:
    loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
    assert longest_batch(loader).shape == (2, 5)
    assert longest_batch([torch.ones(1, 2), torch.ones(1, 3)]).shape == (1, 3)


def test_a_data_set_of_fewer_samples_than_a_batch_is_repeated() -> None:
    samples: Any = [torch.ones(4), torch.ones(4)]
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=3)
    assert longest_batch(loader).shape == (3, 4)


@pytest.mark.parametrize("nothing", [[], torch.utils.data.DataLoader([], batch_size=2)])  # type: ignore[arg-type]  # likewise
def test_no_data_is_an_error(nothing: Any) -> None:
    with pytest.raises(InvalidRequest, match="give sample_batch="):
        longest_batch(nothing)
