"""Simulated cards: the two grids of an H200, resampled by what data sheets say of other GPUs.

None of these cards was measured.

A card lies between two of `SHEETS`, each figure (memory, bandwidth, the rates of float32, TF32 and
16-bit types) at a place of its own. Every recorded time is taken apart: what kernels take, by the
line that the largest recorded micro-batches set, scales as a roofline over the plan's operations
says (`kernels`); where the recorded time is above that, the host's launches decide, and they stay.
So does the scatter of steps, in seconds: it is the host's.
How well kernels reach a card's rates differs by precision and layout (`REACH`), which no prediction
knows. The budget is the recorded one times the card's share of the largest memory in `SHEETS`;
bytes stay as recorded. The seed decides everything.

On some cards plans without checkpointing may be compiled. What that gains and takes is drawn from
what is published (`GAINS`, `COSTS_S`); bytes are taken to stay.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from autofit.devices.gpu_catalogue import Gpu, Rates, find_gpu
from autofit.plan import Dimension, Settings, variant_key
from autofit.planning.search_spec import TimeLine
from benchmarks.grids.kernels import RECORDED, kernel_lines
from benchmarks.grids.recorded import GridWorld, Row, Told, grid_world

SHEETS = ("L4", "A100-80GB", "H100", "RTX 4090")
"""Figures: `autofit.devices.gpu_catalogue`, from NVIDIA's data sheets."""
REACH = {"unit and layout": 0.1, "precision": 0.1, "precision and layout": 0.03}
"""Standard deviations of the log of how much of its rates a card reaches: assumptions.

On the H200, float16 is as far from bfloat16 in one layout as in the other, within 3 %: both run on
the same units.
"""
COMPILE, LEVEL = "compile.mode", "checkpointing.level"
GAINS = {"default": (1.0, 1.42), "tf32": (1.0, 1.42), "bfloat16": (1.23, 1.85)}
"""Least and most speed of a compiled plan over the same uncompiled, by precision.

On an A100: 1.21 on average in float32 over 163 models (pytorch.org/get-started/pytorch-2.0); in 16
bits 1.23 on average over timm's models and 1.60 over transformers' (github.com/pytorch/pytorch/
issues/93794), 1.85 of GPT-2 small (github.com/karpathy/nanoGPT). Nothing was found of an L4 or an
H100, so theirs is drawn from the same.
"""
COSTS_S = (20.0, 120.0)
"""Seconds of a compilation: 120 on average over transformers' models in 2022 (the same issue), and
20 to 45 as a search takes it for GPT-2 small and ResNet-50 (`strategies/compile.py`)."""
_UNITS = {"default": "float32", "tf32": "tf32", "bfloat16": "16 bits", "float16": "16 bits"}


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


def compiled_card_world(name: str, seed: int, told: Told) -> GridWorld:
    """Return a workload on the card of a seed, where it may be compiled besides."""
    plain, draw = card_world(name, seed, told), random.Random(f"compile/{seed}/{name}")
    gains = {precision: draw.uniform(*each) for precision, each in GAINS.items()}
    gains["float16"] = gains["bfloat16"]  # on the same units
    compiling = Dimension(
        ("off", "default"),
        when={LEVEL: (0,)},
        trial_cost_s=round(draw.uniform(*COSTS_S), 1),
        fresh_worker=True,
    )
    space = replace(plain.space, dimensions={**plain.space.dimensions, COMPILE: compiling})
    rows = {}
    for variant, its in plain.rows.items():
        settings = dict(variant)
        rows[variant_key({**settings, COMPILE: "off"})] = its
        if settings[LEVEL] == 0:
            faster = gains[str(settings["precision.dtype"])]
            compiled = [replace(r, seconds=r.seconds and r.seconds / faster) for r in its]
            rows[variant_key({**settings, COMPILE: "default"})] = compiled
    return replace(plain, space=space, rows=rows)


def card_world(name: str, seed: int, told: Told) -> GridWorld:
    """Return a recorded workload as it would run on the card of a seed."""
    card, recorded = draw_card(seed), grid_world(name, seed, told)
    here, there = kernel_lines(name, RECORDED), kernel_lines(name, card)
    rows = {}
    for variant, its in recorded.rows.items():
        reach = _reach(seed, dict(variant))
        rows[variant] = _scaled(its, here[variant], there[variant], reach)
    largest = max(find_gpu(sheet).total_bytes for sheet in SHEETS)
    budget = round(recorded.budget_bytes * card.total_bytes / largest)
    return replace(recorded, rows=rows, budget_bytes=budget, gpu=card)


def _reach(seed: int, settings: Settings) -> float:
    """Return how well a card's kernels reach its rates, over how well the H200's do."""
    precision, layout = str(settings["precision.dtype"]), settings.get("memory_format.layout")
    kinds = {
        "unit and layout": (_UNITS[precision], layout),
        "precision": precision,
        "precision and layout": (precision, layout),
    }
    draws = (
        random.Random(f"{seed}/{name}/{kind}").gauss(0, REACH[name]) for name, kind in kinds.items()
    )
    return math.exp(sum(draws))


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
            ratio = kernels(there, size) / kernels(here, size) / reach
            by_host = row.seconds > busy
            seconds = max(row.seconds, busy * ratio) if by_host else row.seconds * ratio
            row = replace(row, seconds=seconds, scatter=row.scatter * row.seconds / seconds)
        scaled.append(row)
    return scaled
