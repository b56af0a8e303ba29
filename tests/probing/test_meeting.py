"""Where the ranks meet, when nothing answers there."""

from __future__ import annotations

import socket

import pytest

from autofit.errors import InvalidRequest
from autofit.probing import meeting
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
