"""autofit and what a user would pick instead: the same trainings, the same budget, one table.

    python -m benchmarks.versus --json RAW.jsonl                       on this processor
    python -m benchmarks.versus --json RAW.jsonl small_gpt=512MiB --seeds 1 --only autofit
    python -m benchmarks.versus --json RAW.jsonl --place cuda gpt2_small=24GiB

Each cell, a tool on a workload with a seed, is a line of RAW.jsonl as soon as it is known, and a
cell that the file has is not run again: a run that was ended goes on, and a cell can be run alone.
On two quiet cores about 20 minutes a workload and seed, six hours in all; `--dry` counts what is
left.

Each tool runs in a process of its own as its users run it, finders of a batch size in float32 and
in bfloat16. Answers are brought to the user's global batch, where there is one. A judge trains each
answer in a fresh process under the budget: does it live through 200 steps? Then the answer and a
plain loop in float32 at the largest batch that fits take turns in two processes, once as the user
of each tool would train and once with glibc's thresholds fixed for both. Answers of one seed that
train alike are judged and timed once. Optuna searches as long as autofit did. A tool that is not
installed gets a cell that says so: the extra `bench` has them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from autofit.units import parse_bytes
from benchmarks.versus.bench import Answer, Bench
from benchmarks.versus.roster import COMPARED, OURS, PEERS
from benchmarks.versus.summary import CONDITIONS, Cell, markdown, read, summary

WORKLOADS = ("gpt", "lstm", "resnet", "unet", "encoder", "separable")
TASKS = tuple(f"small_{name}=512MiB" for name in WORKLOADS)
"""A segment of 20 MiB is 4 % of the budget."""
PLAIN = "float32"
"""The loop that every answer is paired with: the largest batch that fits, of a plain training."""
MINUTES = 2.0  # about what a cell takes on two quiet cores


def what_trains(answer: Answer) -> str:
    """Return the same for answers that train alike; a report's plan has more to it than sizes."""
    names = ("micro_batch", "accumulation_steps", "precision", "levers", "report")
    return json.dumps({name: answer[name] for name in names})


def alike(cell: Cell, cells: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the cells of the same task whose answers train alike, those of its seed first.

    What a plain loop holds depends on no seed, but on the version of torch. What died of anything
    but memory is judged again.
    """
    assert cell.answer is not None
    keys = ("workload", "budget_bytes", "place", "steps", "torch")
    for other in sorted(cells, key=lambda each: each.seed != cell.seed):
        same = all(getattr(other, key) == getattr(cell, key) for key in keys)
        known = other.lives or "OutOfMemoryError" in (other.verdict or {}).get("died_of", "")
        if same and known and what_trains(other.found["answer"]) == what_trains(cell.answer):
            yield other


def judged(cell: Cell, known: Sequence[Cell], at: Bench, repeats: int) -> Cell:
    """Return a cell with its verdict and its speeds."""
    if cell.answer is None:
        return cell
    same = list(alike(cell, known))
    answer, verdict = cell.answer, same[0].verdict if same else at.verdict(cell.answer)
    cell = replace(cell, verdict=verdict)
    if not cell.lives or cell.peer == PLAIN:
        return replace(cell, rates={name: [(1.0, 1.0)] for name in CONDITIONS if cell.lives})
    plain: Answer = next(
        c.found["answer"] for c in known if c.seed == cell.seed and c.peer == PLAIN
    )
    rates = next((other.rates for other in same if other.seed == cell.seed and other.rates), None)
    if rates is None:
        rates = {
            name: [at.pair(answer, plain, **variables) for _ in range(repeats)]
            for name, variables in CONDITIONS.items()
        }
    return replace(cell, rates=rates)


def run(
    name: str, task: Mapping[str, Any], known: Sequence[Cell], given: argparse.Namespace
) -> Cell:
    """Run one cell."""
    ours = next((c.found["seconds"] for c in known if c.peer == OURS), 60.0)
    with tempfile.TemporaryDirectory() as folder:
        own = dict(task) | {"seconds": given.seconds or ours}
        at = Bench(own, Path(folder), given.steps, given.timed_steps, given.limit)
        found, ooms = at.found(name)
        told = {"steps": given.steps, "peer": name, "found": found, "ooms": ooms}
        cell = Cell(**task, **told, load=os.getloadavg()[0], date=str(date.today()))
        return judged(cell, known, at, given.repeats)


def cells_left(given: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the cells that the file does not have, seed by seed, the plain loop first."""
    names = [PLAIN, *(name for name in PEERS if name in given.only and name != PLAIN)]
    done = {(cell.workload, cell.seed, cell.peer) for cell in read([given.json])}
    found = []
    for seed, text, name in product(given.seeds, given.tasks or TASKS, names):
        workload, _, budget = text.partition("=")
        task = {"workload": workload, "place": given.place, "budget_bytes": parse_bytes(budget)}
        if (workload, seed, name) not in done:
            found.append((name, task | {"seed": seed}))
    return found


def options() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="*", metavar="WORKLOAD=BUDGET", help=" ".join(TASKS))
    parser.add_argument("--place", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, required=True, help="JSON lines, one a cell")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(COMPARED), choices=list(PEERS))
    parser.add_argument("--steps", type=int, default=200, help="that an answer has to survive")
    parser.add_argument("--timed-steps", type=int, default=20, help="of an answer, each turn")
    parser.add_argument("--repeats", type=int, default=1, help="pairs of processes, each condition")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a tool may take")
    parser.add_argument("--seconds", type=float, help="of Optuna; without it, as long as autofit's")
    parser.add_argument("--dry", action="store_true", help="say what is left, and run nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells that are left, and print what all of the file come to."""
    given = options().parse_args(arguments)
    left = cells_left(given)
    print(f"{len(left)} cells, about {MINUTES * len(left):.0f} minutes", file=sys.stderr)
    for name, task in [] if given.dry else left:
        keys = ("workload", "budget_bytes", "place")
        known = [c for c in read([given.json]) if all(getattr(c, k) == task[k] for k in keys)]
        own = [c for c in known if c.seed == task["seed"]]
        try:
            cell = run(name, task, [*own, *(c for c in known if c.seed != task["seed"])], given)
        except (RuntimeError, OSError) as error:  # the others are worth having; the next run tries
            print(f"{name} on {task['workload']} has no cell: {error}", file=sys.stderr)
            continue
        with given.json.open("a") as file:
            file.write(json.dumps(asdict(cell)) + "\n")
        print(cell, file=sys.stderr, flush=True)
    if cells := read([given.json]):
        print("\n".join(markdown(summary(cells))))


if __name__ == "__main__":
    main()
