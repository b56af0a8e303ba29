"""One thread: these models are so small that sharing them out only costs time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def any_time_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer every implementation of an optimizer, however little time it saves."""
    monkeypatch.setattr("autofit.strategies.optimizer.WORTH", float("-inf"))


@pytest.fixture
def any_blocks_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer to compile blocks alone, however little time that saves."""
    monkeypatch.setattr("autofit.strategies.compile.MIN_SAVED", float("-inf"))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Torch's default process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]  # torch
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
