"""What else may be probed, each plan with its acquisition value.

A candidate is a variant at a size: those at a few risks of running out of memory, rounded to
multiples of eight too, the incumbent's size, and sizes around the fastest of each variant. Its
value is what the plan is expected to gain over the incumbent, and a share of what it tells of the
variant's largest size, both if it fits; less the cost of the risk that it does not. Values are
differences of log speed: 0.01 is one percent.

A plan that recomputes is no candidate where the same variant fits without, unless it measured
faster there.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np

from autofit.plan import Plan
from autofit.planning.beliefs import Beliefs, Mask
from autofit.planning.constants import (
    APART,
    COSTLY_INCUMBENTS,
    CREDIT,
    GAP,
    MAX_COSTLY_SHARE,
    MAX_VARIANTS,
    MAX_WITHOUT_FIT,
    MIN_VALUE,
    MULTIPLE,
    PATIENCE,
    RISKS,
    SURE,
)
from autofit.planning.experts import handy_size, plan_of
from autofit.planning.feasibility import MicroBatches
from autofit.planning.held_bytes import expected_gain
from autofit.planning.lines import Array, Indices


def likeliest_to_fit(beliefs: Beliefs, allowed: Mask) -> Plan | None:
    """Return, while nothing fits, the smallest plan not yet run that is most likely to fit."""
    if len(beliefs.probes) >= MAX_WITHOUT_FIT:
        return None
    smallest = beliefs.sizes.smallest
    free = np.flatnonzero(allowed & (smallest <= beliefs.bound_at(slice(None), smallest)))
    chance = beliefs.held.chance(free, smallest[free])
    ordered = free[np.argsort(-chance, kind="stable")].tolist()
    return next(filter(None, (plan_of(beliefs, int(smallest[at]), at) for at in ordered)), None)


def best_candidate(beliefs: Beliefs, allowed: Mask) -> Plan | None:
    """Return the plan of the largest acquisition value, if that is worth a probe."""
    variants, sizes, tells = _candidates(beliefs, allowed)
    values = _values(beliefs, variants, sizes, tells)
    return _best_new(beliefs, variants, sizes, values, values > _least_value(beliefs))


def best_costly(beliefs: Beliefs, allowed: Mask, seconds_left: float | None) -> Plan | None:
    """Return the costly plan that is expected to gain most for its seconds; None: none pays.

    Costly values are tried beside the fastest variants without: first at the size of each one's
    fastest plan, then at others. A probe pays where it is expected to save more over the planned
    training than it takes; together they take no more than `MAX_COSTLY_SHARE` of that.
    """
    seconds, left_s = costly_seconds(beliefs), _costly_seconds_left(beliefs)
    may = allowed & (seconds <= min(left_s, math.inf if seconds_left is None else seconds_left))
    firsts, others = _costly_candidates(beliefs, may)
    variants, sizes = (np.concatenate(pair) for pair in zip(firsts, others, strict=True))
    values = _values(beliefs, variants, sizes, np.ones(len(variants), dtype=bool))
    took_s = seconds[variants]
    pays = values > np.maximum(took_s / planned_seconds(beliefs), _least_value(beliefs))
    return _best_new(beliefs, variants, sizes, values / took_s, pays)


def without_recomputation(beliefs: Beliefs, allowed: Mask) -> Plan | None:
    """Return the incumbent without its recomputation, where that is expected to fit now."""
    assert beliefs.incumbent is not None
    plan = beliefs.incumbent.plan
    variant, size = beliefs.index(plan), plan.micro_batch
    bare = int(beliefs.known.without_recomputation[variant])
    at = np.array([bare]), np.array([size])
    if bare == variant or not allowed[bare] or size > beliefs.reach_at(*at)[0]:
        return None
    fits = float(beliefs.held.chance(*at)[0]) >= 1 - RISKS[-1]
    return plan_of(beliefs, size, bare) if fits and size > beliefs.largest[bare] else None


def half_of_incumbent(beliefs: Beliefs) -> Plan | None:
    """Return half the incumbent's size, where nothing near below it ran and nothing was predicted.

    A drop of speed above that size would show there alone: a line with a larger fixed time explains
    both ends of a gap.
    """
    assert beliefs.incumbent is not None
    plan = beliefs.incumbent.plan
    variant, size = beliefs.index(plan), plan.micro_batch
    if beliefs.has_predicted_memory or beliefs.known.trial_costs_s[variant] > 0:
        return None
    own = [t.plan.micro_batch for t in beliefs.fitting if beliefs.index(t.plan) == variant]
    half = handy_size(beliefs, size / 2, variant)
    if half < 1 or any(size / GAP <= each < size for each in own):
        return None
    return plan_of(beliefs, half, variant)


def costly_seconds(beliefs: Beliefs) -> Array:
    """Return (variants): the seconds that a probe of each takes."""
    usual = [t.measurement.seconds for t in beliefs.fitting if not _is_costly(beliefs, t.plan)]
    known = [seconds for seconds in usual if seconds is not None]
    return beliefs.trial_costs_s + (float(np.mean(known)) if known else 0.0)


def planned_seconds(beliefs: Beliefs) -> float:
    """Return how long the planned training takes with the incumbent; infinite if unknown."""
    samples = beliefs.spec.planned_samples
    if not samples or beliefs.incumbent is None:
        return math.inf
    return samples / math.exp(beliefs.mean_log_speed(beliefs.incumbent.plan))


def _costly_seconds_left(beliefs: Beliefs) -> float:
    spent_s = sum(
        trial.measurement.seconds or 0.0
        for trial in beliefs.probes
        if _is_costly(beliefs, trial.plan)
    )
    return MAX_COSTLY_SHARE * planned_seconds(beliefs) - spent_s


def _is_costly(beliefs: Beliefs, plan: Plan) -> bool:
    return bool(beliefs.known.trial_costs_s[beliefs.index(plan)] > 0)


def _best_new(
    beliefs: Beliefs, variants: Indices, sizes: MicroBatches, scores: Array, enough: Mask
) -> Plan | None:
    """Return the plan of the highest score that is enough, and that neither ran nor runs."""
    ordered = [at for at in np.argsort(-scores, kind="stable").tolist() if enough[at]]
    found = (plan_of(beliefs, int(sizes[at]), int(variants[at])) for at in ordered)
    return next(filter(None, found), None)


def _least_value(beliefs: Beliefs) -> float:
    patience = max(1.0, len(beliefs.probes) / PATIENCE) ** 2
    return beliefs.spec.effort.least_value_factor * MIN_VALUE * patience


def _candidates(beliefs: Beliefs, allowed: Mask) -> tuple[Indices, MicroBatches, Mask]:
    """Return candidates: variants, sizes, and whether each tells of its variant's largest size."""
    allowed = _most_promising(beliefs, allowed)
    at_risk = _at_risks(beliefs)
    rows = np.array([*at_risk, *_around_fastest(beliefs)])
    in_reach = rows <= beliefs.reach_at(slice(None), rows)
    row, variants = np.nonzero((rows >= 1) & in_reach & allowed)
    sizes = rows[row, variants]
    first = np.unique(sizes * len(allowed) + variants, return_index=True)[1]
    first = first[_is_apart(beliefs, variants[first], sizes[first])]
    kept = first[~_is_needless(beliefs, variants[first], sizes[first])]
    return variants[kept], sizes[kept], row[kept] < len(at_risk)


