"""The default answer beside plans that a person writes by hand, on a processor.

    python -m benchmarks.by_hand --json FILE            (about a quarter of an hour, two cores)
    python -m benchmarks.by_hand --json FILE --models medium_cnn --processes 1 --turns 1

For each of three models `autofit.search` is called as a user calls it. Beside its answer a plain
loop trains by up to six plans: float32; bfloat16; that at half the size; with the fused optimizer;
with channels_last besides, for images; and compiled besides. Each is at the largest micro-batch
that trains under the budget, rounded down to a multiple of eight, and must train there; a plan that
does not is left out. Then every plan has a process of its own, and all take turns in random order,
several times; then new processes do, since a process stays faster or slower than its like for as
long as it lives. Denormal numbers are flushed and glibc's thresholds fixed in all of them
(`benchmarks.versus.place.compute_alike`). A ratio is that of the medians of one set of processes;
the printed one is the median over the sets. Models that the file has are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from autofit.units import format_bytes, parse_bytes
from benchmarks.versus.__main__ import Bench

MODELS: Mapping[str, str] = {
    "medium_vit": "256MiB",
    "medium_cnn": "256MiB",
    "medium_gpt": "256MiB",
}
"""Workload -> budget: all plans fit, and none at every size."""
IMAGES = ("medium_vit", "medium_cnn")
GRAIN = 8
"""Nobody writes a micro-batch of 43."""
STEPS_TO_LIVE = 3
AUTOFIT = "autofit"


@dataclass(frozen=True)
class ByHand:
    """One plan: the precision, whether at half the largest size, and the levers that are on."""

    precision: str = "bfloat16"
    halved: bool = False
    fused: bool = False
    channels_last: bool = False
    compiled: bool = False

    @property
    def levers(self) -> dict[str, bool]:
        """Fields of a `Task`."""
        names = ("fused", "channels_last", "compiled")
        return {name: getattr(self, name) for name in names}


def plans_by_hand(model: str) -> dict[str, ByHand]:
    """Return what a person tries, each with what helped before."""
    images = model in IMAGES
    plans = {
        "float32": ByHand("float32"),
        "bfloat16": ByHand(),
        "bfloat16, half the size": ByHand(halved=True),
        "bfloat16, fused": ByHand(fused=True),
    }
    if images:
        plans["bfloat16, fused, channels_last"] = ByHand(fused=True, channels_last=True)
    plans["all of it, compiled"] = ByHand(fused=True, channels_last=images, compiled=True)
    return plans


@dataclass(frozen=True)
class Found:
    """What one model gave.

    Attributes:
        seconds, probes: of the search.
        plans: by name, the micro-batch or the plan.
        speeds: by name, medians in samples per second, one for each set of processes.
        left_out: by name, why a plan by hand does not train.
    """

    model: str
    budget_bytes: int
    seconds: float
    probes: int
    plans: Mapping[str, str]
    speeds: Mapping[str, Sequence[float]]
    left_out: Mapping[str, str]

    @property
    def best(self) -> str:
        """The fastest plan by hand."""
        return max((n for n in self.speeds if n != AUTOFIT), key=lambda n: self.ratio(n, AUTOFIT))

    def ratio(self, name: str, other: str) -> float:
        """Return how many times as fast one plan is as another."""
        pairs = zip(self.speeds[name], self.speeds[other], strict=True)
        return statistics.median(one / two for one, two in pairs)

    def lines(self) -> Iterator[str]:
        """Yield Markdown."""
        yield (
            f"\n## {self.model} in {format_bytes(self.budget_bytes)}: "
            f"{self.ratio(AUTOFIT, self.best):.3f} of {self.best}"
        )
        yield f"\nThe search: {self.probes} probes in {self.seconds:.0f} s.\n"
        yield "| plan | | samples/s | autofit's answer over it |\n|---|---|---|---|"
        for name, speeds in self.speeds.items():
            told = ", ".join(f"{speed:.1f}" for speed in speeds)
            yield f"| {name} | {self.plans[name]} | {told} | {self.ratio(AUTOFIT, name):.3f} |"
        for name, why in self.left_out.items():
            yield f"| {name} | {self.plans[name]} | - | {why} |"


@dataclass(frozen=True)
class Contest:
    """One model's plans, and the folder in which each has its own.

    Attributes:
        sets, turns: how many processes each plan has one after the other, and turns of each.
    """

    task: dict[str, Any]
    folder: Path
    sets: int
    turns: int

    def bench(self, name: str, levers: Mapping[str, bool] | None = None) -> Bench:
        """Return where a plan's processes run."""
        own = self.folder / name.replace(" ", "-")
        own.mkdir(exist_ok=True)
        return Bench(self.task | dict(levers or {}), dict(os.environ), own, 0, 20, 1, 900.0)

    def searched(self) -> dict[str, Any]:
        """Let autofit search as a user does; return what `run_peer` writes."""
        at = self.bench(AUTOFIT)
        at.python("run_peer", AUTOFIT, at._task_file("float32"), at.folder)
        found: dict[str, Any] = json.loads((at.folder / "found.json").read_text())
        if "answer" not in found:
            raise RuntimeError(f"the search of {self.task['workload']} failed: {found['error']}")
        return found

    def size(self, precision: str) -> int:
        """Return the largest size of the plain loop in a precision, as a person rounds it."""
        largest: int = self.bench(precision).judged("largest", precision=precision)["largest"]
        return largest // GRAIN * GRAIN or largest

    def why_not(self, name: str, plan: ByHand, size: int) -> str | None:
        """Return of what a plan by hand dies under the budget; None: it lives."""
        at = self.bench(name, plan.levers)
        answer = at.folder / "answer.json"
        answer.write_text(json.dumps({"micro_batch": size, "precision": plan.precision}))
        told = at.judged("survive", answer, STEPS_TO_LIVE, precision=plan.precision)
        return None if told["survives"] else str(told["died_of"])

    def speeds(self, plans: Mapping[str, ByHand]) -> dict[str, list[float]]:
        """Return each plan's median speeds, one for each set of processes."""
        speeds: dict[str, list[float]] = {name: [] for name in (AUTOFIT, *plans)}
        for number in range(self.sets):
            with ExitStack() as held:
                turns = {
                    name: held.enter_context(self._training(name, plans.get(name)))
                    for name in speeds
                }
                for name, its in self._in_turns(turns, random.Random(number)).items():
                    speeds[name].append(statistics.median(its))
                    say(f"set {number}: {name}: {speeds[name][-1]:.1f} samples/s")
        return speeds

    def _training(self, name: str, plan: ByHand | None) -> Any:
        at = self.bench(name, plan.levers if plan else None)
        return at.training(at.folder / "answer.json", plan.precision if plan else "float32")

    def _in_turns(
        self, turns: Mapping[str, Callable[[], float]], draw: random.Random
    ) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(self.turns):
            for name in draw.sample(sorted(turns), len(turns)):
                found[name].append(turns[name]())
        return found


