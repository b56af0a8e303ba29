"""Whether ranks that train together get the gradients of one process on all their samples.

One accumulation of a few samples that are shared unevenly, compared on every rank with the same
accumulation that this rank runs alone over all of them, before any wrapper is around the model. The
worst rank decides. It finds what torch does not report: parameters that are not synchronized since
the loss calls a submodule past the wrapper, since they are replaced after it, or since one rank
does not use them, and losses that are a mean over something else than they are weighted by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autofit.equivalence.gradients import compare_passes
from autofit.errors import InvalidRequest, release_exception
from autofit.plan import Dimension, Plan, ResolvedPlan, Scalar, payloads_of, settings_of
from autofit.strategy import Comparison, Phase, Strategy
from autofit.training.builder import TrainingBuilder
from autofit.training.ranks import Ranks

_EACH = 3
"""The most samples of a rank: two micro-batches of different sizes."""


def shared_evenly_or_not(ranks: int) -> int:
    """Return a number of samples that so many ranks cannot share evenly."""
    return _EACH * ranks - 1


def compare_ranks(
    builder: TrainingBuilder,
    settings: Mapping[str, Scalar],
    payloads: Mapping[str, object],
    strategy: Strategy,
) -> Comparison:
    """Return how far the gradients of a parallel strategy's settings are from one process's.

    Every rank of the builder's world calls this, and gets the comparison of the worst.

    Raises:
        Exception: whatever the model or the device raises.
    """
    world, workload = builder.world, builder.fresh_workload()
    samples = shared_evenly_or_not(world.size)
    alone = ResolvedPlan(Plan(samples))
    plan = Plan.split(samples, _EACH - 1, settings, world_size=world.size)
    together = ResolvedPlan(plan, payloads, (strategy,))
    passes = ((alone, builder.seed), (together, builder.seed))
    ranks = Ranks(world, builder.device.torch_device)
    batch = ranks.of_first(workload.batch(samples))  # each rank may have read or drawn its own
    own = compare_passes(builder, passes, batch)
    found = [Comparison.from_dict(each) for each in ranks.objects(own.to_dict())]
    return max(found, key=lambda each: max(each.gradient, each.loss))


def without_unequal(
    builder: TrainingBuilder, strategies: Sequence[Strategy], dimensions: Mapping[str, Dimension]
) -> tuple[dict[str, Dimension], list[str]]:
    """Return the dimensions without parallel values whose gradients differ, and notes on them.

    Raises:
        InvalidRequest: no value of a setting is left.
    """
    checked, notes = dict(dimensions), []
    if builder.fresh_workload().train_step is not None:
        notes.append("train_step hides its gradients: those of several ranks were not compared")
        return checked, notes
    for strategy in strategies:
        own = settings_of(strategy.name, dimensions)
        if strategy.phase is not Phase.PARALLEL or not own:
            continue
        refused: dict[str, dict[Scalar, str]] = {}
        for name, value, settings in _one_at_a_time(own):
            why = _why_not(builder, strategy, settings, payloads_of(own, settings))
            if why is not None:
                refused.setdefault(name, {})[value] = f"{name}={value} {why}"
        for name, words in refused.items():
            notes += words.values()
            left = [value for value in own[name].values if value not in words]
            if not left:
                first = next(iter(words.values()))
                raise InvalidRequest(f"no value of {name} trains what one process does: {first}")
            checked[name] = _with_values(own[name], left)
    return checked, notes


def _one_at_a_time(
    own: Mapping[str, Dimension],
) -> Iterator[tuple[str, Scalar, dict[str, Scalar]]]:
    """Yield each value beside the first values of the other settings; all first ones once."""
    plain = {name: dimension.values[0] for name, dimension in own.items()}
    for at, (name, dimension) in enumerate(own.items()):
        for value in dimension.values if at == 0 else dimension.values[1:]:
            yield name, value, {**plain, name: value}


def _why_not(
    builder: TrainingBuilder,
    strategy: Strategy,
    settings: Mapping[str, Scalar],
    payloads: Mapping[str, object],
) -> str | None:
    """Return why the settings are set aside; None: they train what one process does."""
    try:
        found = compare_ranks(builder, settings, payloads, strategy)
    except Exception as error:
        # Its ranks may have parted ways: whoever asked replaces them all, and does not ask again
        release_exception(error)
        raise
    finally:
        builder.reclaim_or_not()
    if found.equal:
        return None
    where = f", most of all in {', '.join(found.modules)}" if found.modules else ""
    return (
        f"was set aside: the gradients of the ranks differ from one process's by "
        f"{found.gradient:.1%}{where}. Is every module called through the model that the loss is "
        "given, and does every rank use the same parameters? Where the loss is a mean over "
        "something other than samples, give loss_weight"
    )


def _with_values(dimension: Dimension, left: Sequence[Scalar]) -> Dimension:
    data = dimension.to_dict()
    kept = [at for at, value in enumerate(data["values"]) if value in left]
    of_values = {
        name: [data[name][at] for at in kept]
        for name in ("values", "payloads", "hints", "trial_costs_s")
    }
    return Dimension.from_dict({**data, **of_values})
