"""What every integration shares: what of a plan goes to the model, and what cannot."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from autofit import InvalidArgument, Plan
from autofit.integrations.applied import library, on_model, replaced
from autofit.integrations.loader_batches import longest_samples
from autofit.plan import ResolvedPlan
from autofit.strategy import TrainingView
from tests.plugin import Changing


def acted(act: Callable[[TrainingView], Any], model: nn.Module) -> Any:
    """Apply a plan of somebody else's strategy, which does this to a training."""
    plan = ResolvedPlan(Plan(1, settings={"plugin.on": True}), {}, [Changing(act)])
    return on_model(plan, model, None)


@pytest.fixture
def entered() -> list[bool]:
    return []


@pytest.fixture
def wrap(entered: list[bool]) -> Callable[[TrainingView], Any]:
    """Has each forward noted in `entered`."""

    @contextmanager
    def noted() -> Iterator[None]:
        entered.append(torch.is_grad_enabled())
        yield

    def act(training: TrainingView) -> None:
        training.wrap_forward(noted)

    return act


def test_a_replaced_attribute_is_put_back_even_if_it_was_none() -> None:
    model: Any = nn.Linear(2, 2)
    model.note = None
    with replaced(model, "note", "another"), replaced(model, "further", "new"):
        assert (model.note, model.further) == ("another", "new")
    assert model.note is None
    assert not hasattr(model, "further")


def test_a_forward_context_is_entered_around_the_models_own_forward(
    wrap: Any, entered: list[bool]
) -> None:
    model = nn.Linear(2, 2)
    with acted(wrap, model):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert entered == [True]
    assert "forward" not in vars(model)


def test_copies_of_a_covered_model_run_their_own_weights(wrap: Any, entered: list[bool]) -> None:
    """As an average of the weights that a trainer keeps; a pickled one is without the contexts."""
    model, ones = nn.Linear(2, 2), torch.ones(1, 2)
    signature = inspect.signature(model.forward)
    with acted(wrap, model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert inspect.signature(model.forward) == signature
    before = model(ones)
    nn.init.zeros_(model.weight)
    for each, contexts_entered in zip(copies, ([True], []), strict=True):
        entered.clear()
        torch.testing.assert_close(each(ones), before)
        assert entered == contexts_entered


def replace_optimizer(training: TrainingView) -> None:
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)


def scale(training: TrainingView) -> None:
    training.scaler = torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (replace_optimizer, "replaces training.optimizer"),
        (
            lambda training: training.wrap_optimizer_step(lambda step: step()),
            "needs training.wrap_optimizer_step",
        ),
        (scale, "replaces training.scaler"),
    ],
)
def test_what_only_a_training_of_autofits_can_do_is_refused(
    act: Callable[[TrainingView], Any], words: str
) -> None:
    with (
        pytest.raises(InvalidArgument, match=f"'plugin' {words}.*report.apply"),
        acted(act, nn.Linear(2, 2)),
    ):
        pass


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(InvalidArgument, match="pip install no_such_library"):
        library("no_such_library.part", "nor_this_one")


class Counted(torch.utils.data.Dataset[Any]):
    """Counts the samples that are asked of it; each of them draws a random number."""

    def __init__(self, make: Callable[[int], Any], size: int = 3000) -> None:
        self.make, self.size, self.asked = make, size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> Any:
        torch.rand(1)
        self.asked += 1
        return self.make(place)


def test_images_are_not_decoded_to_be_measured() -> None:
    images = Counted(lambda place: (torch.zeros(3, 8, 8), place % 10))
    batch = longest_samples(torch.utils.data.DataLoader(images, 8))
    assert batch.batch[0].shape == (8, 3, 8, 8)
    assert images.asked < 100


@pytest.mark.parametrize(
    "tokens", [lambda length: [1] * length, torch.ones, lambda length: "a" * length]
)
def test_the_one_longest_of_many_sequences_is_found(tokens: Callable[[int], Any]) -> None:
    texts = Counted(lambda place: {"text": tokens(50 if place == 2001 else 7), "label": 1})
    loader = torch.utils.data.DataLoader(
        texts, 2, collate_fn=lambda chosen: torch.tensor([len(one["text"]) for one in chosen])
    )
    assert longest_samples(loader).batch.tolist() == [50, 7]
    assert texts.asked == 3000


def test_looking_for_the_longest_ends() -> None:
    texts = Counted(lambda place: torch.ones(7 + place % 2))
    states, loader = torch.get_rng_state(), torch.utils.data.DataLoader(texts, 1)
    with pytest.warns(UserWarning, match=r"of 3000 .* sample_batch="):
        batch = longest_samples(loader, seconds=0.0)
    assert batch.batch.shape[1] in (7, 8)
    assert texts.asked < 3000
    assert torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize("nothing", [[], torch.utils.data.DataLoader([], batch_size=2)])  # type: ignore[arg-type]  # likewise
def test_no_data_is_an_error(nothing: Any) -> None:
    with pytest.raises(InvalidArgument, match="sample_batch="):
        longest_samples(nothing)
