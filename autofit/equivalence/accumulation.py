"""Decide whether the accumulation count may change, by comparing gradients on a few samples.

Where the gradients differ beyond rounding, the count stays at the
baseline's unless the user allows otherwise, and a note says by how much they differ, where, and
what would free it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autofit.equivalence.gradients import (
    SAMPLES_OF_A_COMPARISON,
    compare_passes,
    compare_plans,
)
from autofit.errors import release_exception
from autofit.plan import Plan, ResolvedPlan
from autofit.strategy import Comparison
from autofit.training.builder import TrainingBuilder
from autofit.training.workload import Workload


@dataclass(frozen=True)
class Resplit:
    """Decision about the accumulation count.

    Attributes:
        allowed: whether the accumulation count may change.
        comparison: of split and whole gradients; None where it was not needed or failed.
        notes: for the reader of the report.
    """

    allowed: bool
    comparison: Comparison | None = None
    notes: tuple[str, ...] = ()


def decide_resplit(builder: TrainingBuilder, workload: Workload) -> Resplit:
    """Decide whether split batches of the workload may train in place of whole ones.

    Args:
        builder: builds the trainings that are compared.
        workload: of the builder; its model is not used.
    """
    allowed = workload.allow_resplit
    if workload.global_batch is None or workload.global_batch == 1:
        return Resplit(True)
    if workload.train_step is not None:
        return _unknown("train_step decides how a batch is split", "allow_resplit", allowed)
    if not workload.makes_batches and workload.sample_batch_size == 1:
        why = "copies of one sample do not show whether split gradients equal whole ones"
        return _unknown(why, "two or more samples", allowed)
    try:
        comparison = _split_against_whole(builder)
        noise = None if comparison.equal else _whole_against_whole(builder)
    except Exception as error:
        release_exception(error)
        why = f"split and whole gradients could not be compared ({type(error).__name__}: {error})"
        return Resplit(allowed, notes=(why if allowed else _kept(why, "allow_resplit"),))
    finally:
        builder.reclaim_or_not()
    if noise is None:
        return Resplit(True, comparison)
    if not noise.equal and not allowed:
        why = (
            "the model draws random numbers that move the gradients of the same samples by "
            f"{noise.gradient:.1%}, so split and whole gradients cannot be compared"
        )
        return Resplit(False, comparison, (_kept(why, "allow_resplit"),))
    return Resplit(allowed, comparison, (_note(comparison, workload),))


def _unknown(why: str, way_out: str, allowed: bool) -> Resplit:
    """Return the decision where no gradients could be compared."""
    return Resplit(allowed, notes=() if allowed else (_kept(why, way_out),))


def _split_against_whole(builder: TrainingBuilder) -> Comparison:
    samples = SAMPLES_OF_A_COMPARISON
    whole, split = Plan(samples), Plan.split(samples, -(-samples // 2))
    return compare_plans(builder, ResolvedPlan(whole), ResolvedPlan(split), samples)


def _whole_against_whole(builder: TrainingBuilder) -> Comparison:
    """Compare the same samples under two seeds, which shows the noise of the model itself."""
    whole = ResolvedPlan(Plan(SAMPLES_OF_A_COMPARISON))
    passes = (whole, builder.seed), (whole, builder.seed + 1)
    return compare_passes(builder, passes, SAMPLES_OF_A_COMPARISON)


def _note(comparison: Comparison, workload: Workload) -> str:
    where = f" ({', '.join(comparison.modules)})" if comparison.modules else ""
    why = f"split gradients differ from whole ones by {comparison.gradient:.1%}{where}"
    if workload.allow_resplit:
        return f"{why}: allow_resplit was given, so the accumulation count is free"
    if comparison.normalizes_over_batch or workload.loss_weight is not None:
        return _kept(why, "allow_resplit")
    weight = "loss_weight where the loss is a mean over something other than samples"
    return _kept(why, f"allow_resplit, or {weight}")


def _kept(why: str, way_out: str) -> str:
    return f"{why}: the accumulation count stays at the baseline's; to free it, give {way_out}"
