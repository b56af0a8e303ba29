"""The lines to paste: they train as the plan does, also on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.plan import Plan, ResolvedPlan, Scalar
from autofit.registry import load_strategies
from autofit.report.paste import paste_lines
from tests.plugin import Plugin


class Folding(Plugin):
    name = "folding"

    def describe(self, settings: Any, payloads: Any) -> list[str]:
        return [f"fold({dict(settings)}, {dict(payloads)})"]


def test_a_strategy_is_given_its_own_settings_and_payloads_and_no_others() -> None:
    plan = Plan(8, settings={"folding.level": 1, "folding_too.level": 2})
    payloads = {"folding.level": ["a"], "folding_too.level": ["b"]}
    lines = paste_lines(ResolvedPlan(plan, payloads, [Folding()]))
    assert lines[1:] == ["fold({'folding.level': 1}, {'folding.level': ['a']})"]


PAYLOADS = {"checkpointing.level": {"units": ["0"], "state": []}}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
def test_a_plan_of_several_strategies_runs_as_it_stands(dtype: str) -> None:
    """Also with the body that a reader fills in: it runs inside all of them."""
    settings: dict[str, Scalar] = {
        "checkpointing.level": 1, "memory_format.layout": "channels_last", "precision.dtype": dtype,
    }  # fmt: skip
    resolved = ResolvedPlan(Plan.split(30, 8, settings), PAYLOADS, load_strategies())
    code = "\n".join(paste_lines(resolved))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    with _kept_precision():
        exec(code, {"model": model})
        assert "forward" not in vars(model[0])
        filled = code.replace("...  #", "seen = 'forward' in vars(model[0]), model(batch).dtype  #")
        scope: dict[str, Any] = {"model": model, "batch": torch.randn(2, 3, 8, 8)}
        exec(filled, scope)
    assert scope["seen"] == (True, torch.float32 if dtype == "tf32" else getattr(torch, dtype))
    assert scope["accumulation_steps"] == 4


@contextmanager
def _kept_precision() -> Iterator[None]:
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [backend.allow_tf32 for backend in backends]
    try:
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


# -- The lines to paste for several ranks, pasted into a loop of two of gloo beside `Training`

LOOP = """
import json
import os
from functools import partial

import torch
from torch import nn

from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.report.paste import paste_lines
from autofit.training.loss import Recipe
from autofit.training.optimizers import build_optimizer
from autofit.training.training import Training
from autofit.world import world_of_environment

PAYLOADS = {"parallel.mode": {"modules": ["1", "2"]}}
SAY = "# before each micro-batch: "


def made():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 2)).double()


def weights(model):
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in found]


def applied(resolved, batches, world):
    optimizer = partial(build_optimizer, partial(torch.optim.SGD, lr=0.1), place=None)
    recipe, device = Recipe(criterion=nn.MSELoss()), torch.device("cpu")
    with Training(made(), optimizer, recipe, resolved, device=device, world=world) as training:
        for batch in batches:
            training.step(training.share_of(batch))
        return weights(training.plain_model)


def pasted(resolved, batches, world):
    lines = paste_lines(resolved)
    scope = {"model": made(), "torch": torch}
    exec("\\n".join(lines), scope)
    model, steps = scope["model"], scope["accumulation_steps"]
    if any("ZeroRedundancyOptimizer(" in line for line in lines):
        kind = {"optimizer_class": torch.optim.SGD}
        optimizer = scope["ZeroRedundancyOptimizer"](model.parameters(), **kind, lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [line.removeprefix(SAY) for line in lines if line.startswith(SAY)]
    for batch in batches:
        own = [tensor.tensor_split(world.size)[world.rank] for tensor in batch]
        cut = zip(*(tensor.tensor_split(steps) for tensor in own), strict=True)
        for number, (inputs, targets) in enumerate(cut):
            assert len(inputs) <= scope["micro_batch"]
            scope["is_last"] = number == steps - 1
            exec("\\n".join(before), scope)
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss * scope["loss_factor"] * len(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


world = world_of_environment()
torch.distributed.init_process_group("gloo")
torch.manual_seed(1)
# One rank of 9 samples has 5, in micro-batches of 2, 2, 1; the other 4, in 2, 1, 1
batches = [(torch.randn(9, 4).double(), torch.randn(9, 2).double()) for _ in range(2)]
found = {}
for mode, sharing in (("ddp", "once"), ("ddp_view", "each"), ("zero1", "once"), ("fsdp2", "once")):
    settings = {"parallel.mode": mode, "parallel.accumulation": sharing}
    plan = Plan.split(9, 2, settings, world_size=2)
    resolved = ResolvedPlan(plan, PAYLOADS, load_strategies(["parallel"], world_size=2))
    pairs = zip(applied(resolved, batches, world), pasted(resolved, batches, world), strict=True)
    first = weights(made())
    apart = max(float((one - other).abs().max()) for one, other in pairs)
    moved = max(
        float((one - other).abs().max())
        for one, other in zip(first, applied(resolved, batches, world), strict=True)
    )
    found[mode] = {"apart": apart, "moved": moved}
if world.rank == 0:
    print(json.dumps(found), flush=True)
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads abort some processes that exit by themselves
"""


@pytest.mark.slow
def test_pasted_lines_of_two_ranks_train_what_apply_does(
    on_two_ranks: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    """Also where the ranks' shares, and the micro-batches of each, differ."""
    found = on_two_ranks(tmp_path, LOOP)
    assert [*found] == ["ddp", "ddp_view", "zero1", "fsdp2"]
    for each in found.values():
        assert each["apart"] < 1e-12 < 1e-3 < each["moved"]
