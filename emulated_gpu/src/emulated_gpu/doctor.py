"""Says whether an emulated GPU can be had here: what is missing, or what ran on one."""

from __future__ import annotations

import subprocess
import sys

from emulated_gpu.build import build_driver, build_values
from emulated_gpu.errors import Unavailable
from emulated_gpu.launch import environment
from emulated_gpu.machines import new_machine
from emulated_gpu.toolchain import find_cuda_torch, toolchain

_SECONDS = 300
_PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
model, target = nn.Linear(64, 1).cuda(), torch.ones(32, 1, device="cuda")
optimizer, losses = torch.optim.SGD(model.parameters(), 0.001), []
for _ in range(3):
    loss = nn.functional.mse_loss(model(torch.ones(32, 64, device="cuda")), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
total = torch.cuda.get_device_properties(0).total_memory
print(f"{torch.cuda.get_device_name()} with {total / 2**30:.1f} GiB")
"""


def diagnose() -> int:
    """Print what was found, and return 0 where a small training ran on an emulated card.

    Raises:
        Unavailable: something is missing.
    """
    torch = find_cuda_torch()
    compiler, headers = toolchain()
    print(f"torch      {torch.version}, for CUDA {torch.cuda}, in {torch.folder}")
    print(f"compiler   {compiler}")
    print(f"headers    {headers[0]}")
    print(f"built      {build_driver()}")
    print(f"           {build_values()}")
    print(f"training   on {_trained()}", flush=True)
    return 0


def _trained() -> str:
    """Train a small model on an emulated card; return what it says of the card."""
    machine = new_machine()
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=environment(machine=machine),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    finally:
        machine.remove()
    if ran.returncode:
        raise Unavailable(
            f"a small training failed on the emulated card, with status {ran.returncode}:\n"
            f"{ran.stderr[-2000:]}"
        )
    return ran.stdout.strip()