def _most_promising(beliefs: Beliefs, allowed: Mask) -> Mask:
    """Return which variants of a large space may be fastest, at their largest size."""
    if len(allowed) <= MAX_VARIANTS:
        return allowed
    every = np.arange(len(allowed))
    speeds, times = beliefs.speeds(every, beliefs.optimistic)
    promise = np.where(allowed, speeds + SURE * np.sqrt(times.variance), -math.inf)
    chosen = np.zeros(len(allowed), dtype=bool)
    chosen[np.argsort(-promise, kind="stable")[:MAX_VARIANTS]] = True
    chosen[[beliefs.index(trial.plan) for trial in beliefs.fitting]] = True
    return chosen & allowed


def _at_risks(beliefs: Beliefs) -> list[MicroBatches]:
    """Return rows of sizes at a few risks, and the next lower multiples that suit tiled kernels."""
    rows = []
    for risk in RISKS:
        limits = beliefs.largest_at(risk)
        limits = np.minimum(limits, beliefs.reach_at(slice(None), limits))
        sizes = beliefs.sizes.handy(np.maximum(limits, beliefs.sizes.smallest).astype(np.float64))
        even = beliefs.sizes.down((sizes // MULTIPLE * MULTIPLE).astype(np.float64))
        rows += [sizes, np.where(2 * even > sizes, even, 0)]
    return rows


def _around_fastest(beliefs: Beliefs) -> list[MicroBatches]:
    """Return rows of sizes around each variant's fastest, and one of the incumbent's size."""
    assert beliefs.incumbent is not None
    between = np.zeros((4, len(beliefs.variants)))
    between[3] = beliefs.incumbent.plan.micro_batch
    for variant, speeds in beliefs.speeds_by_size.items():
        at = max(speeds, key=lambda size: speeds[size])
        below = max((size for size in speeds if size < at), default=at / 4)
        above = min((size for size in speeds if size > at), default=0)
        between[:3, variant] = math.sqrt(at * below), math.sqrt(at * above), at * math.sqrt(2)
    between = np.minimum(between, beliefs.reach_at(slice(None), between))
    return [beliefs.sizes.handy(row) for row in between]


def _is_apart(beliefs: Beliefs, variants: Indices, sizes: MicroBatches) -> Mask:
    """Return which sizes are not those that ran, or nearly."""
    ran = beliefs.speeds_by_size
    pairs = zip(variants.tolist(), sizes.tolist(), strict=True)
    return np.array(
        [
            all(max(size, own) >= APART * min(size, own) for own in ran.get(variant, ()))
            for variant, size in pairs
        ],
        dtype=bool,
    )


def _is_needless(beliefs: Beliefs, variants: Indices, sizes: MicroBatches) -> Mask:
    """Return which plans recompute at a size at which the same variant fits without."""
    bare = beliefs.known.without_recomputation[variants]
    fits = beliefs.held.chance(bare, sizes) >= 1 - RISKS[1]
    fits = (fits & (sizes <= beliefs.bound_at(bare, sizes))) | (sizes <= beliefs.largest[bare])
    helps = [at for at in beliefs.speeds_by_size if _recomputing_helps(beliefs, at)]
    needless: Mask = (bare != variants) & beliefs.usable[bare] & fits & ~np.isin(variants, helps)
    return needless


def _recomputing_helps(beliefs: Beliefs, variant: int) -> bool:
    """Return whether a variant measured faster than without its recomputation, at some size."""
    speeds = beliefs.speeds_by_size
    own = speeds.get(variant, {})
    bare = speeds.get(int(beliefs.known.without_recomputation[variant]), {})
    return any(own[size] > bare[size] for size in own.keys() & bare.keys())


def _values(beliefs: Beliefs, variants: Indices, sizes: MicroBatches, tells: Mask) -> Array:
    """Return (plans): the acquisition value of each.

    What a probe tells of the speed at the largest size that may fit is worth its knowledge
    gradient, which grows with the share of the variance there that the probe explains.
    """
    assert beliefs.incumbent is not None
    if not len(variants):
        return np.zeros(0)
    plan = beliefs.incumbent.plan
    reference, base = beliefs.speeds(np.array([beliefs.index(plan)]), np.array([plan.micro_batch]))
    speeds, times = beliefs.speeds(variants, sizes)
    with_base = times.covariance(base)
    spread = np.sqrt(np.maximum(times.variance + base.variance - 2 * with_base, 0.0))
    chance = beliefs.held.chance(variants, sizes)
    gain = expected_gain(speeds - reference, spread)
    top_speeds, top = beliefs.speeds(variants, np.maximum(beliefs.optimistic[variants], sizes))
    top_variance = top.variance + base.variance - 2 * top.covariance(base)
    told = np.abs(times.covariance(top) - with_base)
    told = told / np.sqrt(times.variance + beliefs.typical_noise**2)
    told = np.minimum(told, np.sqrt(np.maximum(top_variance, 0.0)))
    at_top = np.maximum(expected_gain(top_speeds - reference, told) - gain, 0.0)
    value = chance * (gain + np.where(tells, CREDIT * at_top, 0.0))
    return value - beliefs.oom_cost(1 - chance)


def _costly_candidates(
    beliefs: Beliefs, allowed: Mask
) -> tuple[tuple[Indices, MicroBatches], tuple[Indices, MicroBatches]]:
    """Return costly variants at the size of the plan beside which each is tried, and at others.

    Others only where a plan at such a size told something: of a variant that ran, or that ran
    without recomputation.
    """
    beside = _beside_fastest(beliefs, allowed)
    ran = {beliefs.index(trial.plan) for trial in beliefs.probes}
    bare, smallest = beliefs.known.plainest_costly, beliefs.sizes.smallest
    new = np.array([v for v in beside if v not in ran and bare[v] == v], dtype=np.intp)
    sizes = np.array([beside[variant] for variant in new.tolist()], dtype=np.int64)
    fits = beliefs.held.chance(new, sizes) >= 1 - RISKS[-1]
    fits &= (sizes <= beliefs.reach_at(new, sizes)) & (sizes >= smallest[new])
    sizes = np.where(fits, sizes, beliefs.cautious[new])
    kept = sizes >= 1
    known = [v for v in beside if {v, int(bare[v])} & ran]
    may = np.zeros(len(allowed), dtype=bool)
    may[known] = True
    return (new[kept], sizes[kept]), _candidates(beliefs, may)[:2]


def _beside_fastest(beliefs: Beliefs, allowed: Mask) -> dict[int, int]:
    """Return costly variant -> the size of the plan beside which it is tried.

    Those are the fastest plans of the fastest variants without costly values, of those that go with
    any.
    """
    cheap = [t.plan for t in beliefs.fitting if not _is_costly(beliefs, t.plan)]
    cheap.sort(key=beliefs.mean_log_speed, reverse=True)
    fastest: dict[int, Plan] = {}
    for plan in cheap:
        fastest.setdefault(beliefs.index(plan), plan)
    beside = (
        ([each for each in beliefs.known.costly_beside(variant) if allowed[each]], plan)
        for variant, plan in fastest.items()
    )
    found: dict[int, int] = {}
    for costly, plan in islice((each for each in beside if each[0]), COSTLY_INCUMBENTS):
        for variant in costly:
            found.setdefault(variant, plan.micro_batch)
    if not fastest:  # nothing fits without
        found = {each: int(beliefs.cautious[each]) for each in np.flatnonzero(allowed).tolist()}
    return found
