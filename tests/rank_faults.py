"""Faults of single ranks: probes on two gloo ranks, a random fault in one of four.

Each fault is one of `KINDS`, on a random rank, in a random forward, under a random parallel mode.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.fault_table import OTHER_COUNT
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Deadlines, Target, open_prober
from autofit.registry import load_strategies
from autofit.strategy import Strategy
from autofit.training.workload import Workload

KINDS = ("oom", "oom of all", "oom in backward", "killed", "hang", "user error", "other count")
MODES = ("ddp", "fsdp2", "fsdp2_keep")
RANKS = 2
BUDGET = "256MiB"
FIRST = 4
"""The micro-batch of the first probe; each probe has its own, by which ranks know its fault."""
_HANG_S = 3600.0
_TOO_MUCH = 2**27
"""Elements that fill twice the budget."""
_UNITS = {"modules": ["blocks.0", "blocks.1", "blocks.2"]}


@dataclass(frozen=True)
class Fault:
    """What happens in a probe.

    Attributes:
        kind: one of `KINDS`.
        rank: on which; None: on all.
        forward: at which forward, from 1.
    """

    kind: str
    rank: int | None
    forward: int

    @property
    def strikes(self) -> bool:
        """Whether it happens on this rank."""
        return self.rank is None or self.rank == dist.get_rank()


class Blocks(nn.Module):
    """A small model that has a fault at some micro-batches."""

    def __init__(self, faults: Mapping[int, Fault]) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.faults, self.forwards = dict(faults), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        fault = self.faults.get(len(inputs))
        happens = fault is not None and fault.forward == self.forwards and fault.strikes
        hidden = inputs
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if happens and fault is not None:
            return struck(fault, hidden)
        return hidden


def struck(fault: Fault, hidden: torch.Tensor) -> torch.Tensor:
    """Do what the fault is, and return what the forward goes on with."""
    if fault.kind in ("oom", "oom of all"):
        return hidden + torch.empty(_TOO_MUCH).sum()
    if fault.kind == "oom in backward":
        return OutOfMemoryInBackward.apply(hidden)  # type: ignore[no-untyped-call]  # torch
    if fault.kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hang":
        time.sleep(_HANG_S)
    if fault.kind == "user error":
        raise ValueError("the user's own error on one rank")
    return hidden


class OutOfMemoryInBackward(torch.autograd.Function):
    """Passes its input on, and needs more than there is for its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Ask for too much."""
        return gradient + torch.empty(_TOO_MUCH).sum()


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss; under "other count" one rank runs the model, forward and back, once more."""
    own: Any = getattr(model, "module", model)
    fault = own.faults.get(len(batch))
    if fault is not None and fault.kind == "other count" and own.forwards + 1 == fault.forward:
        own.forwards += 1
        if fault.strikes:
            model(batch).square().mean().backward()
    return model(batch).square().mean()


def faults_of(probes: int, seed: int) -> dict[int, Fault]:
    """Return the faults by micro-batch: of about one probe in four, each kind as often."""
    rng = random.Random(seed)
    struck_sizes = rng.sample(range(FIRST, FIRST + probes), k=max(len(KINDS), probes // 4))
    faults = {}
    for number, size in enumerate(struck_sizes):
        kind = KINDS[number % len(KINDS)]
        rank = None if kind == "oom of all" else rng.randrange(RANKS)
        faults[size] = Fault(kind, rank, rng.randint(1, 3))
    return faults


def is_right(fault: Fault | None, seen: Measurement) -> bool:
    """Return whether the outcome and the rank named are those of the fault."""
    if fault is None:
        return seen.outcome is Outcome.OK and seen.failed_rank is None
    if fault.kind == "other count":  # no rank of two is the one to blame
        outcomes = (Outcome.USER_ERROR, Outcome.TIMEOUT)
        named = OTHER_COUNT in (seen.detail or "")
        return seen.outcome in outcomes and named and seen.failed_rank is None
    outcome = {
        "killed": Outcome.CRASHED,
        "hang": Outcome.TIMEOUT,
        "user error": Outcome.USER_ERROR,
    }.get(fault.kind, Outcome.OOM)
    by_rank = seen.failed_rank is not None if fault.rank is None else seen.failed_rank == fault.rank
    return seen.outcome is outcome and by_rank


@dataclass(frozen=True)
class Row:
    """One probe: what happened (None: nothing), under which mode, and what was measured."""

    fault: Fault | None
    mode: str
    seen: Measurement


def request_of(size: int, mode: str, steps: int, strategies: tuple[Strategy, ...]) -> ProbeRequest:
    """Return the request for one probe; a hang is noticed after the shortest deadline."""
    settings = {"parallel.mode": mode, "parallel.accumulation": "once"}
    plan = Plan(size, accumulation_steps=steps, world_size=RANKS, settings=settings)
    payloads = {"parallel.mode": _UNITS} if mode.startswith("fsdp2") else {}
    resolved = ResolvedPlan(plan, payloads, strategies)
    return ProbeRequest(resolved, expected_seconds=0.01, most_timed_seconds=0.2)


def run(probes: int, seed: int, *, deadline_s: float = 8.0) -> list[Row]:
    """Run the probes on ranks of this machine."""
    faults = faults_of(probes, seed)
    rng = random.Random(seed + 1)
    strategies = load_strategies(["parallel"])
    workload = Workload(partial(Blocks, faults), torch.randn(FIRST, 32), loss_fn=loss_fn)
    rows = []
    deadlines = Deadlines(shortest_s=deadline_s)
    target = Target("cpu", BUDGET, ranks=RANKS)
    with open_prober(workload, strategies, target, deadlines=deadlines) as prober:
        for size in range(FIRST, FIRST + probes):
            mode, steps = rng.choice(MODES), rng.randint(1, 2)
            fault = faults.get(size)
            if fault is not None and fault.kind == "other count":
                mode = MODES[-1]  # ranks of ddp meet in the last backward of a step alone
            request = request_of(size, mode, steps, strategies)
            rows.append(Row(fault, mode, prober.probe(request).measurement))
    return rows
