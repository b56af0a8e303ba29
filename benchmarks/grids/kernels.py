"""What the kernels of each plan of the grids do, so that their time on any GPU can be estimated.

    python -m benchmarks.grids.kernels          (writes `kernels.json.gz` anew, some minutes)

Each variant of both grids is run on the meta device at two micro-batches; the operations of a step
are kept as (floating-point operations, bytes moved, rate of the data sheet, how many are alike).
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autofit import Plan, Workload
from autofit.devices.gpu_catalogue import Gpu, find_gpu
from autofit.plan import Dimension, VariantKey, variant_key
from autofit.planning.search_spec import TimeLine
from autofit.prediction.cuda.roofline import LAUNCH_S, Operation
from autofit.prediction.dry_run import dry_run
from autofit.registry import resolve, strategies_of
from autofit.space import Space
from benchmarks.grids.models import MODELS, batch_of, loss_of, optimizer_of
from benchmarks.traces.trainings import tf32

RECORDED = find_gpu("H200")
WRITTEN = Path(__file__).with_name("kernels.json.gz")
MICRO_BATCHES = {"gpt2_small": (4, 16), "resnet50": (64, 256)}
"""Where the dry runs are; kernel seconds are straight to a few percent."""
_LEVEL = "checkpointing.level"

Kernels: TypeAlias = Sequence[tuple[int, int, str, int]]


def kernel_lines(name: str, gpu: Gpu) -> dict[VariantKey, TimeLine]:
    """Return what the kernels of a micro-batch take by variant: fixed seconds, and per sample."""
    small, large = MICRO_BATCHES[name]
    found = {}
    for settings, parts in _written()[name]:
        first, last = (_seconds(kernels, gpu) for kernels in parts)
        slope = (last - first) / (large - small)
        found[variant_key(settings)] = last - slope * large, slope
    return found


def time_lines(name: str, gpu: Gpu) -> dict[VariantKey, TimeLine]:
    """Return the time lines that `autofit.prediction` estimates: launches may take longer."""
    large = MICRO_BATCHES[name][-1]
    found = kernel_lines(name, gpu)
    for settings, parts in _written()[name]:
        fixed, each = found[variant_key(settings)]
        launches = LAUNCH_S * sum(count for *_, count in parts[-1])
        found[variant_key(settings)] = max(fixed, launches - each * large), each
    return found


def _seconds(kernels: Kernels, gpu: Gpu) -> float:
    assert gpu.rates is not None, gpu
    rates: dict[str, float] = asdict(gpu.rates)
    return sum(
        count * max(flops / rates[rate], moved / rates["bytes_per_s"])
        for flops, moved, rate, count in kernels
    )


@cache
def _written() -> dict[str, list[tuple[dict[str, Any], list[Kernels]]]]:
    found: dict[str, Any] = json.loads(gzip.decompress(WRITTEN.read_bytes()))
    return found


# Running them.


class _Shared(nn.Module):
    """A model of the grids with a share of its blocks checkpointed; ids or images -> loss."""

    def __init__(self, name: str, share: float) -> None:
        super().__init__()
        self.name, self.inner = name, MODELS[name]()
        self.inner.share = share

    def forward(self, batch: Tensor) -> Tensor:
        return loss_of(self.name, self.inner(batch), batch)


def _kernels(name: str, settings: dict[str, Any], share: float, micro_batch: int) -> Kernels:
    workload = Workload(
        partial(_Shared, name, share),
        (batch_of(name, 2, "cpu"),),
        optimizer=partial(optimizer_of, name),
    )
    plan = Plan(micro_batch, settings=settings)
    space = Space({key: Dimension([value]) for key, value in settings.items()}, 2)
    with tf32(False):  # as it was where the grids were recorded
        run = dry_run(workload, resolve(plan, space, strategies_of(plan)), RECORDED)
    return [(*kind, count) for kind, count in Counter(_kind(each) for each in run.work).items()]


def _kind(operation: Operation) -> tuple[int, int, str]:
    moved = operation.traffic_bytes + sum(2 * size.bytes_on(RECORDED) for size in operation.scratch)
    rate = "float32_flops_per_s"
    if operation.tf32:
        rate = "tf32_flops_per_s"
    elif operation.dtype in (torch.float16, torch.bfloat16):
        rate = "half_flops_per_s"
    return operation.flops, moved, rate


def main() -> None:
    from benchmarks.grids.recorded import LEVELS, WORKLOADS, grid_world

    shares = {level: share for share, level in LEVELS.items()}
    found: dict[str, Any] = {}
    for name in WORKLOADS:
        found[name] = []
        for variant in grid_world(name).rows:
            settings = dict(variant)
            share = shares[int(settings.pop(_LEVEL))]
            parts = [_kernels(name, settings, share, size) for size in MICRO_BATCHES[name]]
            found[name].append((dict(variant), parts))
            print(name, dict(variant), [sum(k[3] for k in part) for part in parts], flush=True)
    WRITTEN.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))


if __name__ == "__main__":
    main()
