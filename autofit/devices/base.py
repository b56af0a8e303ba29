"""What a device does: hold a training to a VRAM budget, and report memory and time.

A lock leaves a device to one search at a time; it is released when its process ends, anyhow.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import stat
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter  # itself, since the user's code may put another in its place
from typing import Any

import torch
from torch.torch_version import TorchVersion

from autofit.errors import DeviceUnavailable
from autofit.strategy import Capabilities

# Versions of torch with which the unit tests were run, in order.
#
# With 2.13 all other tests pass, too; with 2.11, built for CUDA, those of a GPU, which is emulated.
TRIED_TORCH = ("2.8", "2.9", "2.10", "2.11", "2.13", "2.14", "2.15")


def notes_on_torch(version: str = torch.__version__) -> tuple[str, ...]:
    """Return a note if torch is newer or older than every version autofit was tested with."""
    oldest, newest = map(TorchVersion, (TRIED_TORCH[0], TRIED_TORCH[-1]))
    own = TorchVersion(".".join(version.split(".")[:2]))
    if oldest <= own <= newest:
        return ()
    apart = (
        f"newer than {newest}, the newest" if own > newest else f"older than {oldest}, the oldest"
    )
    return (f"torch {version} is {apart} that autofit was tried with",)


@dataclass(frozen=True)
class MemoryReading:
    """The memory counters of a process on a device; peaks are those since `reset_peaks`."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    non_torch_bytes: int
    allocator_retries: int

    @property
    def peak_held_bytes(self) -> int:
        """Peak reserved plus non-torch bytes, which a VRAM budget limits."""
        return self.peak_reserved_bytes + self.non_torch_bytes


@dataclass(frozen=True)
class Environment:
    """Device and software of a search; the keys of the report's "environment"."""

    device: str
    gpu: str | None
    capability: str | None
    total_bytes: int
    driver: str | None = None
    cuda: str | None = None
    torch: str = torch.__version__
    python: str = platform.python_version()


class Device:
    """One device, used by this process; each kind of device says where it differs.

    Attributes:
        torch_device: the device in torch.
        environment: the environment for a report.
        total_bytes: bytes of memory on the device.
        free_bytes: bytes that this process could use when the device was opened.
        exclusive_key: a name, unique on this host, that two searches must not use at once; None:
            shareable.
        tracked_steps: steps beyond the warm-up that must run under `accounting` for peaks to be
            known.
        clock: see `autofit.strategy.Context.clock`.
    """

    torch_device: torch.device
    environment: Environment
    total_bytes: int
    free_bytes: int
    exclusive_key: str | None = None
    tracked_steps = 0
    clock: Callable[[], float] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The native features of the hardware."""
        raise NotImplementedError

    def limit(self, vram_budget_bytes: int) -> None:
        """From now on, run out of memory where reserved and non-torch bytes exceed the budget."""
        raise NotImplementedError

    def accounting(self) -> AbstractContextManager[None]:
        """Count what is allocated inside against the budget."""
        return nullcontext()

    def in_host_memory(self) -> AbstractContextManager[None]:
        """Let tensors made inside live in host memory, where they do not count."""
        return nullcontext()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device, in storage that counts against the budget."""
        is_cuda = self.torch_device.type == "cuda"  # a copy to the host is used without waiting
        return tensor.to(self.torch_device, non_blocking=is_cuda)

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a sample batch in the host memory that a data loader should fill."""
        return tensor

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the parameters and buffers of a module to the device, and return that module."""
        return model.to(self.torch_device)

    def mark(self) -> Any:
        """Return the moment at which the work queued so far ends."""
        return perf_counter()

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """Return the seconds from one mark to a later one; only after `synchronize`."""
        return float(later - earlier)

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def read(self) -> MemoryReading:
        """Return the memory counters."""
        raise NotImplementedError

    def allocated_bytes(self) -> int:
        """Return bytes in live tensors; cheap enough to call after every step."""
        raise NotImplementedError

    def reset_peaks(self) -> None:
        """Restart the peaks at the current values."""
        raise NotImplementedError

    def release_cache(self, *, workspaces: bool = True) -> None:
        """Return unused cached memory to the device.

        Args:
            workspaces: with those that libraries keep from call to call.
        """

    def check_health(self) -> None:
        """Compute something small and check it; raise what the device raises if it is gone."""

    def foreign_bytes(self) -> int | None:
        """Return the bytes that other processes use on the device, or None if unknown."""
        return None

    def busy(self) -> str | None:
        """Return what other processes do on the device while this one is idle; None: not much."""
        return None


