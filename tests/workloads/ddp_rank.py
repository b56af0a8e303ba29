"""One rank that trains a model under DistributedDataParallel, plain and checkpointed.

Arguments: rank, a folder, and JSON of keyword arguments of DistributedDataParallel by name;
the weights go to FOLDER/NAME-RANK.pt.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

checkpointed = importlib.import_module("autofit.strategies.checkpointing.checkpointed").checkpointed


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.dropout(torch.tanh(self.norm(self.linear(x))), 0.1, True)


def train(rank: int, options: dict[str, Any], checkpoint: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    units = ["0", "1", "2"] if checkpoint else []
    buffers = [name for name, _ in model.named_buffers()]
    with checkpointed(model, units, buffers) if checkpoint else nullcontext():
        parallel = DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(rank + 1)
        for _ in range(3):
            parallel(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def main(rank: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name, options in cases.items():
        states = [train(rank, options, on).state_dict() for on in (False, True)]
        torch.save(states, folder / f"{name}-{rank}.pt")
    dist.barrier()  # a rank that leaves while the other still talks may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
