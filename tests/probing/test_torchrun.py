"""One call by ranks that something else than torchrun started, where rank 0 serves the store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

CALLS_TWICE = """
from autofit.probing.torchrun import owned_by_rank_0
print(owned_by_rank_0(lambda ranks: 10 * ranks), owned_by_rank_0(lambda ranks: "again"))
"""
RAISES = """
from autofit.probing.torchrun import owned_by_rank_0
def lead(ranks):
    raise LookupError("of rank 0")
try:
    owned_by_rank_0(lead)
except LookupError as error:
    print(error)
"""
DIES = """
import os
from autofit.errors import WorkerFailed
from autofit.probing.torchrun import owned_by_rank_0
try:
    owned_by_rank_0(lambda ranks: os._exit(3))
except WorkerFailed:
    print("the store is gone")
"""


def said_by_ranks(program: str) -> list[str]:
    """What each of two ranks prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | world | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        return [rank.communicate(timeout=240)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (CALLS_TWICE, ["20 again", "20 again"]),
        (RAISES, ["of rank 0", "of rank 0"]),
        (DIES, ["", "the store is gone"]),
    ],
    ids=["two calls", "an error", "a death"],
)
def test_all_ranks_end_as_rank_0_does(program: str, said: list[str]) -> None:
    assert said_by_ranks(program) == said
