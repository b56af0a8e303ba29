"""Opening a study where the user keeps it: in memory, in a file, or in a database.

Promises: one search at a time has a study, and one whose process has ended keeps nobody out; a
study that cannot be opened is refused, with the cause on one line; everything that was opened is
closed by the caller's stack.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection

from autofit.errors import InvalidArgument, StudyError
from autofit.units import format_seconds

_STUDY_NAME = "autofit"
_STALE_LOCK_S = 3  # a write takes milliseconds: an older lock was left by a killed process


class AskTellStudy(optuna.Study):
    """A study for ask and tell; `optuna.Study.stop` raises outside of `optimize`.

    Attributes:
        stopped: whether its sampler has stopped it, having nothing else to propose.
    """

    stopped = False

    def stop(self) -> None:
        """Note that the sampler has nothing else to propose."""
        self.stopped = True


def name_of(study: str | os.PathLike[str] | None) -> str:
    """Return what a study is called in messages: its path or URL, without a password."""
    if study is None:
        return "in memory"
    given = os.fspath(study)
    scheme, colon, rest = given.partition(":")
    hidden, at, place = rest.rpartition("@")  # the last one: a password may contain another
    if not colon or not (at or "://" in given):
        return given
    if "?" in hidden:  # of the password or of an option: what follows may be the rest of a secret
        return f"{scheme}:***"
    return f"{scheme}:{'***@' if at else ''}{place.partition('?')[0]}"


def check_opens(study: str | os.PathLike[str]) -> None:
    """Open a study and close it again, before what a search does first takes its time.

    Raises:
        StudyError: it cannot be opened, or another search has it.
    """
    with ExitStack() as held:
        open_study(study, held)


def open_study(
    study: str | os.PathLike[str] | None, held: ExitStack
) -> tuple[AskTellStudy, Claim | None]:
    """Open a study, or make it if there is none.

    Args:
        study: a file path, an Optuna storage URL, or None for memory.
        held: closes everything that was opened.

    Returns:
        The study; and for a database, which has no lock, the claim that keeps other searches out.

    Raises:
        StudyError: it cannot be opened, or another search has it.
    """
    storage: BaseStorage
    name = name_of(study)
    with _opening(name):
        if study is None:
            storage = InMemoryStorage()
        elif "://" not in (given := os.fspath(study)):
            storage = _open_file(given, held)
        else:
            storage = _database(given)
            held.callback(storage.engine.dispose)  # or its file stays open until it is collected
            held.callback(storage.remove_session)
        optuna.create_study(
            study_name=_STUDY_NAME, storage=storage, direction="maximize", load_if_exists=True
        )
        opened = AskTellStudy(_STUDY_NAME, storage)
        if opened.directions != [StudyDirection.MAXIMIZE]:
            raise StudyError(f"{name} holds a study {_STUDY_NAME!r} of another program")
        if not isinstance(storage, RDBStorage):
            return opened, None
        claim = Claim(opened, name)
        held.callback(claim.give_up)
        return opened, claim


_CLAIM = "autofit_claim"
_SILENT_S = 3600.0  # a search on another host that asked for no plan in this time has ended


class Claim:
    """One search's claim on a study in a database, which has no lock, kept in the study itself.

    Of two that claim it at the same instant the last one to write has it; the other learns so when
    it renews its claim, before it asks for a plan.

    Args:
        study: the study.
        name: of the study in messages.

    Raises:
        StudyError: another search that still runs has it.
    """

    def __init__(self, study: optuna.Study, name: str) -> None:
        self._study, self._name = study, name
        self._own = this_process() | {"id": uuid.uuid4().hex}
        other = study.user_attrs.get(_CLAIM)
        if other is not None and is_live(other):
            raise StudyError(
                f"process {other['pid']} on {other['host']} is using the study {name} (last seen "
                f"{format_seconds(_silence_s(other))} ago): wait for it to end, or use another "
                "study"
            )
        self._write()

    def renew(self) -> None:
        """Show that this search still runs.

        Raises:
            StudyError: another search took it for ended, and has the study now.
        """
        if not self._is_own:
            raise StudyError(
                f"another search has taken over the study {self._name}, because this one did not "
                "respond for too long: resume it when the other has ended"
            )
        self._write()

    def give_up(self) -> None:
        """Let other searches use the study."""
        if self._is_own:
            self._study.set_user_attr(_CLAIM, None)

    @property
    def _is_own(self) -> bool:
        claim = self._study.user_attrs.get(_CLAIM)
        return claim is not None and claim["id"] == self._own["id"]

    def _write(self) -> None:
        self._study.set_user_attr(_CLAIM, self._own | {"seen": time.time()})


def is_live(claim: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a claim still runs.

    On another host, or in another container, that is unknown; a claim renewed within the last hour
    then counts as live.
    """
    runs = runs_here(claim)
    return _silence_s(claim) < _SILENT_S if runs is None else runs


