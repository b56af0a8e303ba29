"""Predictions held against the emulated GPU, on models that nobody here wrote.

Models of torchvision, timm, transformers and diffusers, with random weights; in float32, bfloat16
and float16, with SGD, AdamW and Adafactor, with small and large batches, and half of them with
their library's own checkpointing, if they have that. `autofit.predict` tells each case by a dry
run; `benchmarks.oracle` trains it in a worker on the emulated card, where PyTorch's own allocator
answers, with values from when the training asks for one. Compared are peak allocated, peak
reserved, and required bytes: the smallest limit under which the last two of four steps run without
a flush, to a page of 2 MiB or 0.1 %. Non-torch bytes are left out on both sides.

    python -m benchmarks.emulation_models RESULTS.jsonl [--mixed] [--seconds 1200]

A hash orders all but the first three cases of each model; `--mixed` leaves these three out. Where a
training asks for values, a large batch takes many minutes on a CPU: `--uncomputed` gives such
trainings up.

`.ci/run` runs it on 30 models of transformers, the one such package that development installs.

Where torch cannot be imported without NVIDIA's libraries, run it under `emulated-gpu run
--no-values --`. A case that RESULTS.jsonl has is not run again; `--table` prints the summary of
what it has. The packages are no requirement of anything else here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from autofit import Plan, Workload, predict
from autofit.devices.gpu_catalogue import find_gpu
from autofit.errors import PredictionUnavailable
from autofit.plan import Dimension
from autofit.registry import resolve, strategies_of
from autofit.space import Space
from benchmarks.emulated_models import MODELS
from benchmarks.emulation_cases import Case, cases, mixed_cases, workload_of
from benchmarks.oracle.emulation import Emulated, Emulation

GPU = "H200"
PROMISES = {
    "allocated_median": 0.001,
    "allocated_90th": 0.005,
    "required_median": 0.001,
    "required_90th": 0.0125,
    "required_most": 0.07,
    "failed": 0,
}
"""108 models showed 0.00, 0.15, 0.00, 1.3 and 6.1 %. A page of 2 MiB is 1 % of the small ones."""


@dataclass(frozen=True)
class Bytes:
    """Peak allocated, peak reserved and required bytes, without non-torch bytes."""

    allocated: int
    reserved: int
    required: int


@dataclass(frozen=True)
class Result:
    """One case.

    Attributes:
        case: model and how it is trained.
        package: of the model.
        rehearsed: None where it was not told.
        emulated: None where its training failed.
        refused: why the rehearsal cannot tell.
        failed: what was raised elsewhere.
        computed_values: whether the training asked for values, and so computed.
        estimates: sizes that the emulated card does not know exactly.
        rehearsal_s, emulation_s: durations; that of the emulation with the start of its worker.
    """

    case: Case
    package: str
    rehearsed: Bytes | None = None
    emulated: Bytes | None = None
    refused: str | None = None
    failed: str | None = None
    computed_values: bool = False
    estimates: tuple[str, ...] = ()
    rehearsal_s: float = 0.0
    emulation_s: float = 0.0

    def error(self, kind: str) -> float | None:
        """Return the rehearsal's error as a share of what the card took."""
        if self.rehearsed is None or self.emulated is None:
            return None
        return float(getattr(self.rehearsed, kind) / getattr(self.emulated, kind) - 1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, line: str) -> Result:
        read = json.loads(line)
        read["case"] = Case(**read["case"])
        read["estimates"] = tuple(read["estimates"])
        for kind in ("rehearsed", "emulated"):
            read[kind] = Bytes(**read[kind]) if read[kind] else None
        return cls(**read)


def told_by_a_dry_run(workload: Workload, plan: Plan) -> Bytes:
    """Return what the rehearsal tells."""
    found = predict(workload, plan=plan, gpu=GPU)
    own = found.breakdown["non_torch"]
    return Bytes(found.peak_allocated_bytes, found.peak_reserved_bytes, found.required_bytes - own)


def told_by_the_card(
    workload: Workload, plan: Plan, near_bytes: int | None, *, may_compute: bool
) -> tuple[Bytes, Emulated]:
    """Return what torch's own allocator needs; without values unless the training asks for one."""
    strategies = strategies_of(plan)
    dimensions = {name: Dimension([value]) for name, value in plan.settings.items()}
    resolved = resolve(plan, Space(dimensions, workload.sample_batch_size), strategies)
    gpu = find_gpu(GPU)
    with Emulation(workload, strategies, gpu, may_compute=may_compute) as emulation:
        need = emulation.need(resolved, near_bytes)
    ample = need.ample
    found = Bytes(ample.peak_allocated_bytes, ample.peak_reserved_bytes, need.limit_bytes)
    return found, need


