"""`autofit.estimate_memory` and `autofit.fits` as a user calls them; nothing is computed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.units import GIB

LOSS: dict[str, Any] = {"criterion": nn.CrossEntropyLoss()}


def net(width: int = 512) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def batch(samples: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 64), torch.zeros(samples, dtype=torch.long)


@dataclass
class Noted:
    """A criterion that leaves a mark in a file each time it runs, in whichever process."""

    file: Path

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self.file.open("a") as file:
            file.write(".")
        return nn.functional.cross_entropy(output, target)


def test_an_estimate_has_the_parts_and_says_what_fits() -> None:
    found = autofit.estimate_memory(net(), batch(), **LOSS, gpu="A100-80GB")
    weights = sum(p.nbytes for p in net().parameters())
    parts = found.breakdown
    for part, times in (("weights", 1), ("gradients", 1), ("optimizer_state", 2)):
        assert times * weights <= parts[part] <= times * weights + 512 * 16
    assert parts["activations"] > 0
    assert found.excess_bytes("20GiB") == found.interval[1] - 20 * GIB
    assert found.fits("20GiB")
    assert found.fits()
    assert not found.fits("1MiB")
    assert found.excess_bytes("1MiB") > 0


def test_a_model_and_a_batch_without_memory_need_the_same() -> None:
    with torch.device("meta"):
        model, ids = net(), batch()
    without = autofit.estimate_memory(model, ids, **LOSS, gpu="L4")
    mixed = autofit.estimate_memory(net(), ids, **LOSS, gpu="L4")
    real = autofit.estimate_memory(net(), batch(), **LOSS, gpu="L4")
    assert without.required_bytes == mixed.required_bytes == real.required_bytes
    assert all(parameter.is_meta for parameter in model.parameters())


def test_nothing_of_the_users_changes() -> None:
    model, given = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    weights, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    autofit.fits(model, given, "1GiB", **LOSS, optimizer=optimizer)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_an_equal_question_is_answered_without_another_dry_run(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.touch()

    def runs(width: int = 768, samples: int = 24, **given: Any) -> bool:
        before = marks.stat().st_size
        autofit.fits(net(width), batch(samples), "2GiB", criterion=Noted(marks), **given)
        return marks.stat().st_size > before

    assert runs()
    assert not runs()  # other weights, other inputs
    others: list[dict[str, Any]] = [
        {"width": 769},
        {"samples": 25},
        {"optimizer": torch.optim.SGD},
        {"settings": {"precision.dtype": "bfloat16"}},
        {"gpu": "T4"},
        {"global_batch": 48},
    ]
    assert all(runs(**other) for other in others)


class Repeating(nn.Module):
    """Runs a layer as often as an attribute of its own, beside all parameters, says."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.plan = nn.Linear(64, 64), {"times": [times]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.plan["times"][0]):
            x = torch.tanh(self.layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_what_no_parameter_shows_is_part_of_the_question() -> None:
    one, many = (
        autofit.estimate_memory(Repeating(times), torch.randn(4096, 64), gpu="L4")
        for times in (1, 9)
    )
    kept = 4096 * 64 * 4  # bytes of each result of tanh
    assert many.breakdown["activations"] - one.breakdown["activations"] >= 8 * kept


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu": "L5"}, "unknown GPU 'L5'.*A100-80GB"),
        ({"vram_budget": "8 apples"}, "cannot read '8 apples'"),
        ({"vram_budget": "64GiB", "gpu": "L4"}, "more than the device has"),
        ({"vram_budget": None}, "needs a vram_budget"),
        ({"criterion": None, "sample_batch": torch.ones(4, 64)}, "needs a loss"),
        ({"settings": "bfloat16"}, "settings must be a mapping"),
        ({"settings": {"precision.dtype": "int4"}}, "int4"),
        ({"model": "resnet"}, "model must be an nn.Module"),
        ({"sample_batch": None}, "give a sample batch"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    asked = {"model": net(), "sample_batch": batch(), "vram_budget": "2GiB", **LOSS}
    with pytest.raises(autofit.InvalidArgument, match=words):
        autofit.fits(**(asked | given))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such layer")


class Raising:
    """What a model may hold: it raises when it is pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "seen", "words"),
    [
        (TypeError("a lock"), autofit.InvalidArgument, "a lock.*function that builds the model"),
        (MemoryError("no room"), MemoryError, "no room"),
        (SystemExit("enough"), SystemExit, "enough"),
    ],
)
def test_what_pickling_a_model_raises_is_told(
    error: BaseException, seen: type[BaseException], words: str
) -> None:
    model = net()
    vars(model)["held"] = Raising(error)
    with pytest.raises(seen, match=words):
        autofit.fits(model, batch(), "1GiB", **LOSS)


def test_an_error_of_the_forward_is_the_users_own() -> None:
    with pytest.raises(KeyError, match="no such layer"):
        autofit.fits(Broken(), batch(), "2GiB", **LOSS)


def test_without_a_gpu_the_estimate_says_which_was_assumed() -> None:
    assert "(assumed: no gpu given)" in str(autofit.estimate_memory(net(), batch(), **LOSS))


def test_options_of_the_allocator_that_are_ignored_are_named_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6")
    named = "garbage_collection_threshold:0.6"
    with pytest.warns(UserWarning, match=named):
        assert named in str(autofit.estimate_memory(net(), batch(), **LOSS, gpu="L4"))
    with pytest.warns(UserWarning, match=named):
        autofit.fits(net(), batch(), "1GiB", **LOSS)
    workload = autofit.Workload(net, batch(), **LOSS)
    with pytest.warns(UserWarning, match=named):
        assert named in str(autofit.check(workload, gpu="L4"))
    with pytest.warns(UserWarning, match=named):
        assert named in str(autofit.predict(workload, gpu=["L4", "T4"]))


def test_fits_says_what_it_assumed_of_a_size() -> None:
    with pytest.warns(UserWarning, match=r"GPU of 8.00 GiB: assumed"):
        assert autofit.fits(net(), batch(), gpu="8GiB", **LOSS)