def _silence_s(claim: Mapping[str, Any]) -> float:
    seen: float = claim["seen"]
    return max(0.0, time.time() - seen)  # the clock of another host may be ahead


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
    except StudyError:
        raise
    except Exception as error:  # a driver raises what it likes about the options of a URL
        cause = cause_of(error)
        of_database = sys.modules.get("sqlalchemy.exc")
        if of_database and isinstance(error, of_database.ArgumentError):  # 2.0.0 repeats the URL
            cause = "SQLAlchemy cannot parse this URL"
        # Not "from error": a driver's own words, and its arguments, may hold the password.
        raise StudyError(f"cannot open the study {name}: {cause}") from None
    finally:
        optuna.logging.set_verbosity(verbosity)


def errors_of_storages() -> tuple[type[Exception], ...]:
    """Return what a study raises that cannot be read or written."""
    of_database = sys.modules.get("sqlalchemy.exc")
    return (OSError, StorageInternalError, *([of_database.SQLAlchemyError] if of_database else []))


def _database(url: str) -> RDBStorage:
    import sqlalchemy  # most studies are in memory or in a file
    import sqlalchemy.exc

    if sqlalchemy.make_url(url).host and url.count("@") > 1:  # a driver would name half a password
        raise StudyError(f"cannot open the study {name_of(url)}: write an @ in the password as %40")
    return RDBStorage(url)


class _WriteLock(JournalFileSymlinkLock):
    """Optuna's lock, whose release ends with Ctrl-C where that comes while it removes its file.

    It then removes the file once more, which fails, and that error would hide the Ctrl-C.
    """

    def release(self) -> None:
        try:
            super().release()
        except OSError as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise


def _open_file(name: str, held: ExitStack) -> JournalStorage:
    """Open an Optuna journal for this process alone.

    Two locks protect it. `flock` is held for as long as the search runs and ends with its process,
    however that ends: a second search is refused at once. Optuna's own lock, a link beside the
    file, is held during each write, so that other Optuna programs can read and write meanwhile.
    """
    # Optuna's lock is a symbolic link to the file: a relative path would not resolve.
    path = Path(os.path.expanduser(name)).absolute()  # which leaves an unknown user's as it is
    write_lock = _WriteLock(str(path), grace_period=_STALE_LOCK_S)
    try:
        _cut_torn_line(path, held.enter_context(_locked(path)), write_lock)
        with checked(path):
            return JournalStorage(JournalFileBackend(str(path), write_lock))
    except OSError as error:
        raise StudyError(
            f"cannot write the study {name_of(path)}: {error.strerror or error}; use a folder that "
            "exists, is writable and has room"
        ) from None  # a mistyped URL is a path, and may hold a password


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")  # reading may not end
    with open(path, "ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyError(
                f"another search is using the study {path}: wait for it to end, or use another "
                "study"
            ) from None
        yield file


def _cut_torn_line(path: Path, file: IO[bytes], write_lock: JournalFileSymlinkLock) -> None:
    """Cut an unfinished last line off: after the next append Optuna could not read past it."""
    write_lock.acquire()
    try:
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        begun = b'{"op_code"'  # what any entry begins with
        if not content.startswith(begun[: len(content)]):
            raise StudyError(
                f"{path} is not a study (a file in Optuna's journal format): give the path of a "
                "new file"
            )
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                json.loads(line)
            except (ValueError, RecursionError):  # Optuna names no line
                what = f"line {number} of it is damaged: {line[:60]!r}"
                raise _damaged(path, what) from None
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())
    finally:
        write_lock.release()


def _damaged(study: object, what: str) -> StudyError:
    return StudyError(
        f"the study {study} cannot be read ({what}): repair it, or use a copy or another study"
    )


@contextmanager
def checked(study: object) -> Iterator[None]:
    """Refuse a study whose content cannot be what Optuna and autofit wrote.

    Optuna reads a journal without checking it, so damage shows as any error; no code of a user's is
    inside.
    """
    try:
        yield
    except StudyError:
        raise
    except InvalidArgument as error:  # of the codec
        raise _damaged(study, str(error)) from error
    except (
        ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, OverflowError,
        RecursionError,
    ) as error:  # fmt: skip
        raise _damaged(study, f"{type(error).__name__}: {error}") from error


# Which process this is, and whether one that was noted so still runs.


def this_process() -> dict[str, Any]:
    """Return host and id of this process, and its start time: the system reuses ids."""
    pid = os.getpid()
    return {"pid": pid, "started": _start_ticks(pid), **_whereabouts()}


def _whereabouts() -> dict[str, Any]:
    """Return what makes a process id unique: the host, its boot, and the namespace of the id.

    Containers may have one host name, and ids of their own.
    """
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        known = {"boot": boot.read_text().strip(), "namespace": namespace.stat().st_ino}
    except OSError:  # systems without /proc
        known = {"boot": None, "namespace": None}
    return {"host": socket.gethostname(), **known}


def runs_here(claim: Mapping[str, Any]) -> bool | None:
    """Return whether the process of `this_process` runs, or None if it is elsewhere, so unknown."""
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
