"""Who runs a trial: enough to tell later, from the same host, whether that process still lives.

A process id alone is reused by the system, so the start time of the process goes with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Owner:
    """One process on one host.

    Attributes:
        pid: its process id.
        host: the host's name.
        started: when the process started, in the system's own ticks; None: the system does not say.
    """

    pid: int
    host: str
    started: int | None

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls(os.getpid(), socket.gethostname(), _start_ticks(os.getpid()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Owner:
        """The owner that `to_dict` wrote."""
        return cls(data["pid"], data["host"], data["started"])

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    @property
    def alive(self) -> bool | None:
        """Whether the process still runs; None where it cannot be told: it is on another host."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs as another user
        return _start_ticks(self.pid) == self.started and not _is_zombie(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc(5)); None on systems without it."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _is_zombie(pid: int) -> bool:
    """Whether the process has ended and only waits to be reaped."""
    fields = _stat_fields(pid)
    return bool(fields) and fields[0] in "ZX"


def _stat_fields(pid: int) -> list[str]:
    """The fields after the command name, which may itself hold blanks and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
