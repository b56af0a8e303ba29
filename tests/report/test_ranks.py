"""Plans of two ranks, which train together over gloo: `Report.apply`, and the lines to paste."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

HEAD = """
import copy
import json
import os
import warnings

import torch
from torch import nn

from autofit.errors import InvalidArgument
from autofit.report.report import load
from autofit.report.details import training_lines
from autofit.report.place import Place

rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, words):
        return self.head(self.embed(words))


def loss(model, batch):
    words, targets = batch
    return nn.functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())


def finish(found):
    every = [None] * 2
    torch.distributed.all_gather_object(every, found)
    if rank == 0:
        print(json.dumps(every), flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads abort some processes that exit by themselves

"""

OPTIMIZERS = """
def weights(model):
    found = [p.detach() for p in model.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for p in found]


torch.manual_seed(rank)
batch = torch.randint(0, 16, (4, 6)), torch.randint(0, 16, (4, 6))
found = {}
for mode in ("ddp", "zero1", "fsdp2", "fsdp2_keep"):
    report = load(f"{mode}.json")
    model = Net()
    first, before = weights(model), {id(p) for p in model.parameters()}
    live = torch.optim.AdamW(model.parameters(), lr=0.1)
    try:
        report.apply(model, live, loss_fn=loss)
        found[mode] = {"refused": None}
    except InvalidArgument as error:
        found[mode] = {"refused": str(error)}
    found[mode]["is_as_it_was"] = before == {id(p) for p in model.parameters()}
    printed = "\\n".join(training_lines(report.record, Place()))
    scope = {"report": report, "model": Net(), "make_optimizer": torch.optim.AdamW, "loss_fn": loss}
    exec(printed, scope | {"optimizer": live, "loader": [batch]})
    apart = [float((one - two).abs().max()) for one, two in zip(first, weights(scope["model"]))]
    found[mode]["moved_as_printed"] = max(apart)
    with report.apply(model, torch.optim.AdamW, loss_fn=loss) as training:
        training.step(batch)
        optimizer = getattr(training.optimizer, "optim", training.optimizer)
        held = 0
        for state in optimizer.state.values():
            held += sum(getattr(v, "to_local", lambda v=v: v)().numel() for v in state.values())
    moved = [float((one - two).abs().max()) for one, two in zip(first, weights(model))]
    found[mode].update(moved=max(moved), held=held)
finish(found)
"""

PADDING = """
report = load("ddp.json")
found = {}
for name, ignored in (("alike", (2, 2)), ("apart", (0, 3))):
    torch.manual_seed(rank)
    words, targets = torch.randint(0, 16, (4, 6)), torch.randint(0, 16, (4, 6))
    targets[:, 6 - ignored[rank] :] = -100
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with report.apply(Net(), torch.optim.SGD, loss_fn=loss) as training:
            training.step((words, targets))
            training.step((words, targets))
    found[name] = [str(each.message) for each in warned if "loss_weight" in str(each.message)]
finish(found)
"""


Run = Callable[[Path, str], Any]
PLAN = {"micro_batch": 4, "accumulation_steps": 1, "global_batch": 8, "ranks": 2}


def ran(on_two_ranks: Run, folder: Path, script: str) -> list[dict[str, Any]]:
    """Return what each of two ranks found, beside reports of one micro-batch of 4 on each."""
    data = json.loads((ROOT / "tests" / "recorded" / "report.json").read_text())
    data["workload"].update(loss="loss_fn", given=["loss_fn"], parameters=16 * 8 + 8 * 16 + 16)
    data["workload"]["sample_shapes"] = {"[0]": "int64[4, 6]", "[1]": "int64[4, 6]"}
    data["workload"]["batched"] = ["[0]", "[1]"]
    for mode in ("ddp", "zero1", "fsdp2", "fsdp2_keep"):
        data["dimensions"] = {
            "parallel.mode": {
                "values": [mode],
                "payloads": [{"modules": []} if mode.startswith("fsdp2") else None],
            }
        }
        for trial in (data["best"], *data["trials"]):
            if trial["number"] == data["best"]["number"]:
                trial["plan"] |= PLAN | {"settings": {"parallel.mode": mode}}
        (folder / f"{mode}.json").write_text(json.dumps(data))
    return on_two_ranks(folder, HEAD + script)


@pytest.mark.slow
def test_a_live_optimizer_is_refused_and_a_function_of_parameters_trains(
    on_two_ranks: Run, tmp_path: Path
) -> None:
    """Sharding would leave it parameters that nothing trains, zero1 the whole of its state."""
    for of_rank in ran(on_two_ranks, tmp_path, OPTIMIZERS):
        for each in of_rank.values():
            assert "such as torch.optim.AdamW" in each["refused"]
            assert each["is_as_it_was"]
            assert each["moved"] == each["moved_as_printed"] > 1e-4
        for mode in ("zero1", "fsdp2", "fsdp2_keep"):
            assert of_rank[mode]["held"] < 0.8 * of_rank["ddp"]["held"]


def test_padding_that_differs_between_ranks_is_warned_of(on_two_ranks: Run, tmp_path: Path) -> None:
    """Also where each rank has one micro-batch, in which nothing differs."""
    for of_rank in ran(on_two_ranks, tmp_path, PADDING):
        assert of_rank["alike"] == []
        assert len(of_rank["apart"]) == 1


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
    plan = Plan.split(9, 2, settings, ranks=2)
    resolved = ResolvedPlan(plan, PAYLOADS, load_strategies(["parallel"], ranks=2))
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
def test_pasted_lines_of_two_ranks_train_what_apply_does(on_two_ranks: Run, tmp_path: Path) -> None:
    """Also where the ranks' shares, and the micro-batches of each, differ."""
    found = on_two_ranks(tmp_path, LOOP)
    assert [*found] == ["ddp", "ddp_view", "zero1", "fsdp2"]
    for each in found.values():
        assert each["apart"] < 1e-12 < 1e-3 < each["moved"]
