"""autofit and what a user would pick instead: the same trainings, the same budget, one table.

    python -m benchmarks.versus --place cpu small_gpt=128MiB --seeds 0 1 2     on this processor
    python -m benchmarks.versus --place emulated gpt2_small=24GiB              a card of 24 GiB
    python -m benchmarks.versus --place cuda --steps 200 gpt2_small=24GiB      a real one

Each tool runs in a process of its own as its users run it; batch-size finders in each precision
that a user may have chosen by hand. An answer that changes the user's global batch has a second
row, in which accumulation by hand makes up for it. Probes and OOMs are counted by the user's own
loss and by the allocator, in any process; where that cannot tell probes, as of autofit and Optuna,
by the tool's own account. A judge trains by each answer in a process of its own: does it live, what
does it hold, and, where time means something, how fast is it, as a share of the fastest of a grid:
plain loops at powers of two, and at the largest size that bisection finds to fit. Equal plain loops
are judged once for all seeds. Without `--seconds` Optuna searches as long as autofit did. A tool
that is not installed gets a row that says so: the extra `bench` has them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import emulated_gpu
from autofit.units import format_bytes, parse_bytes
from benchmarks.versus.roster import PEERS, Peer
from benchmarks.versus.summary import BY_HAND, read
from benchmarks.versus.table import Comparison, Row, keeps, markdown

TURNS = 5
"""Turns of each process of a pair. More would not tell more: a process stays faster or slower than
its like for as long as it lives, so a pair counts once."""


class NothingTrains(Exception):
    """No micro-batch trains under the budget."""


@dataclass(frozen=True)
class Bench:
    """Where one workload's processes run, how long the judge trains, and how long a tool may take.

    Attributes:
        steps, timed_steps: that the judge trains to see an answer live, and to time it.
        limit_s: a tool that takes longer is ended, with the processes that it started.
        verdicts: whether an answer lives, by what is trained.
    """

    task: dict[str, Any]
    environment: dict[str, str]
    folder: Path
    steps: int
    timed_steps: int
    repeats: int
    limit_s: float
    verdicts: dict[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """Whether time means something here."""
        return self.repeats > 0 and bool(self.task["place"] != "emulated")

    def python(self, module: str, *arguments: object, log: Path | None = None) -> str:
        """Run a module of this folder in a process of its own; return its standard output.

        With a log it is a tool, whose time is limited.
        """
        with self._running(module, *arguments, log=log) as process:
            told, _ = process.communicate(timeout=self.limit_s if log else None)
        if process.returncode:
            raise RuntimeError(f"{module} ended with {process.returncode}: see {self.folder}")
        return told

    @contextmanager
    def _running(
        self, module: str, *arguments: object, log: Path | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a module of this folder; at the end, end its process and those that it started."""
        with (
            (self.folder / "stderr.txt").open("a") as errors,
            subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.versus.{module}", *map(str, arguments)],
                env=self.environment | ({"VERSUS_LOG": str(log)} if log else {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # so that all that it starts can be ended
            ) as process,
        ):
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def judged(self, how: str, *arguments: object, precision: str = "float32") -> Any:
        """Return what the judge says."""
        told = self.python("judge", how, self._task_file(precision), *arguments)
        return json.loads(told.splitlines()[-1])

    def row(self, name: str, peer: Peer, precision: str) -> Row:
        """Let one tool search, and judge whether its answer lives."""
        shown = precision if peer.finder else "own"
        own = self._folder_of(name, shown)
        own.mkdir()
        (own / "task.json").write_text(json.dumps(self.task | {"precision": precision}))
        log = own / "log.jsonl"
        try:
            self.python("run_peer", name, own / "task.json", own, log=log)
            found = json.loads((own / "found.json").read_text())
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:100]}"}
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        answer = found.get("answer")
        verdict = None
        if answer:
            verdict = self._verdict(own, name, answer, precision)
            answer["report"] = answer["report"] and Path(answer["report"]).name
        probes = (answer or {}).get("probes") or sizes_tried(events)
        refusals, ooms = (sum(e["event"] == kind for e in events) for kind in ("refusal", "oom"))
        return Row(name, shown, found, probes, refusals, ooms, verdict)

    def with_accumulation(self, row: Row, global_batch: int) -> Row | None:
        """Return the row of its answer with accumulation added by hand; None: nothing to add."""
        answer = row.found.get("answer")
        if answer is None or answer["micro_batch"] < 1 or keeps(global_batch, answer):
            return None
        steps = math.ceil(global_batch / answer["micro_batch"])
        sizes = {"micro_batch": math.ceil(global_batch / steps), "accumulation_steps": steps}
        name, answer = f"{row.peer}{BY_HAND}", answer | sizes
        own = self._folder_of(name, row.precision)
        own.mkdir()
        verdict = self._verdict(own, name, answer, row.task_precision)
        return replace(row, peer=name, found=row.found | {"answer": answer}, verdict=verdict)

    def _folder_of(self, name: str, precision: str) -> Path:
        return self.folder / f"{name} {precision}".replace("/", " ")

    def _verdict(self, own: Path, peer: str, answer: dict[str, Any], precision: str) -> Any:
        (own / "answer.json").write_text(json.dumps(answer))
        if (key := what_trains(peer, answer)) not in self.verdicts:
            told = self.judged("survive", own / "answer.json", self.steps, precision=precision)
            self.verdicts[key] = told
        return self.verdicts[key]

    def rated(self, rows: Sequence[Row], fastest: dict[str, Any]) -> list[Row]:
        """Return the rows with speeds beside the grid's fastest; equal answers share theirs."""
        alike: dict[str, list[tuple[float, float]]] = {}
        grid = self.folder / "fastest.json", fastest["precision"]
        grid[0].write_text(json.dumps(fastest))
        rated = []
        for row in rows:
            if row.verdict and row.verdict["survives"]:
                key = what_trains(row.peer, row.found["answer"])
                if key not in alike:
                    path = self._folder_of(row.peer, row.precision) / "answer.json"
                    pair = (path, row.task_precision), grid
                    try:
                        alike[key] = [self._in_turns(*pair) for _ in range(self.repeats)]
                    except (
                        RuntimeError,
                        BrokenPipeError,
                    ) as error:  # the other rows are worth having all the same
                        print(f"{row.peer} has no speed: {error}", file=sys.stderr)
                        alike[key] = []
                row = replace(row, rates=alike[key])
            rated.append(row)
        return rated

    def _in_turns(self, *trainings: tuple[Path, str]) -> tuple[float, float]:
        """Return samples per second of two answers that train in turns, in two processes."""
        with ExitStack() as stack:
            ours, best = (stack.enter_context(self.training(*each)) for each in trainings)
            turns = [(ours(), best()) for _ in range(TURNS)]
        first, second = zip(*turns, strict=True)
        return statistics.median(first), statistics.median(second)

    @contextmanager
    def training(self, answer: Path, precision: str) -> Iterator[Callable[[], float]]:
        """Let a process train by an answer in turns; each returns samples per second of one.

        It trains as the tool's user would: by `Report.apply`, or in a plain loop.
        """
        arguments = ("speed", self._task_file(precision), answer, self.timed_steps)
        with self._running("judge", *arguments) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            asked, told = process.stdin, process.stdout

            def turn() -> float:
                asked.write("\n")
                asked.flush()
                if not (line := told.readline()):
                    raise RuntimeError((self.folder / "stderr.txt").read_text()[-500:])
                return float(line)

            turn()  # builds and warms up first
            yield turn

    def _task_file(self, precision: str) -> Path:
        path = self.folder / f"task-{precision}.json"
        path.write_text(json.dumps(self.task | {"precision": precision}))
        return path


