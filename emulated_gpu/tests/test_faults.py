"""Faults of the driver: which call fails, what torch makes of it, and what still works."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from emulated_gpu import Fault

pytestmark = pytest.mark.emulated

Run = Callable[..., str]

STICKY = """
import torch
x = torch.ones(8, device="cuda")
try:
    for _ in range(50):
        x = x + 1
    torch.cuda.synchronize()
except RuntimeError as error:
    print(type(error).__name__, str(error).splitlines()[0])
for again in (torch.cuda.synchronize, lambda: torch.zeros(2**22, device="cuda"), x.cpu):
    try:
        again()
        print("works")
    except RuntimeError:
        print("fails", end=" ")
"""

INJECTED = """
import torch
from emulated_gpu import Fault, count_calls, inject
inject(Fault("malloc", error=2, times=2))  # torch flushes its cache and asks once more
try:
    torch.empty(2**26, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory", end=" ")
before = count_calls("launch")
torch.empty(2**26, device="cuda").fill_(1)
print(count_calls("launch") - before)
"""

CUBLAS = """
import torch
try:
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
except RuntimeError as error:
    print("CUBLAS_STATUS_ALLOC_FAILED" in str(error), end=" ")
(torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).sum()
print("works")
"""

HANGING = """
import os, threading, time, torch
torch.ones(8, device="cuda") + 1

def watch():
    time.sleep(1)
    print("hung", flush=True)
    os._exit(0)

threading.Thread(target=watch, daemon=True).start()
torch.cuda.synchronize()
print("returned")
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (700, "CUDA error: an illegal memory access was encountered"),
        (719, "CUDA error: unspecified launch failure"),
    ],
)
def test_an_error_of_a_kernel_ends_the_context_for_good(run_on: Run, code: int, said: str) -> None:
    printed = run_on(STICKY, faults=[Fault("launch", 20, error=code)])
    assert printed == f"AcceleratorError {said}\nfails fails fails "


def test_another_process_of_the_machine_goes_on_after_it(run_on: Run) -> None:
    run_on(STICKY, faults=[Fault("launch", 20, error=700)])
    assert run_on(STICKY) == "works\nworks\nworks\n"


def test_an_injected_fault_is_met_once_and_calls_are_counted(run_on: Run) -> None:
    assert run_on(INJECTED) == "out of memory 1\n"


def test_a_library_that_cannot_allocate_leaves_the_process_healthy(run_on: Run) -> None:
    assert run_on(CUBLAS, faults=[Fault("cublas", error=3)]) == "True works\n"


def test_a_kernel_that_never_ends_is_waited_for(run_on: Run) -> None:
    assert run_on(HANGING, faults=[Fault("launch", 2, error=None)]) == "hung\n"
