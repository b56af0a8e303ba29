"""What a program meets on a card: streams, graphs, snapshots, compiled kernels, a second card."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from emulated_gpu import find_card

pytestmark = pytest.mark.emulated

Run = Callable[..., str]

WAITING = """
import torch
first, second = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
assert first != second and second.priority == -1 and first.device.index == 0
with torch.cuda.stream(first):
    torch.cuda._sleep(2 * 10**8)
    done = torch.cuda.Event()
    done.record()
assert second.query() and not first.query()
second.wait_event(done)
assert not second.query(), "it waits for what the event waits for"
second.synchronize()
assert done.query() and first.query()
print("done")
"""

GRAPHS = """
import warnings
import torch
model, given = torch.nn.Linear(32, 32).cuda(), torch.zeros(8, 32, device="cuda")
warm = torch.cuda.Stream()
with torch.cuda.stream(warm):
    model(given)
torch.cuda.current_stream().wait_stream(warm)
graph = torch.cuda.CUDAGraph()
with warnings.catch_warnings():
    warnings.simplefilter("error")  # as of a graph without nodes
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        result = model(given)
pool = [each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] != (0, 0)]
assert sum(each["allocated_size"] for each in pool) >= result.nbytes
graph.replay()
torch.cuda.synchronize()
assert result.shape == (8, 32)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
assert any("empty" in str(each.message) for each in said)
print("done")
"""

SNAPSHOT = """
import pickle, sys, torch
torch.cuda.memory._record_memory_history()
def allocate():
    return torch.empty(5 * 2**20, dtype=torch.uint8, device="cuda")
held = allocate()
del held
torch.cuda.empty_cache()
torch.cuda.memory._dump_snapshot(sys.argv[1])
(trace,) = pickle.load(open(sys.argv[1], "rb"))["device_traces"]
print(*(each["action"] for each in trace))
assert any(frame["name"] == "allocate" for frame in trace[0]["frames"]), trace[0]["frames"]
"""

PRESSURE = """
import torch
statistics = torch.cuda.memory_stats
torch.cuda.set_per_process_memory_fraction(0.5)
cached = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(10)]
del cached
large = torch.empty(9 * 2**30, dtype=torch.uint8, device="cuda")
print(statistics()["num_alloc_retries"], statistics()["num_ooms"])
assert torch.cuda.memory_reserved() == large.nbytes
try:
    torch.empty(9 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print(statistics()["num_alloc_retries"], statistics()["num_ooms"])
"""

COMPILED = """
import torch
def chain(x):
    return torch.nn.functional.gelu(x * 2 + 1).cos().sum()
x = torch.randn(2**20, device="cuda", requires_grad=True)
def peak(function):
    function(x).backward()
    torch.cuda.reset_peak_memory_stats()
    function(x).backward()
    return torch.cuda.max_memory_allocated()
fused, eager = peak(torch.compile(chain)), peak(chain)
assert fused < eager, (fused, eager)
from torch._inductor.codecache import PyCodeCache
print(any("triton" in open(each.__file__).read() for each in PyCodeCache.modules))
"""

TWO_CARDS = """
import torch
assert torch.cuda.device_count() == 2
names = [torch.cuda.get_device_name(at) for at in range(2)]
sizes = [torch.cuda.get_device_properties(at).total_memory for at in range(2)]
first = torch.arange(12.0, device="cuda:0")
second = first.to("cuda:1")
assert second.device.index == 1 and torch.equal(second.cpu(), first.cpu())
held = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda:1")
assert torch.cuda.memory_allocated(0) < 2**20 < torch.cuda.memory_allocated(1)
free = [torch.cuda.mem_get_info(at)[0] for at in range(2)]
assert sizes[0] - free[0] < 2**30 < 3 * 2**30 < sizes[1] - free[1]
assert not torch.cuda.can_device_access_peer(0, 1)
try:
    first + second
except RuntimeError as error:
    assert "same device" in str(error)
try:
    torch.cuda.set_device(2)
except RuntimeError as error:
    print(names, "invalid device ordinal" in str(error))
"""


def test_a_stream_waits_for_another_ones_event(run_on: Run) -> None:
    assert run_on(WAITING) == "done\n"


def test_a_cuda_graph_is_captured_and_its_memory_counts(run_on: Run) -> None:
    assert run_on(GRAPHS) == "done\n"


def test_a_snapshot_has_the_history_of_allocations(run_on: Run, tmp_path: object) -> None:
    assert run_on(SNAPSHOT, f"{tmp_path}/snapshot").split() == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
        "segment_free",
    ]


def test_the_allocator_gives_its_cache_back_before_it_runs_out(run_on: Run) -> None:
    """Ten GiB lie in the cache where nine more are asked for within twelve."""
    printed = run_on(PRESSURE, cards=[find_card(memory="24GiB")])
    assert printed == "1 0\n2 1\n"


def test_a_compiled_function_fuses_by_triton(run_on: Run) -> None:
    pytest.importorskip("triton")
    assert run_on(COMPILED) == "True\n"


def test_two_cards_are_two(run_on: Run) -> None:
    cards = [find_card("L4"), find_card("T4")]
    assert run_on(TWO_CARDS, cards=cards) == "['NVIDIA L4', 'NVIDIA T4'] True\n"
