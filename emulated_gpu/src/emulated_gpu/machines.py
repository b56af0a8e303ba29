"""The memory of an emulated machine, seen from outside: who holds what, and neighbours that do.

The file and its layout are those of `sources/driver/process_table.cpp`.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emulated_gpu.cards import MAX_CARDS
from emulated_gpu.errors import InvalidArgument

_MAX_PROCESSES = 128
_OTHERS = struct.Struct(f"={MAX_CARDS}Q")
_ROW = struct.Struct(f"=QQ{MAX_CARDS}Q")
_TABLE_BYTES = _OTHERS.size + _MAX_PROCESSES * _ROW.size


@dataclass(frozen=True)
class Machine:
    """An emulated machine: processes that name it share the memory of its cards.

    Attributes:
        name: letters, digits, "-", "_" and ".".
    """

    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name, re.ASCII):
            raise InvalidArgument(
                f"a machine is named by letters, digits, - _ ., got {self.name!r}"
            )

    @property
    def path(self) -> Path:
        """The file that its processes share; it is there while any of them holds memory."""
        return Path(f"/dev/shm/emulated-gpu-{os.getuid()}-{self.name}")

    def held_bytes(self, device: int = 0) -> dict[int, int]:
        """Return the bytes that each living process holds on a device, by its pid."""
        try:
            table = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        rows = _ROW.iter_unpack(table[_OTHERS.size : _TABLE_BYTES])
        held = {pid: holds[device] for pid, _, *holds in rows if pid and holds[device]}
        return {pid: count for pid, count in held.items() if Path(f"/proc/{pid}").exists()}

    def hold(self, held_bytes: int, device: int = 0) -> None:
        """Let a neighbour that no process list shows hold this much on a device, from now on."""
        with self._locked() as file:
            os.pwrite(file, struct.pack("=Q", held_bytes), 8 * device)

    def remove(self) -> None:
        """Forget the machine, and those named after it ("NAME.gw0"), once their processes ended."""
        for path in (self.path, *self.path.parent.glob(f"{self.path.name}.*")):
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            if self.path.exists() and os.fstat(file).st_ino == self.path.stat().st_ino:
                break
            os.close(file)  # its last process removed it in between
        try:
            os.ftruncate(file, _TABLE_BYTES)
            yield file
        finally:
            os.close(file)


def new_machine() -> Machine:
    """Return a machine that no process uses yet."""
    return Machine(f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