def contest(model: str, at: Contest) -> Found:
    """Search, write the plans by hand, and time all of them."""
    began = time.monotonic()
    found = at.searched()
    answer = found["answer"]
    (at.bench(AUTOFIT).folder / "answer.json").write_text(json.dumps(answer))
    told = {
        AUTOFIT: f"{answer['micro_batch']} x {answer['accumulation_steps']} {answer['settings']}"
    }
    say(f"{model}: {told[AUTOFIT]}, {answer['probes']} probes, {found['seconds']:.0f} s")
    largest = {precision: at.size(precision) for precision in ("float32", "bfloat16")}
    plans, left_out = plans_by_hand(model), {}
    for name, plan in plans.items():
        size = max(largest[plan.precision] // (2 if plan.halved else 1), 1)
        told[name] = str(size)
        if (why := at.why_not(name, plan, size)) is not None:
            left_out[name] = why
        say(f"{model}: {name} at {size}: {why or 'trains'}")
    speeds = at.speeds({name: plan for name, plan in plans.items() if name not in left_out})
    say(f"{model}: {time.monotonic() - began:.0f} s in all")
    budget = at.task["budget_bytes"]
    return Found(model, budget, found["seconds"], answer["probes"], told, speeds, left_out)


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run the models that the file does not have, and print Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--processes", type=int, default=2, help="of each plan, one after the other"
    )
    parser.add_argument("--turns", type=int, default=7, help="of each process")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    done = json.loads(given.json.read_text())["models"] if given.json.exists() else []
    for model in given.models:
        if any(each["model"] == model for each in done):
            continue
        task = {"workload": model, "place": "cpu", "budget_bytes": parse_bytes(MODELS[model])}
        with tempfile.TemporaryDirectory() as folder:
            at = Contest(task | {"seed": given.seed}, Path(folder), given.processes, given.turns)
            done.append(asdict(contest(model, at)))
        told = {
            "date": str(date.today()),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": os.getloadavg()[0],
            "models": done,
        }
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    for each in done:
        print("\n".join(Found(**each).lines()))


if __name__ == "__main__":
    main()
