"""Opening a study where the user keeps it: in memory, in a file, or in a database.

Promises: one search at a time has a study, or several that share it, except in memory; a study that
cannot be opened is refused, with the cause on one line; everything that was opened is closed by the
caller's stack.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import socket
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import optuna
import sqlalchemy.exc
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from autofit.errors import InvalidRequest, StudyRefused
from autofit.units import format_seconds

_STUDY_NAME = "autofit"
_STALE_LOCK_S = 3  # a write takes milliseconds: an older lock was left by a killed process
_TABLES_TRIES, _TABLES_PAUSE_S = 3, 0.2

_CLAIM_PREFIX = "autofit_claim_"
_CLAIM_TRIES, _CLAIM_PAUSE_S = 4, 0.5
BEAT_S, GRACE_S = 10, 60
"""Seconds between the signs of life of a shared study's worker, and without one until it counts as
gone."""
_SILENT_S = 3600.0  # a search on another host that asked for no plan in this time has ended


class AskTellStudy(optuna.Study):
    """A study for ask and tell; `optuna.Study.stop` raises outside of `optimize`.

    Attributes:
        stopped: whether its sampler has stopped it, having nothing else to propose.
    """

    stopped = False

    def stop(self) -> None:
        """Note that the sampler has nothing else to propose."""
        self.stopped = True


def open_study(
    name: str, study: str | os.PathLike[str] | None, held: ExitStack, *, share: bool = False
) -> tuple[AskTellStudy, Claim | None]:
    """Open a study, or make it if there is none.

    Args:
        name: of the study in messages: the path or URL, if there is one.
        study: a file path, an Optuna storage URL, or None for memory.
        held: closes everything that was opened.
        share: let other searches that do so in, too.

    Returns:
        The study; and for a database, which has no lock, the claim that keeps other searches out.

    Raises:
        StudyRefused: it cannot be opened or shared, or another search has it.
    """
    storage: BaseStorage
    if study is None:
        storage = InMemoryStorage()
    elif "://" not in name:
        storage = _open_file(name, held, share=share)
    else:
        storage = _open_database(name, held, share=share)
    with _opening(name):
        optuna.create_study(
            study_name=_STUDY_NAME, storage=storage, direction="maximize", load_if_exists=True
        )
        opened = AskTellStudy(_STUDY_NAME, storage)
        if not isinstance(storage, RDBStorage):
            return opened, None
        claim = Claim(opened, name, share=share)
        held.callback(claim.give_up)
        claim.take()
        return opened, claim


def cause_of(error: BaseException) -> str:
    """Return the text of the error at the bottom of a chain, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _opening(name: str) -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    except StudyRefused:
        raise
    except (
        OSError,
        ImportError,
        ValueError,
        DuplicatedStudyError,
        StorageInternalError,
        sqlalchemy.exc.SQLAlchemyError,
    ) as error:
        raise StudyRefused(f"cannot open the study {name}: {cause_of(error)}") from error
    finally:
        optuna.logging.set_verbosity(verbosity)


def _open_database(url: str, held: ExitStack, *, share: bool) -> RDBStorage:
    if share and url.startswith("sqlite"):
        raise StudyRefused(
            f"a study in SQLite cannot be shared ({url}): workers on other hosts could not be told "
            "apart from it. Give a path, a journal file for workers on one host, or the URL of a "
            "database server such as PostgreSQL"
        )
    with _opening(url):
        storage = _database(url, keeps_heartbeat=share)
    held.callback(storage.engine.dispose)  # or its file stays open until garbage is collected
    held.callback(storage.remove_session)
    return storage


def _database(url: str, *, keeps_heartbeat: bool) -> RDBStorage:
    def connected() -> RDBStorage:
        if not keeps_heartbeat:
            return RDBStorage(url)
        with unremarked_experiments():
            return RDBStorage(url, heartbeat_interval=BEAT_S, grace_period=GRACE_S)

    # Of two processes that create the tables at once, one fails, and finds them created.
    for _ in range(_TABLES_TRIES):
        with suppress(sqlalchemy.exc.DatabaseError):
            return connected()
        time.sleep(_TABLES_PAUSE_S)
    return connected()


