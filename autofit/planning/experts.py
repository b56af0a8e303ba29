"""The plans that an expert tries first, by hand.

For each value of the leading setting, as a rule a precision: all levers on, then that value alone,
at the largest micro-batch that is expected to fit. Before them a second size where nothing yet
tells fixed bytes from growing ones. A plan leaves the list when it ran, or when it surely is slower
than the incumbent: a step takes no less time with more samples, which bounds the speed of larger
sizes by what was measured; and the lines tell at `SURE` deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from autofit.measurement import TrialKind
from autofit.plan import Plan, Scalar, Settings
from autofit.planning.beliefs import Beliefs, Mask
from autofit.planning.constants import (
    BOLD,
    COARSE,
    MEMORY_ERROR,
    MIN_VALUE,
    MULTIPLE,
    NEAR,
    ODD,
    RISKS,
    SURE,
)
from autofit.planning.search_spec import SearchSpec


@dataclass(frozen=True)
class Experts:
    """What experts try in a space.

    Attributes:
        leading: the setting whose values are tried one by one; None: no setting has a lever.
        variants: their settings, the most promising first.
    """

    leading: str | None
    variants: list[Settings]

    @classmethod
    def of(
        cls, spec: SearchSpec, why: Callable[[Settings], object] = lambda settings: None
    ) -> Experts:
        """Return those of a space: the lever that changes the arithmetic most is the leading.

        Args:
            spec: of the search.
            why: tells why settings are excluded, if they are: all levers together are those that
                are left.
        """
        space = spec.space
        levers: Mapping[str, Scalar] = {
            name: dimension.lever
            for name, dimension in space.dimensions.items()
            if dimension.lever is not None and not dimension.is_costly
        }
        plain = space.default_settings
        if not levers:
            return cls(None, [plain])
        leading = max(levers, key=lambda name: spec.numerics.get(name, 0))
        values = space.dimensions[leading].values
        order = dict.fromkeys([levers[leading], *reversed(values[1:]), values[0]])
        alone = [{**plain, leading: value} for value in order]
        together = [dict(each) for each in alone]
        for each, (name, lever) in product(together, levers.items()):
            if name != leading and not why({**each, name: lever}):
                each[name] = lever
        settled = [space.plan(space.largest_micro_batch, each).settings for each in together]
        distinct = {tuple(each.items()): each for each in [*settled, *alone]}
        return cls(leading, list(map(dict, distinct.values())))


def expert_plan(beliefs: Beliefs, allowed: Mask) -> Plan | None:
    """Return the next plan that an expert would try, or None if no such plan can win."""
    second = _second_size(beliefs, allowed)
    if second is not None:
        return second
    experts = Experts.of(beliefs.spec, beliefs.exclusions.why)
    for settings in experts.variants:
        variant = beliefs.known.variant_of(settings)
        if variant is None or not allowed[variant]:
            continue
        is_new = _is_new_value(beliefs, settings, experts.leading)
        plan = _above_odd_failure(beliefs, variant) or _at_largest(beliefs, variant, is_new=is_new)
        if plan is not None:
            return plan
    return None


def plan_of(beliefs: Beliefs, size: int, variant: int) -> Plan | None:
    """Return a variant's plan of that size; None where it ran, or is running."""
    plan = beliefs.spec.space.plan(size, beliefs.variants[variant])
    return None if any(trial.plan == plan for trial in beliefs.probes) else plan


def handy_size(beliefs: Beliefs, size: float, variant: int) -> int:
    """Return the variant's largest micro-batch up to a size, as `Sizes.handy`."""
    return int(beliefs.sizes.handy(np.full(len(beliefs.variants), float(size)))[variant])


def _at_largest(beliefs: Beliefs, variant: int, *, is_new: bool) -> Plan | None:
    """Return a variant's plan of the largest size that is expected to fit.

    None where that ran, nearly, or surely is slower than the incumbent. `is_new`: its value of the
    leading setting has not run yet, and no line rules it out.
    """
    top, most = int(beliefs.cautious[variant]), int(beliefs.optimistic[variant])
    largest, done = int(beliefs.largest[variant]), NEAR * _in_reach(beliefs, variant, top)
    if beliefs.spec.space.samples_per_rank and not beliefs.has_predicted_memory:
        # The sizes of a global batch are far apart: an expert tries the next one
        risk = BOLD if beliefs.oom_probes == 0 else RISKS[-1]
        bold = int(beliefs.largest_at(risk)[variant])
        if bold >= COARSE * max(top, 1):
            top = done = bold
    if top < 1 or largest >= done:
        return None
    if not is_new and _is_surely_slower(beliefs, variant, most):
        return None
    size = handy_size(beliefs, _in_reach(beliefs, variant, top), variant)
    even = size // MULTIPLE * MULTIPLE
    is_near = even > NEAR * size and even >= beliefs.sizes.smallest[variant]
    if is_near and beliefs.spec.space.samples_per_rank is None:
        size = even
    return plan_of(beliefs, size, variant) if size > largest else None


