"""CPU seconds of each part of a search: until its first probe, between probes, and after the last.

    python -m benchmarks.first_probe [TARGET] [--budget 64MiB] [--parts]

A search as the command line makes it runs in a process of its own, and whenever it says that
something begins, the processor time of that process and of all that it started is read from /proc.
A part is what ran between two such words. torch computes in one thread, so that the seconds of the
processor are about the same beside other programs: threads that wait for each other count their
waiting. The clock's seconds stand beside them, for a machine that does nothing else.

Printed are the parts in order, probes but for the first as one row, and the sums up to the first
probe, between the first and the last, and after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PROBE = "probe"


@dataclass(frozen=True)
class Part:
    """What ran from one word of the search to the next.

    Attributes:
        name: what began.
        cpu_s: processor seconds of all processes of the search.
        clock_s: seconds of the clock.
    """

    name: str
    cpu_s: float
    clock_s: float


def cpu_seconds_of(process: int) -> float:
    """Return the processor seconds of a process and all below it, with those that have ended."""
    stats = dict(_stats())
    seconds, found = 0.0, [process]
    while found:
        parent = found.pop()
        seconds += stats[parent][1]
        found += [pid for pid, (its_parent, _) in stats.items() if its_parent == parent]
    return seconds


def _stats() -> Iterable[tuple[int, tuple[int, float]]]:
    """Yield process id -> that of its parent, and its processor seconds."""
    for each in Path("/proc").iterdir():
        if not each.name.isdecimal():
            continue
        try:
            fields = (each / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        # Its own and those of children that it has waited for, in user and system mode
        yield int(each.name), (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_SECOND)


class _Notes:
    """Writes when each part of the search in this process began.

    Args:
        path: of a file, a JSON object a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Any) -> None:
        """Note an event of the search that begins a part."""
        kind = type(event).__name__
        if kind == "StageStarted":
            self.note(event.stage)
        elif kind == "ProbeStarted":
            self.note(f"{_PROBE} {event.kind.value} {event.plan}")
        elif kind in ("ProbeFinished", "Repeating"):
            self.note("deciding")

    def note(self, name: str) -> None:
        """Note that a part of that name begins."""
        facts = {"name": name, "cpu_s": cpu_seconds_of(os.getpid()), "clock_s": time.time()}
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def searched(target: str, budget: str, max_probes: int | None, path: Path) -> None:
    """Search in this process as the command line does, and note its parts."""
    notes = _Notes(path)
    notes.note("importing the command line")
    from autofit.cli import console, main  # noqa: F401  # as the command does
    from autofit.cli.options import load_target

    notes.note(f"loading {target}")
    if start_ahead := getattr(console, "start_server_ahead", None):  # as later versions do
        start_ahead()
    workload = load_target(target)
    notes.note("importing the search")
    from autofit.searching.options import SearchArguments, SearchOptions
    from autofit.searching.search import search_as_asked

    asked = SearchArguments(
        vram_budget=budget,
        device="cpu",
        max_probes=max_probes,
        progress=notes,
        options=SearchOptions(),
    )
    report = search_as_asked(asked, workload)
    notes.note("showing the report")
    print(report)
    notes.note("end")


def parts_of(target: str, budget: str, max_probes: int | None = None) -> list[Part]:
    """Run a search in a process of its own, and return its parts."""
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder) / "notes", time.time()
        given = [target, "--budget", budget, "--notes", str(path)]
        given += [] if max_probes is None else ["--max-probes", str(max_probes)]
        command = [sys.executable, "-m", "benchmarks.first_probe", *given]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        notes = [json.loads(line) for line in path.read_text().splitlines()]
    first = {"name": "starting Python", "cpu_s": 0.0, "clock_s": began}
    return [_part(*pair) for pair in zip([first, *notes], notes, strict=False)]


def _part(one: Mapping[str, Any], following: Mapping[str, Any]) -> Part:
    cpu_s, clock_s = (following[key] - one[key] for key in ("cpu_s", "clock_s"))
    return Part(one["name"], cpu_s, clock_s)


def rows_of(parts: list[Part], *, each_probe: bool = False) -> list[Part]:
    """Return the parts with the probes but for the first in one row, and sums."""
    probes = [at for at, part in enumerate(parts) if part.name.startswith(_PROBE)]
    first, last = probes[0], probes[-1]
    between = parts[first : last + 1]
    is_row = [each_probe or not _is_of_probe(part) for part in between]
    shown = [part for part, alone in zip(between, is_row, strict=True) if alone]
    rest = [part for part, alone in zip(between, is_row, strict=True) if not alone]
    return [
        *parts[:first],
        _sum("until the first probe", parts[:first]),
        *([_sum(f"{len(probes)} probes, and deciding", rest)] if rest else []),
        *shown,
        _sum("from the first probe to the last", between),
        *parts[last + 1 :],
        _sum("after the last probe", parts[last + 1 :]),
        _sum("in all", parts),
    ]


def _is_of_probe(part: Part) -> bool:
    return part.name.startswith(_PROBE) or part.name == "deciding" or " 1 x " in part.name


def _sum(name: str, parts: list[Part]) -> Part:
    cpu_s, clock_s = sum(part.cpu_s for part in parts), sum(part.clock_s for part in parts)
    return Part(f"**{name}**", cpu_s, clock_s)


def main() -> None:
    """Print the table of a search."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", default="benchmarks/workloads.py:tiny_gpt")
    parser.add_argument("--budget", default="64MiB")
    parser.add_argument("--max-probes", type=int)
    parser.add_argument("--parts", action="store_true", help="a row for each probe")
    parser.add_argument("--notes", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.notes is not None:
        searched(given.target, given.budget, given.max_probes, Path(given.notes))
        return
    print("| part | CPU s | clock s |\n|---|---|---|")
    for row in rows_of(
        parts_of(given.target, given.budget, given.max_probes), each_probe=given.parts
    ):
        print(f"| {row.name} | {row.cpu_s:.2f} | {row.clock_s:.2f} |")


if __name__ == "__main__":
    main()
