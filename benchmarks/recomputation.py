"""What it gains to keep products and attention where the rest is recomputed.

    python -m benchmarks.recomputation [--rounds 3]

On the CPU, a decoder of four blocks, plain and with a gated MLP, is probed at every level that is
found with units that keep their products and without, in turns. For each level with such units: its
peak and step time, and the time of levels without them at the same peak, between the two nearest
ones in proportion. Prints Markdown. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import partial
from importlib import import_module
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from autofit.plan import Dimension, Plan, ResolvedPlan
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Target, open_prober
from autofit.registry import load_strategies
from autofit.testing import PlainContext
from autofit.training.workload import Workload

WIDTH, TOKENS, BLOCKS, SAMPLES = 384, 256, 4, 2
SETTING = "checkpointing.level"


class Block(nn.Module):
    """(n, TOKENS, WIDTH) -> the same."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each token."""
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, WIDTH // 64, 64))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        normed = self.norms[1](x)
        if self.gate is None:
            made = gelu(self.up(normed), approximate="tanh")
        else:
            made = silu(self.gate(normed)) * self.up(normed)
        added: Tensor = self.down(made)
        return x + added


def _decoder(gated: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(gated=gated) for _ in range(BLOCKS)), nn.Linear(WIDTH, 8))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def _levels(workload: Workload, *, keeping: bool) -> Dimension:
    units: Any = import_module("autofit.strategies.checkpointing.units")
    (strategy,), found = load_strategies(["checkpointing"]), units._keeping_products
    if not keeping:
        units._keeping_products = lambda timeline, worthy: []
    try:
        return strategy.dimensions(PlainContext(lambda: workload))[SETTING]
    finally:
        units._keeping_products = found


def measure(gated: bool, rounds: int) -> None:
    """Print the levels of a decoder that keep products, beside the others at the same peaks."""
    workload = Workload(
        partial(_decoder, gated), torch.randn(SAMPLES, TOKENS, WIDTH), loss_fn=_loss
    )
    found = {keeping: _levels(workload, keeping=keeping) for keeping in (False, True)}
    strategies = load_strategies(["checkpointing"])
    times, peaks = defaultdict[Any, list[float]](list), dict[Any, int]()
    with open_prober(workload, strategies, Target("cpu", "16GiB")) as prober:
        for _ in range(rounds):
            for keeping, levels in found.items():
                for level in levels.values:
                    plan = Plan(2 * SAMPLES, settings={SETTING: level})
                    load = {SETTING: levels.payloads[level]} if level in levels.payloads else {}
                    request = ProbeRequest(ResolvedPlan(plan, load, strategies))
                    measured = prober.probe(request).measurement
                    assert measured.step_time_s is not None, measured.detail
                    assert measured.peak_allocated_bytes is not None
                    times[keeping, level].append(measured.step_time_s)
                    peaks[keeping, level] = measured.peak_allocated_bytes
    whole = sorted((peaks[key], min(each)) for key, each in times.items() if not key[0])
    print(f"\n{'gated' if gated else 'plain'} MLP: whole units", end="")
    print("".join(f"; {peak / 2**20:.0f} MiB {s * 1e3:.0f} ms" for peak, s in whole))
    print(
        "\n| units | peak, MiB | ms a step | whole units there, ms | share |\n|---|---|---|---|---|"
    )
    shares = []
    for level, load in found[True].payloads.items():
        peak, step_s = peaks[True, level], min(times[True, level])
        beside = [(a, b) for a, b in pairwise(whole) if a[0] <= peak <= b[0]]
        if not any(unit.endswith("~") for unit in load["units"]) or not beside:
            continue
        (low, slow_s), (high, fast_s) = beside[0]
        there_s = slow_s + (fast_s - slow_s) * (peak - low) / (high - low)
        shares.append(step_s / there_s)
        cells = " ".join(load["units"]), f"{peak / 2**20:.0f}", f"{step_s * 1e3:.0f}"
        print(f"| {' | '.join(cells)} | {there_s * 1e3:.0f} | {shares[-1]:.3f} |")
    print(f"\ngeometric mean {geometric_mean(shares):.3f}", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    for gated in (False, True):
        measure(gated, rounds)


if __name__ == "__main__":
    main()
