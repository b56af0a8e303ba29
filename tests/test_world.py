"""What torchrun tells a process of the ranks around it."""

from __future__ import annotations

import pytest

from autofit.errors import InvalidRequest
from autofit.world import World, world_of_environment


def test_a_process_of_torchrun_is_one_of_its_ranks() -> None:
    told = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_PORT": "29500"}
    assert world_of_environment(told) == World(rank=5, local_rank=1, size=8)


@pytest.mark.parametrize("told", [{}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "4"}])
def test_without_all_of_torchruns_variables_a_process_is_alone(told: dict[str, str]) -> None:
    assert world_of_environment(told) == World(0, 0, 1)


@pytest.mark.parametrize("rank", ["two", "4", "-1"])
def test_a_rank_that_is_none_is_refused(rank: str) -> None:
    with pytest.raises(InvalidRequest, match=rank):
        world_of_environment({"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "4"})
