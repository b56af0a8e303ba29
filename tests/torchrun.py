"""Processes as torchrun starts them, for tests of several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRACE_S = 300
"""Within which ranks end after a signal before torchrun kills them without a word; its own 30 s are
too short for a busy machine. torch 2.13 reads it."""
WORKLOAD = """
import torch
from torch import nn

import autofit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs


def make_workload() -> autofit.Workload:
    batch = (torch.randn(4, 32), torch.randn(4, 32))
    return autofit.Workload(Net, batch, criterion=nn.MSELoss(), global_batch=8)
"""


def started(folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start torchrun with two ranks; where it only starts them, `run_ranks` is cheaper."""
    alone = ["--standalone", "--nproc-per-node", "2"]  # else older torchruns listen on 29500
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *alone, *command],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_of(launcher: int) -> Iterator[tuple[int, int]]:
    """Yield the rank and the process id of each process that torchrun started."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        ranks = [each for each in variables if each.startswith(b"RANK=")]
        if parent == launcher and ranks:
            yield int(ranks[0].partition(b"=")[2]), int(entry.name)
