"""The usual mistakes of trainings on several ranks, as the survey of two gloo ranks names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autofit.errors import InvalidArgument
from autofit.measurement import Outcome
from autofit.plan import Plan
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.registry import load_strategies, resolve
from autofit.strategy import Numerics
from autofit.training.workload import Workload
from tests.probing.test_rank_channel import IGNORED, mean_over_valid, valid

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DDP, SHARDED = ("ddp", "ddp_view", "zero1"), ("fsdp2", "fsdp2_keep")


class Net(nn.Module):
    """Blocks between two linear layers, and a side branch that `uses_side` decides on."""

    def __init__(self, side: str) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
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


class Normalizing(Net):
    """With BatchNorm, which refuses a single sample, beside linear layers."""

    def __init__(self) -> None:
        super().__init__("always")
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2)
        )


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


def refused_in_buckets(model: nn.Module, batch: Any) -> torch.Tensor:
    if getattr(model, "gradient_as_bucket_view", False) and dist.get_rank() == 1:
        raise TypeError("no views of buckets")
    return mean_over_valid(model, batch)


def full_in_buckets(model: nn.Module, batch: Any) -> torch.Tensor:
    if getattr(model, "gradient_as_bucket_view", False) and dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return mean_over_valid(model, batch)


def ranks_of(side: str = "always", numerics: str = "rounding", **given: Any) -> Any:
    dtype = given.pop("dtype", torch.float32)
    made = {"loss_fn": mean_over_valid, "loss_weight": valid}
    build = given.pop("build", lambda: Net(side))
    workload = Workload(lambda: build().to(dtype), batch_of, **{**made, **given})
    strategies = load_strategies(["parallel"], numerics=Numerics.parse(numerics), world_size=2)
    return open_prober(workload, strategies, Target("cpu", "1GiB", ranks=2))


def probed(prober: Prober, mode: str) -> Any:
    space = prober.survey().space()
    settings = space.complete({"parallel.mode": mode})
    resolved = resolve(Plan(2, world_size=2, settings=settings), space, prober.strategies)
    return prober.probe(ProbeRequest(resolved)).measurement


@pytest.mark.parametrize(("side", "lacking"), [("rank 1", 0), ("some samples", 1)])
def test_a_parameter_that_one_rank_alone_uses_is_named(side: str, lacking: int) -> None:
    with ranks_of(side) as prober, pytest.raises(InvalidArgument) as caught:
        prober.survey()
    said = str(caught.value)
    assert f"rank {lacking} gets no gradient" in said
    assert "'branch.side.weight', 'branch.side.bias'" in said
    assert "find_unused_parameters" in said


def test_a_parameter_that_no_rank_uses_leaves_the_modes_that_shard() -> None:
    with ranks_of("never") as prober:
        survey = prober.survey()
        assert survey.dimensions["parallel.mode"].values == SHARDED
        (note,) = (note for note in survey.notes if " skipped" in note)
        assert note.startswith("parallel.mode: ddp, ddp_view, zero1 skipped")
        assert "'branch.side.weight', 'branch.side.bias'" in note
        assert probed(prober, "fsdp2").outcome is Outcome.OK


def test_a_mean_of_means_is_said_to_need_a_weight() -> None:
    with ranks_of(loss_weight=None) as prober, pytest.raises(InvalidArgument) as caught:
        prober.survey()
    assert "differ from one process's by" in str(caught.value)
    assert "loss_weight" in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"loss_fn": past_the_wrapper},
        {"loss_fn": float_after_wrapping, "dtype": torch.bfloat16},
    ],
    ids=["past the wrapper", "float after wrapping"],
)
def test_gradients_that_are_not_shared_set_their_modes_aside(given: Any) -> None:
    with ranks_of(**given) as prober:
        survey = prober.survey()
        assert survey.dimensions["parallel.mode"].values == SHARDED
        notes = [note for note in survey.notes if " skipped" in note]
        assert [note.partition(" ")[0] for note in notes] == [f"parallel.mode={m}" for m in DDP]
        assert all("most of all in" in note for note in notes)
        assert probed(prober, "fsdp2").outcome is Outcome.OK


def test_batch_norm_is_told_and_hides_no_gradients_that_are_not_shared() -> None:
    with ranks_of(build=Normalizing) as prober:
        survey = prober.survey()
        assert survey.dimensions["parallel.mode"].values == (*DDP, *SHARDED)
        assert sum("'blocks.0.1', 'blocks.1.1' normalize" in note for note in survey.notes) == 1
        assert probed(prober, "ddp").outcome is Outcome.OK
    with ranks_of(build=Normalizing, loss_fn=past_the_wrapper) as prober:
        assert prober.survey().dimensions["parallel.mode"].values == SHARDED


@pytest.mark.parametrize(
    ("loss_fn", "left", "said"),
    [
        (refused_in_buckets, ("ddp", "zero1"), " was skipped: TypeError: no views of buckets"),
        (full_in_buckets, DDP, ": memory ran out"),
    ],
    ids=["raises", "is full"],
)
def test_a_mode_under_which_one_rank_raises_does_not_end_the_search(
    loss_fn: Any, left: tuple[str, ...], said: str
) -> None:
    with ranks_of(numerics="exact", loss_fn=loss_fn) as prober:
        survey = prober.survey()
        assert survey.dimensions["parallel.mode"].values == left
        assert sum(n.startswith(f"parallel.mode=ddp_view{said}") for n in survey.notes) == 1
        assert probed(prober, "ddp").outcome is Outcome.OK


class Adapted(nn.Module):
    """A frozen layer, larger than all that is trained of it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 64).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(64, 2), nn.Linear(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x))


def of_trained(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad])


def test_only_what_the_optimizer_updates_is_dealt_out_to_the_ranks() -> None:
    with ranks_of(build=Adapted, optimizer=of_trained) as prober:
        survey = prober.survey()
        assert survey.dimensions["parallel.mode"].values == (*DDP, *SHARDED)
        assert probed(prober, "zero1").outcome is Outcome.OK
