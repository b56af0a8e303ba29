"""Rows of the comparison and the Markdown table they make; pure text, from raw JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autofit.units import format_bytes

HEAD = (
    "| tool | precision | answer | of the largest | speed | peak of budget | survives | probes |"
    " refusals | OOM | search | changed | global batch |"
)


@dataclass(frozen=True)
class Row:
    """One tool on one workload, as it was found by the harness.

    Attributes:
        peer: its name in the roster.
        precision: that was chosen by hand; "own": the tool chose.
        found: what `run_peer` wrote.
        probes: trials, told by the sizes that ran one after the other, or by the tool.
        refusals: of the allocator, in any process.
        ooms: those that an operation raised as an error, since it could not go on; without those
            under a limit that the tool set, where the card had what was asked for.
        verdict: what the judge found of the answer; None: there is none.
        rates: samples per second of the answer and of the grid's fastest, in turns, for each pair
            of processes; empty where time means nothing.
    """

    peer: str
    precision: str
    found: dict[str, Any]
    probes: int
    refusals: int
    ooms: int
    verdict: dict[str, Any] | None = None
    rates: list[tuple[float, float]] = field(default_factory=list)

    @property
    def torch(self) -> str | None:
        """The version of torch that the tool ran with; None: not recorded."""
        told: str | None = self.found.get("versions", {}).get("torch")
        return told

    @property
    def task_precision(self) -> str:
        """The precision of the task that the tool was given."""
        return self.precision.replace("own", "float32")


@dataclass(frozen=True)
class Comparison:
    """All rows of one workload.

    Attributes:
        workload, budget_bytes, place, seed: of the task.
        global_batch: the user's; None: free.
        largest: precision -> largest micro-batch that trains under the budget, by the plain loop.
        grid_fastest: the answer that was fastest in the grid; None: no times here.
        load: processes that wanted a processor, a minute's mean, at the beginning and the end.
    """

    workload: str
    budget_bytes: int
    place: str
    seed: int
    global_batch: int | None
    steps: int
    largest: dict[str, int]
    grid_fastest: dict[str, Any] | None
    rows: Sequence[Row]
    load: Sequence[float] = ()


def markdown(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of a table."""
    told = comparison
    yield f"## {told.workload}, {format_bytes(told.budget_bytes)}, seed {told.seed}"
    yield ""
    sizes = ", ".join(f"{size} in {precision}" for precision, size in told.largest.items())
    yield f"Largest micro-batch that trains, by the plain loop: {sizes}."
    if told.grid_fastest:
        answer = f"{told.grid_fastest['micro_batch']} in {told.grid_fastest['precision']}"
        yield f"Fastest of the grid, which is a speed of 1: {answer}."
    if told.load:
        yield f"Load of the machine: {' to '.join(f'{load:.1f}' for load in told.load)}."
    yield ""
    yield HEAD
    yield "|" + "---|" * (HEAD.count("|") - 1)
    for row in told.rows:
        yield f"| {' | '.join(_cells(told, row))} |"


def _cells(told: Comparison, row: Row) -> Iterator[str]:
    answer, verdict = row.found.get("answer"), row.verdict or {}
    yield row.peer
    yield row.precision if answer is None else answer["precision"]
    if answer is None:
        yield f"none: {row.found.get('error', 'unknown')[:80]}".replace("|", "/")
    else:
        steps = answer["accumulation_steps"] or 1
        yield f"{answer['micro_batch']} x {steps}" if steps > 1 else str(answer["micro_batch"])
    largest = told.largest.get(answer["precision"]) if answer else None
    yield f"{answer['micro_batch'] / largest:.2f}" if answer and largest else "-"
    yield _speed(row.rates)
    peak = verdict.get("peak_bytes")
    yield f"{peak / told.budget_bytes:.2f}" if peak else "-"
    yield "-" if answer is None else "yes" if verdict.get("survives") else "**no**"
    yield str(row.probes)
    yield str(row.refusals)
    yield str(row.ooms)
    yield f"{row.found['seconds']:.0f} s" if "seconds" in row.found else "-"
    yield ", ".join(row.found.get("changed", ["?"])) or "nothing"
    yield _global_batch(told.global_batch, answer)


def shares(rates: Sequence[tuple[float, float]]) -> list[float]:
    """Return an answer's speed in each pair of processes, as a share of the grid's fastest."""
    return sorted(ours / best for ours, best in rates)


def _speed(rates: Sequence[tuple[float, float]]) -> str:
    """Return the median share of the grid's fastest, and the range."""
    if not rates:
        return "-"
    each = shares(rates)
    spread = f" ({each[0]:.2f} to {each[-1]:.2f})" if len(each) > 1 else ""
    return f"{statistics.median(each):.2f}{spread}"


def _global_batch(wanted: int | None, answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "-"
    if wanted is None:
        return "free"
    return "kept" if keeps(wanted, answer) else f"{wanted} to {samples_of(answer)}"


def keeps(wanted: int, answer: dict[str, Any]) -> bool:
    """Whether an answer trains on the global batch that its user wants, but for rounding up."""
    rounded: bool = wanted <= samples_of(answer) < wanted + (answer["accumulation_steps"] or 1)
    return rounded or answer["report"] is not None


def samples_of(answer: dict[str, Any]) -> int:
    """Return the samples of an optimizer step."""
    return int(answer["micro_batch"] * (answer["accumulation_steps"] or 1))
