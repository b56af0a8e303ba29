"""Whether ranks are alike (one kind of GPU, the same first weights), and share one training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autofit.errors import InvalidArgument
from autofit.plan import Dimension, settings_of
from autofit.registry import names_of_ranks
from autofit.strategy import Phase, Strategy

if TYPE_CHECKING:
    from autofit.training.training import TrainingBuilder


def check_ranks_alike(builder: TrainingBuilder, weights: float) -> None:
    """Refuse ranks that differ; every rank of the builder's world calls this.

    Args:
        builder: of this rank.
        weights: a number that other first weights would change.

    Raises:
        InvalidArgument: they are not alike.
    """
    from autofit.training.ranks import Ranks

    own = {"gpu": builder.device.environment.gpu, "weights": weights}
    check_alike(Ranks(builder.world, builder.device.torch_device).objects(own))


def check_alike(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks that differ in GPU or first weights, by the first that does.

    Raises:
        InvalidArgument: what it has instead.
    """
    first = ranks[0]
    for rank, facts in enumerate(ranks):
        if facts["weights"] != first["weights"]:
            raise InvalidArgument(
                f"rank {rank} starts with other weights than rank 0: the function that builds the "
                "model must take random numbers from torch alone, which autofit seeds on each rank"
            )
        if facts["gpu"] != first["gpu"]:
            raise InvalidArgument(
                f"rank {rank} has gpu {facts['gpu']}, rank 0 {first['gpu']}: use "
                f"{len(ranks)} GPUs of one kind"
            )


def check_shared(
    ranks: int,
    strategies: Iterable[Strategy],
    dimensions: Mapping[str, Dimension],
    notes: Sequence[str],
) -> None:
    """Refuse ranks none of whose strategies shares the training: each would train alone.

    Args:
        ranks: how many there are.
        strategies, dimensions: of the survey.
        notes: of the survey; those that begin with a strategy's name say why it was left out.

    Raises:
        InvalidArgument: no strategy of `Phase.PARALLEL` offers a setting.
    """
    names = [strategy.name for strategy in strategies if strategy.phase is Phase.PARALLEL]
    if any(settings_of(name, dimensions) for name in names):
        return
    alone = f"no strategy shares gradients among the {ranks} ranks, so each would train alone"
    if not names:
        raise InvalidArgument(
            f"{alone}: add an installed one to strategies= "
            f"({', '.join(names_of_ranks()) or 'there is none'}), or start one process"
        )
    why = "; ".join(note for note in notes if note.startswith(tuple(names)))
    raise InvalidArgument(f"{alone}: {why or f'{names[0]} offers no setting for this model'}")
