"""An emulated GPU: the CUDA build of PyTorch runs on a machine without one.

PyTorch's caching allocator, its operators and its errors are the real ones; CUDA's runtime and
driver, cuBLAS, cuDNN and NVML below them are emulated. They are loaded into processes that are
started for it, by `run` or in an `environment`, never into this one.
"""

from emulated_gpu.cards import Card, card_names, find_card
from emulated_gpu.driver import count_calls, estimates, reads_watched
from emulated_gpu.errors import EmulatedGpuError, InvalidArgument, Unavailable
from emulated_gpu.faults import Fault, inject, parse_fault
from emulated_gpu.launch import environment, run
from emulated_gpu.machines import Machine, new_machine
from emulated_gpu.toolchain import why_unavailable

__version__ = "0.1.0"
__all__ = [
    "Card",
    "EmulatedGpuError",
    "Fault",
    "InvalidArgument",
    "Machine",
    "Unavailable",
    "card_names",
    "count_calls",
    "environment",
    "estimates",
    "find_card",
    "inject",
    "new_machine",
    "parse_fault",
    "reads_watched",
    "run",
    "why_unavailable",
]
