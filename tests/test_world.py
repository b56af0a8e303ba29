"""What torchrun tells a process of the ranks around it."""

from __future__ import annotations

import pytest

from autofit.errors import InvalidArgument
from autofit.strategy import World
from autofit.world import check_ranks, world_of_environment


def test_a_process_of_torchrun_is_one_of_its_ranks() -> None:
    told = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_PORT": "29500"}
    assert world_of_environment(told) == World(rank=5, local_rank=1, size=8)


@pytest.mark.parametrize("told", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"RANK": "3"}])
def test_where_nothing_tells_of_other_ranks_a_process_is_alone(told: dict[str, str]) -> None:
    assert world_of_environment(told) == World(0, 0, 1)


@pytest.mark.parametrize(
    ("told", "missing"), [({}, "RANK and LOCAL_RANK"), ({"RANK": "0"}, "LOCAL_RANK")]
)
def test_a_process_that_does_not_know_its_place_among_ranks_does_not_go_on_alone(
    told: dict[str, str], missing: str
) -> None:
    words = f"^WORLD_SIZE=4 .* {missing} .* torchrun.* unset WORLD_SIZE"
    with pytest.raises(InvalidArgument, match=words):
        world_of_environment({**told, "WORLD_SIZE": "4"})


@pytest.mark.parametrize("rank", ["two", "4", "-1"])
def test_a_rank_that_is_none_is_refused(rank: str) -> None:
    with pytest.raises(InvalidArgument, match=rank):
        world_of_environment({"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("of_plan", "here", "words"),
    [
        (2, 1, "2 ranks, .*single device.* with torchrun"),
        (2, 3, "2 ranks, .*3 ranks.* with torchrun"),
        (1, 2, "single device, .*2 ranks.* without torchrun"),
    ],
)
def test_a_plan_of_another_number_of_ranks_is_refused(of_plan: int, here: int, words: str) -> None:
    check_ranks(of_plan, World(size=of_plan))
    with pytest.raises(InvalidArgument, match=words):
        check_ranks(of_plan, World(size=here))
