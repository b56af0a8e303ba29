"""Predictions held against the emulated GPU, on models that nobody here wrote.

Models of transformers, with random weights; in float32, bfloat16 and float16, with SGD, AdamW and
Adafactor, with small and large batches, and half of them with their library's own checkpointing, if
they have that. `autofit.predict` tells each case by a dry run; `benchmarks.oracle` trains it in a
worker on the emulated card, where PyTorch's own allocator answers, with values from when the
training asks for one. Compared are peak allocated, peak reserved, and required bytes: the smallest
limit under which the last two of four steps run without a flush, to a page of 2 MiB or 0.1 %.
Non-torch bytes are left out on both sides.

    python -m benchmarks.emulation_models RESULTS.jsonl [--most 30] [--seconds 1200]

Where a training asks for values, a large batch takes many minutes on a CPU: `--uncomputed` gives
such trainings up. Where torch cannot be imported without NVIDIA's libraries, run it under
`emulated-gpu run --no-values --`. A case that RESULTS.jsonl has is not run again; `--table` prints
the summary of what it has. `.ci/run` runs 30 cases. On 2026-11-28 models of torchvision, timm and
diffusers were among them: benchmarks/results/emulation-models-2026-11-28.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from autofit import Plan, Workload, predict
from autofit.devices.gpu_catalogue import find_gpu
from autofit.errors import PredictionUnavailable
from autofit.plan import Dimension
from autofit.registry import resolve, strategies_of
from autofit.space import Space
from benchmarks.emulated_models import MODELS
from benchmarks.emulation_cases import Case, cases, workload_of
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


KINDS = ("allocated", "reserved", "required")

Found = dict[str, Any]
"""A case as it travels in a line of the file.

The fields of `Case`, and: rehearsed and emulated, bytes by kind (without non-torch bytes);
refused, why the rehearsal cannot tell; failed, what was raised elsewhere; computed_values, whether
the training asked for values; estimates, sizes that the card does not know exactly; and seconds of
both, of the emulation with the start of its worker.
"""


def told_by_a_dry_run(workload: Workload, plan: Plan) -> dict[str, int]:
    """Return what the rehearsal tells, by kind."""
    found = predict(workload, plan=plan, gpu=GPU)
    required = found.required_bytes - found.breakdown["non_torch"]
    sizes = (found.peak_allocated_bytes, found.peak_reserved_bytes, required)
    return dict(zip(KINDS, sizes, strict=True))


def told_by_the_card(
    workload: Workload, plan: Plan, near_bytes: int | None, *, may_compute: bool
) -> tuple[dict[str, int], Emulated]:
    """Return what torch's own allocator needs; without values unless the training asks for one."""
    strategies = strategies_of(plan)
    dimensions = {name: Dimension([value]) for name, value in plan.settings.items()}
    resolved = resolve(plan, Space(dimensions, workload.sample_batch_size), strategies)
    with Emulation(workload, strategies, find_gpu(GPU), may_compute=may_compute) as emulation:
        need = emulation.need(resolved, near_bytes)
    sizes = (need.ample.peak_allocated_bytes, need.ample.peak_reserved_bytes, need.limit_bytes)
    return dict(zip(KINDS, sizes, strict=True)), need


def found_of(case: Case, *, may_compute: bool = True) -> Found:
    """Tell a case by both; an error of either is part of what is found."""
    found: Found = asdict(case)
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
        near_bytes = found.get("rehearsed", {}).get("required")
        found["emulated"], need = told_by_the_card(
            workload, plan, near_bytes, may_compute=may_compute
        )
        found["emulation_s"] = time.perf_counter() - started - found["rehearsal_s"]
        found |= {"computed_values": need.computed_values, "estimates": need.ample.estimates}
    except Exception as error:  # of any kind: the other cases are run all the same
        found["failed"] = f"{type(error).__name__}: {error}"[:300]
    return found


def error(found: Found, kind: str) -> float | None:
    """Return the rehearsal's error as a share of what the card took; None: one has no answer."""
    if "rehearsed" not in found or "emulated" not in found:
        return None
    return float(found["rehearsed"][kind] / found["emulated"][kind] - 1)


def read(path: Path) -> list[Found]:
    """Return what a file has."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def summary(results: Sequence[Found]) -> dict[str, float]:
    """Return the figures that `PROMISES` bounds, and counts."""
    figures: dict[str, float] = {
        "models": len({found["model"] for found in results}),
        "cases": len(results),
        "cannot tell": sum("refused" in found for found in results),
        "failed": sum("failed" in found for found in results),
    }
    for kind in KINDS:
        errors = [abs(each) for found in results if (each := error(found, kind)) is not None]
        if len(errors) > 1:
            figures[f"{kind}_median"] = statistics.median(errors)
            figures[f"{kind}_90th"] = statistics.quantiles(errors, n=10, method="inclusive")[-1]
            figures[f"{kind}_most"] = max(errors)
    return figures


def table(results: Sequence[Found]) -> Iterator[str]:
    """Yield the figures of all, the largest differences, and what has no answer."""
    yield from (f"{name:20}{figure:.5g}" for name, figure in summary(results).items())
    known = [found for found in results if error(found, "required") is not None]
    yield from map(line, sorted(known, key=lambda one: -abs(error(one, "required") or 0))[:25])
    yield from (line(found) for found in results if "refused" in found or "failed" in found)


def line(found: Found) -> str:
    """Return a case in words."""
    errors = (error(found, kind) for kind in KINDS)
    shown = "".join(f"{'-' if each is None else format(each, '+.2%'):>10}" for each in errors)
    why = found.get("refused") or found.get("failed") or ""
    return f"{case_of(found).name:60}{shown}  {why[:90]}"


def case_of(found: Found) -> Case:
    """Return the case of what was found."""
    return Case(**{each.name: found[each.name] for each in fields(Case)})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="a file of one JSON object a line")
    parser.add_argument("--only", nargs="+", default=list(MODELS), help="models by name")
    parser.add_argument("--table", action="store_true", help="print the summary and run nothing")
    parser.add_argument("--uncomputed", action="store_true", help="compute no values on the card")
    parser.add_argument("--most", type=int, help="run at most so many cases")
    parser.add_argument("--seconds", type=float, help="begin no case after so long")
    options = parser.parse_args(arguments)
    if not options.table:
        run(options.results, [each for each in cases() if each.model in options.only], options)
    results = read(options.results)
    print("\n".join(table(results)))
    figures = summary(results)
    return 0 if all(figures.get(name, 1) <= bound for name, bound in PROMISES.items()) else 1


def run(path: Path, asked: Sequence[Case], options: argparse.Namespace) -> None:
    """Run the cases that the file does not have, and append a line for each."""
    done = {case_of(found) for found in read(path)}
    ends = time.monotonic() + (options.seconds or math.inf)
    with path.open("a") as file:
        for case in [case for case in asked if case not in done][: options.most]:
            if time.monotonic() > ends:
                return
            found = found_of(case, may_compute=not options.uncomputed)
            print(json.dumps(found), file=file, flush=True)
            print(line(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
