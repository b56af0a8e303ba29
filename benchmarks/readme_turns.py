"""The README's search, some runs of it, and its answers in turns beside what a finder answers.

    python -m benchmarks.readme_turns --json FILE --text FILE        (about three minutes)

Each run is the README's command in a process of its own. Then each different answer, and the
largest power of two that trains in float32 with default settings, train in turns, in pairs of
processes. `--text` takes what the first run printed, and both files are what the README's numbers
are taken from (`benchmarks/stated_numbers/search.md`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import autofit
from autofit.report.summary import describe
from autofit.units import parse_bytes
from benchmarks.versus.bench import Bench
from benchmarks.versus.peers import Answer

WORKLOAD, BUDGET = "small_cnn", "64MiB"
ASKED = (
    *("--device", "cpu", "--vram-budget", BUDGET),
    *("--planned-steps", "1000", "--out", "report.json"),
)
COMMAND = ("autofit", "search", f"benchmarks/workloads.py:{WORKLOAD}", *ASKED)
FIRST_TRIALS = 5


def ran(report: Path, text: Path | None) -> dict[str, Any]:
    """Run the README's command in the repository; return its answer and its first trials."""
    command = [sys.executable, "-m", *COMMAND[:-1], str(report)]
    began, root = time.monotonic(), Path(__file__).parents[1]
    told = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout
    if text is not None:
        text.write_text(f"$ {' '.join(COMMAND)}\n{told}")
    found = autofit.load(report)
    return {
        "command_s": round(time.monotonic() - began, 1),
        "seconds": found.record.search.seconds,
        "probes": found.record.search.probes,
        "plan": describe(found.plan, found.record),
        "trials": [str(trial) for trial in found.record.trials[:FIRST_TRIALS]],
        "answer": asdict(Answer(found.plan.micro_batch, "float32", report=str(report))),
    }


def finder_answer(at: Bench) -> Answer:
    """Return the largest power of two that trains in float32, accumulated to the global batch."""
    found, _ = at.found("float32")
    answer = found["answer"]
    size = answer["micro_batch"] * answer["accumulation_steps"]
    samples = 1
    while 2 * samples <= size and at.verdict(asdict(Answer(2 * samples, "float32")))["survives"]:
        samples *= 2
    return Answer(samples, "float32").keeping(size)


def main() -> None:
    """Search, let the answers train in turns, and write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="what the first run printed")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=3, help="of processes, for each answer")
    given = parser.parse_args()
    task = {"workload": WORKLOAD, "place": "cpu", "budget_bytes": parse_bytes(BUDGET), "seed": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [given.text, *[None] * (given.runs - 1)]
        runs = [ran(folder / f"{n}.json", text) for n, text in enumerate(texts)]
        at = Bench(task, folder, steps=20)
        finder = finder_answer(at)
        speeds = {}
        for run in runs:
            pairs = [at.pair(run["answer"], asdict(finder)) for _ in range(given.pairs)]
            speeds[run["plan"]] = [statistics.median(its) for its in zip(*pairs, strict=True)]
    ours, finders = speeds[runs[0]["plan"]]
    plan = f"{finder.micro_batch} x {finder.accumulation_steps}"
    told = {
        "workload": WORKLOAD,
        "budget": BUDGET,
        "measured": f"in turns, {given.pairs} pairs of processes, medians, after the searches",
        "finder": {"plan": plan, "samples_per_second": round(finders)},
        "autofit": {"plan": runs[0]["plan"], "samples_per_second": round(ours)},
        "answers": speeds,
        "runs": runs,
    }
    given.json.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({name: told[name] for name in ("finder", "autofit", "answers")}, indent=1))


if __name__ == "__main__":
    main()
