"""Where a study lies: in memory, in a file of its own, or in a database that others may use.

Promises: what cannot be opened is refused, with the cause in one line; what is held open is let go
of with the stack that was given.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import optuna
import sqlalchemy.exc
from optuna.exceptions import DuplicatedStudyError, StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from autofit.errors import StudyRefused

# The study's file: an Optuna journal that one search at a time may write.
#
# Two locks keep it whole. `flock` on the file is held for as long as a search runs and falls with
# its process, however that ends: a second search is refused at once. Optuna's own lock, a link
# beside the file, is held for each write, so that other Optuna programs can read and write
# meanwhile.

_STALE_LOCK_S = (
    3  # a write takes milliseconds; a lock this old was left by a process that was killed
)


class JournalFile:
    """An open journal, exclusively this process's until `close`.

    Raises:
        StudyRefused: the file is no journal, another search has it, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Optuna's lock is a symbolic link to the file: a relative one would point nowhere.
        self.path = Path(path).expanduser().absolute()
        self._lock = JournalFileSymlinkLock(str(self.path), grace_period=_STALE_LOCK_S)
        try:
            self._file = self._claim()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            self._repair()
            self.storage = JournalStorage(JournalFileBackend(str(self.path), self._lock))
        except OSError as error:
            self.close()
            raise _unwritable(self.path, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            self.close()
            raise _no_study(self.path) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others have the file."""
        self._file.close()

    def _claim(self) -> IO[bytes]:
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise OSError(errno.EINVAL, "it is a pipe or a device, no file")  # reading may not end
        file = open(self.path, "ab+")  # noqa: SIM115  # stays open as long as the lock is wanted
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StudyRefused(
                f"another search is using the study {self.path}: wait for it to end, or give "
                "this one a study of its own"
            ) from None
        except BaseException:
            file.close()
            raise
        return file

    def _repair(self) -> None:
        """Cut a torn last line off: Optuna reads past it once, and never after the next append."""
        self._lock.acquire()
        try:
            self._file.seek(0)
            content = self._file.read()
            if content and not _is_journal(content):
                raise _no_study(self.path)
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                self._file.truncate(whole)
                os.fsync(self._file.fileno())
        finally:
            self._lock.release()


def _is_journal(content: bytes) -> bool:
    """Whether it begins as a journal does; a stranger's file must not be cut."""
    first, newline, _ = content.partition(b"\n")
    if not newline:
        return first.startswith(b'{"op_code"') or b'{"op_code"'.startswith(first)
    try:
        entry = json.loads(first)
    except ValueError:
        return False
    return isinstance(entry, dict) and "op_code" in entry


def _no_study(path: Path) -> StudyRefused:
    return StudyRefused(
        f"{path} is not a study (a file in Optuna's journal format): give the path of a new file"
    )


def _unwritable(path: Path, error: OSError) -> StudyRefused:
    return StudyRefused(
        f"cannot write the study {path}: {error.strerror or error}; give a path in a folder that "
        "exists, can be written and has room"
    )


_STUDY_NAME = "autofit"
_TABLES_TRIES, _TABLES_PAUSE_S = 3, 0.2


class AskedStudy(optuna.Study):
    """A study that is asked and told; outside of Optuna's own loop it could not be stopped.

    Attributes:
        stopped: whether its sampler said that it has nothing else to offer.
    """

    stopped = False

    def stop(self) -> None:
        """What a sampler calls that has offered all it can."""
        self.stopped = True


def open_study(
    name: str, study: str | os.PathLike[str] | None, held: ExitStack
) -> tuple[AskedStudy, bool]:
    """The study that lies there, made where there is none.

    Args:
        name: what it is called in messages: the path or URL, where there is one.
        study: a file path, an Optuna storage URL, or None for memory alone.
        held: leaving it lets go of the study.

    Returns:
        The study, and whether others can open it at the same time: only a file is locked.

    Raises:
        StudyRefused: it cannot be opened.
    """
    storage = _storage(name, study, held)
    with _opening(name):
        optuna.create_study(
            study_name=_STUDY_NAME, storage=storage, direction="maximize", load_if_exists=True
        )
        return AskedStudy(_STUDY_NAME, storage), isinstance(storage, RDBStorage)


def _storage(name: str, study: str | os.PathLike[str] | None, held: ExitStack) -> BaseStorage:
    if study is None:
        return InMemoryStorage()
    if "://" not in name:
        journal = JournalFile(name)
        held.callback(journal.close)
        return journal.storage
    with _opening(name):
        storage = _database(name)
    held.callback(storage.engine.dispose)  # else a file stays open until garbage is collected
    held.callback(storage.remove_session)
    return storage


def _database(url: str) -> RDBStorage:
    """The database; of two that make its tables at once, one fails, and finds them made."""
    for _ in range(_TABLES_TRIES):
        with suppress(sqlalchemy.exc.DatabaseError):
            return RDBStorage(url)
        time.sleep(_TABLES_PAUSE_S)
    return RDBStorage(url)


@contextmanager
def _opening(name: str) -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
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


def cause_of(error: BaseException) -> str:
    """The text of the error at the bottom of a chain, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
