"""Several runs of the comparison in one: what each tool did to a workload, and autofit beside them.

    python -m benchmarks.versus.summary RAW.json ...         prints it, as JSON

A finder at float32 is what its user gets without a thought of precision; in another it was chosen
by hand. A speed counts only where every run's answer lived through all steps of the judge.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.versus.roster import PEERS
from benchmarks.versus.table import Comparison, Row, keeps, shares

OURS = ("autofit", "autofit, 5,000 steps planned")
ALL = "all"
"""Stands for all workloads: the geometric means."""

Tool = Mapping[str, Any]
RIVALS: Mapping[str, Callable[[Tool], bool]] = {
    "finder at float32": lambda tool: tool["finder"] and tool["precision"] == "float32",
    "finder": lambda tool: bool(tool["finder"]),
    "finder at the kept global batch": lambda tool: tool["finder"] and tool["kept"],
    "tuner": lambda tool: not tool["finder"] and not tool["ours"],
}
"""Those whose best is set beside autofit."""


def summary(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """Return workload -> tool -> what it did; autofit's has the ratios to the best `against` it."""
    names = dict.fromkeys(one.workload for one in comparisons)
    found = {name: _of([c for c in comparisons if c.workload == name]) for name in names}
    return {**found, ALL: {name: _overall(name, list(found.values())) for name in OURS}}


def _of(runs: Sequence[Comparison]) -> dict[str, Any]:
    by_tool: dict[str, list[tuple[Comparison, Row]]] = {}
    for run in runs:
        for row in run.rows:
            own = row.precision == "own"
            label = row.peer if own else f"{row.peer}, {row.precision}"
            by_tool.setdefault(label, []).append((run, row))
    tools = {label: _tool(rows) for label, rows in by_tool.items()}
    against = {name: _against(tools, name) for name in OURS if name in tools}
    return {label: tool | against.get(label, {}) for label, tool in tools.items()}


def _tool(rows: Sequence[tuple[Comparison, Row]]) -> dict[str, Any]:
    first, found = rows[0][1], [row.found for _, row in rows]
    lived = sum(bool(row.verdict and row.verdict["survives"]) for _, row in rows)
    speeds = sorted(share for _, row in rows for share in shares(row.rates))
    name = first.peer.removesuffix(", accumulation by hand")
    return {
        "finder": PEERS[name].finder and not name.startswith("autofit"),
        "ours": name.startswith("autofit"),
        "precision": first.precision,
        "kept": all(_keeps(run, row) for run, row in rows),
        "runs": len(rows),
        "lived": lived,
        "speed": statistics.median(speeds) if speeds and lived == len(rows) else None,
        "range": [speeds[0], speeds[-1]] if speeds else [],
        "ooms": statistics.mean(row.ooms for _, row in rows),
        "probes": statistics.mean(row.probes for _, row in rows),
        "seconds": statistics.mean(one.get("seconds", 0.0) for one in found),
        "changed": sorted({what for one in found for what in one.get("changed", [])}),
    }


def _keeps(run: Comparison, row: Row) -> bool:
    answer = row.found.get("answer")
    return answer is not None and (run.global_batch is None or keeps(run.global_batch, answer))


def _against(tools: Mapping[str, Tool], ours: str) -> dict[str, Any]:
    """Return one tool's speed as a share of the best of each kind of rival."""
    own = tools[ours]["speed"]
    best = {
        kind: max((t["speed"] for t in tools.values() if t["speed"] and among(t)), default=None)
        for kind, among in RIVALS.items()
    }
    return {"against": {kind: own / speed for kind, speed in best.items() if own and speed}}


def _overall(name: str, workloads: Sequence[Mapping[str, Tool]]) -> dict[str, Any]:
    rows = [tools[name] for tools in workloads if name in tools]
    against = {
        kind: [row["against"][kind] for row in rows if kind in row["against"]] for kind in RIVALS
    }
    return {
        "against": {
            kind: statistics.geometric_mean(each) for kind, each in against.items() if each
        },
        "least": {kind: min(each) for kind, each in against.items() if each},
        "ooms": statistics.mean([row["ooms"] for row in rows] or [0]),
        "seconds": max([row["seconds"] for row in rows], default=0.0),
    }


def read(path: Path) -> list[Comparison]:
    """Return the comparisons of a raw file."""
    names = {field.name for field in fields(Row)}
    return [
        Comparison(
            **{
                **one,
                "rows": [
                    Row(**{k: v for k, v in row.items() if k in names}) for row in one["rows"]
                ],
            }
        )
        for one in json.loads(path.read_text())["comparisons"]
    ]


if __name__ == "__main__":
    runs = [one for path in sys.argv[1:] for one in read(Path(path))]
    print(json.dumps(summary(runs), indent=1))