def what_trains(peer: str, answer: dict[str, Any]) -> str:
    """Return the same for answers that train alike; a report's plan has more to it than sizes."""
    sizes = [answer["micro_batch"], answer["accumulation_steps"] or 1]
    return json.dumps([*sizes, peer if answer["report"] else answer["precision"]])


def verdicts_of(at: Bench, others: Sequence[Comparison]) -> dict[str, Any]:
    """Return what other seeds showed of plain loops: what those hold depends on no value.

    Only with this torch, and not of what died by anything but memory.
    """
    alike = (at.task["workload"], at.task["budget_bytes"], at.task["place"], at.steps)
    rows = [
        row
        for one in others
        if (one.workload, one.budget_bytes, one.place, one.steps) == alike
        for row in one.rows
        if row.verdict and not row.found["answer"]["report"] and is_reusable(row)
    ]
    return {what_trains(row.peer, row.found["answer"]): row.verdict for row in rows}


def is_reusable(row: Row) -> bool:
    """Whether a verdict is of this torch, and about memory."""
    assert row.verdict is not None
    is_about_memory = row.verdict["survives"] or "OutOfMemoryError" in row.verdict["died_of"]
    return row.torch == version("torch") and is_about_memory


def sizes_tried(events: Sequence[dict[str, Any]]) -> int:
    """Return how often the size of the batch, the model or the process changed."""
    runs = [(e["pid"], e["model"], e["samples"]) for e in events if e["event"] == "forward"]
    return sum(before != after for before, after in zip([None, *runs], runs, strict=False))