def result_of(case: Case, *, may_compute: bool = True) -> Result:
    """Tell a case by both; an error of either is part of the result."""
    found: dict[str, Any] = {}
    try:
        workload = workload_of(case)
        settings = {} if case.precision == "default" else {"precision.dtype": case.precision}
        plan = Plan(case.batch_factor * workload.sample_batch_size, settings=settings)
        started = time.perf_counter()
        try:
            found["rehearsed"] = told_by_a_dry_run(workload, plan)
        except PredictionUnavailable as refusal:
            found["refused"] = str(refusal)[:300]
        found["rehearsal_s"] = time.perf_counter() - started
        started = time.perf_counter()
        dry = found.get("rehearsed")
        near_bytes = dry.required if dry is not None else None
        found["emulated"], need = told_by_the_card(
            workload, plan, near_bytes, may_compute=may_compute
        )
        found["emulation_s"] = time.perf_counter() - started
        found["computed_values"] = need.computed_values
        found["estimates"] = need.ample.estimates
    except Exception as error:  # of any kind: the other cases are run all the same
        found["failed"] = f"{type(error).__name__}: {error}"[:300]
    return Result(case, MODELS[case.model].package, **found)


def read(path: Path) -> list[Result]:
    """Return the results that a file has."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result.of_json(line) for line in lines]


def summary(results: Sequence[Result]) -> dict[str, float]:
    """Return the figures that `PROMISES` bounds, and counts."""
    told = [result for result in results if result.rehearsed and result.emulated]
    figures: dict[str, float] = {
        "models": len({result.case.model for result in results}),
        "cases": len(results),
        "compared": len(told),
        "cannot tell": sum(result.refused is not None for result in results),
        "failed": sum(result.failed is not None for result in results),
    }
    for kind in ("allocated", "reserved", "required"):
        errors = [abs(error) for result in told if (error := result.error(kind)) is not None]
        if len(errors) > 1:
            figures[f"{kind}_median"] = statistics.median(errors)
            figures[f"{kind}_90th"] = statistics.quantiles(errors, n=10, method="inclusive")[-1]
            figures[f"{kind}_most"] = max(errors)
    return figures


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the summary by precision and package, the largest differences, and refusals."""
    yield (
        "| cases | compared | "
        + " | ".join(
            f"{kind}: median | 90th | most" for kind in ("allocated", "reserved", "required")
        )
        + " |"
    )
    yield "|---|---:|" + "---:|" * 9
    groups = [("all", results)]
    for key in ("precision", "optimizer", "batch_factor", "checkpointed"):
        values = dict.fromkeys(getattr(result.case, key) for result in results)
        groups += [
            (f"{key} {value}", [r for r in results if getattr(r.case, key) == value])
            for value in values
        ]
    packages = dict.fromkeys(result.package for result in results)
    groups += [(name, [r for r in results if r.package == name]) for name in packages]
    groups += [("asked for values", [r for r in results if r.computed_values])]
    for label, its in groups:
        figures = summary(its)
        cells = [
            f"{figures[f'{kind}_{which}']:.2%}" if f"{kind}_{which}" in figures else "-"
            for kind, which in product(
                ("allocated", "reserved", "required"), ("median", "90th", "most")
            )
        ]
        yield f"| {label} | {figures['compared']:.0f} | {' | '.join(cells)} |"
    yield ""
    yield "The largest differences of required bytes:"
    yield ""
    known = [result for result in results if result.error("required") is not None]
    for result in sorted(known, key=lambda one: -abs(one.error("required") or 0))[:25]:
        errors = (
            f"{kind} {result.error(kind):+.1%}" for kind in ("allocated", "reserved", "required")
        )
        yield f"- {result.case.name}: {', '.join(errors)}"
    yield ""
    yield from (f"- {r.case.name} cannot be told: {r.refused}" for r in results if r.refused)
    yield from (f"- {r.case.name} failed: {r.failed}" for r in results if r.failed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="a file of one JSON object a line")
    parser.add_argument("--only", nargs="+", default=(), help="models by name")
    parser.add_argument("--table", action="store_true", help="print the summary and run nothing")
    parser.add_argument("--package", help="models of that package alone")
    parser.add_argument("--mixed", action="store_true", help="those in the order of a hash alone")
    parser.add_argument("--uncomputed", action="store_true", help="compute no values on the card")
    parser.add_argument("--most", type=int, help="run at most so many cases")
    parser.add_argument("--seconds", type=float, help="begin no case after so long")
    options = parser.parse_args(arguments)
    if not options.table:
        run(options.results, chosen(options), options)
    results = read(options.results)
    print("\n".join(table(results)))
    figures = summary(results)
    return 0 if all(figures.get(name, 1) <= bound for name, bound in PROMISES.items()) else 1


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for."""
    asked = mixed_cases() if options.mixed else cases()
    only = options.only or [n for n in MODELS if options.package in (None, MODELS[n].package)]
    return list(dict.fromkeys(case for case in asked if case.model in only))  # each once


def run(path: Path, asked: Sequence[Case], options: argparse.Namespace) -> None:
    """Run the cases that the file does not have, and append a line for each."""
    done = {result.case for result in read(path)}
    ends = time.monotonic() + (options.seconds or math.inf)
    with path.open("a") as file:
        for case in [case for case in asked if case not in done][: options.most]:
            if time.monotonic() > ends:
                return
            result = result_of(case, may_compute=not options.uncomputed)
            print(result.to_json(), file=file, flush=True)
            errors = (result.error(kind) for kind in ("allocated", "reserved", "required"))
            shown = "".join(f"{'-' if e is None else format(e, '+.2%'):>10}" for e in errors)
            why = result.refused or result.failed or ""
            times = f"{result.rehearsal_s:6.1f}{result.emulation_s:7.1f}"
            print(f"{case.name:60}{shown}{times}  {why[:90]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
