"""Two processes train a checkpointed model under DistributedDataParallel as they do a plain one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + torch.dropout(torch.tanh(self.norm(self.linear(x))), 0.1, True)
        return mixed


def _train(rank: int, options: dict[str, Any], checkpoint: bool, module: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    units = ["0", "1", "2"] if checkpoint else []
    buffers = [name for name, _ in model.named_buffers()]
    checkpointed = __import__(module, fromlist=["checkpointed"]).checkpointed
    with checkpointed(model, units, buffers) if checkpoint else nullcontext():
        parallel = DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(rank + 1)
        for _ in range(3):
            parallel(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def _rank(rank: int, port: int, options: dict[str, Any], module: str, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    states = [
        _train(rank, options, checkpoint, module).state_dict() for checkpoint in (False, True)
    ]
    torch.save(states, Path(folder) / f"{rank}.pt")
    dist.barrier()  # a rank that leaves while the other still talks may abort
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str
)
def test_two_ranks(part: Callable[[str], Any], tmp_path: Path, options: dict[str, Any]) -> None:
    module = part("checkpointed").__name__
    spawn(  # type: ignore[no-untyped-call]  # torch does not annotate it
        _rank, (_free_port(), options, module, str(tmp_path)), nprocs=RANKS
    )
    for rank in range(RANKS):
        plain, checkpointed = torch.load(tmp_path / f"{rank}.pt")
        assert plain.keys() == checkpointed.keys()
        assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
