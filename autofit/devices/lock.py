"""A lock for one search at a time on a device; it is released when its process ends, anyhow."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from autofit.errors import DeviceUnavailable

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
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_nlink < 2:  # else it is a file of that user's
            with suppress(PermissionError):  # another user's
                os.fchmod(file, 0o644)  # whatever the umask: else a kill locks all others out
            return file
        os.close(file)
        raise _unusable(path, "not a regular file")


def _unusable(path: Path, why: str | None) -> DeviceUnavailable:
    return DeviceUnavailable(f"cannot use the device's lock file {path}: {why}. Remove it")
