"""The fixtures of the simulated device, and of a database server."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.postgresql import missing, running_server
from tests.simulated import device, make_device

__all__ = ["device", "make_device"]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a server; skips, in words, where one cannot be started."""
    lacks = missing()
    if lacks is not None:
        pytest.skip(lacks)
    with running_server() as url:
        yield url


@pytest.fixture
def database(postgresql: str) -> str:
    """The URL of a database that nothing has used."""
    import psycopg

    name = f"autofit_{uuid4().hex[:12]}"
    server = postgresql.replace("+psycopg", "")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'create database "{name}"'.encode())
    return postgresql.rpartition("/")[0] + f"/{name}"
