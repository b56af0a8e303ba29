"""How long the search takes to propose a plan in a long study.

Prints Markdown: processor milliseconds of one decision after so many trials of random plans of a
simulated device with 96 variants, the least of several. One process, one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.proposal_time    (ten seconds)
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence

from autofit.measurement import Trial, TrialKind
from autofit.plan import ResolvedPlan
from autofit.planning import planner
from autofit.planning.posterior import Posterior
from autofit.probing.messages import ProbeRequest
from benchmarks.irregular_devices import IrregularDevice, draw_irregular_device

SEED = 20_010  # of a device with 96 variants
_NOISE = 0.02
_LARGEST, _SMALLEST = 1.02, math.exp(-4)  # of the largest micro-batch that fits


def study(device: IrregularDevice, count: int) -> list[Trial]:
    """Return the baseline and trials of random plans, of which few run out of memory."""
    draw, space, prober = (
        random.Random(f"study/{device.device.seed}"),
        device.space,
        device.prober(),
    )
    plans = [space.baseline]
    for variant in draw.choices(list(device.device.lines), k=count - 1):
        line = device.device.lines[variant]
        most = (device.device.budget_bytes - line.fixed_bytes) / line.sample_bytes
        share = math.exp(draw.uniform(math.log(_SMALLEST), math.log(_LARGEST)))
        size = min(max(1, int(share * most)), space.largest_micro_batch)
        plans.append(space.plan(size, dict(variant)))
    kinds = [TrialKind.BASELINE, *[TrialKind.SEARCH] * (count - 1)]
    return [
        Trial(number, kind, plan, prober.probe(ProbeRequest(ResolvedPlan(plan))).measurement)
        for number, (kind, plan) in enumerate(zip(kinds, plans, strict=True))
    ]


def milliseconds(device: IrregularDevice, trials: Sequence[Trial], repeats: int) -> float:
    """Return the least processor time of a decision; what a search finds once is found before."""
    given = Posterior(device.spec(), trials).given
    taken = []
    for _ in range(repeats + 1):
        began = time.process_time()
        planner.decide(Posterior(device.spec(), trials, given=given))
        taken.append(1000 * (time.process_time() - began))
    return min(taken)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, nargs="+", default=[20, 100, 500])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device = draw_irregular_device(SEED, noise=_NOISE)
    trials = study(device, max(arguments.trials))
    print("| trials | milliseconds |\n|---|---|")
    for count in arguments.trials:
        print(f"| {count} | {milliseconds(device, trials[:count], arguments.repeats):.0f} |")


if __name__ == "__main__":
    main()