def _in_reach(beliefs: Beliefs, variant: int, size: int) -> int:
    return min(size, int(beliefs.reach_at(np.array([variant]), np.array([size]))[0]))


def _is_new_value(beliefs: Beliefs, settings: Settings, leading: str | None) -> bool:
    if leading is None:
        return False
    ran = (t.plan.settings[leading] for t in beliefs.probes if t.measurement.step_times_s)
    return settings[leading] not in ran


def _second_size(beliefs: Beliefs, allowed: Mask) -> Plan | None:
    """Return a second size where nothing yet tells fixed bytes from growing ones.

    Twice the first, as far as that surely fits by bytes in proportion to the samples; of the
    variant that holds least. In any case where the first is the smallest, or after two other
    variants.
    """
    fits = {trial.plan.micro_batch for trial in beliefs.fitting}
    if len(fits) > 1 or beliefs.has_predicted_memory:
        return None
    held = [(t.measurement.held_bytes or 0, t.plan) for t in beliefs.fitting]
    held_bytes, plan = min(held, key=lambda pair: pair[0])
    size, wanted = plan.micro_batch, 2.0 * plan.micro_batch
    if len(beliefs.probes) <= 2 and held_bytes and size > 1:
        room = beliefs.spec.vram_budget_bytes / held_bytes
        wanted = min(wanted, size * room * math.exp(-2 * MEMORY_ERROR))
    variant = beliefs.index(plan)
    second = int(beliefs.sizes.down(np.full(len(beliefs.variants), wanted))[variant])
    is_apart = allowed[variant] and 1.2 * size <= second <= beliefs.bound_at(variant, second)
    return plan_of(beliefs, second, variant) if is_apart else None


def _is_surely_slower(beliefs: Beliefs, variant: int, most: int) -> bool:
    """Return whether no size up to `most` of a variant can be as fast as the incumbent."""
    assert beliefs.incumbent is not None
    incumbent = beliefs.mean_log_speed(beliefs.incumbent.plan)
    bounds = [
        beliefs.mean_log_speed(trial.plan) + math.log(max(most / trial.plan.micro_batch, 1.0))
        for trial in beliefs.fitting
        if beliefs.index(trial.plan) == variant
    ]
    if min(bounds, default=math.inf) <= incumbent:
        return True
    if bounds and 2 * beliefs.largest[variant] < most:
        return False
    plan = beliefs.spec.space.plan(max(most, 1), beliefs.variants[variant])
    mean, deviation = beliefs.ahead(plan, beliefs.incumbent.plan)
    return mean + SURE * deviation <= MIN_VALUE


def _above_odd_failure(beliefs: Beliefs, variant: int) -> Plan | None:
    """Return one larger size of a variant that ran out of memory once, against expectation.

    The caching allocator may fail at some size and not at a larger one. The lines without that
    failure say up to where the variant is predicted to fit.
    """
    failed = [
        trial
        for trial in beliefs.probes
        if beliefs.index(trial.plan) == variant and trial.measurement.outcome.about_memory
    ]
    if len(failed) != 1 or failed[0].kind is TrialKind.CONFIRMATION:
        return None
    size = failed[0].plan.micro_batch
    if size != beliefs.bound_at(variant, size) + 1 or not beliefs.largest[variant]:
        return None
    fixed, slope = np.exp(beliefs.held.lines_without(variant).coefficients[:, variant])
    limit = (beliefs.spec.vram_budget_bytes * math.exp(-MEMORY_ERROR) - fixed) / slope
    limit = min(limit, float(beliefs.known.largest_micro_batches[variant]))
    above = handy_size(beliefs, limit, variant) if limit >= ODD * size else 0
    return plan_of(beliefs, above, variant) if above >= ODD * size else None
