"""Start processes on an emulated GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

from emulated_gpu.build import DRIVER, build_driver, build_values
from emulated_gpu.cards import Card, cards_setting, find_card
from emulated_gpu.errors import InvalidArgument
from emulated_gpu.faults import Fault, faults_setting
from emulated_gpu.machines import Machine, new_machine
from emulated_gpu.toolchain import find_cuda_torch

Values = bool | Literal["integers"]
PREFIX = "EMULATED_GPU_"
MACHINE = f"{PREFIX}MACHINE"
"""The variable that names a process's emulated machine; it is not set elsewhere."""
NVML_LIMITS = ("refuse", "noproc", "nomem", "hostpid", "nouuid", "mig")
"""nvmlInit fails; no process is listed; their memory is not told; their pids are those of another
pid namespace; no card is found by its UUID; the cards are slices of larger ones."""
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def environment(
    cards: Sequence[Card] | None = None,
    *,
    machine: Machine,
    faults: Sequence[Fault] = (),
    nvml: Sequence[str] = (),
    values: Values = True,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment in which a process, and its children, find an emulated GPU.

    The first call builds the libraries, which takes a minute.

    Args:
        cards: of the machine; None: one H200.
        machine: processes with the same machine share the memory of its cards.
        faults: calls that fail, counted in each process.
        nvml: what NVML does not tell (`NVML_LIMITS`).
        values: whether kernels compute; "integers": those alone whose tensors all hold integers,
            booleans or a single number, such as masks and flags. Without, a training is faster and
            its losses mean nothing.
        base: the environment to add to; None: this process's.

    Raises:
        Unavailable: the CUDA build of torch, the compiler or CUDA's headers are missing.
        InvalidArgument: there are too many cards, or `nvml` has another word.
    """
    if unknown := set(nvml) - set(NVML_LIMITS):
        raise InvalidArgument(f"nvml= is of {NVML_LIMITS}, got {sorted(unknown)}")
    setting = cards_setting([find_card()] if cards is None else cards)
    driver = build_driver()
    before = dict(os.environ if base is None else base)
    made = {name: text for name, text in before.items() if not name.startswith(PREFIX)}
    _prepend(made, "LD_LIBRARY_PATH", driver, os.pathsep)
    # Preloaded: torch would look for the runtime beside itself before LD_LIBRARY_PATH is asked.
    _prepend(made, "LD_PRELOAD", driver / DRIVER, " ")
    if values:
        _prepend(made, "PYTHONPATH", build_values(), os.pathsep)
    return made | {
        f"{PREFIX}CARDS": setting,
        MACHINE: machine.name,
        f"{PREFIX}FAULTS": faults_setting(faults),
        f"{PREFIX}NVML": ",".join(nvml),
        f"{PREFIX}VALUES": values if isinstance(values, str) else str(int(values)),
        f"{PREFIX}CUDNN": str(find_cuda_torch().cudnn),
        "TRITON_LIBCUDA_PATH": str(driver),
    }


def run(
    command: Sequence[str | Path],
    *,
    cards: Sequence[Card] | None = None,
    machine: Machine | None = None,
    faults: Sequence[Fault] = (),
    nvml: Sequence[str] = (),
    values: Values = True,
) -> int:
    """Run a command on an emulated GPU, and return its exit status, as a shell does.

    Signals that would end this process go to the command.

    Args:
        command: and its arguments.
        cards: as those below, of `environment`.
        machine: None: a new one, which is forgotten at the end.
        faults: calls that fail.
        nvml: what NVML does not tell.
        values: whether kernels compute.

    Raises:
        Unavailable, InvalidArgument: those of `environment`; there is no such command.
    """
    own = machine or new_machine()
    try:
        found = environment(cards, machine=own, faults=faults, nvml=nvml, values=values)
        try:
            process = subprocess.Popen(list(map(str, command)), env=found)
        except OSError as error:
            raise InvalidArgument(f"{command[0]} cannot be run: {error.strerror}") from error
        with _signals_go_to(process):
            status = process.wait()
        return status if status >= 0 else 128 - status
    finally:
        if machine is None:
            own.remove()


@contextmanager
def _signals_go_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on; a terminal's interrupt reaches the command by itself."""
    if threading.current_thread() is not threading.main_thread():  # Python lets no other set them
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepend(variables: dict[str, str], name: str, path: Path, separator: str) -> None:
    before = variables.get(name, "").split(separator)
    kept = [entry for entry in before if entry and entry != str(path)]
    variables[name] = separator.join([str(path), *kept])