@contextmanager
def bench(
    task: dict[str, Any], steps: int, timed_steps: int, repeats: int, limit_s: float
) -> Iterator[Bench]:
    """Make the place: for an emulated one a card that ends at the budget."""
    environment = dict(os.environ)
    with ExitStack() as held:
        if task["place"] == "emulated":
            machine = emulated_gpu.new_machine()
            held.callback(machine.remove)
            cards = [emulated_gpu.find_card(memory=task["budget_bytes"])]
            environment = emulated_gpu.environment(cards, machine=machine, values=False)
        folder = held.enter_context(tempfile.TemporaryDirectory())
        yield Bench(task, environment, Path(folder), steps, timed_steps, repeats, limit_s)


def compared(at: Bench, names: Sequence[str], precisions: Sequence[str]) -> Comparison:
    """Run every tool on one workload.

    Where no seconds are set, a tool that its user ends searches as long as autofit did.

    Raises:
        NothingTrains: not a single sample trains under the budget.
    """
    load = [os.getloadavg()[0]]
    sizes = {name: at.judged("largest", precision=name) for name in precisions}
    largest = {name: told["largest"] for name, told in sizes.items()}
    if not any(largest.values()):
        budget = format_bytes(at.task["budget_bytes"])
        raise NothingTrains(f"{at.task['workload']} trains at no size in {budget}: allow it more")
    global_batch = sizes[precisions[0]]["global_batch"]
    fastest = None
    if at.timed:
        grids = {
            name: at.judged("grid", size, at.timed_steps, precision=name)
            for name, size in largest.items()
            if size
        }
        precision = max(grids, key=lambda name: max(grids[name].values()))
        size = max(grids[precision], key=grids[precision].get)
        fastest = {"micro_batch": int(size), "precision": precision}
    rows = []
    for name in names:
        peer = PEERS[name]
        for precision in precisions if peer.finder else ["float32"]:
            rows.append(at.row(name, peer, precision))
            print(f"{at.task['workload']}: {rows[-1]}", file=sys.stderr, flush=True)
        if name == "autofit" and "seconds" not in at.task and "answer" in rows[-1].found:
            at = replace(at, task=at.task | {"seconds": rows[-1].found["seconds"]})
    if global_batch:
        rows += [r for row in rows if (r := at.with_accumulation(row, global_batch)) is not None]
    if fastest:
        rows = at.rated(rows, fastest)
    return Comparison(
        at.task["workload"],
        at.task["budget_bytes"],
        at.task["place"],
        at.task["seed"],
        global_batch,
        at.steps,
        largest,
        fastest,
        rows,
        [*load, os.getloadavg()[0]],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, and write Markdown to standard output and raw JSON to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="+", metavar="WORKLOAD=BUDGET")
    parser.add_argument("--place", choices=("cpu", "emulated", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=200, help="that an answer has to survive")
    parser.add_argument("--timed-steps", type=int, default=20, help="of an answer, each turn")
    parser.add_argument(
        "--repeats", type=int, default=4, help="pairs of processes that time an answer; 0: none"
    )
    parser.add_argument(
        "--limit", type=float, default=900, metavar="S", help="a tool that takes longer is ended"
    )
    parser.add_argument(
        "--seconds", type=float, help="of Optuna's searches; without it, as long as autofit's"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="a run for each")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument(
        "--judged",
        nargs="+",
        type=Path,
        default=[],
        metavar="RAW.json",
        help="of other seeds, with this torch: their plain loops are not judged again",
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    names = [n for n in given.only if given.place != "cpu" or not PEERS[n].card_only]
    names.sort(key=list(PEERS).index)
    found: list[Comparison] = []
    judged = [one for path in given.judged for one in read(path)]
    for seed, text in product(given.seeds, given.tasks):
        workload, _, budget = text.partition("=")
        task = {"workload": workload, "place": given.place, "budget_bytes": parse_bytes(budget)}
        task |= {"seed": seed} | ({} if given.seconds is None else {"seconds": given.seconds})
        with bench(task, given.steps, given.timed_steps, given.repeats, given.limit) as at:
            at.verdicts.update(verdicts_of(at, [*found, *judged]))
            try:
                found.append(compared(at, names, given.precisions))
            except NothingTrains as error:  # the others are worth having all the same
                print(error, file=sys.stderr)
                continue
        print("\n".join(markdown(found[-1])), end="\n\n", flush=True)
        if given.json:
            told = {
                "date": str(date.today()),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "python": platform.python_version(),
                "comparisons": [asdict(one) for one in found],
            }
            given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
