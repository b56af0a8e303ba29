"""Predictions of one rank of many: held against real ranks, and of models that shard badly."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit import Plan, Workload
from autofit.devices.gpu_catalogue import NCCL_BYTES
from autofit.errors import InvalidArgument, PredictionUnavailable, Unsupported
from autofit.plan import Scalar
from autofit.prediction import sharded
from autofit.prediction.predict import Prediction, predict as prediction_of
from autofit.strategy import World
from autofit.units import MIB
from tests.gloo_rank import cases, workload

ROOT = Path(__file__).parents[2]
WORKSPACES_BYTES = 65 * MIB
"""What cuBLAS takes on a GPU and a CPU does not: twice 32 MiB, and 1 MiB for cuBLASLt."""


def predict(given: Workload, mode: str, ranks: int = 2, **more: Any) -> Prediction:
    settings: dict[str, Scalar] = {"parallel.mode": mode, **more.pop("settings", {})}
    counts = {"accumulation_steps": more.pop("steps", 1), "ranks": ranks}
    plan = Plan(more.pop("micro_batch", 4), settings=settings, **counts)
    return prediction_of(given, plan=plan, gpu="H100", **more)


def of_model(model: nn.Module, batch: torch.Tensor, **more: Any) -> Workload:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).float().pow(2).mean()

    return Workload(model, batch, loss_fn=loss, **more)


@pytest.fixture(scope="module")
def on_two_ranks(
    python: Callable[..., subprocess.Popen[Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, int]:
    """The peaks of two real ranks: of each case, the larger one."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    start = partial(python, "-m", "tests.gloo_rank", cwd=ROOT, forks_workers=False)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [start(str(rank), "2", store, **pipes) for rank in range(2)]
    try:
        ended = [rank.communicate(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ended[0][1] + ended[1][1]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ended)
    return {name: max(first[name], second[name]) for name in first}


@pytest.mark.slow
@pytest.mark.timeout(600)  # two ranks that train in turn on few cores
@pytest.mark.parametrize(("name", "plan"), [pytest.param(*case, id=case[0]) for case in cases()])
def test_a_prediction_holds_what_two_ranks_hold(
    name: str, plan: Plan, on_two_ranks: dict[str, int]
) -> None:
    """On the meta device in place of a GPU, less what its libraries take there."""
    found = autofit.predict(workload(), plan=replace(plan, ranks=2), gpu="H100")
    assert found.peak_allocated_bytes - WORKSPACES_BYTES == pytest.approx(
        on_two_ranks[name], rel=1e-2
    )
    kinds = {kind: size for kind, size in found.breakdown.items() if kind != "non_torch"}
    assert sum(kinds.values()) == found.peak_allocated_bytes


@pytest.mark.slow
def test_what_is_sharded_is_held_in_shares() -> None:
    found = {ranks: predict(workload(), "fsdp2", ranks).breakdown for ranks in (2, 64)}
    whole = predict(workload(), "ddp", 64).breakdown
    kind = "optimizer_state"
    assert found[2][kind] == pytest.approx(whole[kind] / 2, rel=0.02)
    # 64 ranks: small parameters are rounded up to blocks of the allocator
    assert whole[kind] / 64 < found[64][kind] < whole[kind] / 16
    shards = {ranks: whole["weights"] / ranks for ranks in found}
    gathered = {ranks: found[ranks]["weights"] - shards[ranks] for ranks in found}
    assert 0 <= gathered[64] < gathered[2] + 64 * 512
    assert gathered[2] < whole["weights"], "not all at once"
    assert whole["gradients"] == pytest.approx(2 * whole["weights"], rel=0.01), "and the buckets"


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = (5000, 4000, 3000, 3000, 3000)
        self.parts = nn.ParameterList(torch.ones(1, size) for size in self.sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = [
            nn.functional.linear(x.expand(-1, size), part)
            for size, part in zip(self.sizes, self.parts, strict=True)
        ]
        return torch.cat(wide, 1)


def test_the_state_that_is_dealt_out_is_that_of_the_rank_with_most() -> None:
    """Whole parameters: the second of two ranks holds 4 + 3 + 3 thousand, the first 5 + 3."""
    found = predict(of_model(Uneven(), torch.randn(4, 1)), "zero1")
    assert found.breakdown["optimizer_state"] == pytest.approx(2 * 4 * 10_000, rel=0.05)


class Checkpointed(nn.Module):
    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        parts = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
        self.blocks = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            run: Any = partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=False)
            x = run(x) if self.by_hand else block(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_what_is_checkpointed_is_gathered_again(mode: str) -> None:
    batch = torch.randn(512, 64)
    units = {"units": [f"blocks.{index}" for index in range(6)], "state": []}
    plain, by_hand = (
        predict(of_model(Checkpointed(by_hand=flag), batch), mode, micro_batch=512)
        for flag in (False, True)
    )
    by_plan = predict(
        of_model(Checkpointed(by_hand=False), batch),
        mode,
        micro_batch=512,
        settings={"checkpointing.level": 1},
        payloads={"checkpointing.level": units},
    )
    assert by_hand.peak_allocated_bytes < plain.peak_allocated_bytes - 3 * 512 * 256 * 4
    assert by_plan.peak_allocated_bytes == pytest.approx(by_hand.peak_allocated_bytes, rel=0.01)


def test_a_rank_is_one_of_the_plans_ranks_and_shares_its_batch() -> None:
    found = autofit.predict(
        workload(), plan=Plan(4, accumulation_steps=2, global_batch=512, ranks=64), gpu="L4"
    )
    assert str(found).startswith("4 x 2 on each of 64 ranks, ")
    assert found.plan.settings["parallel.mode"] == "ddp"
    assert autofit.predict(workload(), gpu="L4", ranks=2).plan.samples_per_step == 8


def test_nccl_is_said_to_be_unknown_and_leaves_room() -> None:
    found = predict(workload(), "fsdp2")
    high = found.interval[1]
    assert "NCCL                unknown, counted as 0" in str(found)
    assert found.fits(high - 1) is False
    assert found.fits(high) is None
    assert found.fits(high + NCCL_BYTES - 1) is None
    assert found.fits(high + NCCL_BYTES) is True
    alone = autofit.predict(workload(), gpu="H100")
    assert "NCCL" not in str(alone)
    assert alone.fits(alone.interval[1]) is True


def test_a_verdict_says_what_decides() -> None:
    checked = partial(autofit.check, workload(), gpu="L4", ranks=2)
    verdict = checked(vram_budget="1GiB")
    assert verdict.fits is None
    assert "NCCL, not known: leave 2.00 GiB for it" in str(verdict)
    assert "unknown, counted as 0" in verdict.explain()
    assert checked(vram_budget="4GiB").fits is True
    assert checked(vram_budget="128MiB").fits is False


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "most"), [(64, 8), (60, 8), (16, 2), (8, 1)])
def test_the_largest_micro_batch_is_one_of_the_global_batch(asked: int, most: int) -> None:
    own = of_model(nn.Linear(8, 8), torch.randn(4, 8))
    plan = Plan.split(asked, 1, ranks=8)
    assert autofit.predict(own, plan=plan, gpu="H100").largest_micro_batch == most
    asks_itself = replace(own, global_batch=asked)
    assert autofit.predict(asks_itself, ranks=8, gpu="H100").largest_micro_batch == most
    free = autofit.predict(own, plan=Plan(1, ranks=8), gpu="H100")
    assert (free.largest_micro_batch or 0) > 1000


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"ranks": 0}, "ranks must be a whole number .*1, got 0"),
        ({"ranks": 4, "plan": Plan(4, ranks=2)}, "the plan is for 2 ranks"),
        (
            {"ranks": 8, "plan": Plan(3, accumulation_steps=2, global_batch=6)},
            "a global batch of 6 samples .* 8 ranks",
        ),
        ({"plan": Plan(4, settings={"parallel.mode": "ddp"})}, "parallel.mode"),
    ],
)
def test_what_cannot_be_meant_is_refused(ask: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        autofit.predict(workload(), gpu="L4", **ask)


class Scaled(nn.Linear):
    """With a parameter that has no dimension, such as a temperature."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.scale


def with_live_optimizer() -> Workload:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return of_model(model, torch.randn(4, 8), optimizer=optimizer)


IMAGES = torch.randn(4, 4, 8, 8)


@pytest.mark.parametrize(
    ("mode", "given", "words"),
    [
        ("zero1", with_live_optimizer(), "optimizer= as a function of the parameters"),
        ("fsdp2", with_live_optimizer(), "optimizer= as a function of the parameters"),
        ("fsdp2", of_model(Scaled(), torch.randn(4, 8)), "'scale' is a scalar"),
        (
            "fsdp2",
            of_model(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), IMAGES),  # type: ignore[call-overload]  # torch has it
            "'weight' is not contiguous",
        ),
    ],
    ids=["optimizer dealt out", "optimizer sharded", "scalar", "channels last"],
)
def test_what_cannot_be_shared_is_named_and_replicated_all_the_same(
    mode: str, given: Workload, words: str
) -> None:
    assert predict(given, "ddp").required_bytes > 0
    with pytest.raises(Unsupported, match=words):
        predict(given, mode)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_cannot_be_sharded_and_frozen_embeddings_have_none(kind: Any) -> None:
    model = nn.Sequential(kind(16, 8, sparse=True), nn.Linear(8, 8))
    given = of_model(model, torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(Unsupported, match="sparse=False"):
        predict(given, "fsdp2")
    model[0].weight.requires_grad_(False)
    assert predict(given, "fsdp2").required_bytes > 0


def test_fewer_parameters_than_ranks_cannot_be_dealt_out() -> None:
    given = of_model(nn.Linear(8, 8), torch.randn(4, 8))
    few = r"zero1 .* 2 are too few for 4"
    plan = Plan(4, settings={"parallel.mode": "zero1"}, ranks=4)
    with pytest.raises(Unsupported, match=few) as caught:
        autofit.predict(given, gpu=["L4"], plan=plan)
    assert caught.value.exit_code == 2


def test_without_a_private_name_of_torch_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device")
    missing = pytest.raises(
        PredictionUnavailable, match=r"several ranks cannot.*_move_states_to_device"
    )
    with missing, sharded.one_of_ranks(World(size=2)):
        pass


def test_a_process_of_another_group_predicts_as_one_of_none() -> None:
    alone = predict(workload(), "ddp").required_bytes
    with sharded.one_of_ranks(World(size=2)):
        assert predict(workload(), "ddp").required_bytes == alone
