"""What a process on an emulated GPU can ask of the driver that it runs on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from emulated_gpu.errors import Unavailable


def loaded_driver() -> Any:
    """Return the emulated driver of this process.

    Raises:
        Unavailable: this process runs on no emulated GPU.
    """
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "emulated_gpu_inject"):
        raise Unavailable(
            "this process runs on no emulated GPU: start it with `python -m emulated_gpu --`"
        )
    return library


def count_calls(call: str) -> int:
    """Return how many calls of a kind (`faults.Call`) this process has made.

    Raises:
        Unavailable: this process runs on no emulated GPU.
    """
    function = loaded_driver().emulated_gpu_count
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_ulonglong
    return int(function(call.encode()))


def estimates() -> tuple[str, ...]:
    """Return what this process was told that rests on a guess, such as unknown scratch memory.

    Raises:
        Unavailable: this process runs on no emulated GPU.
    """
    function = loaded_driver().emulated_gpu_estimates
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_ulonglong], ctypes.c_ulonglong
    text = ctypes.create_string_buffer(int(function(None, 0)))
    function(text, len(text))
    return tuple(text.value.decode(errors="replace").splitlines())


@contextmanager
def reads_watched(seen: Callable[[], bool]) -> Iterator[None]:
    """Call a function when this process copies from the card to the host, as `.item()` does.

    It is called on the thread that copies, below the Python code that asked, and must not raise.

    Args:
        seen: returns whether it wants to be called again.

    Raises:
        Unavailable: this process runs on no emulated GPU.
    """
    watch = loaded_driver().emulated_gpu_on_read
    kind = ctypes.CFUNCTYPE(None)
    watch.argtypes, watch.restype = [kind], None

    def called() -> None:
        if not seen():
            watch(kind())

    kept = kind(called)  # for as long as the driver may call it
    watch(kept)
    try:
        yield
    finally:
        watch(kind())
