"""The dimension as a search sees it: levels, payloads, hints, and lines to paste."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.errors import InvalidArgument
from autofit.plan import Dimension, Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.strategy import Strategy, TrainingView
from autofit.testing import PlainContext
from autofit.testing.conformance import attention, convolutions
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload
from tests.plugin import Plugin

SETTING = "checkpointing.level"
label_of = importlib.import_module("autofit.strategies.checkpointing.levels").label_of


@pytest.fixture(scope="module")
def levels() -> Dimension:
    (strategy,) = load_strategies(["checkpointing"])
    return strategy.dimensions(PlainContext(attention))[SETTING]


def test_levels_go_from_plain_to_least_memory_for_more_time(levels: Dimension) -> None:
    assert list(levels.values) == list(range(len(levels.values)))
    assert 3 <= len(levels.values) <= 24
    assert list(levels.payloads) == list(levels.values[1:])
    assert all(levels.payloads[level]["units"] for level in levels.values[1:])
    assert all(levels.labels[level].startswith("recompute ") for level in levels.values[1:])
    hints: Any = [levels.hints[level] for level in levels.values]
    assert (hints[0].bytes_per_sample, hints[0].seconds_per_sample) == (1.0, 1.0)
    for before, after in pairwise(hints):
        assert after.bytes_per_sample < before.bytes_per_sample
        assert after.seconds_per_sample > before.seconds_per_sample


def _gradients(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model(**batch)["loss"].backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_the_lines_to_paste_do_the_same(checkpointing: Strategy, levels: Dimension) -> None:
    last = levels.values[-1]
    lines = checkpointing.describe({SETTING: last}, {SETTING: levels.payloads[last]})
    workload, twin = attention(), attention()
    scope: dict[str, Any] = {"model": workload.build_model(), "train": _gradients}
    scope["batch"] = workload.sample_batch
    exec("\n".join([*lines, "    found = train(model, batch)"]), scope)
    plain = _gradients(twin.build_model(), twin.sample_batch)
    assert all(map(torch.equal, scope["found"], plain))
    assert checkpointing.describe({SETTING: 0}, {}) == []


def test_a_plan_for_another_model_is_refused(train_at: Callable[..., Training]) -> None:
    with pytest.raises(InvalidArgument, match="search again"):
        train_at(convolutions(), {"units": ["decoder.layers.7"], "state": []})


class KeepsOutsideOfModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale(x).exp().sin() * x.cos()).tanh().mean()


def _slope(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss with a transform that lets no saved tensor be watched."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    slope = torch.func.grad(lambda x: torch.func.functional_call(model, weights, (x,)).sum())
    return model(batch).mean() + slope(batch).square().mean()


def _refused(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise KeyError


def test_what_the_users_step_raises_is_raised(checkpointing: Strategy) -> None:
    with pytest.raises(KeyError):
        checkpointing.dimensions(_context(nn.Linear(4, 4), loss_fn=_refused))


@pytest.mark.parametrize(("dropout", "seeds"), [(0.0, {0}), (0.1, {0, 1, 2})])
def test_a_step_without_random_numbers_is_compared_from_one_seed(
    checkpointing: Strategy, dropout: float, seeds: set[int]
) -> None:
    tried: set[int] = set()

    class Watched(PlainContext):
        def compare(self, *settings: Any, seed: int = 0, **more: Any) -> Any:
            tried.add(seed)
            return super().compare(*settings, seed=seed, **more)

    layers = [
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 8))
        for _ in range(3)
    ]
    context = Watched(lambda: Workload(nn.Sequential(*layers), torch.randn(8, 8)))
    assert len(checkpointing.dimensions(context)[SETTING].values) > 2
    assert tried == seeds


class Blocks(nn.Module):
    """Blocks in turn, each run by a function."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x.square().mean()


