"""Every number that the sampler was tuned or guessed with, and no number that follows from others.

Beside each: its unit, why it has this value, and what falls when it is changed. "x2" and "/2" are
the number doubled and halved over 48 irregular devices (measured on 2026-11-25):
points of mean regret, then probes, with standard errors where they matter. "Not measured":
nobody knows yet. An acquisition value is a difference of log speed: 0.01 is 1%.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# The end of the search. No probe has a lower value than the first, times the square of the probes
# over the second once there are more; times a factor by effort.
MIN_VALUE = 0.005  # log speed
PATIENCE = 10  # probes. 8: -0.1 points, -0.9 probes; 13: +0.3 +- 0.3, +0.9
QUICK, THOROUGH = 10.0, 0.25  # times the least value; a promise of `effort`
MAX_WITHOUT_FIT = 12  # probes while nothing fits; not measured
# The fewest and the most that a search without a limit usually takes, final comparison included.
USUAL_PROBES = (11, 24)  # probes
USUAL_PROBES_WITH_LINES = (10, 21)  # probes
USUAL_PROBES_OF_SIZES = (2, 8)  # probes, where no setting has a second value

# What is tried.
# Of the first OOM, times its risk; half of it more with each OOM. 0.1: 0.54 OOMs for 0.33
OOM_COST = 0.2  # log speed
RISKS = (0.03, 0.15, 0.4)  # of an OOM, at which sizes are proposed. Two: .325 on one recorded grid
# Where an expert plan is tried; a riskier plan of another sampler is refused.
CAUTIOUS = 0.1  # of an OOM. 0.05 without lines: -0.8 +- 0.7 points
OPTIMISTIC = 0.6  # of an OOM: up to where a plan has potential. 0.1: .91 for .97 on launches
# The next size of a global batch is far away: it is tried at this risk until one OOM, if it is so
# much larger. Without, bfloat16 was not tried at the whole batch on a CPU.
BOLD, COARSE = 0.8, 1.15  # of an OOM; times
# No micro-batch is tried that is more than this many times the largest measured; not measured.
STEP, STEP_WITH_LINES = 6, 64  # times
NEAR = 0.8  # of its largest size: an expert plan that ran there is done; not measured
# Deviations by which a plan must be slower to be left out, and hold less to fit in 98% of runs.
SURE = 2.0  # 1.5, of speeds: 0.0
ODD = 1.15  # times a size that ran out: a larger one that was predicted to fit is tried once
CREDIT = 0.9  # of what a probe tells of the largest size. 0.6: +0.6 +- 0.4, later -0.2 +- 0.5
APART = 1.02  # sizes that are nearer than this factor are alike; not measured
# Spread of step times around their lines, beside the noise of their steps, from which the incumbent
# is repeated once. Without, of 10 devices whose probes scatter by 20%: .78 of the best for .92.
DOUBTED, DOUBTED_PROBES = 4.0, 4  # times; probes before
GAP = 4  # factor between two sizes that may hide a drop of speed; not measured
MULTIPLE = 8  # samples: kernels may work in tiles of so many
COSTLY_INCUMBENTS = 2  # fastest variants beside which costly values are tried; not measured
MAX_COSTLY_SHARE = 0.1  # of the planned training, that costly probes take; a promise of the docs
MAX_VARIANTS = 512  # of a large space, that a decision looks at: the most promising

# The final comparison.
MAX_GIVEN_UP = 0.02  # log speed: slower by no more than this is tied; a promise of the docs
MAX_LOST = 0.05  # log speed: decided where, with 95%, no plan is faster by more; a promise
MAX_ROUNDS = 4  # turns of each finalist; beside two busy loops a fifth decided hardly more
MAX_RIVALS = 2  # plans
# Times the timed seconds of a search's probe, where steps scatter: of simulated pairs beside two
# busy loops, four rounds then decide 75 of 100 and not 49.
COMPARED_LONGER = 2.0
MAX_TRANSIENT = 3  # in a row, before a plan that ran shows whether the machine is to blame
NOISY = 0.1  # log step time: from this scatter on, a reader is told that gains may be hidden

# What is believed beforehand.
# Log bytes that a probe holds around its line, where no segment is larger: learned, among these.
# A smaller one is chance: with 0.005, 0.6 OOMs on recorded grids with lines.
MEMORY_ERROR, MEMORY_ERRORS = 0.02, (0.01, 0.02, 0.04)
MEMORY_SPREAD = 0.003  # log bytes by which a plan departs from its line
MIN_GROWING = 0.02  # share of what a first probe holds, beside what is known to be fixed
TIME_SPREADS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)  # log seconds, likewise; learned, among these
ALIKE = 0.6  # correlation of two variants' residuals at one size. 0.4: +0.1 +- 0.2
LENGTH = 1.5  # log sizes over which residuals are correlated. 1: -0.1 +- 0.4
KNOWN_TREND = 0.25  # of an ordered setting's deviations, where all its values have hints


@dataclass(frozen=True)
class LinePrior:
    """Prior of a family of lines: standard deviations of log coefficients, unless stated otherwise.

    Attributes:
        level: of all lines together; wide, because the device may be anything.
        level_known, fixed_known: of the same, of slopes and of what is fixed, around predictions.
        fixed: of the effect of one value on what is fixed.
        slope: of the effect of one value of an unordered setting on the slope.
        slope_mean: prior mean of that effect; negative because strategies offer values that are
            expected to help.
        hinted, predicted: of the same around a hint, and around a predicted line.
        trend: of the effect on the slope of the last value of an ordered setting; the values
            before it have proportional shares of that effect.
            The last value departs from it by half as much.
        pair: of the effect of two values together.
        own: of a variant's slope around the sum of all effects.
        is_relative: whether predictions tell ratios of lines alone, and not their level.
    """

    level: float = 1.5
    level_known: float = 0.05
    fixed_known: float = 0.15
    fixed: float = 0.05
    slope: float = 0.6
    slope_mean: float = -0.3
    hinted: float = 0.07
    predicted: float = 0.04
    trend: float = 0.6
    pair: float = 0.1
    own: float = 0.06
    is_relative: bool = False


MEMORY_PRIOR = LinePrior()
# What is fixed in a step is launches and casts of weights, in which settings differ much.
TIME_PRIOR = LinePrior(trend=0.3, fixed=0.4, pair=0.15)
# The roofline of a model is off by any factor, and by a share of each setting's effect; it knows of
# no launches.
PREDICTED_TIME_PRIOR = replace(
    TIME_PRIOR, fixed=0.6, predicted=0.3, level_known=1.0, fixed_known=2.5, is_relative=True
)

# Effort that is spent on arithmetic: no answer depends on these, only how exact it is, and when.
GAUSS_NEWTON_STEPS, CONVERGED = 25, 1e-4  # of log coefficients
INACTIVE = 1e3  # error of a bound that holds: the reading then has no weight
TINY = 1e-10  # so that nothing is divided by zero
FORECAST_STEPS = 10  # that a probe is said to take, or `TIMED_S`
# Seconds of timed steps that end a probe, by effort. Only steps that scatter take so many, and
# where steps do, probes differ by more than longer timing would tell.
QUICK_TIMED_S, TIMED_S = 1.0, 2.0
