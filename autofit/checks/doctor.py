"""What a search would meet on this machine, and what to do about it.

The device is looked at in a worker process that then trains a small model for a few steps, as a
probe does: a driver that hangs or crashes ends that process, and not the one that asks.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autofit.devices.base import (
    TRIED_TORCH,
    Environment,
    host_memory,
    load_of_others,
    notes_on_torch,
)
from autofit.devices.cuda import notes_on_choice
from autofit.devices.nvml import Nvml
from autofit.errors import AutofitError, release_exception
from autofit.measurement import Measurement, Outcome
from autofit.memory.allocator import VARIABLES, configured
from autofit.probing.prober import Deadlines, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.session import Session
from autofit.registry import GROUP, installed_names, load_strategies, resolve, unavailable
from autofit.strategy import Capabilities, Strategy
from autofit.training.workload import Workload
from autofit.units import format_bytes

_DEADLINES = Deadlines(unknown_s=120.0)
_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_BYTES = 2**30
_MIN_HOST_BYTES = 2 * 2**30
_CROWDED = 0.05  # share of a device's memory that others hold


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at.
        found: what was found.
        advice: what to do about it; None: nothing.
        stops_searches: whether a search cannot run until that is done.
    """

    subject: str
    found: str
    advice: str | None = None
    stops_searches: bool = False

    def __str__(self) -> str:
        mark = "stop" if self.stops_searches else "note" if self.advice else "ok"
        line = f"{mark:<6}{self.subject:<16}{self.found}"
        return line if self.advice is None else f"{line}\n{'':<22}-> {self.advice}"


@dataclass(frozen=True)
class Diagnosis:
    """What a search would meet on this machine.

    Attributes:
        facts: versions, device and memory, by name.
        findings: what was looked at.
    """

    facts: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def can_search(self) -> bool:
        """Whether a search can run."""
        return not any(finding.stops_searches for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        findings = [asdict(finding) for finding in self.findings]
        return {"can_search": self.can_search, "facts": dict(self.facts), "findings": findings}

    def __str__(self) -> str:
        facts = [f"{name:<16}{value}" for name, value in self.facts.items()]
        return "\n".join([*facts, "", *map(str, self.findings)])


@dataclass(frozen=True)
class _Device:
    """What a worker saw of its device."""

    capabilities: Capabilities
    free_bytes: int
    held_bytes: Mapping[int, int] | None
    busy: str | None


def diagnose(device: str | None = None) -> Diagnosis:
    """Look at this machine as a search would, and train a small model for a few steps on it.

    Args:
        device: "cuda", "cuda:1" or "cpu"; None: cuda where there is one.

    Raises:
        InvalidArgument: there is no such kind of device.
    """
    facts = {
        "autofit": importlib.metadata.version("torch-autofit"),
        "torch": torch.__version__,
        "tried torch": ", ".join(TRIED_TORCH),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("optuna", "cloudpickle")},
        "strategies": ", ".join(installed_names()),
    }
    strategies, broken = _load_each()
    findings = [_of_the_installation(), *broken, *_of_the_host()]
    seen, of_device = _look_at_device(device, strategies)
    return Diagnosis(facts | seen, (*findings, *of_device))


def _load_each() -> tuple[list[Strategy], list[Finding]]:
    """Return the installed strategies that can be loaded, and a finding for each other one."""
    loaded: list[Strategy] = []
    broken: list[Finding] = []
    for name in installed_names():
        try:
            loaded += load_strategies([name])
        except AutofitError as error:
            advice = (
                f"repair or uninstall the package that has this entry point of {GROUP}, or search "
                "with strategies= without it"
            )
            found = f"{name} cannot be used: {error}"
            broken.append(Finding("strategies", found, advice, stops_searches=True))
    return loaded, broken


def _of_the_installation() -> Finding:
    version = ".".join(torch.__version__.split(".")[:2])
    is_tried, others = version in TRIED_TORCH, ", ".join(TRIED_TORCH)
    found = f"autofit is {'' if is_tried else 'not '}tested with torch {version}"
    found = "; ".join([found, *notes_on_torch()])
    return Finding("torch", found, None if is_tried else f"if something fails, try one of {others}")


def _of_the_host() -> Iterator[Finding]:
    total, available = host_memory()
    found = f"{format_bytes(available)} of {format_bytes(total)} available"
    advice = "a worker with torch takes about 1 GiB beside your model: end other processes"
    yield Finding("host memory", found, advice if available < _MIN_HOST_BYTES else None)
    if _SHARED_MEMORY.exists():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        found = f"{format_bytes(free)} free in {_SHARED_MEMORY}"
        advice = (
            "data loaders with workers pass batches through it: start the container with "
            "--shm-size=8g or --ipc=host"
        )
        yield Finding("shared memory", found, advice if free < _MIN_SHARED_BYTES else None)
    if (load := load_of_others()) is not None:
        yield Finding(
            "load",
            load,
            "speeds will vary and a search takes longer: wait, or end those processes",
        )


