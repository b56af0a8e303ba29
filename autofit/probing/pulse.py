"""Whether the other ranks are there: each counts in the store, and whoever waits for one looks.

Promises: who waits for a rank whose process or machine went away, or for a store that did, is told
within `SILENCE_S` and two beats, by `WorkerFailed`. No closed connection is relied on: ranks need
not have any but to the store, whose host may be another one than theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from autofit.errors import WorkerFailed
from autofit.probing.meeting import Meeting

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports no name

BEAT_S = 1.0
SILENCE_S = 20.0
"""Without a beat a rank counts as gone: above what an import or a busy machine holds a thread up,
and within torchrun's 30 s for what it ends."""
_RESUME = "with a study, the same command resumes the search"


@contextmanager
def beating(meeting: Meeting) -> Iterator[None]:
    """Count for this rank, from a thread with a client of its own, until this is left."""
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(meeting, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _beat(meeting: Meeting, ended: threading.Event) -> None:
    with suppress(RuntimeError):  # the store is gone: who waits says so
        store = meeting.store()
        while True:
            store.add(_key(meeting.world.rank), 1)
            if ended.wait(BEAT_S):
                return


class Watch:
    """Looks whether ranks beat. One that never did is not missed: it may not have come yet.

    Args:
        store: of the meeting.
        ranks: to look at.
        hosts: rank -> its machine, where known.
    """

    def __init__(
        self, store: Store, ranks: Iterable[int], hosts: Mapping[int, str] | None = None
    ) -> None:
        self._store, self._hosts = store, hosts or {}
        self._looked_at = time.monotonic()
        self._heard = dict.fromkeys(ranks, (0, self._looked_at))

    def check(self) -> None:
        """Look, if the last look was a beat ago.

        Raises:
            WorkerFailed: a rank has not been heard of for `SILENCE_S`.
        """
        now = time.monotonic()
        unseen_s = now - self._looked_at
        if unseen_s < BEAT_S:
            return
        self._looked_at = now
        for rank, (count, since) in self._heard.items():
            beats = self._store.add(_key(rank), 0)
            if beats != count or not beats or unseen_s > SILENCE_S / 2:  # or nobody looked
                self._heard[rank] = (beats, now)
            elif now - since > SILENCE_S:
                host = f" ({self._hosts[rank]})" if rank in self._hosts else ""
                raise WorkerFailed(
                    f"rank {rank}{host} has not been heard of for {SILENCE_S:g} s: its process or "
                    f"its machine went away; {_RESUME}"
                )


def store_lost(error: BaseException) -> WorkerFailed:
    """Return what to raise where the store does not answer any more."""
    reason = str(error).partition("\n")[0]
    return WorkerFailed(
        f"the ranks' store cannot be reached, so the machine that held it went away ({reason}); "
        f"{_RESUME}"
    )


def _key(rank: int) -> str:
    return f"beat/{rank}"
