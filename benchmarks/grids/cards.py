"""Simulated cards: the two grids of an H200, resampled by what data sheets say of other GPUs.

A card lies between two of `SHEETS`, each figure (memory, bandwidth, the rates of float32, TF32 and
16-bit types) at a place of its own. Every recorded time is taken apart: what kernels take, by the
line that the largest recorded micro-batches set, scales as a roofline over the plan's operations
says (`kernels`); where the recorded time is above that, the host's launches decide, and they stay.
So does the scatter of steps, in seconds: it is the host's.
How well kernels reach a card's rates differs by precision and layout (`REACH`), which no prediction
knows. The budget is the recorded one times the card's share of the largest memory in `SHEETS`;
bytes stay as recorded. The seed decides everything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from autofit.devices.gpus import Gpu, Rates, find_gpu
from autofit.planning.search_spec import TimeLine
from benchmarks.grids.kernels import RECORDED, kernel_lines
from benchmarks.grids.recorded import GridWorld, Row, grid_world

SHEETS = ("L4", "A100-80GB", "H100", "RTX 4090")
"""Figures: `autofit.devices.gpus`, from NVIDIA's data sheets."""
REACH = 0.15
"""Standard deviation of the log of how much of its rates a card reaches: an assumption."""
_HOST_BOUND = 1.1
"""A recorded time that is so much above that of its kernels is decided by launches."""


def draw_card(seed: int) -> Gpu:
    """Return a GPU between two data sheets."""
    draw = random.Random(f"card/{seed}")
    one, other = (find_gpu(name) for name in draw.sample(SHEETS, 2))

    def between(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    assert one.rates is not None  # data sheets are known of all of them
    assert other.rates is not None
    rates = {key: between(rate, getattr(other.rates, key)) for key, rate in vars(one.rates).items()}
    memory = round(between(one.total_bytes, other.total_bytes))
    return replace(RECORDED, name=f"card {seed}", total_bytes=memory, rates=Rates(**rates))


def card_world(name: str, seed: int) -> GridWorld:
    """Return a recorded workload as it would run on the card of a seed."""
    card, recorded = draw_card(seed), grid_world(name, seed=seed)
    here, there = kernel_lines(name, RECORDED), kernel_lines(name, card)
    rows = {}
    for variant, its in recorded.rows.items():
        settings = dict(variant)
        kind = settings["precision.dtype"], settings.get("memory_format.layout")
        reach = math.exp(random.Random(f"reach/{seed}/{kind}").gauss(0, REACH))
        rows[variant] = _scaled(its, here[variant], there[variant], reach)
    largest = max(find_gpu(sheet).total_bytes for sheet in SHEETS)
    budget = round(recorded.budget_bytes * card.total_bytes / largest)
    return replace(recorded, rows=rows, budget_bytes=budget, gpu=card)


def _scaled(rows: Sequence[Row], here: TimeLine, there: TimeLine, reach: float) -> list[Row]:
    """Return the rows with the seconds of the card; those that ran out of memory as they are."""
    last = max((row for row in rows if row.seconds), key=lambda row: row.micro_batch)
    assert last.seconds is not None

    def kernels(line: TimeLine, micro_batch: int) -> float:
        return line[0] + line[1] * micro_batch

    scaled = []
    for row in rows:
        if row.seconds is not None:
            size = row.micro_batch
            busy = last.seconds * kernels(here, size) / kernels(here, last.micro_batch)
            by_host = row.seconds > _HOST_BOUND * busy
            ratio = kernels(there, size) / kernels(here, size) / reach
            seconds = max(row.seconds, busy * ratio) if by_host else row.seconds * ratio
            row = replace(row, seconds=seconds, scatter=row.scatter * row.seconds / seconds)
        scaled.append(row)
    return scaled