def _look_at_device(
    name: str | None, installed: Sequence[Strategy]
) -> tuple[dict[str, str], list[Finding]]:
    """Return facts and findings of the device, from a worker that trained on it."""
    chosen = [
        Finding("device", note, "use a torch build that matches the driver, or --device cpu")
        for note in notes_on_choice(name)
    ]
    if name is None and not torch.version.cuda and Path("/proc/driver/nvidia").exists():
        chosen.append(
            Finding(
                "device",
                f"an NVIDIA driver is loaded, and torch {torch.__version__} was built without CUDA",
                "install the CUDA build of torch (https://pytorch.org/get-started/locally)",
            )
        )
    began = time.monotonic()
    strategies = load_strategies([])
    try:
        with open_prober(_workload(), strategies, Target(name), deadlines=_DEADLINES) as prober:
            survey = prober.survey()
            seen = prober.run(_seen)
            space = survey.space()
            request = ProbeRequest(resolve(None, space, strategies, None))
            measured = prober.probe(request).measurement
    except AutofitError as error:
        if error.exit_code != AutofitError.exit_code:  # the request was wrong, not the machine
            raise
        release_exception(error)
        failed = Finding(
            "device",
            str(error),
            "follow the message, or use another device",
            stops_searches=True,
        )
        return {}, [*chosen, failed, *_of_allocator()]
    environment = survey.environment
    facts = {
        name: "-" if value is None else format_bytes(value) if name == "total_bytes" else str(value)
        for name, value in vars(environment).items()
        if name not in ("torch", "python")
    }
    native = [kind for kind, has in vars(seen.capabilities).items() if has is True]
    facts |= {
        "free": format_bytes(seen.free_bytes),
        "native types": ", ".join(["float32", *native]),
    }
    findings = [*chosen, _of_probe(environment.device, measured, time.monotonic() - began)]
    findings += [
        Finding("strategies", why, "install that, and searches can use the strategy")
        for why in unavailable(installed, environment.device.partition(":")[0])
    ]
    if environment.device != "cpu":
        findings += [*_of_gpu(seen, environment), *_of_allocator()]
    return facts, findings


def _workload() -> Workload:
    """Return a small training whose products and convolutions load the libraries of a device."""
    nn, batch = torch.nn, (torch.ones(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))
    return Workload(  # built in the worker: weights draw random numbers
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8)),
        batch,
        criterion=nn.CrossEntropyLoss(),
    )


def _seen(session: Session) -> _Device:
    device = session.builder.device
    nvml = None if device.exclusive_key is None else Nvml(device.exclusive_key)
    held = None if nvml is None else nvml.bytes_by_process()
    if held is not None:
        held = {pid: used for pid, used in held.items() if pid != os.getpid()}
    return _Device(device.capabilities, device.free_bytes, held, device.busy())


def _of_probe(device: str, measured: Measurement, seconds: float) -> Finding:
    if measured.outcome is Outcome.OK:
        found = f"a worker trained a small model on {device}; all of it took {seconds:.0f} s"
        return Finding("worker", found)
    return Finding(
        "worker",
        f"a small model could not be trained on {device}: {measured.outcome}: {measured.detail}",
        "see docs/outcomes.md for this outcome",
        stops_searches=True,
    )


def _of_gpu(seen: _Device, environment: Environment) -> Iterator[Finding]:
    if environment.driver is None or seen.held_bytes is None:
        yield Finding(
            "NVML",
            "it does not say what processes hold on this device",
            "memory outside torch is then estimated; in a container, start it with the NVIDIA "
            "runtime and --pid=host",
        )
    else:
        yield Finding("NVML", f"answers; driver {environment.driver}")
    held = seen.held_bytes or {}
    if sum(held.values()) > _CROWDED * environment.total_bytes:
        shown = ", ".join(f"process {pid}: {format_bytes(used)}" for pid, used in held.items())
        yield Finding(
            "other processes", shown, "end them, or set a VRAM budget that leaves room for them"
        )
    if seen.busy is not None:
        yield Finding("device load", seen.busy, "speeds will vary: wait until the device is idle")


def _of_allocator() -> Iterator[Finding]:
    read, _ = configured()
    for name in VARIABLES:
        given = os.environ.get(name, "")
        if given and name != read:
            found, instead = f"torch does not read {name}={given}", read or VARIABLES[0]
            yield Finding("allocator", found, f"set {instead}, or unset it")
        elif "cudaMallocAsync" in given:
            advice = "a search counts what the caching allocator holds: unset it"
            yield Finding("allocator", f"{name}={given}", advice)
        elif given:
            yield Finding("allocator", f"{name}={given}: a search measures under it")
