"""Where the ranks meet, when nothing answers there."""

from __future__ import annotations

import json
import signal
import socket
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports no name

from autofit.errors import InvalidRequest
from autofit.probing import group, meeting
from autofit.strategy import World


@pytest.mark.parametrize("is_served", ["True", "False"])
def test_a_rank_that_reaches_no_store_is_told_where_it_looked(
    is_served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "CONNECT_S", 0.2)
    with socket.socket() as held:  # bound and not listening: nobody answers there
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        told["TORCHELASTIC_USE_AGENT_STORE"] = is_served
        with pytest.raises(InvalidRequest, match=f"rank 1 cannot reach 127.0.0.1:{port}"):
            meeting.meet(World(1, 1, 2), told)


def test_a_port_of_another_program_is_refused_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_served", None)
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with pytest.raises(InvalidRequest, match=f"rank 0 cannot serve 127.0.0.1:{port}"):
            meeting.meet(World(0, 0, 2), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})


class Interrupted:
    """A client of a store, in which Ctrl-C comes with each number that it draws."""

    def __init__(self, store: HashStore) -> None:
        self.store = store

    def add(self, key: str, amount: int) -> int:
        number = self.store.add(key, amount)
        signal.raise_signal(signal.SIGINT)
        return number

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)


def test_a_command_is_whole_where_ctrl_c_comes_as_it_is_written() -> None:
    """Seats would wait for ever for a number without a command."""
    store = HashStore()
    client: Any = Interrupted(store)
    with pytest.raises(KeyboardInterrupt):
        group._write(client, {"do": "warm"})
    assert store.check(["command/0"])
    assert json.loads(store.get("command/0")) == {"do": "warm"}
