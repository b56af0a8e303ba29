"""The code of a report, run: the loop that it exports, and the lines to paste."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.cli.main import app
from autofit.errors import InvalidArgument
from autofit.plan import Plan, ResolvedPlan, Scalar
from autofit.registry import load_strategies
from autofit.report.paste import paste_lines
from autofit.report.report import Report, load
from autofit.training.workload import Workload
from tests.integrations.conftest import report_of
from tests.plugin import Plugin

INPUTS = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(30) % 3
PLACED: dict[str, Scalar] = {"checkpointing.level": 1, "optimizer.implementation": "for_loop"}


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.net(x)
        return {"output": output, "loss": nn.functional.cross_entropy(output, y)}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 4, 2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(x.view(-1, 2, 3, 1).expand(-1, -1, -1, 2)).flatten(1))


def model_of() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 3))


def halve_biases(model: nn.Module, optimizer: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and parameter.grad is not None:
            parameter.grad.mul_(0.5)


def of_classes(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], ignore_index=0)


def valid(batch: Any) -> float:
    return float((batch["y"] != 0).sum())


PAIR = (INPUTS[:5], TARGETS[:5])
NAMED = {"x": INPUTS[:5], "y": TARGETS[:5]}
CASES: dict[str, tuple[type[nn.Module] | Any, Any, Plan, dict[str, Any]]] = {
    "criterion, uneven": (
        model_of,
        PAIR,
        Plan.split(10, 4),
        {"criterion": nn.CrossEntropyLoss(), "clip_grad_norm": 0.1},
    ),
    "placement, bfloat16": (
        model_of,
        PAIR,
        Plan(5, accumulation_steps=2, settings={"precision.dtype": "bfloat16", **PLACED}),
        {"criterion": nn.CrossEntropyLoss(), "before_step": halve_biases},
    ),
    "no accumulation": (
        model_of,
        PAIR,
        Plan(10, settings=PLACED),
        {"criterion": nn.CrossEntropyLoss()},
    ),
    "float16, the model's own loss": (
        OwnLoss,
        NAMED,
        Plan(5, accumulation_steps=2, settings={"precision.dtype": "float16"}),
        {"clip_grad_norm": 0.1},
    ),
    "loss_weight": (
        model_of,
        NAMED,
        Plan(5, accumulation_steps=2),
        {"loss_fn": of_classes, "loss_weight": valid},
    ),
    "channels last": (
        Images,
        PAIR,
        Plan(5, accumulation_steps=2, settings={"memory_format.layout": "channels_last"}),
        {"criterion": nn.CrossEntropyLoss()},
    ),
}


def reported(
    model: nn.Module, batch: Any, plan: Plan, given: Mapping[str, Any], path: Path
) -> tuple[Report, Report]:
    """Return the report of a search, and the same loaded from its file."""
    workload = Workload(model, batch, global_batch=plan.samples_per_step, **given)
    found = report_of(workload, plan, ("1", "2"))
    functions = [name for name in given if name != "clip_grad_norm"]
    facts = {**found.record.workload, "given": functions, "loss": "the model's own loss"}
    report = replace(found, record=replace(found.record, workload=facts))
    return report, load(report.save(path / "report.json"))


@pytest.mark.parametrize("name", CASES)
def test_the_loop_has_the_losses_of_apply(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, sample, plan, given = CASES[name]
    model: nn.Module = make()
    other = copy.deepcopy(model)
    report, loaded = reported(model, sample, plan, given, tmp_path)
    rows = [(INPUTS[at : at + 10], TARGETS[at : at + 10]) for at in (0, 10, 20)]
    batches: Any = [dict(zip("xy", row, strict=True)) for row in rows]
    if not isinstance(sample, dict):
        batches = rows
    with report.apply(other, torch.optim.AdamW(other.parameters(), lr=0.05)) as training:
        expected = [training.step(batch).item() for batch in batches]

    text = loaded.export("pytorch", tmp_path / "train.py")
    assert (tmp_path / "train.py").read_text() == text
    monkeypatch.chdir(tmp_path)  # where report.json is
    names: dict[str, Any] = {}
    exec(compile(text, "train.py", "exec"), names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    functions = {key: value for key, value in given.items() if key != "clip_grad_norm"}
    found = [loss.item() for loss in names["train"](model, optimizer, batches, **functions)]
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) == 3
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-8)


def test_the_command_line_prints_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reported(model_of(), PAIR, Plan(5), {"criterion": nn.CrossEntropyLoss()}, tmp_path)
    command = ["report", str(tmp_path / "report.json"), "--export", "pytorch"]
    app(command, standalone_mode=False)
    printed = capsys.readouterr().out
    assert json.dumps(str(tmp_path / "report.json")) in printed
    app([*command, "--out", str(tmp_path / "train")], standalone_mode=False)
    assert (tmp_path / "train").read_text() == printed
    assert capsys.readouterr() == ("", f"autofit: wrote {tmp_path / 'train'}\n")
    for more in (["-v"], ["--out", "a", "--out", "b"]):
        with pytest.raises(InvalidArgument, match="--out"):
            app([*command, *more], standalone_mode=False)


# -- The lines to paste


class Folding(Plugin):
    name = "folding"

    def describe(self, settings: Any, payloads: Any) -> list[str]:
        return [f"fold({dict(settings)}, {dict(payloads)})"]


def test_a_strategy_is_given_its_own_settings_and_payloads_and_no_others() -> None:
    plan = Plan(8, settings={"folding.level": 1, "folding_too.level": 2})
    payloads = {"folding.level": ["a"], "folding_too.level": ["b"]}
    lines = paste_lines(ResolvedPlan(plan, payloads, [Folding()]))
    assert lines[1:] == ["fold({'folding.level': 1}, {'folding.level': ['a']})"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
def test_a_plan_of_several_strategies_runs_as_it_stands(dtype: str) -> None:
    """Also with the body that a reader fills in: it runs inside all of them."""
    settings: dict[str, Scalar] = {
        "checkpointing.level": 1, "memory_format.layout": "channels_last", "precision.dtype": dtype,
    }  # fmt: skip
    payloads = {"checkpointing.level": {"units": ["0"], "state": []}}
    resolved = ResolvedPlan(Plan.split(30, 8, settings), payloads, load_strategies())
    code = "\n".join(paste_lines(resolved))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    filled = code.replace("...  #", "seen = 'forward' in vars(model[0]), model(batch).dtype  #")
    scope: dict[str, Any] = {"model": model, "batch": torch.randn(2, 3, 8, 8)}
    exec(filled, scope)
    assert "forward" not in vars(model[0])
    assert scope["seen"] == (True, torch.float32 if dtype == "tf32" else getattr(torch, dtype))
    assert scope["accumulation_steps"] == 4
