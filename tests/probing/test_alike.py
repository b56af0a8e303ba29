"""What several ranks are refused for, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.errors import InvalidArgument
from autofit.plan import Dimension, Plan
from autofit.probing.alike import check_alike, check_shared
from autofit.probing.probe import probe_if
from autofit.probing.rank_channel import device_of_rank
from autofit.registry import load_strategies
from autofit.strategy import World
from autofit.training.workload import Workload

FACTS = {"gpu": "H100", "weights": 0.5}


def workload() -> Workload:
    return Workload(torch.nn.Linear(4, 4), torch.randn(4, 4))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (FACTS | {"gpu": "L4"}, "rank 1 has gpu L4, rank 0 H100: use 2 GPUs"),
        (FACTS | {"weights": 0.25}, "other weights than rank 0"),
    ],
)
def test_ranks_that_differ_are_refused_by_what_differs(other: dict[str, Any], words: str) -> None:
    check_alike([FACTS, FACTS])
    with pytest.raises(InvalidArgument, match=words):
        check_alike([FACTS, other])


def test_one_named_gpu_is_refused_for_several_ranks() -> None:
    assert device_of_rank("cpu", World(1, 1, 2)) == "cpu"
    assert device_of_rank("cuda", World(1, 1, 2)) == "cuda:1"
    with pytest.raises(InvalidArgument, match="'cuda:1' names one GPU, and there are 2 ranks"):
        device_of_rank("cuda:1", World(0, 0, 2))


def test_ranks_that_would_share_no_gradients_are_refused() -> None:
    """Whether no strategy would, or the one that would was left out, on whatever error."""
    level = {"checkpointing.level": Dimension([0, 1])}
    checkpointing = load_strategies(["checkpointing"])
    with pytest.raises(InvalidArgument, match=r"among the 3 ranks.*strategies= \(parallel\)"):
        check_shared(3, checkpointing, level, [])
    both = load_strategies(["checkpointing", "parallel"])
    notes = ["checkpointing left out: what", "parallel left out: RuntimeError: cannot look"]
    with pytest.raises(
        InvalidArgument, match="alone: parallel left out: RuntimeError: cannot look"
    ):
        check_shared(2, both, level, notes)
    check_shared(2, both, level | {"parallel.mode": Dimension(["ddp"])}, notes)


def test_a_global_batch_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"6 samples .* 8 ranks"):
        Plan(6, global_batch=6).on(8)
    assert Plan(4, global_batch=16, accumulation_steps=4).on(2).accumulation_steps == 2
    assert Plan(4).on(2).samples_per_step == 8


def test_ranks_of_another_number_are_refused_where_a_report_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from autofit.report.apply import _world_of

    with pytest.raises(InvalidArgument, match="for 2 ranks"):
        _world_of(Plan(4, world_size=2))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match="the ranks have no process group"):
        _world_of(Plan(4, world_size=2))
    with pytest.raises(InvalidArgument, match="start the ranks with torchrun"):
        probe_if(lambda survey: None, workload(), device="cpu")
