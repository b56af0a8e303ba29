"""Whose running statistics BatchNorm has on several ranks, as the survey's note says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autofit.equivalence.ranks import normalizing_apart

TRAIN = """
import json
import os
from functools import partial

import torch
from torch import nn

from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.training.loss import Recipe
from autofit.training.optimizers import build_optimizer
from autofit.training.ranks import Ranks
from autofit.training.training import Training
from autofit.strategy import world_of_environment

PAYLOADS = {"parallel.mode": {"modules": []}}
world, device = world_of_environment(), torch.device("cpu")
torch.distributed.init_process_group("gloo")
found = {}
for mode, sharing in (("ddp", "once"), ("ddp", "each"), ("zero1", "once"), ("fsdp2", "once")):
    settings = {"parallel.mode": mode, "parallel.accumulation": sharing}
    plan = Plan(2, accumulation_steps=2, settings=settings, world_size=2)
    resolved = ResolvedPlan(plan, PAYLOADS, load_strategies(["parallel"], world_size=2))
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    seen = []
    norm.register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.tolist()))
    optimizer = partial(build_optimizer, partial(torch.optim.SGD, lr=0.1), place=None)
    recipe, model = Recipe(criterion=nn.MSELoss()), nn.Sequential(nn.Linear(4, 4), norm)
    with Training(model, optimizer, recipe, resolved, device=device, world=world) as training:
        torch.manual_seed(1 + world.rank)
        for _ in range(2):
            training.step((torch.randn(4, 4), torch.randn(4, 4)))
    pairs = zip(*Ranks(world, device).objects(seen), strict=True)
    found[f"{mode} {sharing}"] = [first == second for first, second in pairs]
if world.rank == 0:
    print(json.dumps(found), flush=True)
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads abort some processes that exit by themselves
"""


def test_wrappers_send_statistics_before_a_step_and_sharding_never(
    on_two_ranks: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    """Whether two ranks see the same ones in each micro-batch of two steps of two."""
    assert on_two_ranks(tmp_path, TRAIN) == {
        "ddp once": [True, False, True, False],
        "ddp each": [True, True, True, True],
        "zero1 once": [True, False, True, False],
        "fsdp2 once": [True, False, False, False],
    }


def test_the_note_tells_whose_statistics_each_way_keeps() -> None:
    (note,) = normalizing_apart(torch.nn.Sequential(torch.nn.BatchNorm1d(4)))
    assert "DistributedDataParallel the running statistics are those of rank 0" in note
    assert "fully_shard each rank keeps its own" in note
    assert normalizing_apart(torch.nn.Sequential(torch.nn.SyncBatchNorm(4))) == []
