"""Which search may use a study that others can open at the same time, told in the study itself.

A storage URL has no lock. Each search writes a claim of its own and only then looks for those of
others, so of two that begin in the same instant at least one sees the other (the flags of Dekker's
algorithm; Dijkstra, "Cooperating Sequential Processes", 1965). Where both do, both let go, and try
again after a pause that chance makes longer for one of them.
"""

from __future__ import annotations

import os
import random
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna

from autofit.errors import StudyRefused
from autofit.units import format_seconds

# Who runs a trial: enough to tell later, from the same host, whether that process still lives.
#
# A process id alone is reused by the system, so the start time of the process goes with it.


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


_PREFIX = "autofit_claim_"
_SILENT_S = 3600.0  # a search on another host that asked for nothing in so long has ended
_TRIES = 4
_PAUSE_S = 0.5


class Claim:
    """One search's claim on a study.

    Args:
        study: the study.
        name: what it is called in messages.
    """

    def __init__(self, study: optuna.Study, name: str) -> None:
        self._study, self._name = study, name
        self._key = f"{_PREFIX}{uuid.uuid4().hex}"
        self._owner = Owner.current()
        self._written = False

    def take(self) -> None:
        """Have the study for this search alone.

        Raises:
            StudyRefused: another search that lives has it.
        """
        for _ in range(_TRIES):
            rival = self._rival()
            if rival is not None:  # it was first: it is not to be disturbed
                break
            self.renew()
            rival = self._rival()
            if rival is None:
                return
            self.give_up()
            time.sleep(random.SystemRandom().uniform(0.0, _PAUSE_S))
        assert rival is not None
        raise StudyRefused(
            f"{Owner.from_dict(rival)} is using the study {self._name} (last seen "
            f"{format_seconds(_silence_s(rival))} ago): wait for it to end, or give this search a "
            "study of its own"
        )

    def renew(self) -> None:
        """Show that this search lives."""
        self._written = True
        self._study.set_user_attr(self._key, self._owner.to_dict() | {"seen": time.time()})

    def give_up(self) -> None:
        """Let other searches have the study; nothing where it was not claimed."""
        if self._written:
            self._study.set_user_attr(self._key, None)
            self._written = False

    def _rival(self) -> Mapping[str, Any] | None:
        """The claim of another search that lives; None: there is none."""
        return next(
            (
                claim
                for key, claim in self._study.user_attrs.items()
                if key.startswith(_PREFIX) and key != self._key
                if claim is not None and _lives(claim)
            ),
            None,
        )


def _lives(claim: Mapping[str, Any]) -> bool:
    alive = Owner.from_dict(claim).alive
    return alive if alive is not None else _silence_s(claim) < _SILENT_S


def _silence_s(claim: Mapping[str, Any]) -> float:
    seen: float = claim["seen"]
    return time.time() - seen
