"""Several runs of the comparison in one: what each tool did to a workload, and autofit beside them.

    python -m benchmarks.versus.summary RAW.json ... [--json OUT]

The README's table is taken from the OUT that is `benchmarks/results/DATE-versus-cpu-summary.json`.
A finder answers with a batch size; at float32 its user has not thought of precision, in another it
was chosen by hand. A tuner chooses more than the batch size. A tool has a speed on a workload only
where each run's answer lived through all steps of the judge.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.versus.roster import PEERS
from benchmarks.versus.table import Comparison, Row, keeps, shares

OURS = ("autofit", "autofit, 5,000 steps planned")
ALL = "all"
"""Stands for all workloads."""
BY_HAND = ", accumulation by hand"
"""Ends the name of a tool whose answer was brought to the global batch."""

Tool = Mapping[str, Any]
Summary = Mapping[str, Mapping[str, Tool]]
RIVALS: Mapping[str, Callable[[Tool], bool]] = {
    "finder at float32": lambda tool: tool["kind"] == "finder" and tool["precision"] == "float32",
    "finder": lambda tool: tool["kind"] == "finder",
    "finder at the kept global batch": lambda tool: tool["kind"] == "finder" and tool["kept"],
    "tuner": lambda tool: tool["kind"] == "tuner",
}
"""Those whose best is set beside autofit."""


def summary(comparisons: Sequence[Comparison]) -> Summary:
    """Return workload -> tool -> what it did; autofit's has its speed over the best of `RIVALS`.

    Raises:
        ValueError: runs of one workload differ in budget, place, steps or torch, or a seed has two.
    """
    names = dict.fromkeys(one.workload for one in comparisons)
    found = {name: _of([c for c in comparisons if c.workload == name]) for name in names}
    return {**found, ALL: {name: _overall(name, list(found.values())) for name in OURS}}


def _of(runs: Sequence[Comparison]) -> dict[str, Tool]:
    if len({(run.budget_bytes, run.place, run.steps) for run in runs}) > 1:
        raise ValueError(f"{runs[0].workload}: runs differ in budget, place or steps")
    rows = [(run.seed, row) for run in runs for row in run.rows]
    if len({row.torch for _, row in rows}) > 1:
        raise ValueError(f"{runs[0].workload}: runs differ in torch")
    if len({(seed, row.peer, row.precision) for seed, row in rows}) < len(rows):
        raise ValueError(f"{runs[0].workload}: a tool has two rows of one seed")
    by_tool: dict[str, list[tuple[Comparison, Row]]] = {}
    for run in runs:
        for row in run.rows:
            own = row.precision == "own"
            label = row.peer if own else f"{row.peer}, {row.precision}"
            by_tool.setdefault(label, []).append((run, row))
    tools = {label: _tool(rows) for label, rows in by_tool.items()}
    return {
        label: {**tool, "against": _against(tools, tool)} if label in OURS else tool
        for label, tool in tools.items()
    }


def _tool(rows: Sequence[tuple[Comparison, Row]]) -> Tool:
    first, found = rows[0][1], [row.found for _, row in rows]
    lived = sum(bool(row.verdict and row.verdict["survives"]) for _, row in rows)
    took = [one["seconds"] for one in found if "seconds" in one]
    speeds = sorted(share for _, row in rows for share in shares(row.rates))
    return {
        "peer": first.peer,
        "kind": _kind(first.peer),
        "precision": first.precision,
        "kept": all(_keeps(run, row) for run, row in rows),
        "runs": len(rows),
        "lived": lived,
        "speed": statistics.median(speeds) if all(row.rates for _, row in rows) else None,
        "range": [speeds[0], speeds[-1]] if speeds else [],
        "ooms": [row.ooms for _, row in rows],
        "mean_ooms": statistics.mean(row.ooms for _, row in rows),
        "seconds": took,  # of those that were not ended
    }


def _kind(peer: str) -> str:
    if peer.startswith("autofit"):
        return "autofit"
    return "finder" if PEERS[peer.removesuffix(BY_HAND)].finder else "tuner"


def _keeps(run: Comparison, row: Row) -> bool:
    answer = row.found.get("answer")
    return answer is not None and (run.global_batch is None or keeps(run.global_batch, answer))


def _against(tools: Mapping[str, Tool], ours: Tool) -> dict[str, float]:
    speeds = {
        kind: [tool["speed"] for tool in tools.values() if tool["speed"] and among(tool)]
        for kind, among in RIVALS.items()
    }
    return {
        kind: ours["speed"] / max(each) for kind, each in speeds.items() if each and ours["speed"]
    }


def _overall(name: str, workloads: Sequence[Mapping[str, Tool]]) -> Tool:
    each = [tools[name]["against"] if name in tools else {} for tools in workloads]
    everywhere = [kind for kind in RIVALS if all(kind in ratios for ratios in each)]
    return {
        "against": {kind: statistics.geometric_mean(r[kind] for r in each) for kind in everywhere}
    }


def markdown(told: Summary) -> Iterator[str]:
    """Yield the lines of two tables: each tool, and autofit over the best of its rivals."""
    names = [name for name in told if name != ALL]
    yield f"| tool | {' | '.join(names)} | answers that live | OOMs a search | seconds |"
    yield "|---" * (len(names) + 4) + "|"
    for peer in dict.fromkeys(tool["peer"] for name in names for tool in told[name].values()):
        its = [[t for t in told[name].values() if t["peer"] == peer] for name in names]
        if BY_HAND not in peer:  # only where a global batch is wanted: in the second table
            yield f"| {peer} | {' | '.join(_cells(its))} |"
    yield ""
    yield f"| over the best | {' | '.join(names)} | geometric mean |"
    yield "|---" * (len(names) + 2) + "|"
    for ours, kind in product(OURS, RIVALS):
        ratios = [told[name].get(ours, {}).get("against", {}).get(kind) for name in [*names, ALL]]
        cells = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        yield f"| {ours}: {kind} | {' | '.join(cells)} |"


def _cells(of_workloads: Sequence[Sequence[Tool]]) -> Iterator[str]:
    for tools in of_workloads:
        speeds = ("-" if tool["speed"] is None else f"{tool['speed']:.2f}" for tool in tools)
        yield ", ".join(speeds) or "-"
    every = [tool for tools in of_workloads for tool in tools]
    yield f"{sum(tool['lived'] for tool in every)} of {sum(tool['runs'] for tool in every)}"
    yield f"{statistics.mean(ooms for tool in every for ooms in tool['ooms']):.1f}"
    seconds = [took for tool in every for took in tool["seconds"]]
    yield f"{min(seconds):.0f} to {max(seconds):.0f}" if seconds else "-"


def read(path: Path) -> list[Comparison]:
    """Return the comparisons of a raw file."""
    told = json.loads(path.read_text())["comparisons"]
    return [
        Comparison(**{"seed": 0, **one, "rows": [Row(**row) for row in one["rows"]]})
        for one in told
    ]


def main() -> None:
    """Print the tables of the raw files that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("raw", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="write the summary there too")
    given = parser.parse_args()
    told = summary([one for path in given.raw for one in read(path)])
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    print("\n".join(markdown(told)))


if __name__ == "__main__":
    main()
