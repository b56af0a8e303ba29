"""Where a study lies: in memory, in a file of its own, or in a database that others may use.

Promises: what cannot be opened is refused, with the cause in one line; what is held open is let go
of with the stack that was given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import optuna
import sqlalchemy.exc
from optuna.exceptions import DuplicatedStudyError, StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage

from autofit.errors import StudyRefused
from autofit.searching.journal import JournalFile

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
