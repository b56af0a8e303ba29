"""Ranks that are never started: too many, too late, or where they could not meet."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument, SearchTimedOut, WorkerFailed
from autofit.probing import rank_channel
from autofit.probing.rank_channel import RankChannel
from autofit.training.workload import Workload


def few() -> Workload:
    return Workload(
        nn.Linear(4, 2), torch.ones(4, 4), loss_fn=lambda model, batch: model(batch).sum()
    )


def test_more_ranks_than_a_machine_runs_are_refused_before_any_has_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_channel, "WorkerChannel", None)  # would be called
    with pytest.raises(InvalidArgument, match=r"ranks=1000000.* at most"):
        RankChannel(10**6, few(), device="cpu")


def test_ranks_that_cannot_meet_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "_HOST", "192.0.2.1")  # of no machine (RFC 5737)
    with pytest.raises(WorkerFailed, match=r"192\.0\.2\.1"):
        RankChannel(2, few(), device="cpu")


def test_no_files_are_made_for_ranks_after_the_search_has_ended() -> None:
    with pytest.raises(SearchTimedOut):
        RankChannel(2, few(), device="cpu", ends_at=time.monotonic() - 1)
