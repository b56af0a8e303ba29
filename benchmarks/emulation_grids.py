"""Does it fit? The emulated GPU against the two grids that were recorded on an H200.

Every plan of `benchmarks/grids/h200.jsonl` runs on the emulated card as it ran on the real one, six
steps under the same cap of the allocator, and the answer, that it runs or runs out of memory, is
compared with the recorded one. Peaks are compared where both ran.

    emulated-gpu run --no-values -- python -m benchmarks.emulation_grids [--json FILE]

It runs on a real GPU as well. Exits with 1 if fewer answers than `PROMISED_SHARE` are as recorded,
or if a plan runs that ran out of memory on the H200.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit.units import GIB
from benchmarks.grids.models import MODELS, batch_of, loss_of, optimizer_of
from benchmarks.grids.recorded import BUDGETS_BYTES, WORKLOADS, recorded_plans

PROMISED_SHARE = 0.997
STEPS = 6
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Answer:
    """One plan here and as recorded.

    Attributes:
        workload, micro_batch, precision, checkpointed, channels_last: of the plan.
        recorded: "ok" or "oom".
        emulated: "ok", "oom", or the error that was raised.
        allocated_error: of peak allocated, as a share of the recorded one; None if one of them ran
            out of memory.
        reserved_error: of peak reserved.
        seconds: duration of the run.
    """

    workload: str
    micro_batch: int
    precision: str
    checkpointed: float
    channels_last: bool
    recorded: str
    emulated: str
    allocated_error: float | None
    reserved_error: float | None
    seconds: float

    @property
    def name(self) -> str:
        layout = " channels_last" if self.channels_last else ""
        return (
            f"{self.workload} {self.precision} {self.micro_batch} "
            f"checkpointed {self.checkpointed:.0%}{layout}"
        )


@cache
def built(workload: str) -> nn.Module:
    """Return the model on the CPU, to be copied."""
    torch.manual_seed(0)
    return MODELS[workload]()


def trained(
    workload: str, micro_batch: int, precision: str, checkpointed: float, channels_last: bool
) -> None:
    """Train for `STEPS` steps, as it was recorded."""
    model = copy.deepcopy(built(workload)).to("cuda")
    model.share = checkpointed  # type: ignore[assignment]  # of Decoder and ResNet50
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks it
    optimizer = optimizer_of(workload, model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    batch = batch_of(workload, micro_batch, "cuda")
    if channels_last:
        batch = batch.to(memory_format=torch.channels_last)
    dtype = AUTOCAST.get(precision)

    def step() -> None:
        with torch.autocast("cuda", dtype=dtype) if dtype else nullcontext():
            loss = loss_of(workload, model(batch), batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch left it so
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()


@contextmanager
def within(budget_bytes: int) -> Iterator[None]:
    """Cap the allocator, as it was recorded."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 in products and convolutions, or forbid it."""
    parts: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [part.allow_tf32 for part in parts]
    for part in parts:
        part.allow_tf32 = allowed
    try:
        yield
    finally:
        for part, was in zip(parts, before, strict=True):
            part.allow_tf32 = was


def outcome_of(train: Callable[[], None]) -> str:
    """Return "ok", "oom", or the error."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        train()
    except torch.OutOfMemoryError:
        return "oom"
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "ok"


def answered(row: dict[str, Any]) -> Answer:
    """Run one recorded plan."""
    keys = "workload", "micro_batch", "precision", "checkpointed", "channels_last"
    plan = {key: row[key] for key in keys}
    started = time.perf_counter()
    with within(BUDGETS_BYTES[row["workload"]]), tf32(row["precision"] != "fp32"):
        outcome = outcome_of(lambda: trained(**plan))
    seconds = time.perf_counter() - started
    allocated = reserved = None
    if row["outcome"] == outcome == "ok":
        allocated = torch.cuda.max_memory_allocated() / (row["allocated_gib"] * GIB) - 1
        reserved = torch.cuda.max_memory_reserved() / (row["reserved_gib"] * GIB) - 1
    return Answer(
        **plan,
        recorded=row["outcome"],
        emulated=outcome,
        allocated_error=allocated,
        reserved_error=reserved,
        seconds=seconds,
    )


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """Return counts, and the errors of the peaks where both ran."""
    found: dict[str, float] = {
        "plans": len(answers),
        "as_recorded": sum(one.recorded == one.emulated for one in answers),
        "wrongly_fits": sum(one.recorded != "ok" and one.emulated == "ok" for one in answers),
        "wrongly_runs_out": sum(one.recorded == "ok" and one.emulated == "oom" for one in answers),
        "failed": sum(one.emulated not in ("ok", "oom") for one in answers),
    }
    for kind in ("allocated_error", "reserved_error"):
        errors = [abs(e) for one in answers if (e := getattr(one, kind)) is not None]
        if len(errors) > 1:
            found[f"{kind}_median"] = statistics.median(errors)
            found[f"{kind}_90th"] = statistics.quantiles(errors, n=10, method="inclusive")[-1]
            found[f"{kind}_most"] = max(errors)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("grids", nargs="*", help=f"of {', '.join(WORKLOADS)}; default: both")
    parser.add_argument("--json", type=Path, help="write answers and summary to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU: run it under `emulated-gpu run --no-values --`")
    answers = []
    for row in recorded_plans():
        if options.grids and row["workload"] not in options.grids:
            continue
        answer = answered(row)
        answers.append(answer)
        errors = "".join(
            f"{'-' if e is None else format(e, '+.3%'):>11}"
            for e in (answer.allocated_error, answer.reserved_error)
        )
        mark = "" if answer.recorded == answer.emulated else f"  recorded: {answer.recorded}"
        print(
            f"{answer.name:56}{answer.emulated:>5}{errors}{answer.seconds:>7.1f}{mark}", flush=True
        )
    by_workload = Counter(one.workload for one in answers)
    figures = {
        name: summary([one for one in answers if one.workload == name]) for name in by_workload
    }
    figures["all"] = summary(answers)
    for name, found in figures.items():
        print(name, *(f"{key} {value:.6g}" for key, value in found.items()), sep="  ")
    if options.json:
        versions = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0)}
        plans = [asdict(answer) for answer in answers]
        options.json.write_text(
            json.dumps(versions | {"summary": figures, "plans": plans}, indent=1) + "\n"
        )
    kept = figures["all"]["as_recorded"] >= PROMISED_SHARE * len(answers)
    return 0 if kept and not figures["all"]["wrongly_fits"] else 1


if __name__ == "__main__":
    sys.exit(main())
