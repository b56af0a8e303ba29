"""The ranks that train together, as the process that started this one tells them. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from autofit.errors import InvalidArgument
from autofit.strategy import ALONE, World

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What torchrun sets for every process that it starts."""


def world_of_environment(environment: Mapping[str, str] = os.environ) -> World:
    """Return the world that torchrun's variables describe; of one rank where it set none.

    Raises:
        InvalidArgument: a variable is no whole number, the rank is not among the ranks, or there
            are several ranks and a variable is missing.
    """
    if missing := [name for name in _VARIABLES if name not in environment]:
        size_alone = environment.get("WORLD_SIZE", "1").strip()
        if size_alone.isdecimal() and int(size_alone) > 1:
            raise InvalidArgument(
                f"WORLD_SIZE={size_alone} is set, but {' and '.join(missing)} is not: "
                "start the ranks with torchrun, which sets all of them, or unset "
                "WORLD_SIZE to use one device"
            )
        return ALONE
    try:
        rank, local_rank, size = (int(environment[name]) for name in _VARIABLES)
    except ValueError:
        given = ", ".join(f"{name}={environment[name]!r}" for name in _VARIABLES)
        raise InvalidArgument(
            f"{given} must be whole numbers: start the ranks with torchrun, or unset them"
        ) from None
    return World(rank, local_rank, size)


def check_ranks(ranks: int, world: World) -> None:
    """Refuse a plan for another number of ranks than there are here.

    Raises:
        InvalidArgument: they differ.
    """
    if ranks == world.size:
        return
    whose = f"{ranks} ranks" if ranks > 1 else "a single device"
    here = f"{world.size} ranks" if world.size > 1 else "a single device"
    start = "start that many with torchrun" if ranks > 1 else "run it without torchrun"
    raise InvalidArgument(
        f"the plan is for {whose}, but this is {here}: {start}, or search again here"
    )
