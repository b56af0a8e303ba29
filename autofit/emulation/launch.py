"""Start processes on an emulated GPU."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autofit.emulation.build import DRIVER, build_driver, build_values, find_cuda_torch
from autofit.emulation.card import EmulatedCard, cards_setting, emulated_card
from autofit.emulation.faults import Fault, faults_setting
from autofit.emulation.machine import Machine

PREFIX = "AUTOFIT_EMULATION_"
MACHINE = f"{PREFIX}MACHINE"
"""The variable that names a process's emulated machine; it is not set elsewhere."""


def emulated_environment(
    cards: Sequence[EmulatedCard] | None = None,
    *,
    machine: Machine,
    faults: Sequence[Fault] = (),
    nvml: Sequence[str] = (),
    values: bool = True,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment in which a process, and its children, find an emulated GPU.

    The first call builds the libraries: about 10 s, with values some minutes.

    Args:
        cards: of the machine; None: one H200.
        machine: processes with the same machine share the memory of its cards.
        faults: calls that fail, counted in each process.
        nvml: how NVML is limited: "refuse", "noproc", "nomem", "hostpid", "nouuid", "mig".
        values: whether kernels compute. Without, a training is faster and its losses mean nothing.
        base: the environment to add to; None: this process's.

    Raises:
        EmulationUnavailable: the CUDA build of torch, the compiler or CUDA's headers are missing.
    """
    driver = build_driver()
    before = dict(os.environ if base is None else base)
    environment = {name: text for name, text in before.items() if not name.startswith(PREFIX)}
    _prepend(environment, "LD_LIBRARY_PATH", driver, os.pathsep)
    # Preloaded: torch would look for the runtime beside itself before LD_LIBRARY_PATH is asked.
    _prepend(environment, "LD_PRELOAD", driver / DRIVER, " ")
    if values:
        _prepend(environment, "PYTHONPATH", build_values(), os.pathsep)
    environment |= {
        f"{PREFIX}CARDS": cards_setting([emulated_card()] if cards is None else cards),
        MACHINE: machine.name,
        f"{PREFIX}FAULTS": faults_setting(faults),
        f"{PREFIX}NVML": ",".join(nvml),
        f"{PREFIX}VALUES": "1" if values else "0",
        f"{PREFIX}CUDNN": str(find_cuda_torch().cudnn),
        "TRITON_LIBCUDA_PATH": str(driver),
    }
    return environment


def run_emulated(command: Sequence[str | Path], **options: Any) -> int:
    """Run a command on a machine of its own, and return its exit status, as a shell does.

    Args:
        command: and its arguments.
        **options: those of `emulated_environment`; a machine that is not given is a new one, which
            is forgotten at the end.
    """
    own = "machine" not in options
    machine = options.setdefault("machine", new_machine())
    environment = emulated_environment(**options)
    try:
        status = subprocess.run(list(map(str, command)), env=environment).returncode
        return status if status >= 0 else 128 - status
    finally:
        if own:
            machine.remove()


def new_machine() -> Machine:
    """Return a machine that no process uses yet."""
    return Machine(f"{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _prepend(environment: dict[str, str], name: str, path: Path, separator: str) -> None:
    before = environment.get(name, "").split(separator)
    kept = [entry for entry in before if entry and entry != str(path)]
    environment[name] = separator.join([str(path), *kept])