def _skipped_at_random(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As LayerDrop does, in code outside of the blocks."""
    made: torch.Tensor = block(x) if torch.rand(()) > 0.3 else x
    return made


def _checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = checkpoint(block, x, use_reentrant=False)
    return made


@pytest.mark.slow
def test_blocks_that_are_skipped_at_random_are_all_found(checkpointing: Strategy) -> None:
    torch.manual_seed(0)
    levels = checkpointing.dimensions(_context(Blocks(_skipped_at_random), 8))[SETTING]
    named = {unit for payload in levels.payloads.values() for unit in payload["units"]}
    assert {f"blocks.{index}" for index in range(7)} <= named, "the last gives nothing back"


class NoRoom(PlainContext):
    """A device on which no forward pass fits."""

    def with_training(self, run: Callable[[Any, Any], Any], micro_batch: int) -> Any:
        def with_little_room(training: Any, batch: Any) -> Any:
            training.model.register_forward_pre_hook(_refuse)
            return run(training, batch)

        return super().with_training(with_little_room, micro_batch)


def _refuse(*_: Any) -> None:
    raise torch.OutOfMemoryError("no room")


def _context(model: nn.Module, width: int = 4, **given: Any) -> PlainContext:
    return PlainContext(lambda: Workload(model, torch.randn(8, width), **given))


@pytest.mark.parametrize(
    ("context", "said"),
    [
        (_context(nn.Linear(4, 4)), ""),
        (_context(KeepsOutsideOfModules()), "no checkpoint levels"),
        (
            _context(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)), loss_fn=_slope),
            r"cannot be traced \(RuntimeError",
        ),
        (
            _context(nn.Sequential(Blocks(_checkpointed)), 8),
            "^'0' is not checkpointed: its own code already checkpoints a part",
        ),
        (
            _context(Blocks(_checkpointed), 8),
            "^the model itself is not checkpointed: its own code already checkpoints a part",
        ),
        (PlainContext(attention, "meta"), "real device"),
        (
            NoRoom(attention),
            "^checkpointing skipped: a step of 2 samples does not fit into memory$",
        ),
    ],
    ids=["no gain", "no levels", "untraceable", "a part", "itself", "meta", "no room"],
)
def test_a_model_without_levels_is_left_plain_and_it_is_said_why(
    checkpointing: Strategy, context: PlainContext, said: str
) -> None:
    assert list(checkpointing.dimensions(context)[SETTING].values) == [0]
    assert re.search(said, "\n".join(context.notes))


class Scaled(nn.Module):
    """Computes what a setting of the process says, as the choice of a kernel is one."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * Scaled.scale)


@contextmanager
def _halved() -> Iterator[None]:
    Scaled.scale = 0.5
    yield
    Scaled.scale = 1.0


class Halves(Plugin):
    """A plug-in that changes what is computed, around the forward."""

    name = "halves"

    @contextmanager
    def apply(self, training: TrainingView, settings: Any, payloads: Any) -> Iterator[None]:
        undo = training.wrap_forward(_halved)
        yield
        undo()


def _gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_what_another_strategy_puts_around_the_forward_is_around_a_recomputation() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Scaled(), Scaled()), torch.randn(4, 8)
    with _halved():
        model(batch).square().mean().backward()
    plain = _gradients_of(model)
    resolved = ResolvedPlan(
        Plan(4, settings={SETTING: 1, "halves.on": True}),
        {SETTING: {"units": ["0", "1"], "state": []}},
        [*load_strategies(["checkpointing"]), Halves()],
    )
    optimizer, cpu = torch.optim.SGD(model.parameters(), 0.1), torch.device("cpu")
    with Training(model, optimizer, Recipe(), resolved, device=cpu) as training:
        for inside in (False, True):  # as in a training_step
            training.zero_grad()
            with training.context():
                loss = model(batch).square().mean()
                if inside:
                    training.backward(loss)
            if not inside:
                training.backward(loss)
            assert all(map(torch.equal, _gradients_of(model), plain))


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (["blocks.0"], "recompute 1 of 3 blocks"),
        (["blocks.0", "blocks.2"], "recompute 2 of 3 blocks"),
        (["blocks.0~", "blocks.2~"], "recompute 2 of 3 blocks except matrix products"),
        (["blocks.0", "blocks.2~"], "recompute 2 of 3 blocks except matrix products of 1"),
        (["blocks.1.feed", "blocks.1.head"], "recompute 2 parts"),
        (["blocks[0:2]"], "recompute 1 part"),
        (["blocks.0", "blocks.1.feed"], "recompute 2 parts"),
    ],
)
def test_a_level_is_said_in_words(units: list[str], words: str) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(3))
    model.blocks[1].feed = nn.Linear(2, 2)
    assert label_of(units, model) == words
