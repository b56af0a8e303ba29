"""A device that two searches would spoil for each other is held by one process at a time."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autofit.devices.base import DeviceLock
from autofit.errors import DeviceUnavailable

HOLDS = """
import sys
from autofit.devices.base import DeviceLock
lock = DeviceLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def key() -> Iterator[str]:
    """A name that no device has; a lock of it that was released leaves no file."""
    made = f"test-{uuid.uuid4()}"
    yield made
    assert list(Path("/tmp").glob(f"autofit-*{made}*")) == []


def test_the_second_is_refused_with_the_name_of_the_holder(key: str) -> None:
    with (
        DeviceLock(key),
        pytest.raises(DeviceUnavailable, match=rf"\b{os.getpid()}\b.*{key}"),
    ):
        DeviceLock(key)
    DeviceLock(key).release()


def test_it_falls_with_its_process(key: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(DeviceUnavailable, match=rf"\b{holder.pid}\b"):
        DeviceLock(key)
    holder.kill()
    holder.communicate()
    DeviceLock(key).release()


def test_who_has_opened_the_file_that_a_holder_removes_holds_the_next_one(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lock_file = DeviceLock(key), fcntl.flock

    def lock_once_it_was_removed(file: int, how: int) -> None:
        first.release()
        lock_file(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_once_it_was_removed)
    with DeviceLock(key), pytest.raises(DeviceUnavailable, match=rf"\b{os.getpid()}\b"):
        DeviceLock(key)


def _path(key: str) -> Path:
    return Path("/tmp") / f"autofit-{key}.lock"


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
def test_another_user_takes_over_the_file_of_a_killed_search(key: str) -> None:
    program = f"""
import os
os.umask(0o077)
from autofit.devices.base import DeviceLock
os.setuid(2001 + int(os.sys.argv[1]))
DeviceLock({key!r})
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    try:
        for user in "01":
            ended = subprocess.run([sys.executable, "-c", program, user], capture_output=True)
            assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    finally:
        _path(key).unlink()


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_is_no_file_at_its_place_is_refused(key: str, kind: str, tmp_path: Path) -> None:
    path = _path(key)
    make: dict[str, Callable[[], object]] = {
        "fifo": lambda: os.mkfifo(path, 0o444),
        "directory": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
    }
    make[kind]()
    try:
        with pytest.raises(DeviceUnavailable, match=str(path)):
            DeviceLock(key)
    finally:
        path.rmdir() if kind == "directory" else path.unlink()
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_of_the_users_that_is_linked_there_is_left_alone(key: str, tmp_path: Path) -> None:
    """Anybody may write into /tmp: the link would have the file emptied and made public."""
    if os.stat("/tmp").st_dev != tmp_path.stat().st_dev:
        pytest.skip("a hard link does not lead to another file system")
    private = tmp_path / "private"
    private.write_text("words")
    private.chmod(0o600)
    os.link(private, _path(key))
    try:
        with pytest.raises(DeviceUnavailable, match=str(_path(key))):
            DeviceLock(key)
    finally:
        _path(key).unlink()
    assert private.read_text() == "words"
    assert private.stat().st_mode & 0o777 == 0o600


def test_what_another_user_wrote_into_the_file_reaches_no_terminal(key: str) -> None:
    lock = DeviceLock(key)
    _path(key).write_text("\x1b]0;a title\x07 process 1")
    with pytest.raises(DeviceUnavailable) as refused:
        DeviceLock(key)
    assert "\x1b" not in str(refused.value)
    lock.release()
