"""What the kernels of each plan of the grids do, so that their time on any GPU can be estimated.

Each variant of both grids was run on the meta device at two micro-batches, by `main` of this file
as it was at 35dd6f88. The operations of a step were kept in `kernels.json.gz` as (floating-point
operations, bytes moved, rate of the data sheet, how many are alike).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from autofit.devices.gpu_catalogue import Gpu, find_gpu
from autofit.plan import VariantKey, variant_key
from autofit.planning.search_spec import TimeLine
from autofit.prediction.cuda.roofline import LAUNCH_S

RECORDED = find_gpu("H200")
WRITTEN = Path(__file__).with_name("kernels.json.gz")
MICRO_BATCHES = {"gpt2_small": (4, 16), "resnet50": (64, 256)}
"""Where the dry runs are; kernel seconds are straight to a few percent."""

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
