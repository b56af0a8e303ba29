"""Two processes train a checkpointed model under DistributedDataParallel as they do a plain one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "workloads" / "ddp_rank.py"
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
}


@pytest.fixture(scope="module")
def trained(
    python: Callable[..., subprocess.Popen[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the weights of both ranks."""
    folder = tmp_path_factory.mktemp("ddp")
    more = (folder, json.dumps(CASES))
    ranks = [python(PROGRAM, rank, *more, forks_workers=False) for rank in range(2)]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(trained: Path, case: str) -> None:
    for rank in range(2):
        plain, checkpointed = torch.load(trained / f"{case}-{rank}.pt")
        assert plain.keys() == checkpointed.keys()
        assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
