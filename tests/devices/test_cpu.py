"""The CPU device: real computation, accounted for and bounded as a GPU's."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.devices.base import host_memory
from autofit.devices.cpu import CpuDevice

MIB = 2**20


@pytest.fixture
def device() -> CpuDevice:
    opened = CpuDevice()
    opened.limit(64 * MIB)
    return opened


def _allocated(device: CpuDevice) -> int:
    gc.collect()
    return device.allocated_bytes()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def test_a_placed_tensor_is_a_copy_that_counts_until_it_dies(device: CpuDevice) -> None:
    outside = torch.ones(MIB, dtype=torch.uint8)
    with device.accounting():
        inside = device.place(outside)
    assert device.read().allocated_bytes == MIB
    assert inside.data_ptr() != outside.data_ptr()
    del inside
    assert _allocated(device) == 0
    assert device.read().peak_allocated_bytes == MIB


def test_a_placed_model_is_the_same_module_with_parameters_that_count(device: CpuDevice) -> None:
    model = _net()
    model[1].weight = model[0].weight  # tied: placed once
    identities = [id(parameter) for parameter in model.parameters()]
    values = [parameter.detach().clone() for parameter in model.parameters()]
    with device.accounting():
        assert device.place_model(model) is model
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert model[1].weight is model[0].weight
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert device.allocated_bytes() == sum(4 * p.numel() for p in model.parameters())


def _phase_of_the_end(budget: int, rows: int, checkpointed: bool) -> str:
    """Where a training step of a model of 4 MiB with activations of 2 KiB a row runs out."""
    device = CpuDevice()
    device.limit(budget)
    with device.accounting():
        model = device.place_model(_net())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        phase = "forward"
        try:
            inputs = device.place(torch.randn(rows, 512))
            outputs = checkpoint(model, inputs, use_reentrant=False) if checkpointed else None
            loss = (model(inputs) if outputs is None else outputs).mean()
            phase = "backward"
            loss.backward()
            phase = "step"
            optimizer.step()
        except torch.OutOfMemoryError:
            return phase
    raise AssertionError("it did not run out")


@pytest.mark.parametrize(
    ("budget_mib", "rows", "checkpointed", "phase"),
    [
        (60, 8192, False, "forward"),
        (60, 8192, True, "backward"),
        (12, 1, False, "step"),
    ],
)
def test_memory_ends_where_the_budget_does_in_every_phase(
    budget_mib: int, rows: int, checkpointed: bool, phase: str
) -> None:
    assert _phase_of_the_end(budget_mib * MIB, rows, checkpointed) == phase


def test_reserved_bytes_are_whole_segments_and_go_back_on_release(device: CpuDevice) -> None:
    with device.accounting():
        small = device.place(torch.ones(10))
    reading = device.read()
    assert reading.allocated_bytes == 512
    assert reading.reserved_bytes == 2 * MIB
    assert reading.non_torch_bytes == 0
    del small
    gc.collect()
    assert device.read().reserved_bytes == 2 * MIB
    device.release_cache()
    assert device.read().reserved_bytes == 0


@pytest.mark.parametrize(
    ("limit", "used", "cached", "seen"),
    [
        ("max", 0, 0, (1024, 512)),
        (str(256 * MIB), 64 * MIB, 16 * MIB, (256, 208)),
        (str(768 * MIB), 64 * MIB, 0, (768, 512)),
        (str(64 * MIB), 65 * MIB, 0, (64, 0)),
    ],
)
def test_of_a_groups_memory_only_what_is_left_is_available(
    tmp_path: Path, limit: str, used: int, cached: int, seen: tuple[int, int]
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 4096\ninactive_file {cached}\n")
    assert host_memory(tmp_path, tmp_path) == (seen[0] * MIB, seen[1] * MIB)


FAULTS_OF_A_SEARCH_AND_AFTER = """
import itertools, resource, sys, torch, autofit

notes = sys.argv[1]

def faults():
    torch.ones(10 * 2**20)  # beyond the 32 MiB up to which glibc's thresholds rise by themselves
    counted = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(8):
        torch.ones(10 * 2**20)
        counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    # A kernel that is short of memory takes pages back: at times only
    return min(after - before for before, after in itertools.pairwise(counted))

def loss(model, batch):
    with open(notes, "a") as file:
        print(faults(), file=file)
    return model(batch).mean()

model = torch.nn.Linear(8, 8)
search = dict(device="cpu", vram_budget="256MiB", max_probes=1)
report = autofit.search(model, torch.randn(4, 8), loss_fn=loss, **search)
print(faults())
report.apply(model, torch.optim.SGD(model.parameters())).undo()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.36"), reason="it takes thresholds so high")
def test_trainings_reuse_freed_memory_and_a_search_leaves_its_process_as_it_was(
    tmp_path: Path,
) -> None:
    program, notes = tmp_path / "program.py", tmp_path / "notes.txt"
    program.write_text(FAULTS_OF_A_SEARCH_AND_AFTER)
    command = [sys.executable, str(program), str(notes)]
    own = {name: os.environ[name] for name in os.environ if "MALLOC" not in name}
    ran = subprocess.run(command, env=own, stdout=subprocess.PIPE, text=True, check=True)
    searched, applied = map(int, ran.stdout.split())
    probed = min(map(int, notes.read_text().split()))
    assert max(applied, probed) < searched / 10
