"""Workers are forks of a server, and what becomes of them where there is none."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import WorkerFailed
from autofit.probing.worker_channel import WorkerChannel
from autofit.training.workload import Workload


@pytest.fixture
def channel() -> Iterator[WorkerChannel]:
    opened = WorkerChannel(Workload(nn.Linear(2, 2), torch.ones(2, 2)), device="cpu")
    yield opened
    opened.close()


def worker_and_parent(channel: WorkerChannel) -> tuple[int, int]:
    """Open the channel; return the process ids of its worker and of that one's parent."""
    channel.open()
    worker = channel.pid
    assert worker is not None
    fields = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
    return worker, int(fields[1])


def test_workers_are_forks_of_one_process(channel: WorkerChannel) -> None:
    first, server = worker_and_parent(channel)
    channel.drop()
    second, same = worker_and_parent(channel)
    assert first != second
    assert server == same != os.getpid()


def test_a_server_that_is_killed_is_replaced(channel: WorkerChannel, running: Any) -> None:
    worker, server = worker_and_parent(channel)
    os.kill(server, signal.SIGKILL)
    while running(worker):
        pass
    channel.drop()
    assert worker_and_parent(channel)[1] != server


def test_a_worker_outlives_the_thread_that_asked_for_it(channel: WorkerChannel) -> None:
    thread = threading.Thread(target=channel.open)
    thread.start()
    thread.join()
    worker, _ = worker_and_parent(channel)
    os.kill(worker, 0)


def test_where_something_keeps_a_thread_nothing_is_forked(
    channel: WorkerChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert worker_and_parent(channel)[1] == os.getpid()
    channel.drop()
    assert worker_and_parent(channel)[1] == os.getpid()


def test_a_python_that_does_not_start_is_said_in_its_words(
    channel: WorkerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(WorkerFailed, match="encodings"):
        channel.open()
