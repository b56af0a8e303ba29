"""What one entrance refuses, every other refuses, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.units import GIB

BUDGET = GIB
X, Y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class LazyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(output), target)


def _workload(model: Any, sample_batch: Any, **given: Any) -> autofit.Workload:
    return autofit.Workload(model, sample_batch, **given)


ENTRANCES: dict[str, Callable[..., Any]] = {
    "search": lambda **given: autofit.search(**given, device="cpu", vram_budget=BUDGET),
    "find_batch_size": lambda **given: autofit.find_batch_size(
        **given, device="cpu", vram_budget=BUDGET
    ),
    "probe": lambda **given: autofit.probe(_workload(**given), device="cpu"),
    "predict": lambda **given: autofit.predict(**given, gpu="L4"),
    "predict a Workload": lambda **given: autofit.predict(_workload(**given), gpu="L4"),
    "predict for several": lambda **given: autofit.predict(_workload(**given), gpu=["L4", "T4"]),
    "check": lambda **given: autofit.check(**given, gpu="L4"),
    "check by a probe": lambda **given: autofit.check(_workload(**given), device="cpu"),
    "checkpoint_to_budget": lambda **given: autofit.checkpoint_to_budget(
        **given, device="cpu", vram_budget=BUDGET
    ),
}
LIVE: dict[str, tuple[dict[str, Any], str]] = {
    "lazy": ({"model": nn.Sequential(nn.LazyConv1d(3, 1))}, "no shape yet"),
    "lazy buffer": (
        {"model": nn.Sequential(nn.Linear(6, 3), nn.LazyBatchNorm1d())},
        "no shape yet",
    ),
    "lazy criterion": ({"criterion": LazyLoss()}, "criterion's head.weight"),
    "wrapped": ({"model": nn.DataParallel(net())}, "already wrapped"),
    "wrapped part": ({"model": nn.Sequential(nn.DataParallel(net()))}, "already wrapped"),
    "no model": ({"model": None}, "model must be"),
    "number for a model": ({"model": 3}, "model must be"),
    "empty batch": ({"sample_batch": (X[:0], Y[:0])}, "empty"),
    "target of another size": ({"sample_batch": (X, Y[:4])}, "dimension 0 is 8"),
    "no target": ({"sample_batch": X}, "input, target"),
    "no tensor": ({"sample_batch": {"a": 1}}, "no tensor"),
    "scalar": ({"sample_batch": torch.tensor(1.0)}, "no tensor"),
    "text for a batch": ({"sample_batch": "x"}, "no tensor"),
    "number for a criterion": ({"criterion": 3}, "criterion must be"),
    "two losses": ({"loss_fn": lambda model, batch: model(batch[0]).sum()}, "not both"),
    "text for an optimizer": ({"optimizer": "adam"}, "optimizer must be"),
    "foreign optimizer": (
        {"optimizer": torch.optim.SGD(net().parameters(), 0.1)},
        "optimizer",
    ),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("name", LIVE)
def test_what_cannot_be_trained_is_refused_at_every_entrance(name: str, entrance: str) -> None:
    wrong, words = LIVE[name]
    given = {"model": net(), "sample_batch": (X, Y), "criterion": nn.CrossEntropyLoss()} | wrong
    with pytest.raises(autofit.InvalidArgument, match=words):
        ENTRANCES[entrance](**given)


QUICK = {"check", "checkpoint_to_budget"}


@pytest.mark.parametrize(
    "entrance",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ENTRANCES],
)
def test_what_the_users_code_raises_is_raised_at_every_entrance(entrance: str) -> None:
    given = {"model": net(), "sample_batch": (X.double(), Y), "criterion": nn.CrossEntropyLoss()}
    with pytest.raises(RuntimeError, match="same dtype"):
        ENTRANCES[entrance](**given)


# Those that run the training on a device; the others predict, which needs no values.
RUNS = ["search", "find_batch_size", "probe", "check by a probe", "checkpoint_to_budget"]


def _on_meta(module: nn.Module, name: str) -> nn.Module:
    """Return the module with one of its buffers, or one of its children, on the meta device."""
    setattr(module, name, getattr(module, name).to("meta"))
    return module


def _built_on_meta() -> nn.Module:
    return net().to("meta")


def _batch_on_meta(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(samples, 6, device="meta"), torch.zeros(samples, dtype=torch.long)


META: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "model": (lambda: {"model": net().to("meta")}, r"model's 0\.weight.*1 more.*to_empty"),
    "part": (lambda: {"model": _on_meta(net(), "2")}, r"model's 2\.weight, 2\.bias"),
    "buffer": (
        lambda: {"model": nn.Sequential(net(), _on_meta(nn.BatchNorm1d(3), "running_mean"))},
        r"model's 1\.running_mean is",
    ),
    "criterion": (
        lambda: {"criterion": nn.CrossEntropyLoss(weight=torch.ones(3, device="meta"))},
        "criterion's weight is",
    ),
    "batch": (lambda: {"sample_batch": _batch_on_meta(8)}, "batch is on the meta device"),
}
GOOD = {"model": net(), "sample_batch": (X, Y), "criterion": nn.CrossEntropyLoss()}


@pytest.mark.parametrize("entrance", RUNS)
@pytest.mark.parametrize("name", META)
def test_what_has_no_values_is_refused_where_it_would_run(name: str, entrance: str) -> None:
    make, words = META[name]
    with pytest.raises(autofit.InvalidArgument, match=words):
        ENTRANCES[entrance](**GOOD | make())


BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "lazy": ({"model": lambda: nn.Sequential(nn.LazyConv1d(3, 1))}, "no shape yet"),
    "wrapped": ({"model": lambda: nn.DataParallel(net())}, "already wrapped"),
    "nothing": ({"model": lambda: None}, "must return an nn.Module"),
    "model on meta": ({"model": _built_on_meta}, r"model's 0\.weight.*function"),
    "batch on meta": ({"sample_batch": _batch_on_meta}, "tensor of the batch"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "entrance"),
    [
        (name, entrance)
        for name in BUILT
        for entrance in (RUNS if "meta" in name else ENTRANCES)
        if entrance != "checkpoint_to_budget"  # which takes a live model
    ],
)
def test_what_a_function_makes_is_refused_at_every_entrance(name: str, entrance: str) -> None:
    wrong, words = BUILT[name]
    with pytest.raises(autofit.InvalidArgument, match=words):
        ENTRANCES[entrance](**GOOD | wrong)


@pytest.mark.slow
@pytest.mark.parametrize("entrance", ["predict", "check"])
@pytest.mark.parametrize("name", META)
def test_what_has_no_values_is_predicted(name: str, entrance: str) -> None:
    assert ENTRANCES[entrance](**GOOD | META[name][0]())