@contextmanager
def unremarked_experiments() -> Iterator[None]:
    """Leave out the warning that Optuna's heartbeat may change; the pinned one is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _open_file(name: str, held: ExitStack, *, share: bool) -> JournalStorage:
    """Open an Optuna journal, exclusively unless it is shared.

    Two locks protect it. `flock` is held for as long as the search runs and ends with its process,
    however that ends: a second search is refused at once. Optuna's own lock, a link beside the
    file, is held during each write, so that other Optuna programs can read and write meanwhile.
    """
    # Optuna's lock is a symbolic link to the file: a relative path would not resolve.
    path = Path(name).expanduser().absolute()
    write_lock = JournalFileSymlinkLock(str(path), grace_period=_STALE_LOCK_S)
    try:
        _cut_torn_line(path, held.enter_context(_locked(path, share=share)), write_lock)
        if share:  # a journal that only one search writes is mended when it is opened
            write_lock = _MendingLock(str(path), grace_period=_STALE_LOCK_S)
        with replaying(path):
            return JournalStorage(JournalFileBackend(str(path), write_lock))
    except StudyRefused:
        raise
    except OSError as error:
        raise StudyRefused(
            f"cannot write the study {path}: {error.strerror or error}; give a path in a folder "
            "that exists, can be written and has room"
        ) from error


@contextmanager
def _locked(path: Path, *, share: bool) -> Iterator[IO[bytes]]:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")  # reading may not end
    with open(path, "ab+") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyRefused(
                f"another search is using the study {path}: wait for it to end, or give this one "
                f"a study of its own{_how_to_share(share)}"
            ) from None
        yield file


def _how_to_share(share: bool) -> str:
    """Return what a refused search has to do to join the other one."""
    if share:
        return "; it does not share its study: start it with --share too"
    return "; if that one shares its study, add --share (share=True) to join it"


class _MendingLock(JournalFileSymlinkLock):
    """Optuna's lock; who gets it cuts off what a writer that was killed left of a line.

    Else the next line would continue that one, and nobody could read past the two.
    """

    def acquire(self) -> bool:
        """Wait for the lock, then mend the file."""
        acquired = super().acquire()
        with suppress(OSError), open(self._lock_target_file, "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            if end and file.seek(end - 1) and file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return acquired

    def release(self) -> None:
        """Give up the lock, unless another writer took it for stale while this one wrote."""
        with suppress(RuntimeError):
            super().release()


def _cut_torn_line(path: Path, file: IO[bytes], write_lock: JournalFileSymlinkLock) -> None:
    """Cut an unfinished last line off: after the next append Optuna could not read past it."""
    write_lock.acquire()
    try:
        file.seek(0)
        content = file.read()
        if content and not _is_journal(content):
            raise _not_a_study(path)
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            if not _is_entry(line):
                raise _damaged(path, f"line {number} of it is damaged: {line[:60]!r}")
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())
    finally:
        write_lock.release()


def _is_journal(content: bytes) -> bool:
    """Return whether a file begins like a journal; any other file must not be cut."""
    first, newline, _ = content.partition(b"\n")
    if not newline:
        return first.startswith(b'{"op_code"') or b'{"op_code"'.startswith(first)
    return _is_entry(first)


def _is_entry(line: bytes) -> bool:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and "op_code" in entry


def _damaged(study: object, what: str) -> StudyRefused:
    return StudyRefused(
        f"the study {study} cannot be read ({what}): repair it, use a copy of it, or give another"
    )


@contextmanager
def replaying(study: object) -> Iterator[None]:
    """Refuse a study whose content cannot be what Optuna wrote; only Optuna's own code is inside.

    It reads a journal without checking it, so damage shows as any error.
    """
    try:
        yield
    except (
        ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, OverflowError,
        RecursionError,
    ) as error:  # fmt: skip
        raise _damaged(study, f"{type(error).__name__}: {error}") from error


@contextmanager
def decoding(study: object) -> Iterator[None]:
    """Refuse a study whose content cannot be what autofit wrote; a fault of its code is none."""
    try:
        yield
    except StudyRefused:
        raise
    except InvalidRequest as error:
        raise _damaged(study, str(error)) from error


def _not_a_study(path: Path) -> StudyRefused:
    return StudyRefused(
        f"{path} is not a study (a file in Optuna's journal format): give the path of a new file"
    )


class Claim:
    """One search's claim on a study in a database, kept in the study itself.

    Each search writes its claim and only then looks for those of others, so of two that start at
    the same instant at least one sees the other (the flags of Dekker's algorithm; Dijkstra,
    "Cooperating Sequential Processes", 1965). If both do, both withdraw and try again after pauses
    of random length.

    Args:
        study: the study.
        name: of the study in messages.
        share: tolerate the claims of other searches that do so.
    """

    def __init__(self, study: optuna.Study, name: str, *, share: bool = False) -> None:
        self._study, self._name, self._share = study, name, share
        self._key = f"{_CLAIM_PREFIX}{uuid.uuid4().hex}"
        self._is_written = False

    def take(self) -> None:
        """Keep other searches out of the study.

        Raises:
            StudyRefused: another search that still runs has it.
        """
        for _ in range(_CLAIM_TRIES):
            rival = self._rival()
            if rival is not None:  # it came first: do not make it withdraw
                break
            self.renew()
            rival = self._rival()
            if rival is None:
                self._clear_abandoned()
                return
            self.give_up()
            time.sleep(random.SystemRandom().uniform(0.0, _CLAIM_PAUSE_S))
        assert rival is not None
        raise StudyRefused(
            f"process {rival['pid']} on {rival['host']} is using the study {self._name} (last seen "
            f"{format_seconds(_silence_s(rival))} ago): wait for it to end, or give this search a "
            f"study of its own{_how_to_share(self._share)}"
        )

    def renew(self) -> None:
        """Show that this search still runs.

        Raises:
            StudyRefused: another search took it for ended, and has the study now.
        """
        if self._is_written and self._study.user_attrs.get(self._key) is None:
            raise StudyRefused(
                f"another search has taken over the study {self._name}, since this one was not "
                "heard of for long: resume it when that one has ended"
            )
        self._is_written = True
        claim = this_process() | {"seen": time.time(), "share": self._share}
        self._study.set_user_attr(self._key, claim)

    def give_up(self) -> None:
        """Let other searches use the study."""
        if self._is_written:
            self._study.set_user_attr(self._key, None)
            self._is_written = False

    def _rival(self) -> Mapping[str, Any] | None:
        return next((claim for claim in self._others().values() if is_live(claim)), None)

    def _clear_abandoned(self) -> None:
        """Tell searches that were taken for ended, and have not, that they lost the study."""
        for key in self._others():
            self._study.set_user_attr(key, None)

    def _others(self) -> dict[str, Mapping[str, Any]]:
        return {
            key: claim
            for key, claim in self._study.user_attrs.items()
            if key.startswith(_CLAIM_PREFIX)
            and key != self._key
            and claim is not None
            and not (self._share and claim.get("share"))
        }


def this_process() -> dict[str, Any]:
    """Return host and id of this process, and its start time: the system reuses ids."""
    pid = os.getpid()
    return {"pid": pid, "started": _start_ticks(pid), **_whereabouts()}


def _whereabouts() -> dict[str, Any]:
    """Return where a process id means the same: the host, as booted, and the id's namespace.

    Containers may have one host name, and ids of their own.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        known = {"boot": boot.read_text().strip(), "namespace": namespace.stat().st_ino}
    except OSError:  # systems without /proc
        known = {"boot": None, "namespace": None}
    return {"host": socket.gethostname(), **known}


def is_live(claim: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a claim still runs.

    On another host, or in another container, that is unknown; a claim renewed within the last hour
    then counts as live.
    """
    runs = runs_here(claim)
    return _silence_s(claim) < _SILENT_S if runs is None else runs


def runs_here(claim: Mapping[str, Any]) -> bool | None:
    """Return whether the process of `this_process` runs; None: it is elsewhere, so unknown."""
    pid = claim["pid"]
    if any(claim.get(name) != value for name, value in _whereabouts().items()):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs as another user
    is_zombie = _stat_fields(pid)[:1] in (["Z"], ["X"])
    return _start_ticks(pid) == claim["started"] and not is_zombie


def _silence_s(claim: Mapping[str, Any]) -> float:
    seen: float = claim["seen"]
    return time.time() - seen


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat (proc(5)); None on systems without it."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _stat_fields(pid: int) -> list[str]:
    """Return the fields after the command name, which may itself contain blanks and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
