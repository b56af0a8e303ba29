"""`autofit.estimate_memory` and `autofit.fits` as a user calls them; nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.testing.digest import differences, digest
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
    for part, times in (("weights", 1), ("gradients", 1), ("optimizer_state", 2)):
        assert times * weights <= found.breakdown[part] <= times * weights + 512 * 16
    assert found.breakdown["activations"] > 0
    assert found.excess_bytes("20GiB") == found.interval[1] - 20 * GIB
    assert found.excess_bytes("1MiB") > 0
    assert (found.fits("20GiB"), found.fits(), found.fits("1MiB")) == (True, True, False)


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
    objects = {"model": model, "optimizer": optimizer}
    before = digest(objects)
    autofit.fits(model, given, "1GiB", **LOSS, optimizer=optimizer)
    assert differences(before, digest(objects)) == []


@pytest.mark.slow
def test_an_equal_question_is_answered_without_another_dry_run(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.touch()

    def runs(width: int = 768, samples: int = 24, times: int = 1, **given: Any) -> bool:
        before, model = marks.stat().st_size, net(width)
        vars(model)["plan"] = {"times": [times]}  # no parameter shows it
        autofit.fits(model, batch(samples), "2GiB", criterion=Noted(marks), **given)
        return marks.stat().st_size > before

    assert runs()
    assert not runs()  # other weights, other inputs
    others: list[dict[str, Any]] = [
        {"width": 769},
        {"samples": 25},
        {"times": 9},
        {"optimizer": torch.optim.SGD},
        {"settings": {"precision.dtype": "bfloat16"}},
        {"gpu": "T4"},
        {"global_batch": 48},
    ]
    assert [runs(**other) for other in others] == [True] * len(others)


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


def test_what_was_assumed_of_a_gpu_is_said() -> None:
    assert "(assumed: no gpu given)" in str(autofit.estimate_memory(net(), batch(), **LOSS))
    with pytest.warns(UserWarning, match=r"GPU of 8.00 GiB: assumed"):
        assert autofit.fits(net(), batch(), gpu="8GiB", **LOSS)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, batch: autofit.estimate_memory(model, batch, **LOSS, gpu="L4"),
        lambda model, batch: autofit.fits(model, batch, "1GiB", **LOSS),
        lambda *given: autofit.check(autofit.Workload(*given, **LOSS), gpu="L4"),
        lambda *given: autofit.predict(autofit.Workload(*given, **LOSS), gpu=["L4", "T4"]),
    ],
    ids=["estimate_memory", "fits", "check", "predict"],
)
def test_options_of_the_allocator_that_are_ignored_are_named_everywhere(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6")
    with pytest.warns(UserWarning, match="garbage_collection_threshold:0.6"):
        answer = ask(net, batch())
    assert answer is True or "garbage_collection_threshold:0.6" in str(answer)
