"""Memory of an emulated card: the real allocator's limits, of one process and of several."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

import emulated_gpu
from emulated_gpu.cards import find_card
from emulated_gpu.machines import Machine
from emulated_gpu.sizes import GIB, MIB

pytestmark = pytest.mark.emulated

Run = Callable[..., str]

ONE_PROCESS = """
import torch

free, total = torch.cuda.mem_get_info()
assert total == 24 * 2**30, total
try:
    torch.empty(25 * 2**30, dtype=torch.uint8, device="cuda")
    raise SystemExit("no error")
except torch.OutOfMemoryError as error:
    assert "GPU 0 has a total capacity of 24.00 GiB" in str(error), error

held = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(20)]
assert torch.cuda.memory_reserved() == 20 * 2**30
assert free - torch.cuda.mem_get_info()[0] == 20 * 2**30
del held
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info()[0] == free

torch.cuda.set_per_process_memory_fraction(1 / 24)
try:
    torch.empty(2**30 + 1, dtype=torch.uint8, device="cuda")
    raise SystemExit("no error")
except torch.OutOfMemoryError as error:
    assert "1024.00 MiB allowed" in str(error), error
torch.cuda.set_per_process_memory_fraction(1.0)

pinned = torch.arange(12.0).pin_memory()
assert pinned.is_pinned()
assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), pinned)
zeros = torch.empty(2**22, device="cuda").fill_(1)
torch._C._cuda_clearCublasWorkspaces()

torch.cuda.memory._record_memory_history()
kept = torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
assert len(torch.cuda.memory._snapshot()["device_traces"][0]) == 2  # a segment, and a block
print("done")
"""

EXPANDABLE = """
import torch
pieces = [torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(100)]
assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
held = torch.cuda.mem_get_info()[0]
del pieces
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info()[0] > held
try:
    torch.empty(25 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("done")
"""

HOLDER = """
import sys, torch
held = torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
print("holding", flush=True)
sys.stdin.read()
"""

FREE = """
import ctypes
free, total = ctypes.c_size_t(), ctypes.c_size_t()
assert not ctypes.CDLL(None).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
print(free.value)
"""

NVML = """
import os, pynvml, torch
pynvml.nvmlInit()
held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
assert pynvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name(0) == "NVIDIA L4"
(process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
assert process.pid == os.getpid()
free, total = torch.cuda.mem_get_info()
assert process.usedGpuMemory == total - free > 2**30
uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 0
second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
assert second.used == process.usedGpuMemory
assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == second.used + second.reserved
print("done")
"""

DEVICES = """
import ctypes, uuid
driver, count, identity = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_char * 16)()
driver.cuDeviceGetCount(ctypes.byref(count))
for ordinal in range(count.value):
    name = ctypes.create_string_buffer(100)
    assert not driver.cuDeviceGetName(name, 100, ordinal)
    assert not driver.cuDeviceGetUuid_v2(identity, ordinal)
    print(name.value.decode(), uuid.UUID(bytes=bytes(identity)), sep=",")
"""

FORKED = """
import ctypes, os
runtime = ctypes.CDLL(None)
assert runtime.cudaFree(None) == 0
child = os.fork()
if not child:
    os._exit(runtime.cudaFree(None))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3  # cudaErrorInitializationError
assert runtime.cudaFree(None) == 0
print("done")
"""


def test_a_process_meets_the_end_of_memory_and_of_its_share(run_on: Run) -> None:
    assert run_on(ONE_PROCESS, cards=[find_card(memory="24GiB")]) == "done\n"


def test_expandable_segments_grow_and_shrink(run_on: Run) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert run_on(EXPANDABLE, cards=[find_card(memory="24GiB")], variables=variables) == "done\n"


def test_nvml_and_torch_agree(run_on: Run) -> None:
    assert run_on(NVML, cards=[find_card("L4")]) == "done\n"


def test_memory_is_shared_and_comes_back_from_a_killed_process(
    machine: Machine, run_on: Run
) -> None:
    alone = int(run_on(FREE))
    variables = emulated_gpu.environment(machine=machine, values=False)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=variables, stdin=-1, stdout=-1, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        held = machine.held_bytes()[holder.pid]
        assert held > 5 * GIB
        assert int(run_on(FREE)) == alone - held
        holder.send_signal(signal.SIGKILL)
    assert int(run_on(FREE)) == alone
    assert machine.held_bytes() == {}
    assert not machine.path.exists(), "the last process removes it"


def test_a_neighbour_takes_memory_and_leaves(machine: Machine, run_on: Run) -> None:
    alone = int(run_on(FREE))
    machine.hold(3 * GIB)
    assert int(run_on(FREE)) == alone - 3 * GIB
    machine.hold(0)
    assert int(run_on(FREE)) == alone


def test_what_others_hold_is_taken(run_on: Run) -> None:
    others = [find_card(held_by_others_bytes=10 * GIB)]
    assert int(run_on(FREE)) - int(run_on(FREE, cards=others)) == 10 * GIB


def test_a_process_chooses_among_the_cards(run_on: Run) -> None:
    cards = [find_card("L4"), find_card("T4"), find_card("A100-80GB")]

    def names(visible: str) -> list[str]:
        printed = run_on(DEVICES, cards=cards, variables={"CUDA_VISIBLE_DEVICES": visible})
        return [line.split(",")[0].removeprefix("NVIDIA ") for line in printed.splitlines()]

    assert names("0,1,2") == ["L4", "T4", "A100-80GB"]
    assert names("2,0") == ["A100-80GB", "L4"]
    second = run_on(DEVICES, cards=cards).splitlines()[1]
    assert names(f"GPU-{second.split(',')[1]}") == ["T4"]
    assert names("1,7,0") == ["T4"], "what follows a number that no card has is not seen"


def test_without_cards_there_is_no_gpu(run_on: Run) -> None:
    program = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"
    assert run_on(program, cards=[]) == "False 0\n"
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert run_on(program, variables=hidden) == "False 0\n"


def test_a_process_forked_after_the_first_use_cannot_use_the_gpu(run_on: Run) -> None:
    assert run_on(FORKED) == "done\n"


def test_a_context_takes_what_the_card_says(run_on: Run) -> None:
    program = """
import torch
free, total = torch.cuda.mem_get_info()
(torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum()
print(total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved())
"""
    assert int(run_on(program, cards=[find_card("H200")])) == 620 * MIB


READS = """
import torch
from emulated_gpu.driver import reads_watched

x, seen = torch.ones(3, device="cuda"), []
def quiet(): return x + 1, x.clone(), torch.ones(3).cuda()
asking = [lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.cpu(), lambda: bool((x > 0).all())]
with reads_watched(lambda: not seen.append(1)):
    quiet()
    print(len(seen), end=" ")
    for ask in asking:
        seen.clear()
        ask()
        print(len(seen) > 0, end=" ")
seen.clear()
with reads_watched(lambda: bool(seen.append(1))):  # does not want to be called again
    x.sum().item(), x.sum().item()
x.cpu()
print(len(seen))
"""


def test_what_the_host_reads_is_seen(run_on: Run) -> None:
    assert run_on(READS, values=False) == "0 True True True True 1\n"
