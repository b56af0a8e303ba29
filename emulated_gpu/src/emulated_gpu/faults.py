"""Faults of the driver: which call fails, with which error, or never returns."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from emulated_gpu.driver import loaded_driver
from emulated_gpu.errors import InvalidArgument

Call = Literal[
    "init",
    "context",
    "malloc",
    "host_malloc",
    "memcpy",
    "launch",
    "sync",
    "event",
    "cublas",
    "cudnn",
    "nvml_init",
    "nvml",
]
"""Kinds of calls, in the order in which a process first makes them.

init: the first of all; context: a process's first use of a device; malloc, host_malloc: device
memory and pinned host memory; memcpy, launch: copies and kernels; sync, event: waiting for a stream
or a device, and recording an event; cublas, cudnn: making a handle; nvml_init, nvml: opening NVML,
and asking it for memory or processes.
"""
HANG = -1
_FORM = re.compile(r"(\w+)@(\d+)(?:x(\d+))?=(\d+|hang)(?:@(\S+))?")


@dataclass(frozen=True)
class Fault:
    """Some calls of one kind that fail.

    Attributes:
        call: the kind.
        number: which of them is the first to fail, from 1, counted in each process.
        error: the cudaError_t it returns (nvmlReturn_t for NVML's; any for cublas and cudnn, whose
            handles then fail as out of memory); None: the call hangs. Errors that a kernel causes
            (700, 710, 719) and a hang of "launch" show at the next call that waits for it.
        times: how many in a row fail.
        process: only processes whose command line has this word; "": all.
    """

    call: Call
    number: int = 1
    error: int | None = None
    times: int = 1
    process: str = ""

    def __post_init__(self) -> None:
        if self.call not in get_args(Call):
            raise InvalidArgument(f"no call {self.call!r} can fail; one of {get_args(Call)}")
        if self.number < 1 or self.times < 1:
            raise InvalidArgument(f"calls are counted from 1, got {self.number} and {self.times}")
        if re.search(r"[,@\s]", self.process):
            raise InvalidArgument(f"process= is a word without comma and @, got {self.process!r}")

    @property
    def setting(self) -> str:
        """The fault as `sources/driver/faults.cpp` reads it: "launch@60x2=700@WORD"."""
        times = f"x{self.times}" if self.times > 1 else ""
        process = f"@{self.process}" if self.process else ""
        return f"{self.call}@{self.number}{times}={self._outcome}{process}"

    @property
    def _outcome(self) -> str:
        return "hang" if self.error is None else str(self.error)


def parse_fault(text: str) -> Fault:
    """Return the fault that `Fault.setting` writes so.

    Raises:
        InvalidArgument: it has another form.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise InvalidArgument(f'a fault is given as "launch@60=700" or "sync@3=hang", got {text!r}')
    call, number, times, outcome, process = match.groups()
    error = None if outcome == "hang" else int(outcome)
    named: Any = call
    return Fault(named, int(number), error, int(times or 1), process or "")


def faults_setting(faults: Sequence[Fault]) -> str:
    """Return the faults as `sources/driver/faults.cpp` reads them."""
    return ",".join(fault.setting for fault in faults)


def inject(fault: Fault) -> None:
    """Let calls of this process fail; the next call of the kind is number 1.

    Raises:
        Unavailable: this process runs on no emulated GPU.
    """
    code = HANG if fault.error is None else fault.error
    function = loaded_driver().emulated_gpu_inject
    function.argtypes = [ctypes.c_char_p, ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_int]
    function.restype = None
    function(fault.call.encode(), fault.number, fault.times, code)