_SHARED_FOLDER = Path("/tmp")  # TMPDIR differs between users and jobs, the device does not


class DeviceLock(AbstractContextManager["DeviceLock"]):
    """A lock that is held from construction until `release`.

    Args:
        key: the device's unique name on this host, such as the UUID of a GPU.

    Raises:
        DeviceUnavailable: another search holds it, or its file cannot be used.
    """

    def __init__(self, key: str) -> None:
        folder = _SHARED_FOLDER if _SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())
        name = re.sub(r"[^\w.-]", "_", key)  # MIG-GPU-.../1/0 is a key
        self._path = folder / f"autofit-{name}.lock"
        self._file = _open(self._path)
        while not self._is_taken(key):
            self._file = _open(self._path)
        self._sign(f"process {os.getpid()}\n")

    def release(self) -> None:
        """Release the lock and remove its file; calling it again does nothing."""
        if self._file >= 0:
            self._sign("")
            with suppress(OSError):  # another user's file: it stays, and says nothing
                self._path.unlink()  # before the lock falls: later it may be another's
            os.close(self._file)
            self._file = -1

    def _is_taken(self, key: str) -> bool:
        """Lock the open file; return False, and close it, if its holder removed it before."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            signed = re.match(rb"process \d+", os.pread(self._file, 100, 0))
            holder = signed[0].decode() if signed else "another user's"
            os.close(self._file)
            raise DeviceUnavailable(
                f"another search ({holder}) is using the device {key}, and two at once "
                "would distort each other's memory and times: wait for it, or choose "
                "another device"
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                return True
        os.close(self._file)
        return False

    def __exit__(self, *raised: object) -> None:
        self.release()

    def _sign(self, text: str) -> None:
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text.encode(), 0)
        except OSError:  # another user's file, or a full disk: the lock holds anyway
            return


def _open(path: Path) -> int:
    """Open the lock file, read-only where it is another user's.

    Raises:
        DeviceUnavailable: there is no such file to be had: what lies there is something else.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would wait for its other end
    while True:
        try:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
            except PermissionError:
                file = os.open(path, os.O_RDONLY | flags)
        except FileNotFoundError:  # its user removed it in between
            continue
        except OSError as error:
            raise _unusable(path, error.strerror) from error
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:  # else it is a file of that user's
            with suppress(PermissionError):  # another user's
                os.fchmod(file, 0o644)  # whatever the umask: else a kill locks all others out
            return file
        os.close(file)
        raise _unusable(path, "not a regular file")


def _unusable(path: Path, why: str | None) -> DeviceUnavailable:
    return DeviceUnavailable(f"cannot use the device's lock file {path}: {why}. Remove it")


# Others use much of the cores from this share on: steps then take turns with them.
BUSY = 0.5


def load_of_others(load_of_search: float = 0.0) -> str | None:
    """Return the host's load in words if others use much of its cores; None: they do not.

    Args:
        load_of_search: processes of the load, a mean over the last minute, that are this search's.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"load {load:.1f} on {cores} cores" if load - load_of_search > BUSY * cores else None


def host_memory(
    proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int]:
    """Return (total, available) bytes of host memory, within the control group's limit.

    Inactive file pages of the group count as available: the kernel reclaims them when needed.
    """
    fields = _numbers(proc / "meminfo")
    total, available = (1024 * fields[name] for name in ("MemTotal:", "MemAvailable:"))
    limit = group / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return total, available
    allowed = int(limit.read_text())
    used = int((group / "memory.current").read_text())
    left = allowed - used + _numbers(group / "memory.stat").get("inactive_file", 0)
    return min(total, allowed), max(min(available, left), 0)


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line, by the line's first word."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
