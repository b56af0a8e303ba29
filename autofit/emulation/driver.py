"""What a process on an emulated GPU can ask of the driver that it runs on."""

from __future__ import annotations

import ctypes
from typing import Any

from autofit.emulation.errors import EmulationUnavailable


def loaded_driver() -> Any:
    """Return the emulated driver of this process.

    Raises:
        EmulationUnavailable: this process runs on no emulated GPU.
    """
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "autofit_emulation_inject"):
        raise EmulationUnavailable(
            "this process runs on no emulated GPU: start it with `python -m autofit.emulation --`"
        )
    return library


def count_calls(call: str) -> int:
    """Return how many calls of a kind (`faults.Call`) this process has made.

    Raises:
        EmulationUnavailable: this process runs on no emulated GPU.
    """
    function = loaded_driver().autofit_emulation_count
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_ulonglong
    return int(function(call.encode()))


def estimates() -> tuple[str, ...]:
    """Return what this process was told that rests on a guess, such as unknown scratch memory.

    Raises:
        EmulationUnavailable: this process runs on no emulated GPU.
    """
    function = loaded_driver().autofit_emulation_estimates
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_ulonglong], ctypes.c_ulonglong
    text = ctypes.create_string_buffer(int(function(None, 0)))
    function(text, len(text))
    return tuple(text.value.decode(errors="replace").splitlines())
