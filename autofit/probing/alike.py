"""Whether the ranks of a search are alike: one GPU, one torch, one workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofit.errors import InvalidRequest


@dataclass(frozen=True)
class RankFacts:
    """What must not differ between ranks, and where a rank runs.

    Attributes:
        host: its machine.
        gpu, driver, torch: of its device and software; None: there is none.
        workload: fingerprint of what it trains.
        weights: a number that other first weights would change.
    """

    host: str
    gpu: str | None
    driver: str | None
    torch: str
    workload: str
    weights: float


def check_alike(ranks: Sequence[RankFacts]) -> None:
    """Refuse ranks that differ.

    Raises:
        InvalidRequest: the first that does, and what it has instead.
    """
    first = ranks[0]
    for rank, facts in enumerate(ranks):
        if facts.workload != first.workload:
            raise InvalidRequest(
                f"rank {rank} ({facts.host}) trains another workload than rank 0: every rank "
                "has to make the same call, with a model and a sample batch of the same shapes"
            )
        if facts.weights != first.weights:
            raise InvalidRequest(
                f"rank {rank} ({facts.host}) starts from other weights than rank 0: call "
                "torch.manual_seed before the model is made, or give a function that builds it"
            )
        for name in ("gpu", "driver", "torch"):
            own, theirs = getattr(facts, name), getattr(first, name)
            if own != theirs:
                raise InvalidRequest(
                    f"rank {rank} ({facts.host}) has {name} {own}, rank 0 ({first.host}) {theirs}: "
                    f"a search needs {len(ranks)} alike"
                )
