"""Probes of two gloo ranks: each fault is named with its rank, and the next probe works."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from autofit.equivalence.comparison import compare, traced_plans
from autofit.equivalence.ranks import compare_ranks
from autofit.errors import InvalidArgument
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan, Scalar
from autofit.probing.fault_table import OTHER_COUNT
from autofit.probing.prober import Deadlines, Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.session import Session
from autofit.registry import load_strategies, resolve
from autofit.strategy import Comparison, Numerics
from autofit.training.workload import Workload

pytestmark = pytest.mark.slow

LISTENS = "0A"  # a state in the tables of /proc/net
IGNORED, VOCABULARY, LENGTH = -100, 50, 7
UNITS = {"parallel.mode": {"modules": ["blocks.0", "blocks.1"]}}


class Tied(nn.Module):
    """Token logits, in float64; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        blocks = [nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 16)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Frozen(Tied):
    """Of which the embedding and one block are frozen, as where a part is tuned alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        self.embedding.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


def padded(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, of which each sample ignores others; one of every four all."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    targets = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (samples,), generator=generator)
    lengths[::4] = 0
    targets[torch.arange(LENGTH)[None] >= lengths[:, None]] = IGNORED
    return tokens, targets


def mean_over_valid(model: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def valid(batch: Any) -> float:
    return float((batch[1] != IGNORED).sum())


def of_gradients(
    session: Session, mode: str, samples: int, steps: int, accumulation: str
) -> Comparison:
    """Compare the ranks' gradients of samples that are padded with those of one process."""
    share = -(-samples // 2)
    settings = {"parallel.mode": mode, "parallel.accumulation": accumulation}
    plan = Plan.split(samples, -(-share // steps), settings, ranks=2)
    assert plan.accumulation_steps == steps
    strategy = next(each for each in session.strategies if each.name == "parallel")
    payloads = UNITS if mode.startswith("fsdp2") else {}
    together = ResolvedPlan(plan, payloads, (strategy,))
    passes = ((ResolvedPlan(Plan(samples)), 0), (together, 0))
    first, second = traced_plans(session.builder, passes, padded(samples))
    return compare(first, second)


def of_ranks(session: Session, mode: str) -> Any:
    strategy = next(each for each in session.strategies if each.name == "parallel")
    payloads = UNITS if mode.startswith("fsdp2") else {}
    return compare_ranks(session.builder, {"parallel.mode": mode}, payloads, strategy)


def ranks_of(
    build: Any = Tied, batch: Any = padded, numerics: str = "reduced_precision", **given: Any
) -> Prober:
    workload = Workload(build, batch, **{"loss_fn": mean_over_valid, "loss_weight": valid} | given)
    strategies = load_strategies(["parallel"], numerics=Numerics.parse(numerics), ranks=2)
    return open_prober(workload, strategies, Target("cpu", "1GiB", ranks=2))


@pytest.fixture(scope="module")
def weighted() -> Iterator[Prober]:
    with ranks_of() as prober:
        yield prober


@pytest.mark.parametrize("mode", ["ddp", "ddp_view", "zero1", "fsdp2", "fsdp2_keep"])
@pytest.mark.parametrize(("samples", "steps"), [(16, 2), (13, 3), (5, 3)])
def test_gradients_of_ranks_are_those_of_one_process(
    weighted: Prober, mode: str, samples: int, steps: int
) -> None:
    for accumulation in ("once", "each"):
        call = partial(
            of_gradients, mode=mode, samples=samples, steps=steps, accumulation=accumulation
        )
        found = weighted.run(call)
        assert found.gradient <= 1e-12
        assert found.loss <= 1e-12


def test_gradients_of_a_model_that_is_frozen_in_part_are_those_of_one_process() -> None:
    with ranks_of(Frozen) as prober:
        for mode in ("ddp", "ddp_view", "zero1", "fsdp2", "fsdp2_keep"):
            call = partial(of_gradients, mode=mode, samples=13, steps=3, accumulation="once")
            assert prober.run(call).gradient <= 1e-12, mode


def test_nothing_of_the_ranks_listens_to_other_machines(weighted: Prober) -> None:
    """Who reaches their store could end them, or join in their place."""
    weighted.run(partial(of_ranks, mode="ddp"))
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    sockets = [line.split() for table in tables for line in table]
    heard = {at[1].partition(":")[0] for at in sockets if at[3] == LISTENS and at[9] in own}
    assert heard == {"0100007F"}  # 127.0.0.1


BLOCKS = {"compile.region": "blocks", "compile.memory_budget": 0.05}


@pytest.mark.parametrize(
    ("mode", "more", "said"),
    [
        ("ddp", {}, r"compile: \d+ graphs"),
        ("ddp", BLOCKS, r"compile: \d+ graphs, 0 graph breaks"),
        ("fsdp2", {}, r"compile: (\d+ graphs|nothing was compiled)"),
    ],
)
def test_ranks_compile_or_say_that_nothing_was(
    mode: str, more: dict[str, Scalar], said: str
) -> None:
    workload = Workload(Tied, padded, loss_fn=mean_over_valid, loss_weight=valid)
    strategies = load_strategies(["parallel", "compile"])
    settings = {"parallel.mode": mode, "compile.mode": "default", **more}
    plan = Plan(4, settings=settings, ranks=2)
    payloads = {**UNITS, "compile.region": {"modules": [UNITS["parallel.mode"]["modules"]]}}
    request = ProbeRequest(ResolvedPlan(plan, payloads, strategies))
    with open_prober(workload, strategies, Target("cpu", "1GiB", ranks=2)) as prober:
        seen = prober.probe(request).measurement
    assert seen.outcome is Outcome.OK, seen.detail
    assert any(re.match(said, note) for note in seen.notes), seen.notes


TOO_MUCH = 2**27
"""Elements that fill twice the budget."""
FAULTS: dict[int, tuple[str, int, set[Outcome]]] = {
    4: ("oom", 1, {Outcome.OOM}),
    6: ("killed", 1, {Outcome.CRASHED}),
    8: ("hang", 0, {Outcome.TIMEOUT}),
    10: ("user error", 1, {Outcome.USER_ERROR}),
    12: ("other count", 0, {Outcome.TIMEOUT, Outcome.USER_ERROR}),
}
"""By the micro-batch at which it happens: what, on which rank, and the outcomes."""


def struck_by(micro_batch: int) -> str:
    """What happens on this rank."""
    kind, rank, _ = FAULTS.get(micro_batch, ("", 0, set()))
    return kind if rank == torch.distributed.get_rank() else ""


class Struck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        kind = struck_by(len(x))
        if kind == "oom":
            return x + torch.empty(TOO_MUCH).sum()
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            time.sleep(3600)
        elif kind == "user error":
            raise ValueError("the user's own error on one rank")
        return x


def once_more_on_one_rank(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if struck_by(len(batch)) == "other count":
        model(batch).square().mean().backward()
    return model(batch).square().mean()


@pytest.mark.timeout(600)  # workers are replaced four times
def test_what_single_ranks_do_is_named_and_the_next_probe_works() -> None:
    strategies = load_strategies(["parallel"])
    workload = Workload(Struck, torch.randn(3, 32), loss_fn=once_more_on_one_rank)
    payloads = {"parallel.mode": UNITS["parallel.mode"]}
    deadlines, target = Deadlines(shortest_s=8.0), Target("cpu", "256MiB", ranks=2)
    with open_prober(workload, strategies, target, deadlines=deadlines) as prober:
        for size in range(4, 14):
            # ranks of ddp meet in the last backward of a step alone, and would not see a count
            mode = "ddp" if size % 4 == 0 and size != 12 else "fsdp2_keep"
            plan = Plan(size, accumulation_steps=2, ranks=2, settings={"parallel.mode": mode})
            resolved = ResolvedPlan(plan, payloads if mode != "ddp" else {}, strategies)
            request = ProbeRequest(resolved, expected_seconds=0.01, most_timed_seconds=0.2)
            seen = prober.probe(request).measurement
            kind, rank, outcomes = FAULTS.get(size, ("", 0, {Outcome.OK}))
            assert seen.outcome in outcomes, (size, seen)
            if kind == "other count":  # of two ranks none is the one to blame
                assert OTHER_COUNT in (seen.detail or "")
            elif kind:
                assert seen.failed_rank == rank
            else:
                assert len(seen.ranks) == 2


def test_a_probe_tells_what_each_rank_held_and_whose_steps_count(weighted: Prober) -> None:
    strategies = load_strategies(["parallel"])
    plan = Plan(4, ranks=2, settings={"parallel.mode": "ddp"})
    seen: Any = weighted.probe(ProbeRequest(ResolvedPlan(plan, {}, strategies))).measurement
    assert seen.outcome is Outcome.OK
    assert seen.peak_reserved_bytes == max(use.held_bytes for use in seen.ranks)
    own = [use.step_time_s for use in seen.ranks]
    assert None not in own
    assert seen.step_time_s >= max(time_s for time_s in own if time_s is not None)


# -- The usual mistakes of trainings on several ranks, as their survey names them

DDP, SHARDED = ("ddp", "ddp_view", "zero1"), ("fsdp2", "fsdp2_keep")


class Net(nn.Module):
    """Blocks between two linear layers, and a side branch that `side` decides on."""

    def __init__(self, side: str = "always", *norm: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), *map(copy.deepcopy, norm or (nn.Tanh(),)))
            for _ in range(2)
        )
        self.branch = nn.ModuleDict({"side": nn.Linear(16, 16)})
        self.out = nn.Linear(16, 8)
        self.side = side

    def uses_side(self, x: torch.Tensor) -> bool:
        return {
            "always": True,
            "never": False,
            "rank 1": dist.is_initialized() and dist.get_rank() == 1,
            "some samples": bool((x[:, 0] > 0.5).any()),
        }[self.side]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.into(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.uses_side(x):
            hidden = hidden + self.branch["side"](hidden)
        return self.out(hidden)


def adapted() -> nn.Module:
    """A frozen layer, larger than all that is trained of it."""
    trained = nn.Sequential(nn.Linear(64, 2), nn.Linear(2, 8))
    return nn.Sequential(nn.Linear(8, 64).requires_grad_(False), trained)


def batch_of(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, the first with a feature above 0.5, and classes of which some are ignored."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.rand(samples, 8, generator=generator) / 2
    inputs[0, 0] = 1.0
    targets = torch.randint(0, 8, (samples,), generator=generator)
    targets[1::4] = IGNORED
    return inputs, targets


def past_the_wrapper(model: nn.Module, batch: Any) -> torch.Tensor:
    return mean_over_valid(getattr(model, "module", model), batch)


def float_after_wrapping(model: nn.Module, batch: Any) -> torch.Tensor:
    return mean_over_valid(model.float(), batch)


def raising_in_buckets(model: nn.Module, batch: Any, error: Exception) -> torch.Tensor:
    if getattr(model, "gradient_as_bucket_view", False) and dist.get_rank() == 1:
        raise error
    return mean_over_valid(model, batch)


@pytest.mark.parametrize(("side", "lacking"), [("rank 1", 0), ("some samples", 1)])
def test_a_parameter_that_one_rank_alone_uses_is_named(side: str, lacking: int) -> None:
    with (
        ranks_of(partial(Net, side), batch_of) as prober,
        pytest.raises(InvalidArgument, match=f"rank {lacking} gets no gradient") as caught,
    ):
        prober.survey()
    assert "'branch.side.weight', 'branch.side.bias'" in str(caught.value)
    assert "find_unused_parameters" in str(caught.value)


def test_a_mean_of_means_is_said_to_need_a_weight() -> None:
    with (
        ranks_of(Net, batch_of, loss_weight=None) as prober,
        pytest.raises(InvalidArgument, match=r"(?s)differ from one process's by.*loss_weight"),
    ):
        prober.survey()


NORMALIZING = partial(Net, "always", nn.BatchNorm1d(16))
NOT_SHARED = [rf"parallel\.mode={mode} .* skipped.*most of all in" for mode in DDP]
NO_VIEWS = partial(raising_in_buckets, error=TypeError("no views of buckets"))
NO_ROOM = partial(
    raising_in_buckets, error=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
)


@pytest.mark.parametrize(
    ("given", "left", "said"),
    [
        (
            {"build": partial(Net, "never")},
            SHARDED,
            ["parallel.mode: ddp, ddp_view, zero1 skipped.*'branch.side.weight', 'branch.side.b"],
        ),
        ({"loss_fn": past_the_wrapper}, SHARDED, NOT_SHARED),
        (
            {"build": lambda: Net().to(torch.bfloat16), "loss_fn": float_after_wrapping},
            SHARDED,
            NOT_SHARED,
        ),
        ({"build": NORMALIZING}, (*DDP, *SHARDED), ["'blocks.0.1', 'blocks.1.1' normalize"]),
        ({"build": NORMALIZING, "loss_fn": past_the_wrapper}, SHARDED, NOT_SHARED),
        (
            {"numerics": "exact", "loss_fn": NO_VIEWS},
            ("ddp", "zero1"),
            ["parallel.mode=ddp_view was skipped: TypeError: no views of buckets"],
        ),
        (
            {"numerics": "exact", "loss_fn": NO_ROOM},
            DDP,
            ["parallel.mode=ddp_view: memory ran out"],
        ),
        (
            {
                "build": adapted,
                "optimizer": lambda parameters: torch.optim.AdamW(
                    [p for p in parameters if p.requires_grad]
                ),
            },
            (*DDP, *SHARDED),
            [],
        ),
    ],
    ids=[
        "never used",
        "past the wrapper",
        "float after wrapping",
        "normalizes",
        "normalizes past the wrapper",
        "raises on one rank",
        "is full on one rank",
        "trained in part",
    ],
)
def test_modes_under_which_a_training_goes_wrong_are_set_aside_and_others_run(
    given: dict[str, Any], left: tuple[str, ...], said: list[str]
) -> None:
    made: dict[str, Any] = {"build": Net, "batch": batch_of, "numerics": "rounding"}
    with ranks_of(**made | given) as prober:
        survey = prober.survey()
        assert survey.dimensions["parallel.mode"].values == left
        for words in said:
            assert sum(bool(re.search(words, note)) for note in survey.notes) == 1, survey.notes
        assert said or not any(" skipped" in note for note in survey.notes)
        settings = survey.space().complete({"parallel.mode": left[-1]})
        plan = Plan(2, ranks=2, settings=settings)
        resolved = resolve(plan, survey.space(), prober.strategies)
        assert prober.probe(ProbeRequest(resolved)).measurement.outcome is Outcome.OK
