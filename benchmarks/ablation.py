"""What every constant and rule of the search is for: searches with it changed, paired with searches
as they are.

Prints Markdown: for each constant doubled and halved, and for each rule left out, by how much mean
regret, probes and runs out of memory change, with their standard errors, over the same
`benchmarks.irregular_devices`; and the regret and probes on the recorded grids, likewise.

    python -m benchmarks.ablation --devices 48 --scores scores.jsonl    (an hour of one processor)

Each search is written down as it ends, and those that the file has are not run again. Seeds from
20 000: `benchmarks.answer_quality` has others, on which nothing is tuned.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from benchmarks.answer_quality import NOISES, Job, score
from benchmarks.grids.recorded import WORKLOADS, grid_world

FIRST_SEED = 20_000
_PLANNING = "autofit.planning."

CONSTANTS = (
    "constants.MIN_WORTH",
    "constants.PATIENCE",
    "constants.SURPRISE",
    "constants.POTENTIAL_CREDIT",
    "constants.OOM_COST",
    "constants.SMALLEST_FACTOR",
    "constants.MAX_STEP",
    "constants.VETO_RISK",
    "constants.SHARED_SIZES",
    "constants.IRREGULAR",
    "constants.DROP_ODDS",
    "constants.WIDE_GAP",
    "constants.MEMORY_ERROR",
    "constants.CEILING_MARGIN",
    "constants.LEAST_SPREAD",
    "constants.SURE",
    "constants.ALIKE",
    "constants.MOST_GIVEN_UP",
    "constants.MOST_LOST",
    "constants.MOST_ROUNDS",
    "posterior.Posterior.draws",
)
"""Each is doubled, then halved."""

DEVIATIONS = ("slope", "slope_mean", "intercept", "curvature", "trend", "interaction")
"""Of the prior of both lines, likewise."""


@dataclass(frozen=True)
class Change:
    """One thing done otherwise.

    Attributes:
        name: what is changed, and how.
        values: (module or class of the planner, attribute, the value that it has instead).
    """

    name: str
    values: tuple[tuple[str, str, Any], ...]


@dataclass(frozen=True)
class Score:
    """One search with one change: `on` is a seed, or a grid and what was predicted of it."""

    change: str
    on: str
    regret: float
    probes: int
    ooms: int


def changes() -> Iterator[Change]:
    """Yield every change: rules left out, then constants."""
    yield Change("as it is", ())
    yield from _rules()
    for name in CONSTANTS:
        owner, _, attribute = name.rpartition(".")
        value = getattr(owner_of(owner), attribute)
        for word, factor in (("doubled", 2), ("halved", 0.5)):
            changed = type(value)(value * factor)
            yield Change(f"{name} {word}", ((owner, attribute, changed),))
    constants = importlib.import_module(f"{_PLANNING}constants")
    for field in DEVIATIONS:
        for word, factor in (("doubled", 2), ("halved", 0.5)):
            priors = [
                ("constants", name, replace(prior, **{field: factor * getattr(prior, field)}))
                for name, prior in vars(constants).items()
                if name.endswith("_PRIOR") and name != "OOM_COST_WITH_PRIOR"
            ]
            yield Change(f"LinePrior.{field} {word}", tuple(priors))


def _rules() -> Iterator[Change]:
    def nothing(*given: Any, **named: Any) -> None:
        return None

    def none_of_them(*given: Any, **named: Any) -> list[Any]:
        return []

    left_out: dict[str, tuple[str, str, Any]] = {
        "lookahead": ("constants", "POTENTIAL_CREDIT", 0.0),
        "a size within the widest gap": ("planner", "within_gap", nothing),
        "sizes between measured ones": ("proposals", "_sizes_between", none_of_them),
        "a repeat after a surprise": ("planner", "_surprise", nothing),
        "halving after a failure": ("proposals", "_halfway", lambda found: found.bound.copy()),
        "residuals that others share": ("constants", "ALIKE", 0.0),
    }
    for name, value in left_out.items():
        yield Change(f"without {name}", (value,))


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """Have the planner work with the change meanwhile, wherever the name was imported to."""
    before: list[tuple[Any, str, Any]] = []
    modules = [loaded for name, loaded in sys.modules.items() if name.startswith(_PLANNING)]
    for owner, attribute, value in change.values:
        original = getattr(owner_of(owner), attribute)
        for each in {owner_of(owner), *modules}:
            if vars(each).get(attribute) is original:
                before.append((each, attribute, original))
                setattr(each, attribute, value)
    try:
        yield
    finally:
        for each, attribute, original in before:
            setattr(each, attribute, original)


def owner_of(path: str) -> Any:
    """Return the module, or the class in it, of that path below the planner."""
    module, _, name = path.partition(".")
    found = importlib.import_module(_PLANNING + module)
    return getattr(found, name) if name else found


def on_device(change: Change, number: int) -> Score:
    """Search one irregular device."""
    job = Job(FIRST_SEED + number, NOISES[number % len(NOISES)], "variants", None)
    with changed(change):
        found = score(job)
    return Score(change.name, str(job.seed), found.regret, found.probes, found.ooms)


def on_grid(change: Change, workload: str, *, lines: bool, times: bool) -> Score:
    """Search one recorded grid."""
    from autofit.measurement import probes_of
    from autofit.searching.engine import run_search

    world = grid_world(workload, seed=0)
    with changed(change):
        result = run_search(world.prober(), world.spec(lines=lines, times=times))
    ran = probes_of(result.trials)
    known = "times" if times else "lines" if lines else "nothing"
    return Score(
        change.name,
        f"{workload} {known}",
        1 - world.speed(result.best.plan) / world.optimum(),
        len(ran),
        sum(not trial.ok and trial.measurement.outcome.about_memory for trial in ran),
    )


def jobs(change: Change, devices: int) -> Iterator[tuple[str, Callable[[], Score]]]:
    """Yield the searches of a change, each with its name and a function that runs it."""
    for number in range(devices):
        yield str(FIRST_SEED + number), partial(on_device, change, number)
    for name in WORKLOADS:
        for known, lines, times in (("nothing", 0, 0), ("lines", 1, 0), ("times", 1, 1)):
            yield (
                f"{name} {known}",
                partial(on_grid, change, name, lines=bool(lines), times=bool(times)),
            )


def row(name: str, scores: Sequence[Score], base: dict[str, Score]) -> str:
    """Return a row of the table: differences from the searches as they are."""
    cells = [name]
    for on_grids in (False, True):
        its = [each for each in scores if (" " in each.on) == on_grids and each.on in base]
        for field, factor in (("regret", 100), ("probes", 1), ("ooms", 1)):
            if on_grids and field == "ooms":
                continue
            gaps = [factor * (getattr(s, field) - getattr(base[s.on], field)) for s in its]
            error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
            cells.append(f"{statistics.fmean(gaps):+.2f} ± {error:.2f}" if gaps else "")
    return f"| {' | '.join(cells)} |"


def print_table(scores: Sequence[Score], names: Sequence[str]) -> None:
    """Print what the changes did."""
    base = {each.on: each for each in scores if each.change == names[0]}
    its = [each for on, each in base.items() if " " not in on]
    print(
        f"As it is, on {len(its)} devices: mean regret "
        f"{100 * statistics.fmean(each.regret for each in its):.2f} %, "
        f"{statistics.fmean(each.probes for each in its):.1f} probes.\n"
    )
    print("| change | regret, % | probes | OOM | regret on grids, % | probes on grids |")
    print("|---|---|---|---|---|---|")
    for name in names[1:]:
        if of_change := [each for each in scores if each.change == name]:
            print(row(name, of_change, base))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=48)
    parser.add_argument("--scores", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--part", default="1/1", help="of the changes to run; 0/1: none")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    written = arguments.scores[0]
    scores = [
        Score(**json.loads(line))
        for path in arguments.scores
        if path.exists()
        for line in path.read_text().splitlines()
    ]
    done = {(each.change, each.on) for each in scores}
    part, parts = map(int, arguments.part.split("/"))
    all_changes = list(changes())
    for number, change in enumerate(all_changes):
        if number * parts // len(all_changes) != part - 1:
            continue
        for on, run in jobs(change, arguments.devices):
            if (change.name, on) not in done:
                scores.append(run())
                with written.open("a") as file:
                    file.write(json.dumps(vars(scores[-1])) + "\n")
    print_table(scores, [each.name for each in all_changes])


if __name__ == "__main__":
    main()
