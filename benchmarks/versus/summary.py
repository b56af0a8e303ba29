"""What all cells of a comparison come to: each tool on each workload, and autofit beside them.

    python -m benchmarks.versus.summary RAW.jsonl ... [--json OUT]

The tables of README and docs are taken from the OUT that is
`benchmarks/results/DATE-versus-cpu-summary.json`. A tool has a speed on a workload only where each
seed's answer lived through all steps of the judge.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.versus.roster import EXPERT, OURS, PEERS

CONDITIONS: Mapping[str, Mapping[str, str]] = {
    "speed": {},
    "speed_fixed": {"VERSUS_FIXED": "1"},
}
"""What a speed is called -> variables of the processes: as the user of each tool would train, and
with glibc's thresholds fixed for all, as `Report.apply` fixes them."""
ALL = "all"
"""Stands for all workloads."""

Tool = Mapping[str, Any]
Summary = Mapping[str, Mapping[str, Tool]]
RIVALS: Mapping[str, Callable[[str], bool]] = {
    "best finder": lambda peer: PEERS[peer].kind == "finder",
    "best finder at float32": lambda peer: PEERS[peer].kind == "finder" and "float32" in peer,
    EXPERT: lambda peer: peer == EXPERT,
    "best plan by hand": lambda peer: PEERS[peer].kind == "by hand",
    "best tuner": lambda peer: PEERS[peer].kind == "tuner",
}
"""Those whose best is set beside autofit."""


@dataclass(frozen=True)
class Cell:
    """One tool on one workload with one seed.

    Attributes:
        workload, budget_bytes, place, seed: of the task.
        steps: that an answer has to survive.
        peer: its name in the roster.
        found: what `run_peer` wrote.
        ooms: errors of an operation that found no memory, in any process of the tool.
        verdict: what the judge found of the answer; None: there is none.
        rates: condition -> for each pair of processes, samples per second of the answer and of the
            plain loop.
        load: processes that wanted a processor, a minute's mean.
        date: of the run.
    """

    workload: str
    budget_bytes: int
    place: str
    seed: int
    steps: int
    peer: str
    found: dict[str, Any]
    ooms: int
    verdict: dict[str, Any] | None = None
    rates: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    load: float = 0.0
    date: str = ""

    @property
    def answer(self) -> dict[str, Any] | None:
        """What its user is told."""
        told: dict[str, Any] | None = self.found.get("answer")
        return told

    @property
    def torch(self) -> str | None:
        """The version of torch that the tool ran with; None: it was ended before it said so."""
        told: str | None = self.found.get("versions", {}).get("torch")
        return told

    @property
    def lives(self) -> bool:
        """Whether there is an answer, and it survived."""
        return bool(self.verdict and self.verdict["survives"])

    def shares(self, condition: str) -> list[float]:
        """Return the speed in each pair, as a share of the plain loop's."""
        return [ours / plain for ours, plain in self.rates.get(condition, [])]

    def __str__(self) -> str:
        speeds = {name: [round(share, 2) for share in self.shares(name)] for name in CONDITIONS}
        told = self.answer or self.found.get("error")
        return f"{self.workload}, seed {self.seed}, {self.peer}: {self.ooms} OOMs, {told}, {speeds}"


