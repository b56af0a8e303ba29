"""What parameters without a gradient mean for a training that several ranks share.

Every rank sends the gradients of the same parameters, or waits for ever. Where a parameter gets
none on any rank, `DistributedDataParallel` stops with an error unless it looks for such parameters,
and `fully_shard` leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autofit.errors import InvalidArgument

_MOST_NAMES = 3

Unused = Mapping[str, frozenset[int]]
"""Names of parameters that require gradients -> the ranks on which they get none."""


def check_used_alike(unused: Unused, ranks: int) -> None:
    """Refuse ranks that do not use the same parameters.

    Raises:
        InvalidArgument: some get no gradient for a parameter for which others get one.
    """
    uneven = {name: lacking for name, lacking in unused.items() if len(lacking) < ranks}
    if not uneven:
        return
    lacking = frozenset[int]().union(*uneven.values())
    raise InvalidArgument(
        f"no parallel.mode can train this model: {_said(lacking)} no gradient for "
        f"{named(uneven)}, but other ranks do, and ranks would wait for each other "
        "forever. Use the parameters in every rank's forward (adding 0 times "
        "their sum to the loss is enough), or freeze them "
        "(requires_grad_(False)); autofit does not set "
        "find_unused_parameters=True"
    )


def why_not_replicated(unused: Unused) -> str:
    """Return why modes of `DistributedDataParallel` are left out where parameters are unused."""
    return (
        "DistributedDataParallel needs a gradient for every parameter, but the "
        f"loss does not use {named(unused)}. Freeze them (requires_grad_(False)) "
        "to have these modes searched; autofit does not set "
        "find_unused_parameters=True"
    )


def named(parameters: Iterable[str]) -> str:
    """Return the first parameters and their modules in words."""
    names = list(parameters)
    modules = list(dict.fromkeys(name.rpartition(".")[0] or "the model itself" for name in names))
    return f"{_first_of(names)} (of {_first_of(modules)})"


def _first_of(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _said(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]} gets"
    return f"ranks {', '.join(map(str, numbers))} get"
