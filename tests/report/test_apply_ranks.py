"""`Report.apply` of plans of two ranks, which train together over gloo."""

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


def ran(on_two_ranks: Run, folder: Path, script: str) -> list[dict[str, Any]]:
    """Return what each of two ranks found, beside reports of one micro-batch of 4 on each."""
    data = json.loads((ROOT / "tests" / "recorded" / "report.json").read_text())
    data["workload"].update(loss="loss_fn", given=["loss_fn"], parameters=16 * 8 + 8 * 16 + 16)
    data["workload"]["sample_shapes"] = {"[0]": "int64[4, 6]", "[1]": "int64[4, 6]"}
    data["workload"]["batched"] = ["[0]", "[1]"]
    for mode in ("ddp", "zero1", "fsdp2", "fsdp2_keep"):
        dimension = {**data["dimensions"]["precision.dtype"], "values": [mode], "lever": None}
        payload: dict[str, Any] | None = {"modules": []} if mode.startswith("fsdp2") else None
        plan = {**data["best"]["plan"], "settings": {"parallel.mode": mode}}
        plan.update(micro_batch=4, accumulation_steps=1, global_batch=8, world_size=2)
        dimensions = {"parallel.mode": dimension | {"payloads": [payload], "hints": [None]}}
        dimensions["parallel.mode"]["trial_costs_s"] = [None]
        best = data["best"]["number"]
        trials = [t | {"plan": plan} if t["number"] == best else t for t in data["trials"]]
        of_mode = {**data, "dimensions": dimensions, "trials": trials}
        (folder / f"{mode}.json").write_text(json.dumps(of_mode))
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