def read(paths: Iterable[Path]) -> list[Cell]:
    """Return the cells of raw files; one that does not exist has none."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [Cell(**json.loads(line)) for line in lines]


def summary(cells: Sequence[Cell]) -> Summary:
    """Return workload -> tool -> what it did; autofit's has its speed over the best of `RIVALS`.

    Raises:
        ValueError: runs of one workload differ in budget, place, steps or torch, or a seed has two.
    """
    names = dict.fromkeys(cell.workload for cell in cells)
    found = {name: _of([cell for cell in cells if cell.workload == name]) for name in names}
    ratios = [tools[OURS]["against"] for tools in found.values() if OURS in tools]
    overall = {
        key: {"mean": statistics.geometric_mean(its), "least": min(its)}
        for key in (ratios[0] if ratios else ())
        if all(key in each for each in ratios) and (its := [each[key] for each in ratios])
    }
    return {**found, ALL: {OURS: {"against": overall}}}


def _of(cells: Sequence[Cell]) -> dict[str, Tool]:
    for what in ("budget_bytes", "place", "steps", "torch"):
        if len({getattr(cell, what) for cell in cells} - {None}) > 1:
            raise ValueError(f"{cells[0].workload}: runs differ in {what}")
    if len({(cell.seed, cell.peer) for cell in cells}) < len(cells):
        raise ValueError(f"{cells[0].workload}: a tool has two cells of one seed")
    peers = [peer for peer in PEERS if any(cell.peer == peer for cell in cells)]
    tools = {peer: _tool([cell for cell in cells if cell.peer == peer]) for peer in peers}
    if OURS in tools:
        tools[OURS] |= {"against": _against(tools)}
    return dict(tools)


def _tool(cells: Sequence[Cell]) -> dict[str, Any]:
    all_live = all(cell.lives for cell in cells)
    shares = {name: [s for cell in cells for s in cell.shares(name)] for name in CONDITIONS}
    return {
        "runs": len(cells),
        "lived": sum(cell.lives for cell in cells),
        **{n: statistics.median(its) if its and all_live else None for n, its in shares.items()},
        "mean_ooms": statistics.mean(cell.ooms for cell in cells),
        "seconds": [c.found["seconds"] for c in cells if "seconds" in c.found],  # not ended
        "answers": [cell.answer for cell in cells],
    }


def _against(tools: Mapping[str, Tool]) -> dict[str, float]:
    found = {}
    for condition in CONDITIONS:
        for kind, among in RIVALS.items():
            rivals = [tool[condition] for name, tool in tools.items() if among(name)]
            best, ours = max(filter(None, rivals), default=None), tools[OURS][condition]
            if best and ours:
                found[f"{kind}, {condition}"] = ours / best
    return found


def markdown(told: Summary) -> Iterator[str]:
    """Yield the lines of two tables: each tool, and autofit over the best of its rivals."""
    names = [name for name in told if name != ALL]
    yield f"| tool | {' | '.join(names)} | answers that live | OOMs a search | seconds |"
    yield "|---" * (len(names) + 4) + "|"
    for peer in dict.fromkeys(peer for name in names for peer in told[name]):
        its = [told[name].get(peer) for name in names]
        yield f"| {peer} | {' | '.join(_cells(its))} |"
    yield ""
    yield f"| autofit over | {' | '.join(names)} | geometric mean | least |"
    yield "|---" * (len(names) + 3) + "|"
    for key, overall in told[ALL][OURS]["against"].items():
        ratios = [told[name][OURS]["against"][key] for name in names]
        each = (f"{ratio:.2f}" for ratio in (*ratios, overall["mean"], overall["least"]))
        yield f"| {key} | {' | '.join(each)} |"


def _cells(of_workloads: Sequence[Tool | None]) -> Iterator[str]:
    for tool in of_workloads:
        speeds = [tool[name] if tool else None for name in CONDITIONS]
        yield ", ".join("-" if speed is None else f"{speed:.2f}" for speed in speeds)
    every = list(filter(None, of_workloads))
    yield f"{sum(tool['lived'] for tool in every)} of {sum(tool['runs'] for tool in every)}"
    yield f"{statistics.mean(tool['mean_ooms'] for tool in every):.1f}"
    seconds = [took for tool in every for took in tool["seconds"]]
    yield f"{min(seconds):.0f} to {max(seconds):.0f}" if seconds else "-"


def main() -> None:
    """Print the tables of the raw files that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write the summary there too")
    given = parser.parse_args()
    told = summary(read(given.raw))
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    print("\n".join(markdown(told)))


if __name__ == "__main__":
    main()
