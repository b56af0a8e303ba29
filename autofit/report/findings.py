"""What a search found beside its answer, as a report file holds it.

That is the largest evaluation, the loader, and what bounds a step.
Also how ranks split their samples, in lines for a loop of one's own.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from autofit.codec import Amount, Count, Number
from autofit.plan import Plan


class _Delivered(TypedDict):
    num_workers: Amount
    samples_per_second: Number


class _Evaluation(TypedDict, total=False):
    failed: str
    samples: Count
    held_bytes: Amount
    largest_samples: Count
    largest_held_bytes: Amount
    is_bound: bool


class _Loader(TypedDict):
    failed: NotRequired[str]
    own_workers: Amount
    consumed_samples_per_second: Number
    delivered: list[_Delivered]
    num_workers: Amount | None
    bottleneck: Literal["device", "loader"] | None
    keeps_workers: bool
    warnings: list[str]


class _Bounds(TypedDict, total=False):
    failed: str
    trace: str
    best: dict[str, Number] | None
    baseline: dict[str, Number] | None


class _Flops(TypedDict):
    per_sample: Number
    peak_per_second: Number | None


class Findings(TypedDict, total=False):
    """The findings of a report as JSON."""

    evaluation: _Evaluation
    loader: _Loader
    bounds: _Bounds
    flops: _Flops


def lines_to_paste(plan: Plan, *, has_loss_weight: bool) -> list[str]:
    """Return how ranks split and weight their samples, of which wrappers know nothing.

    Both `DistributedDataParallel` and `fully_shard` divide the sum of gradients by the ranks, so
    each loss takes a weight whose mean over the ranks adds up to one, as in `Training`.
    """
    ranks, samples, steps = plan.world_size, plan.samples_per_step, plan.accumulation_steps
    shares = [sum(plan.micro_batch_sizes_of(rank)) for rank in (0, ranks - 1)]
    share = " or ".join(map(str, dict.fromkeys(shares)))
    geometry = (
        f"accumulation_steps = {steps}  # micro-batches of each rank, the same number on all: "
        f"its {share} of {samples} samples, cut by tensor_split(accumulation_steps)"
    )
    if has_loss_weight:
        return [
            geometry,
            f"# multiply each loss by {ranks} * loss_weight(micro_batch) / the sum of these over "
            f"all micro-batches of all ranks: gradients are averaged over the {ranks} ranks",
        ]
    return [
        geometry,
        f"loss_factor = {ranks} / {samples}  # multiply each loss by this and by the samples of "
        f"its micro-batch: gradients are averaged over the {ranks} ranks",
        "# a loss that is a mean over something else (valid tokens, see loss_weight): multiply by "
        f"{ranks} * that / its sum over all micro-batches of all ranks",
    ]
