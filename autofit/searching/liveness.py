"""Who works on a shared study, and who no longer does.

Promises: a worker that ended, however it did, is found out by all others; one whose process runs
and whose counter moves is never taken for dead; no two clocks need agree.

In: the attributes of the study, one for each worker. Out: the workers that are absent. A worker is
absent where it says that it has left, where its process was on this host and has ended, and where
its counter, which a thread of it raises every `beat_s`, has stood still for `grace_s` on the
observer's own monotonic clock. In a database the thread also drives Optuna's heartbeat of the trial
in flight, which the database's clock times, so that a worker which comes later need not watch for
so long.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage

from autofit.searching.claim import runs_here, this_process
from autofit.searching.storage import BEAT_S, GRACE_S
from autofit.shapes import AMOUNT, COUNT, FLAG, TEXT, check_shape

WORKER = "autofit_worker"
"""The attribute of a trial that holds its worker's key."""
_PREFIX = f"{WORKER}_"
_WORKER = {
    "name": TEXT,
    "host": TEXT,
    "pid": COUNT,
    "beats": AMOUNT,
    "searches": FLAG,
    "has_left": FLAG,
}


class Workers:
    """The workers of a study, as one of them sees the others.

    Args:
        study: that they share.
        beat_s: seconds from one sign of life to the next.
        grace_s: seconds without one after which a worker counts as absent.
        clock: the observer's, monotonic, in seconds.

    Attributes:
        key: of this worker.
        name: of this worker, for people.
        grace_s: as given.
        trial_id: Optuna's of the trial that this worker holds; None: none.
    """

    def __init__(
        self,
        study: optuna.Study,
        *,
        beat_s: float = BEAT_S,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        process = this_process()
        self.key, self.grace_s, self._beat_s, self._clock = uuid.uuid4().hex, grace_s, beat_s, clock
        self.name = f"{process['host']}:{process['pid']}"
        self.trial_id: int | None = None
        self._study = study
        self._entry = process | {"name": self.name, "searches": True, "has_left": False}
        self._beats = 0
        self._writes = threading.Lock()  # of the thread and of the search
        self._has_left = threading.Event()
        self._seen: dict[str, tuple[int, float]] = {}  # its counter, and since when it stands there

    def join(self) -> None:
        """Write this worker's entry and keep it alive."""
        self._write()
        threading.Thread(target=self._beat, daemon=True, name="autofit-beat").start()

    def leave(self) -> None:
        """Say that this worker has gone."""
        self._has_left.set()
        self._write(has_left=True)

    def searches(self, *, still: bool) -> None:
        """Say whether this worker may still run plans for the search."""
        if self._entry["searches"] is not still:
            self._write(searches=still)

    def entries(self, attrs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Return the workers' entries among the attributes of the study, by key.

        Raises:
            InvalidRequest: one is damaged.
        """
        found = {
            name.removeprefix(_PREFIX): entry
            for name, entry in attrs.items()
            if name.startswith(_PREFIX)
        }
        for entry in found.values():
            check_shape(entry, _WORKER, "a worker of the study")
        return found

    def absent(self, entries: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
        """Return the keys of the workers that are gone; never this one's."""
        return frozenset(
            key for key, entry in entries.items() if key != self.key and self._is_gone(key, entry)
        )

    def _is_gone(self, key: str, entry: Mapping[str, Any]) -> bool:
        now, beats = self._clock(), entry["beats"]
        last, since = self._seen.get(key, (None, now))
        if last != beats:
            since = now
        self._seen[key] = (beats, since)
        return bool(entry["has_left"] or runs_here(entry) is False or now - since > self.grace_s)

    def _beat(self) -> None:
        while not self._has_left.wait(self._beat_s):
            with suppress(Exception):  # the next one may get through; the search tells of the rest
                self._write()
                self.beat_trial()

    def beat_trial(self) -> None:
        """Give the database a sign of life of the trial that this worker holds."""
        storage, trial_id = backend_of(self._study), self.trial_id
        if isinstance(storage, RDBStorage) and trial_id is not None:
            storage.record_heartbeat(trial_id)

    def _write(self, **changes: Any) -> None:
        with self._writes:
            self._entry |= changes
            self._beats += 1
            entry = self._entry | {"beats": self._beats}
            self._study.set_user_attr(_PREFIX + self.key, entry)


def backend_of(study: optuna.Study) -> BaseStorage:
    """Return the storage itself, which Optuna keeps behind a cache where it is a database."""
    storage = study._storage  # Optuna has no public name for either
    return getattr(storage, "_backend", storage)
