"""`autofit.predict` and `autofit.check` of a model and a batch; nothing is computed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
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


def test_a_prediction_has_the_parts_and_says_what_fits() -> None:
    found = autofit.predict(net(), batch(), **LOSS, gpu="A100-80GB")
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
    without = autofit.predict(model, ids, **LOSS, gpu="L4")
    mixed = autofit.predict(net(), ids, **LOSS, gpu="L4")
    real = autofit.predict(net(), batch(), **LOSS, gpu="L4")
    assert without.required_bytes == mixed.required_bytes == real.required_bytes
    assert all(parameter.is_meta for parameter in model.parameters())


def test_nothing_of_the_users_changes() -> None:
    model, given = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    objects = {"model": model, "optimizer": optimizer}
    before = digest(objects)
    autofit.check(model, given, **LOSS, optimizer=optimizer, vram_budget="1GiB", gpu="L4")
    autofit.predict(model, given, **LOSS, optimizer=optimizer, gpu="L4")
    assert differences(before, digest(objects)) == []


@pytest.mark.parametrize(
    ("given", "name", "is_default"),
    [
        ({}, "AdamW", True),
        ({"optimizer": torch.optim.SGD}, "SGD", False),
        ({"optimizer": partial(torch.optim.Adam, lr=0.1)}, "Adam", False),
    ],
)
def test_the_optimizer_is_named(given: dict[str, Any], name: str, is_default: bool) -> None:
    found = autofit.predict(net(), batch(), **LOSS, **given, gpu="L4")
    assert (found.optimizer, found.assumes_optimizer) == (name, is_default)
    assert found.to_dict()["optimizer"] == name
    assert (f"{name}, the default" in str(found)) == is_default
    table = autofit.predict(net(), batch(), **LOSS, **given, gpu=["L4", "T4"])
    assert f"Optimizer: {name}" in str(table)


FORMS: dict[str, tuple[Any, Any]] = {
    "predict": (
        lambda *given, **trained: autofit.predict(*given, **trained, gpu="L4"),
        lambda workload, **more: autofit.predict(workload, **more, gpu="L4"),
    ),
    "check": (
        lambda *given, **trained: autofit.check(*given, **trained, gpu="L4"),
        lambda workload, **more: autofit.check(workload, **more, gpu="L4"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_model_and_its_workload_are_answered_alike(name: str) -> None:
    of_model, of_workload = FORMS[name]
    trained = {**LOSS, "optimizer": torch.optim.SGD, "global_batch": 32}
    workload = autofit.Workload(net, batch(), **trained)
    ours, theirs = of_model(net, batch(), **trained), of_workload(workload)
    assert (ours.to_dict(), ours.plan) == (theirs.to_dict(), theirs.plan)
    assert (ours.plan.micro_batch, ours.plan.accumulation_steps) == (16, 2)
    plan = autofit.Plan(4, settings={"precision.dtype": "bfloat16"})
    mixed = of_model(net(), batch(), **LOSS, plan=plan)
    assert mixed.plan.micro_batch == 4
    assert mixed.plan.settings == plan.settings
    assert (
        mixed.to_dict()
        == of_workload(autofit.Workload(net(), batch(), **LOSS), plan=plan).to_dict()
    )
    for more in ({"sample_batch": batch()}, {"criterion": nn.MSELoss()}, {"global_batch": 8}):
        with pytest.raises(
            autofit.InvalidArgument, match=f"pass {next(iter(more))} to the Workload"
        ):
            of_workload(workload, **more)


def test_a_model_is_predicted_for_several_gpus() -> None:
    seen: list[str] = []
    table = autofit.predict(net(), batch(), **LOSS, gpu=["L4", "T4"], progress=seen.append)
    assert set(table.predictions) == {"L4", "T4"}
    assert table.fits


@pytest.mark.slow
def test_an_equal_question_is_answered_without_another_dry_run(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.touch()

    def runs(
        ask: Any = autofit.check, width: int = 768, samples: int = 24, times: int = 1, **given: Any
    ) -> bool:
        before, model = marks.stat().st_size, net(width)
        vars(model)["plan"] = {"times": [times]}  # no parameter shows it
        ask(model, batch(samples), criterion=Noted(marks), **({"gpu": "L4"} | given))
        return marks.stat().st_size > before

    assert runs()
    assert not runs()  # other weights, other inputs
    assert not runs(vram_budget="2GiB")
    assert not runs(autofit.predict)
    others: list[dict[str, Any]] = [
        {"width": 769},
        {"samples": 25},
        {"times": 9},
        {"optimizer": torch.optim.SGD},
        {"plan": autofit.Plan(24, settings={"precision.dtype": "bfloat16"})},
        {"gpu": "T4"},
        {"global_batch": 48},
        {"ask": autofit.predict, "gpu": ["L4", "T4"]},
    ]
    assert [runs(**other) for other in others] == [True] * len(others)
    assert not any(runs(**other) for other in others)


@pytest.mark.slow
class Gated(nn.Module):
    """A layer whose forward looks at a number that a buffer holds."""

    gate: torch.Tensor

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 512)
        self.register_buffer("gate", torch.tensor(gate))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(given)
        if self.gate > 0:
            for _ in range(4):
                output = output.exp().tanh()
        return output


def test_a_number_in_a_buffer_of_the_host_is_read_as_it_is() -> None:
    closed, opened, half = (
        autofit.predict(Gated(gate), batch(), **LOSS) for gate in (0.0, 1.0, 0.5)
    )
    assert opened.required_bytes == half.required_bytes
    of_a_layer = 16 * 512 * 4  # bytes; the backward of each `exp` and `tanh` needs its output
    grown = opened.breakdown["activations"] - closed.breakdown["activations"]
    assert grown >= 8 * of_a_layer


def test_a_function_that_builds_the_model_is_called_for_each_question(tmp_path: Path) -> None:
    width = tmp_path / "width.txt"

    def build() -> nn.Module:
        return net(int(width.read_text()))

    parameters = []
    for text in ("8", "512"):
        width.write_text(text)
        parameters.append(autofit.predict(build, batch(), **LOSS, gpu="L4").breakdown["weights"])
    assert parameters[1] > 10 * parameters[0]


def test_what_a_caller_edits_changes_no_later_answer() -> None:
    model, ids = net(), batch()
    first = autofit.predict(model, ids, **LOSS, gpu="L4")
    weights = first.breakdown["weights"]
    first.breakdown["weights"] = 0  # type: ignore[index]
    assert autofit.predict(model, ids, **LOSS, gpu="L4").breakdown["weights"] == weights


def test_a_module_that_the_worker_alone_has_read_is_read_again_once_it_is_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (file := tmp_path / "width_of_hidden.py").write_text("WIDTH = 64\n")

    def build() -> nn.Module:
        from importlib import import_module

        return net(import_module("width_of_hidden").WIDTH)

    def needed() -> int:
        return autofit.predict(build, batch(), **LOSS, gpu="L4").peak_allocated_bytes

    before = needed()
    assert needed() == before
    file.write_text("WIDTH = 4096  # wider\n")
    os.utime(file, ns=(0, 1))
    assert needed() > before


def check(**given: Any) -> autofit.Verdict:
    asked = {"model": net(), "sample_batch": batch(), "vram_budget": "2GiB", **LOSS}
    return autofit.check(**(asked | given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpu": "L5"}, "unknown GPU 'L5'.*L4"),
        ({"vram_budget": "8 apples"}, "cannot read '8 apples'"),
        ({"vram_budget": "64GiB", "gpu": "L4"}, "more than the device has"),
        ({"vram_budget": None}, "nothing to check against"),
        ({"plan": "bfloat16"}, "plan must be an autofit.Plan"),
        ({"plan": autofit.Plan(4, settings={"precision.dtype": "int4"}), "gpu": "L4"}, "int4"),
        ({"model": "resnet"}, "model must be an nn.Module"),
        ({"sample_batch": None}, "give a sample batch"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a check without gpu= would run here")
def test_what_cannot_be_meant_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(autofit.InvalidArgument, match=words):
        check(**given)


def test_a_training_without_a_loss_is_not_taken_to_need_too_little() -> None:
    bare = {"criterion": None, "sample_batch": torch.ones(4, 64), "gpu": "L4"}
    assert check(**bare).fits is None
    assert "loss" in str(check(**bare))
    assert check(**bare, allow_stand_in_loss=True).fits is True
    assert autofit.predict(net(), torch.ones(4, 64), gpu="L4").has_stand_in_loss


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
        autofit.predict(model, batch(), **LOSS)


def test_what_was_assumed_of_a_gpu_is_said() -> None:
    assert "(assumed: no gpu given)" in str(autofit.predict(net(), batch(), **LOSS))
    for ask in (autofit.check, autofit.predict):
        answer: Any = ask(net(), batch(), gpu="8GiB", **LOSS)
        assert "GPU of 8.00 GiB: assumed" in str(answer)


@pytest.mark.parametrize(
    "ask",
    [
        lambda *given: autofit.check(*given, **LOSS, gpu="L4"),
        lambda *given: autofit.predict(*given, **LOSS, gpu="L4"),
        lambda *given: autofit.predict(*given, **LOSS, gpu=["L4", "T4"]),
    ],
    ids=["check", "predict", "table"],
)
def test_options_of_the_allocator_that_are_ignored_are_named_everywhere(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6")
    with pytest.warns(UserWarning, match="garbage_collection_threshold:0.6"):
        answer = ask(net, batch())
    assert "garbage_collection_threshold:0.6" in str(answer)
