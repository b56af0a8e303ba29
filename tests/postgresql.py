"""A PostgreSQL server of the tests' own, on loopback, where its programs are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_STARTS_WITHIN_S = 120.0


def missing() -> str | None:
    """What is missing for a server, in words; None: nothing."""
    if _program("initdb") is None or _program("postgres") is None:
        return "PostgreSQL is not installed: apt install postgresql"
    if find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'psycopg[binary]'"
    if os.geteuid() == 0 and not _may_run_as():
        return "PostgreSQL does not run as the administrator, and there is no user postgres"
    return None


@contextmanager
def running_server() -> Iterator[str]:
    """Start a server with an empty database and yield its URL for Optuna; stop it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="autofit-postgresql-"))
    options: dict[str, Any] = {"cwd": folder}
    if os.geteuid() == 0:  # it refuses to run as the administrator
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data, port = folder / "data", _free_port()
    with (folder / "log").open("w+") as log:
        options |= {"stdout": log, "stderr": log}
        made = [str(_program("initdb")), "-D", str(data), "-U", "autofit", "-A", "trust", "-N"]
        subprocess.run(made, check=True, timeout=_STARTS_WITHIN_S, **options)
        served = [str(_program("postgres")), "-D", str(data), "-p", str(port), "-F"]
        served += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        server = subprocess.Popen(served, **options)
        try:
            _await(port, server, folder / "log")
            yield f"postgresql+psycopg://autofit@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> str | None:
    """Debian keeps most of them outside of PATH."""
    return shutil.which(name) or max(glob(f"/usr/lib/postgresql/*/bin/{name}"), default=None)


def _may_run_as() -> bool:
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def _await(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    import psycopg

    ends_at = time.monotonic() + _STARTS_WITHIN_S
    while True:
        try:
            psycopg.connect(f"host=127.0.0.1 port={port} user=autofit dbname=postgres").close()
            return
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > ends_at:
                raise RuntimeError(f"no server: {log.read_text()}") from error
        time.sleep(0.2)
