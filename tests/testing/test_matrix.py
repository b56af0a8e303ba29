"""The suite of usages lets an honest strategy pass, and names where another trains otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autofit.errors import Unsupported
from autofit.plan import Dimension
from autofit.strategy import Context, Numerics, TrainingView, undone
from autofit.testing import Cell, NotConformant, Usage, check_usages, usage_table, usages
from tests.plugin import Changing, Plugin

BY_NAME = {usage.name: usage for usage in usages}
FEW = [BY_NAME[name] for name in ("unused branch", "several optimizers")]


def test_every_usage_trains_in_plain_pytorch_and_repeats() -> None:
    """With a strategy that does nothing each training is compared with itself, to the bit."""
    cells = check_usages(Plugin())
    assert [cell.usage for cell in cells] == [usage.name for usage in usages]
    assert {cell.outcome for cell in cells} == {"equal"}


@contextmanager
def drops_a_gradient(training: TrainingView) -> Iterator[None]:
    """Of one bias, which is little of all."""
    bias: Any = training.model.get_parameter("blocks.0.mlp.0.bias")
    with bias.register_hook(torch.zeros_like):
        yield


@contextmanager
def keeps_stale_weights(training: TrainingView) -> Iterator[None]:
    """As a cache does: forwards compute with the weights of the first."""
    weight: Any = training.model.get_parameter("norm.weight")
    kept = weight.detach().clone()

    @contextmanager
    def stale() -> Iterator[None]:
        weight.data, live = kept, weight.data
        yield
        weight.data = live

    with undone(training.wrap_forward(stale)):
        yield


@contextmanager
def runs_twice(training: TrainingView) -> Iterator[None]:
    def again(update: Callable[[], None]) -> None:
        update()
        update()

    with undone(training.wrap_optimizer_step(again)):
        yield


@pytest.mark.parametrize(
    ("change", "numerics"),
    [
        *((drops_a_gradient, level) for level in Numerics),
        *((runs_twice, level) for level in Numerics),
        (keeps_stale_weights, Numerics.EXACT),
        (keeps_stale_weights, Numerics.ROUNDING),
    ],
)
def test_what_trains_otherwise_is_named(change: Any, numerics: Numerics) -> None:
    strategy = Changing(change)
    strategy.numerics = numerics
    with pytest.raises(NotConformant, match=r"unused branch, plugin\.on=True: DIFFERENT"):
        check_usages(strategy, usages=FEW)


def refuses(training: TrainingView) -> None:
    if isinstance(training.optimizer, Mapping):
        raise Unsupported("one optimizer alone")


def fails(training: TrainingView) -> None:
    if isinstance(training.optimizer, Mapping):
        raise KeyError("params")


def test_a_refusal_in_words_is_no_difference() -> None:
    cells = check_usages(Changing(refuses), usages=FEW)
    assert [cell.outcome for cell in cells] == ["equal", "refused"]
    assert "one optimizer alone" in str(cells[1])
    table = usage_table(cells).splitlines()
    assert table[0] == "| usage | plugin.on=True |"
    assert table[2:] == ["| unused branch | equal |", "| several optimizers | refused |"]


def test_another_error_is() -> None:
    with pytest.raises(NotConformant, match=r"several optimizers.*KeyError"):
        check_usages(Changing(fails), usages=FEW)


class OnlyWithOthers(Plugin):
    """Its value is offered beside another strategy's."""

    name = "other"

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {"other.on": Dimension([False, True], when={"plugin.on": (True,)})}


def test_pairs_are_tried_where_they_are_offered() -> None:
    (usage, _) = FEW
    cells = check_usages([Plugin(), OnlyWithOthers()], usages=[usage], pairs=True)
    assert [cell.settings for cell in cells] == [{"plugin.on": True, "other.on": True}]
    with pytest.raises(NotConformant, match=r"other\.on=True, plugin\.on=True"):
        check_usages([Changing(drops_a_gradient), OnlyWithOthers()], usages=[usage], pairs=True)


def test_a_usage_of_ones_own_is_tried() -> None:
    own = Usage("mine", BY_NAME["vmap"].make_workload, steps=1, batch=BY_NAME["vmap"].batch_of)
    (cell,) = check_usages(Plugin(), usages=[own])
    assert cell == Cell("mine", {"plugin.on": True}, "equal")
