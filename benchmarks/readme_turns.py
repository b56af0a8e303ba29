"""The README's search, some runs of it, and its answers in turns beside what a finder answers.

    python -m benchmarks.readme_turns --json FILE --text FILE        (about three minutes)

Each run is the README's command in a process of its own. Prints what it took, its plan and its
first trials. Then each different answer, and the largest power of two that trains in float32 with
default settings, train in turns in processes of their own. `--text` takes what the first run
printed, and both files are what the README's numbers are taken from
(`benchmarks/stated_numbers/search.md`). Runs that the JSON file has are not repeated; turns are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import autofit
from autofit.plan import Plan
from autofit.report.summary import describe
from autofit.units import parse_bytes
from benchmarks.versus.__main__ import Bench

WORKLOAD, BUDGET = "small_cnn", "64MiB"
ASKED = (
    *("--device", "cpu", "--vram-budget", BUDGET),
    *("--planned-steps", "1000", "--out", "report.json"),
)
COMMAND = ("autofit", "search", f"benchmarks/workloads.py:{WORKLOAD}", *ASKED)
FIRST_TRIALS = 5
FINDER = "finder"
TURNS = 9


@dataclass(frozen=True)
class Run:
    """One search.

    Attributes:
        command_s, seconds: of the whole command, and of the search by its own account.
        probes: of the search.
        plan: the answer, and `trials` the first ones, in words.
        answer: of `benchmarks.versus.peers`, with the path of the report.
    """

    command_s: float
    seconds: float
    probes: int
    plan: str
    trials: Sequence[str]
    answer: Mapping[str, Any]

    def lines(self) -> Iterator[str]:
        """Yield Markdown."""
        yield f"- {self.plan}: {self.probes} probes, {self.seconds:.1f} s. The first trials:"
        yield from (f"  - {trial}" for trial in self.trials)


def ran(folder: Path, text: Path | None) -> Run:
    """Run the README's command in the repository, with the report in the folder."""
    root, report = Path(__file__).parents[1], folder / "report.json"
    command = [sys.executable, "-m", *COMMAND[:-1], str(report)]
    began = time.monotonic()
    told = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout
    command_s = round(time.monotonic() - began, 1)
    if text is not None:
        text.write_text(f"$ {' '.join(COMMAND)}\n{told}")
    found = autofit.load(report)
    answer = {
        "micro_batch": found.plan.micro_batch,
        "accumulation_steps": found.plan.accumulation_steps,
        "precision": "float32",
        "report": str(report),
    }
    record = found.record
    trials = [
        f"{describe(trial.plan, record)}: {trial.measurement.outcome.value}"
        + (f", {trial.samples_per_second:.0f} samples/s" if trial.samples_per_second else "")
        for trial in record.trials[:FIRST_TRIALS]
    ]
    plan = describe(found.plan, record)
    search = record.search
    return Run(command_s, search.seconds, search.probes, plan, trials, answer)


def finder_answer(at: Bench) -> dict[str, Any]:
    """Return the largest power of two that trains in float32, accumulated to the global batch."""
    told = at.judged("largest")
    size = min(2 ** (told["largest"].bit_length() - 1), told["global_batch"])
    plan = Plan.split(told["global_batch"], size)
    sizes = {"micro_batch": plan.micro_batch, "accumulation_steps": plan.accumulation_steps}
    return {**sizes, "precision": "float32"}


def in_turns(at: Bench, answers: Mapping[str, Mapping[str, Any]], sets: int) -> dict[str, float]:
    """Return samples per second of each answer: the median over turns, then over processes."""
    medians: dict[str, list[float]] = {name: [] for name in answers}
    for number in range(sets):
        draw, speeds = random.Random(number), {name: list[float]() for name in answers}
        with ExitStack() as held:
            turns = {}
            for index, (name, answer) in enumerate(answers.items()):
                path = at.folder / f"answer-{index}.json"
                path.write_text(json.dumps(answer))
                turns[name] = held.enter_context(at.training(path, "float32"))
            for _ in range(TURNS):
                for name in draw.sample(sorted(turns), len(turns)):
                    speeds[name].append(turns[name]())
        for name, its in speeds.items():
            medians[name].append(statistics.median(its))
            say(f"set {number}: {name}: {medians[name][-1]:.0f} samples/s")
    return {name: statistics.median(its) for name, its in medians.items()}


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Search, let the answers train in turns, and write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="what the first run printed")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sets", type=int, default=3, help="of processes that take turns")
    given = parser.parse_args()
    kept = given.json.parent / f"{given.json.stem}-reports"
    kept.mkdir(exist_ok=True)
    told = json.loads(given.json.read_text()) if given.json.exists() else {"runs": []}
    runs = [Run(**run) for run in told["runs"]]
    while len(runs) < given.runs:
        own = kept / str(len(runs))
        own.mkdir(exist_ok=True)
        runs.append(ran(own, given.text if not runs else None))
        say("\n".join(runs[-1].lines()))
        given.json.write_text(json.dumps({"runs": [asdict(run) for run in runs]}, indent=1) + "\n")
    task = {"workload": WORKLOAD, "place": "cpu", "budget_bytes": parse_bytes(BUDGET), "seed": 0}
    with tempfile.TemporaryDirectory() as folder:
        at = Bench(task, dict(os.environ), Path(folder), 0, 20, 1, 900.0)
        finder = finder_answer(at)
        answers = {FINDER: finder, **{run.plan: run.answer for run in reversed(runs)}}
        speeds = in_turns(at, answers, given.sets)
    plan = f"{finder['micro_batch']} x {finder['accumulation_steps']}"
    told = {
        "workload": WORKLOAD,
        "budget": BUDGET,
        "measured": f"in turns, {given.sets} sets of processes, medians, after the searches",
        "finder": {"plan": plan, "samples_per_second": round(speeds[FINDER])},
        "autofit": {"plan": runs[0].plan, "samples_per_second": round(speeds[runs[0].plan])},
        "answers": {name: round(speed, 1) for name, speed in speeds.items() if name != FINDER},
        "runs": [asdict(run) for run in runs],
    }
    given.json.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({name: told[name] for name in ("finder", "autofit", "answers")}, indent=1))
    for run in runs:
        print("\n".join(run.lines()))


if __name__ == "__main__":
    main()
