"""Every number that the sampler was tuned or guessed with, and no number that follows from others.

Beside each: its unit, why it has this value, and what falls when it is changed. "x2" and "/2" are
the number doubled and halved over 48 irregular devices (benchmarks/results/search-ablation-*.md,
`python -m benchmarks.ablation`): points of mean regret, then probes, with standard errors where
they matter. "Not measured": nobody knows yet. A worth is a difference of log speed: 0.01 is 1 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# The end of the search. No probe is worth less than the first, times the square of the probes over
# the second once there are more; times a factor by effort.
MIN_WORTH = 0.005  # worth. 0.003: +0.17 +- 0.26, +1.1 (42 devices from 70 000)
PATIENCE = 10  # probes. x2: -0.91 +- 0.44, +3.0. /2: +2.21 +- 0.74, -3.5
# With predicted memory lines the ladder is short: more costs one to two probes on recorded
# grids and gains nothing.
PATIENCE_WITH_LINES = 8  # probes
QUICK, THOROUGH = 10.0, 0.25  # times the least worth; a promise of `effort`
# Of the noise of the leader's probes: no gain below this share is looked for.
NOISE_WORTH = 0.05  # share. x2: +0.67 +- 0.45, -0.7. /2: -0.42 +- 0.37, +0.4
MOST_WITHOUT_FIT = 12  # probes while nothing fits; not measured

# The fewest and the most that a search without a limit usually takes, final comparison included
# (benchmarks/results/search-seconds-2026-11-28.md; without lines interactions-2026-11-28.md).
USUAL_PROBES = (13, 30)  # probes
USUAL_PROBES_WITH_LINES = (10, 21)  # probes
USUAL_PROBES_OF_SIZES = (2, 8)  # probes, where no setting has a second value

# What a probe is worth.
# The share of a variant's potential that a probe is credited with which will make it known.
POTENTIAL_CREDIT = 0.9  # share. Without: +2.97 +- 1.46, -4.0, +0.19 OOMs. x2: -1.87 +- 0.82, +3.1
# Of the first OOM, a lost probe and perhaps a new worker: see `oom_cost`. One for both: +0.37
# +- 0.67, +0.7.
OOM_COST = 0.045  # worth, times the square root of the risk
OOM_COST_WITH_PRIOR = 0.12  # worth, times the risk: with lines or hints of all values
# Of that cost, while only the smallest micro-batch is known to fit: there is much to gain, and
# nothing tells fixed bytes from those of a sample.
SMALLEST_FACTOR = 0.25  # share. Without, of 72 devices: +0.18 +- 0.18, +0.1
LEAST_OWN = 0.05  # share of its variance that a second measurement adds to the first; not measured
OUT_OF_REACH = -3.0  # log speed beside the leader's of a variant that does not fit; not measured

# Which sizes may be next.
RISKS = (0.006, 0.015, 0.03, 0.06, 0.12, 0.25, 0.4, 0.6)  # of an OOM. Two: +1.1, 0
VETO_RISK = 0.1  # of an OOM: a riskier plan of another sampler is refused; not measured
# No micro-batch is tried that is more than this many times the largest measured.
MAX_STEP = 4  # x2: +0.09 +- 0.20, -0.8; of 72 others -0.35 +- 0.88, -0.2, but +0.5 with noise
MAX_STEP_WITH_LINES = 16  # with predicted memory lines; not measured
MIN_STEP = 1.02  # a smaller factor beyond the variant's largest teaches nothing; not measured
APART = 1.1  # sizes that are nearer than this factor are alike; not measured
SHARED_SIZES = 3  # fastest sizes of others that are tried on a new variant; not measured
IRREGULAR = 0.02  # spread of log step times from which speed need not grow with the size
# Of 72 devices, without a size within a gap below the leader: +0.23 +- 0.20, -0.8.
DROP_ODDS = 0.02  # probability that speed drops within a factor of e of micro-batches
MOST_DROP = math.log(4)  # of log speed
WIDE_GAP = 2.5  # factor between two measured sizes that may hide a drop
ENOUGH_BELOW = 2  # sizes of at most half the leader's that show a drop below it
# Spread over noise from which the leader is repeated, and fitting probes before. Without, of 72
# devices: +0.65 +- 0.46, -0.2, of 200 others -0.48 +- 0.32, -0.4. Kept for the searches of a U-Net
# in benchmarks/results/answer-quality-2026-11-27.md.
SURPRISE = 4.0  # times. x2: +0.19 +- 0.73, 0. /2: -0.09 +- 0.27, -0.2
SURPRISE_PROBES = 4  # probes
COSTLY_LEADERS = 2  # fastest variants beside which costly values are tried; not measured

# The final comparison.
TIE = 0.005  # worth: a rival from which a turn is expected to gain less is no finalist
MOST_GIVEN_UP = 0.02  # log speed: slower by no more than this is tied; a promise of the docs
MOST_LOST = 0.05  # log speed: decided where, with 95 %, no plan is faster by more; a promise
MOST_ROUNDS = 4  # turns of each finalist; beside two busy loops a fifth decided hardly more
MOST_RIVALS = 2  # plans
# Times the timed seconds of a search's probe, where steps scatter: of simulated pairs beside two
# busy loops, four rounds then decide 75 of 100 and not 49.
COMPARED_LONGER = 2.0
HEADROOM = 2.0  # deviations of held bytes below the budget: 98 % of all runs fit
MOST_ACCIDENTS = 3  # in a row, before a plan that ran shows whether the machine is to blame
NOISY = 0.1  # log step time: from this scatter on, a reader is told that it bounds the gains

# What is believed beforehand.
MEMORY_ERROR = 0.02  # log bytes that a probe holds around its line, where no segment is larger
LEAST_GROWING = 0.02  # share of what a first probe holds, beside what is known to be fixed
CEILING_MARGIN = 0.8  # of these deviations below the budget at a ceiling: 80 % of its probes fit
LEAST_SPREAD = 0.01  # log step time around its line: kernels suit some sizes better than others
SURE = 2.0  # standard errors by which residuals exceed noise before they are called departures
ALIKE = 0.6  # probability that a variant departs as others do. Without: +0.57 +- 0.34, -0.2 (72)
MULTIPLE = 8  # samples: kernels may work in tiles of so many


@dataclass(frozen=True)
class LinePrior:
    """Prior of a family of lines: standard deviations of log coefficients, unless stated otherwise.

    No ablation of them has ended yet; those of the roofline are from the two recorded grids, the
    others are guesses.

    Attributes:
        level: of all lines together; wide, because the device may be anything.
        split: of how the first measured value divides between intercept and slope, each way.
        predicted_level: of the error of slopes that all predicted lines have in common.
        predicted_intercept: likewise of intercepts.
        intercept: of the effect of one value on the intercept.
        hinted_intercept: of the same effect around its hint.
        shared_slope: of the effect on the slope that all values of an unordered setting but the
            first have in common.
        slope: of the effect on the slope of one value alone.
        slope_mean: prior mean of the log slope of a non-plain value of an unordered setting;
            negative because strategies offer values that are expected to help.
        trend: of the effect on the slope of the last value of an ordered setting; the values
            before it have proportional shares of that effect.
        curvature: of the deviation of an ordered setting's values from that trend.
        hinted_slope: of the effect of a value on the slope around its hint.
        predicted_slope: of the same effect around its predicted line.
        own_share: more of the same where it is known: this share of the effect.
        common_share: likewise, in common to all values of the setting: who overrates one precision
            overrates the others.
        interaction: of a variant's slope around the product of its settings' effects.
    """

    level: float = 2.0
    split: float = 1.0
    predicted_level: float = 0.05
    predicted_intercept: float = 0.1
    intercept: float = 0.05
    hinted_intercept: float = 0.15
    shared_slope: float = 0.5
    slope: float = 0.5
    slope_mean: float = -0.2
    trend: float = 0.6
    curvature: float = 0.4
    hinted_slope: float = 0.07
    predicted_slope: float = 0.03
    own_share: float = 0.0
    common_share: float = 0.0
    interaction: float = 0.06


MEMORY_PRIOR = LinePrior(trend=0.7, curvature=0.4)
# Launches set a floor to times, and settings differ in how much they launch: intercepts are three
# times as free as those of bytes. Interactions are not: three times as free, of 300 devices from
# 90 000: +0.21 +- 0.34, +2.2, 0.0; from 50 000: -0.23, +1.7, -0.03
# (benchmarks/results/interactions-2026-11-28.md).
TIME_PRIOR = LinePrior(trend=0.3, curvature=0.15, intercept=0.15, hinted_intercept=0.45)
# The roofline of a model is off by any factor, and by a share of each setting's effect: on the two
# recorded grids by 0.1 to 0.4 of a precision's, by 0.3 at most of a checkpoint level's.
PREDICTED_TIME_PRIOR = replace(
    TIME_PRIOR,
    intercept=0.6,
    predicted_level=1.0,
    predicted_intercept=2.5,  # a roofline knows of no launches
    predicted_slope=0.08,
    own_share=0.12,
    common_share=0.25,
)

# Effort that is spent on arithmetic: no answer depends on these, only how exact it is, and when.
DRAWS = 160  # of a posterior
MOST_VARIANTS = 256  # of a space without a shortlist: with 288, 12 probes take 1.4 s of a processor
SURVEY_DRAWS = 32  # that name variants for a shortlist, each the same number
SURVEYED_LEADERS = 4  # fastest variants beside which costly values are on a shortlist
ITERATIONS = 12  # steps of a draw to its solution
LEAST_STEP = 1e-3  # of a weight, whose standard deviation is 1 beforehand
SHORTENED = 4  # a step that does not reduce the cost is divided by this
# From so many readings on, draws start at the likeliest weights, which takes a third of the steps:
# the readings leave no other way to explain them. Most searches have fewer probes.
MANY_READINGS = 60
LEAST_GAIN = 0.1  # of a draw's cost then: a step that is expected to gain less changes no decision
INACTIVE = 1e-6  # precision of a bound that holds: the reading then has no weight
BEYOND, NO_SPEED = 1e9, -1000.0  # logs of a size and of a speed that no plan has
TINY = 1e-9  # beside 1, of singular values; of log speeds, so that nothing is divided by zero
FARTHEST = 30.0  # standard deviations from which a normal's tail is nothing
FORECAST_STEPS = 10  # that a probe is said to take, or `TIMED_S`
# Seconds of timed steps that end a probe, by effort. Only steps that scatter take so many, and
# where steps do, probes differ by more than longer timing would tell.
QUICK_TIMED_S, TIMED_S = 1.0, 2.0
