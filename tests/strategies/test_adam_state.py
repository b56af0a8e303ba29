"""Adam's moments in 8 bits, by the real libraries where one of them is installed."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit import InvalidArgument, Plan, Training, Workload
from autofit.errors import Unsupported
from autofit.registry import load_strategies
from autofit.testing import check_strategy
from autofit.training.loss import Recipe
from tests.strategies.trainings import offered, training

SETTING = "adam_state.format"
sys.path.append(str(Path(__file__).parents[2] / "examples" / "adam_state"))
strategy: Any = import_module("adam_state")
STRATEGY = strategy.AdamState()
PAYLOADS = {SETTING: {"optimizers": [""]}}
WIDTH = 128

LIBRARIES = {"torchao_8bit": "torchao", "bitsandbytes_8bit": "bitsandbytes"}
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
each_installed = pytest.mark.parametrize(
    "value",
    [
        pytest.param(
            value,
            marks=[
                pytest.mark.skipif(
                    importlib.util.find_spec(name) is None, reason=f"{name} is not installed"
                ),
                *[pytest.mark.slow] * (name == "torchao"),  # it compiles each shape's update
            ],
        )
        for value, name in LIBRARIES.items()
    ],
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def workload(optimizer: Any = torch.optim.AdamW, **given: Any) -> Workload:
    torch.manual_seed(0)
    return Workload(make_model, torch.randn(8, WIDTH), optimizer=optimizer, **given)


def trained(value: str, optimizer: Any, model: nn.Module) -> Training:
    return training(
        model,
        STRATEGY,
        plan=Plan(8, settings={SETTING: value}),
        payloads=PAYLOADS,
        optimizer=optimizer,
        recipe=Recipe(loss_fn=lambda model, batch: (model(batch) - batch).square().mean()),
    )


def test_without_a_library_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "_installed", dict)
    dimension, notes = offered(STRATEGY, SETTING, workload)
    assert dimension.values == ("default",)
    assert notes == ["adam_state.format skipped: neither torchao nor bitsandbytes is installed"]
    model = make_model()
    with pytest.raises(Unsupported, match="pip install torchao"):
        trained("torchao_8bit", torch.optim.AdamW(model.parameters()), model)


def test_a_search_that_allows_rounding_alone_refuses_it() -> None:
    with pytest.raises(InvalidArgument, match="reduced_precision"):
        load_strategies([STRATEGY], numerics="rounding")


class Own(torch.optim.AdamW):
    """An optimizer of the user's."""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (partial(torch.optim.SGD, lr=0.1), "SGD is neither Adam nor AdamW of torch"),
        (Own, "Own is neither"),
        (partial(torch.optim.AdamW, amsgrad=True), "amsgrad=True"),
        (partial(torch.optim.Adam, maximize=True), "maximize=True"),
        (partial(torch.optim.Adam, differentiable=True), "differentiable=True"),
    ],
)
def test_an_optimizer_that_no_library_equals_is_refused(
    make: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "_installed", lambda: LIBRARIES)  # before any is imported
    dimension, notes = offered(STRATEGY, SETTING, partial(workload, make))
    assert dimension.values == ("default",)
    assert all(why in note for note in notes)
    assert len(notes) == 2


def test_an_optimizer_with_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "_installed", lambda: LIBRARIES)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, WIDTH)).mean().backward()
    optimizer.step()
    with pytest.raises(Unsupported, match="create a new one"):
        trained("bitsandbytes_8bit", optimizer, model)


@needs_bitsandbytes
def test_it_keeps_the_contract() -> None:
    assert check_strategy(STRATEGY, workloads=[workload]) > 1


@each_installed
@pytest.mark.filterwarnings("error:Detected call of")  # what a scheduler says of an idle optimizer
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_it_trains_alike_in_a_quarter_of_the_bytes_and_follows_a_scheduler(
    value: str, make: Any
) -> None:
    def end(value: str) -> tuple[list[float], int, Any]:
        model = make_model()
        optimizer = make(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.1)
        generator = torch.Generator().manual_seed(1)
        losses = []
        with trained(value, optimizer, model) as live:
            for _ in range(8):
                losses.append(float(live.step(torch.randn(8, WIDTH, generator=generator))))
                scheduler.step()
            stepping: Any = live.optimizer
            held = sum(_nbytes(state) for state in stepping.state.values())
        assert live.optimizer is optimizer
        return losses, held, model

    plain, plain_bytes, model = end("default")
    losses, held, other = end(value)
    assert losses == pytest.approx(plain, rel=0.02)
    assert losses[-1] < 0.9 * losses[0]
    first = nn.utils.parameters_to_vector(make_model().parameters()).detach()
    moved, moved_other = (
        nn.utils.parameters_to_vector(each.parameters()).detach() - first for each in (model, other)
    )
    difference = float((moved - moved_other).norm() / moved.norm())
    assert 1e-4 < difference < 0.1  # another arithmetic, and the same training
    assert 0.2 * plain_bytes < held < 0.35 * plain_bytes


def _nbytes(state: dict[str, Any]) -> int:
    """Bytes of a parameter's state, a table of codes that all share left out."""
    total = 0
    for name, held in state.items():
        if isinstance(held, torch.Tensor) and not name.startswith("qmap"):
            of_torchao: Any = held
            parts = [of_torchao.codes, of_torchao.scale] if hasattr(held, "codes") else [held]
            total += sum(part.nbytes for part in parts)
    return total


@pytest.mark.parametrize("value", LIBRARIES)
def test_the_lines_to_paste_run(value: str) -> None:
    pytest.importorskip(LIBRARIES[value])
    model = make_model()
    space = {"optimizer": torch.optim.Adam(model.parameters(), lr=0.25)}
    exec("\n".join(STRATEGY.describe({SETTING: value}, PAYLOADS)), space)
    assert type(space["optimizer"]).__name__ == "Adam8bit"
    assert space["optimizer"].param_groups[0]["lr"] == 0.25


@needs_bitsandbytes
def test_a_plan_with_it_runs_and_needs_less() -> None:
    found: Any = {
        value: autofit.probe(
            workload(),
            plan=Plan(8, settings={SETTING: value}),
            device="cpu",
            strategies=[STRATEGY],
        ).measurement
        for value in ("default", "bitsandbytes_8bit")
    }
    plain, moved = found["default"], found["bitsandbytes_8bit"]
    assert plain.ok, plain.detail
    assert moved.ok, moved.detail
    values = sum(p.numel() for p in make_model().parameters())
    assert plain.peak_allocated_bytes - moved.peak_allocated_bytes > 0.9 * 6 * values
