"""What may be probed next, each with its worth.

Every variant has a ceiling in each draw: the largest micro-batch for which its memory line there
leaves room. Its potential is the speed gained over the leading plan at that ceiling. The worth of a
probe is what its plan gains plus a share of the potential that it will then be known to have, both
if it fits, less the cost of running out of memory if it does not. What becomes known is worth its
knowledge gradient (Frazier, Powell and Dayanik, SIAM J. Control Optim. 47, 2008), which grows with
the share of the variance that a measurement explains. Plans are repeated in the final comparison
alone. Worths are differences of log speed: 0.01 is one percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autofit.measurement import Trial, TrialKind, oom_probes_of
from autofit.plan import Plan
from autofit.planning.constants import (
    APART,
    DROP_ODDS,
    ENOUGH_BELOW,
    FARTHEST,
    IRREGULAR,
    LEAST_OWN,
    MAX_STEP,
    MAX_STEP_WITH_LINES,
    MIN_STEP,
    MOST_DROP,
    MOST_WITHOUT_FIT,
    MULTIPLE,
    OOM_COST,
    OOM_COST_WITH_PRIOR,
    OUT_OF_REACH,
    POTENTIAL_CREDIT,
    RISKS,
    SHARED_SIZES,
    SMALLEST_FACTOR,
    TINY,
    VETO_RISK,
    WIDE_GAP,
)
from autofit.planning.feasibility import MicroBatches
from autofit.planning.least_squares import Array
from autofit.planning.posterior import Mask, Posterior


def oom_cost(posterior: Posterior, risk: Array) -> Array:
    """Return the cost of such a risk of running out of memory after these probes.

    It grows with every OOM so far but the baseline's, which nobody chose to risk. With a prior on
    memory, risks are near the truth and the cost is proportional to them. Without one, small risks
    are the least certain (on simulated devices, risks below 1 % came true in 3 % of the probes,
    risks above 20 % in a quarter of the predicted frequency), so it grows with the square root.
    """
    happened = oom_probes_of([t for t in posterior.probes if t.kind is not TrialKind.BASELINE])
    factor = SMALLEST_FACTOR if np.all(posterior.largest <= posterior.sizes.smallest) else 1.0
    if posterior.has_prior_memory:
        return factor * OOM_COST_WITH_PRIOR * (1 + happened / 2) * risk
    cost: Array = factor * OOM_COST * (1 + happened) * np.sqrt(risk)
    return cost


def new_plans(
    posterior: Posterior, leader: Trial, allowed: Mask
) -> tuple[NDArray[np.intp], MicroBatches, Array]:
    """Return the sizes of allowed variants that may be probed: variants, sizes, and worths."""
    halfway = _halfway(posterior)
    opening = _next_sizes(posterior, halfway)
    between = _sizes_between(posterior, halfway) if posterior.spread > IRREGULAR else []
    rows = np.array([*opening, *between])
    row, variants = np.nonzero((rows >= 1) & allowed)
    sizes = rows[row, variants]
    first = np.unique(sizes * len(allowed) + variants, return_index=True)[1]
    row, variants, sizes = row[first], variants[first], sizes[first]
    ahead = posterior.log_speed(leader.plan)[:, None]
    log_speeds = posterior.log_speeds(sizes, variants)
    fits = posterior.memory_limit[:, variants] >= sizes
    chance = fits.mean(axis=0)
    gain = (np.maximum(log_speeds - ahead, 0) * fits).mean(axis=0)
    opened = np.maximum(_opened(posterior, ahead, log_speeds, variants, sizes) - gain, 0)
    credit = np.where(row < len(opening), POTENTIAL_CREDIT, 0.0)
    worths = gain + chance * credit * opened - oom_cost(posterior, 1 - chance)
    return variants, sizes, worths


def _opened(
    posterior: Posterior,
    ahead: Array,
    log_speeds: Array,
    variants: NDArray[np.intp],
    sizes: MicroBatches,
) -> Array:
    """Return (plans): what is expected to be gained at the ceilings after probes of these plans.

    A probe tells of its ceiling as far as its step time and its bytes explain the speed there: a
    small micro-batch, whose time may be that of its launches, tells little.

    Args:
        posterior: of the search.
        ahead: (draws, 1), log speeds of the leader.
        log_speeds: (draws, plans), log speeds of these plans.
        variants, sizes: (plans), of each.
    """
    reached = posterior.log_speeds(posterior.ceilings) - ahead
    reached = np.where(np.isfinite(reached), reached, OUT_OF_REACH)[:, variants]
    held = posterior.memory.log_values_of(variants, sizes.astype(np.float64))
    errors = posterior.typical_noise, posterior.reading_error(posterior.spec.vram_budget_bytes)
    change = _explained_deviation(np.stack([reached, log_speeds, held]), *errors)
    return _knowledge_gradient(reached.mean(axis=0), change)


def _next_sizes(posterior: Posterior, halfway: MicroBatches) -> list[MicroBatches]:
    """Return, per level of risk, every variant's next micro-batch; 0 if it teaches nothing.

    Then likewise the next lower one that suits kernels which work in tiles, unless it is much
    smaller.
    """
    # A belief opens no larger stride.
    ran = [trial.plan for trial in posterior.measured if trial.measurement.step_times_s]
    step = MAX_STEP_WITH_LINES if posterior.has_predicted_memory else MAX_STEP
    bound = np.minimum(halfway, step * max(plan.micro_batch for plan in ran))
    steps: list[MicroBatches] = []
    even_steps: list[MicroBatches] = []
    limits = np.quantile(posterior.memory_limit, RISKS, axis=0)
    # The next size of all, whatever its risk: between so few sizes no level of risk may have one
    next_sizes = [posterior.sizes.at_least(int(size) + 1) for size in posterior.largest]
    for limit in (*limits, np.array(next_sizes, dtype=np.float64)):
        wanted = np.maximum(np.minimum(limit, bound), posterior.sizes.smallest)
        sizes = posterior.sizes.handy(wanted)
        even = sizes // MULTIPLE * MULTIPLE
        even = np.where((2 * even > sizes) & (even < sizes), even, 0)
        even = posterior.sizes.down(even.astype(np.float64))
        for wanted_sizes, found in ((sizes, steps), (even, even_steps)):
            is_new = wanted_sizes > MIN_STEP * posterior.largest
            is_new &= wanted_sizes <= posterior.bound
            found.append(np.where(is_new, wanted_sizes, 0))
    return steps + even_steps


def _halfway(posterior: Posterior) -> MicroBatches:
    """(variants): the largest micro-batch to try next, as far as failures of larger ones tell.

    It halves, in logarithms, what is left between the largest that fits and the smallest that
    failed, so that a limit is found within a few failures whatever its cause. A memory line that
    expected the failure is believed where it is sure enough of a larger micro-batch. A failure that
    no memory line expected, at a size that no variant has run, may await the other variants too.
    """
    largest = posterior.largest
    sure = np.quantile(posterior.memory_limit, VETO_RISK, axis=0)
    limit = np.median(posterior.memory_limit, axis=0)
    halfway, most = posterior.bound.copy(), int(largest.max(initial=1))
    for trial in posterior.probes:
        index, failed = posterior.index(trial.plan), trial.plan.micro_batch
        if failed != posterior.bound[index] + 1:
            continue
        is_expected = trial.measurement.outcome.about_memory and limit[index] < APART * failed
        middle = math.isqrt(max(1, int(largest[index])) * failed)
        if is_expected:
            middle = max(middle, int(min(sure[index], failed - 1)))
        next_size = posterior.sizes.at_least(int(largest[index]) + 1)
        halfway[index] = min(max(middle, next_size), posterior.bound[index])
        if failed > most and not is_expected:
            next_size = posterior.sizes.at_least(most + 1)
            halfway = np.minimum(halfway, max(next_size, math.isqrt(most * failed)))
    return halfway


def _sizes_between(posterior: Posterior, halfway: MicroBatches) -> list[MicroBatches]:
    """Return micro-batches beside each variant's fastest, and the fastest sizes of other variants.

    Where speed grows with the micro-batch none of them is worth a probe.
    """
    measured: list[set[int]] = [set() for _ in posterior.variants]
    timed = [trial for trial in posterior.probes if trial.measurement.step_times_s]
    for trial in timed:
        measured[posterior.index(trial.plan)].add(trial.plan.micro_batch)
    fitting = sorted(posterior.fitting, key=lambda t: -posterior.mean_log_speed(t.plan))
    fastest: dict[int, int] = {}
    for trial in fitting:
        fastest.setdefault(posterior.index(trial.plan), trial.plan.micro_batch)
    shared = list(dict.fromkeys(fastest.values()))[:SHARED_SIZES]
    rows = np.zeros((2 + len(shared), len(measured)))
    for index, its in enumerate(measured):
        if not its:
            rows[2:, index] = shared
        elif index in fastest:
            best = fastest[index]
            below = max((size for size in its if size < best), default=0)
            above = min((size for size in its if size > best), default=0)
            rows[:2, index] = math.sqrt(best * below) or best / 2, math.sqrt(best * above)
    found = []
    for row in rows:
        sizes = posterior.sizes.handy(row)
        is_new = [
            all(max(s, m) >= APART * min(s, m) for m in its)
            for s, its in zip(sizes.tolist(), measured, strict=True)
        ]
        found.append(np.where(is_new & (sizes <= halfway), sizes, 0))
    return found


def within_gap(posterior: Posterior, leader: Trial) -> tuple[float, Plan] | None:
    """Return a size within the widest gap that the leader's variant leaves below the leader.

    A drop of speed inside a gap shows at neither end: a line with a larger fixed time explains
    both, and below the smallest size there is nothing to see. Before the drop, speed may have grown
    as the micro-batch does, from the gap's lower end. None where times were predicted, since a drop
    shows then, or memory: on recorded GPUs this gained nothing.
    """
    plan, space = leader.plan, posterior.spec.space
    own = {
        trial.plan.micro_batch: posterior.mean_log_speed(trial.plan)
        for trial in posterior.fitting
        if trial.plan.variant == plan.variant and trial.plan.micro_batch <= plan.micro_batch
    }
    sizes = sorted(own)
    halves = sum(2 * size <= plan.micro_batch for size in sizes)
    is_known = halves >= ENOUGH_BELOW and sizes[0] ** 2 <= plan.micro_batch
    if is_known or posterior.has_predicted_memory or posterior.spec.predicted_times:
        return None
    below, above = max(zip([1, *sizes], sizes, strict=False), key=lambda gap: gap[1] / gap[0])
    row = np.full(len(posterior.variants), math.sqrt(below * above))
    size = int(posterior.sizes.handy(row)[posterior.index(plan)])
    if above < WIDE_GAP * below or size < 1 or size in own or size >= above:
        return None
    middle, ahead = space.plan(size, plan.settings), own[plan.micro_batch]
    most = posterior.mean_log_speed(middle) + MOST_DROP - ahead
    if below in own:
        most = min(most, own[below] + math.log(above / below) - ahead)
    return DROP_ODDS * math.log(above / below) * most / 2, middle


def gain_of_repeating(ahead: Array, noise: Array) -> Array:
    """Return (plans): the expected gain from another probe of each before one is chosen.

    Args:
        ahead: (draws, plans), log speeds less that of the plan which is chosen otherwise.
        noise: (plans), of the log speed from probe to probe.
    """
    deviation = ahead.std(axis=0)
    change = deviation**2 / np.maximum(np.hypot(deviation, noise), TINY)
    return _knowledge_gradient(ahead.mean(axis=0), change)


def likeliest_to_fit(posterior: Posterior, allowed: Mask) -> Plan | None:
    """Return, while nothing fits, the smallest plan not yet run that is most likely to fit."""
    if len(posterior.probes) >= MOST_WITHOUT_FIT:
        return None
    smallest = posterior.sizes.smallest
    chance = (posterior.memory_limit >= smallest).mean(axis=0)
    remaining: Sequence[int] = np.flatnonzero(allowed & (smallest <= posterior.bound)).tolist()
    best = max(remaining, key=lambda index: (float(chance[index]), -index), default=None)
    if best is None:
        return None
    return posterior.spec.space.plan(int(smallest[best]), posterior.variants[best])


def _knowledge_gradient(mean: Array, change: Array) -> Array:
    """Return E[max(0, x)] for normal x: the gain from learning x before choosing x or nothing.

    Args:
        mean: of x.
        change: standard deviation of what x will be expected to be.
    """
    change = np.maximum(change, TINY)
    z = np.clip(mean / change, -FARTHEST, FARTHEST)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erf(each / math.sqrt(2)) for each in z.ravel()]).reshape(z.shape)
    gain: Array = change * (density + z * (1 + below) / 2)
    return np.where(mean / change > z, mean, gain)


def _explained_deviation(drawn: Array, noise: float, other_noise: float) -> Array:
    """Return, per column, the standard deviation of the best linear guess of the first.

    Args:
        drawn: (3, draws, columns), what is not measured, and two things that are.
        noise, other_noise: of these two.
    """
    drawn = drawn - drawn.mean(axis=1, keepdims=True)
    products = np.einsum("idc,jdc->ijc", drawn, drawn) / drawn.shape[1]
    deviation, _, other = np.sqrt(np.einsum("iic->ic", products))
    noisy_first = np.sqrt(products[1, 1] + noise**2)
    noisy_other = np.sqrt(products[2, 2] + other_noise**2)
    one = products[0, 1] / np.maximum(noisy_first * deviation, TINY)
    two = products[0, 2] / np.maximum(noisy_other * deviation, TINY)
    both = products[1, 2] / np.maximum(noisy_first * other, TINY)
    own = np.maximum(1 - both**2, LEAST_OWN)
    share = (one**2 + two**2 - 2 * one * two * both) / own
    explained: Array = np.sqrt(np.clip(share, 0.0, 1.0)) * deviation
    return explained
