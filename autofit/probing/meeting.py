"""Where the ranks' parents meet: keys in one store that all of them reach, and no process group.

The leader (rank 0) writes numbered commands for all ranks; each rank's seat answers them under its
own rank. Any number of processes and threads may read and write, each with a `Meeting.store` of its
own, since a client that waits for a key keeps others of the same connection waiting.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidRequest
from autofit.strategy import World

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports no name

CONNECT_S = 60.0
"""For a store to answer, and for every rank to come."""

_times_met = 0  # in this process: every rank calls in the same order
_served: Any = None  # keeps the store alive that this process serves


@dataclass(frozen=True)
class Meeting:
    """One call of autofit by every rank.

    Attributes:
        world: the ranks, and which of them this is.
        host, port: of the store.
        name: prefix of the keys, the same on every rank and for no other call.
    """

    world: World
    host: str
    port: int
    name: str

    def store(self, wait_s: float = CONNECT_S) -> Store:
        """Return a new client of the store, which sees the keys of this meeting alone.

        Args:
            wait_s: seconds for the store to answer.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # likewise

        wait = timedelta(seconds=wait_s)
        client = TCPStore(self.host, self.port, None, False, wait)
        return PrefixStore(self.name, client)


def meet(world: World, environment: Mapping[str, str] = os.environ) -> Meeting:
    """Return the meeting of this call; every rank must call it as often.

    Raises:
        InvalidRequest: the environment does not say where the ranks meet, or nothing answers there.
    """
    global _times_met, _served
    try:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        raise InvalidRequest(
            f"there are {world.size} ranks, and MASTER_ADDR and MASTER_PORT do not say where they "
            "meet: start them with torchrun"
        ) from None
    _times_met += 1
    meeting = Meeting(world, host, port, f"autofit/{_times_met}")
    is_served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world.rank == 0 and not is_served and _served is None:
        _served = _serve(host, port)
    try:
        meeting.store(CONNECT_S)
    except RuntimeError as error:
        raise InvalidRequest(
            f"there are {world.size} ranks, and rank {world.rank} cannot reach {host}:{port} "
            "(MASTER_ADDR and MASTER_PORT), where they meet: start them with torchrun, and make "
            f"the same call on every rank ({error})"
        ) from None
    return meeting


def _serve(host: str, port: int) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no name

    try:
        return TCPStore(host, port, None, True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        raise InvalidRequest(
            f"rank 0 cannot serve {host}:{port} (MASTER_ADDR and MASTER_PORT), where the ranks "
            f"meet: choose a free port of its machine ({error})"
        ) from None


def host_name() -> str:
    """Return the name of this machine, by which messages name a rank's."""
    return socket.gethostname()
