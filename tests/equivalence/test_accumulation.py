"""Whether split batches train as whole ones, and whose statistics ranks keep."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.equivalence.accumulation import SplitGradients, compare_split_gradients
from autofit.equivalence.steps import PlainContext
from autofit.measurement import ACT
from autofit.training.workload import Workload

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(16, 1)


def decided(build: Callable[[], nn.Module], batch: Any = (X, Y), **more: Any) -> SplitGradients:
    """Return the decision on a model that is built alike each time."""

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    given = {"criterion": nn.functional.mse_loss, "global_batch": 16, **more}
    make = partial(Workload, seeded, batch, **given)
    return compare_split_gradients(PlainContext(make)._builder, make())


class Routed(nn.Module):
    """The loss of the router balances the batch, and is small beside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.embed(x))
        self.shares = self.router(hidden.detach()).softmax(-1)
        return self.head(hidden)


def balanced(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    loss: torch.Tensor = nn.functional.mse_loss(model(inputs), targets + 3)
    chosen = nn.functional.one_hot(model.shares.argmax(-1), 8).float().mean(0)
    balance: torch.Tensor = (chosen * model.shares.mean(0)).sum()
    return loss + 1e-3 * balance


def test_one_parameter_that_differs_does_not_hide_in_all_gradients_together() -> None:
    found = decided(Routed, criterion=None, loss_fn=balanced)
    assert found.why_kept
    assert found.comparison is not None
    assert found.comparison.gradient < found.comparison.tolerance
    assert found.comparison.modules == ("router",)
    (note,) = found.notes
    assert note.startswith(ACT)
    assert "'router.weight'" in note
    assert "allow_accumulation_change" in note


@pytest.mark.parametrize("is_collated", [False, True])
def test_modules_that_normalize_are_named_and_numbers_are_quoted(is_collated: bool) -> None:
    batch, more = (list(X), {"collate_fn": _collated}) if is_collated else ((X, Y), {})
    layers = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    found = decided(lambda: nn.Sequential(*layers), batch, **more)
    assert found.comparison is not None
    assert found.comparison.modules == ("1",)
    (note,) = found.notes
    assert re.search(r"by [\d.]+% \(in '1', which normalize", note)


class Attentive(nn.Module):
    """A softmax does not see the bias of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, 2, 4)
        scores = self.query(tokens) @ self.key(tokens).mT
        mixed: torch.Tensor = (scores.softmax(-1) @ self.value(tokens)).mean((1, 2))
        return mixed.unsqueeze(1)


def _normalized_after_its_bias() -> nn.Module:
    shaped = nn.Unflatten(1, (2, 4))
    return nn.Sequential(
        shaped, nn.Conv1d(2, 8, 3), nn.GroupNorm(8, 8), nn.Flatten(), nn.Linear(16, 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("build", [Attentive, _normalized_after_its_bias])
def test_gradients_that_are_zero_but_for_roundings_are_noise(
    build: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    found = decided(lambda: build().to(dtype), (X.to(dtype), Y.to(dtype)))
    assert found.why_kept is None, found.notes


class Tracking(nn.Module):
    """Subtracts a mean that follows its inputs while it trains."""

    mean: torch.Tensor

    def __init__(
        self, dropout: float = 0.0, *, is_buffer: bool = True, is_read: bool = True
    ) -> None:
        super().__init__()
        self.inner, self.dropout, self.is_read = nn.Linear(8, 16), nn.Dropout(dropout), is_read
        if is_buffer:
            self.register_buffer("mean", torch.zeros(16))
        else:
            self.mean = torch.zeros(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.inner(x)))
        before = self.mean if self.is_read else 0.0
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        return torch.tanh(hidden - before)


class Codebook(nn.Module):
    """Quantizes to codes that move to the features assigned to them, as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, 16), requires_grad=False)
        self.inner = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x)
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.codes[nearest] = 0.5 * self.codes[nearest] + 0.5 * hidden
        return hidden * quantized


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Tracking, "1.mean"),
        (partial(Tracking, 0.5), "1.mean"),
        (partial(Tracking, is_buffer=False), "1.mean"),
        (Codebook, "1.codes"),
    ],
)
def test_what_one_forward_leaves_and_the_next_reads_is_found_and_named(
    make: Callable[[], nn.Module], name: str
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), make(), nn.Linear(16, 1))

    found = decided(build)
    assert found.why_kept
    assert found.comparison is not None
    assert found.comparison.gradient > 0.02
    (note,) = found.notes
    assert name in note


class Counting(nn.Module):
    """Counts its forwards, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls: torch.Tensor = self.calls + 1
        self.times += 1
        return x


@pytest.mark.parametrize(
    ("make", "features"), [(Counting, 8), (nn.Dropout, 8), (partial(Tracking, is_read=False), 16)]
)
def test_what_no_forward_reads_and_what_is_random_leave_the_count_free(
    make: Callable[[], nn.Module], features: int
) -> None:
    found = decided(lambda: nn.Sequential(make(), nn.Linear(features, 1)))
    assert found.why_kept is None
    assert found.notes == ()


# -- Whose running statistics BatchNorm has on several ranks, as the survey's note says

TRAIN = """
import json
import os
from functools import partial

import torch
from torch import nn

from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.training.loss import Recipe
from autofit.training.optimizers import build_optimizer
from autofit.training.ranks import Ranks
from autofit.training.training import Training
from autofit.world import world_of_environment

PAYLOADS = {"parallel.mode": {"modules": []}}
world, device = world_of_environment(), torch.device("cpu")
torch.distributed.init_process_group("gloo")
found = {}
for mode, sharing in (("ddp", "once"), ("ddp", "each"), ("zero1", "once"), ("fsdp2", "once")):
    settings = {"parallel.mode": mode, "parallel.accumulation": sharing}
    plan = Plan(2, accumulation_steps=2, settings=settings, ranks=2)
    resolved = ResolvedPlan(plan, PAYLOADS, load_strategies(["parallel"], ranks=2))
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    seen = []
    norm.register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.tolist()))
    optimizer = partial(build_optimizer, partial(torch.optim.SGD, lr=0.1), place=None)
    recipe, model = Recipe(criterion=nn.MSELoss()), nn.Sequential(nn.Linear(4, 4), norm)
    with Training(model, optimizer, recipe, resolved, device=device, world=world) as training:
        torch.manual_seed(1 + world.rank)
        for _ in range(2):
            training.step((torch.randn(4, 4), torch.randn(4, 4)))
    pairs = zip(*Ranks(world, device).objects(seen), strict=True)
    found[f"{mode} {sharing}"] = [first == second for first, second in pairs]
if world.rank == 0:
    print(json.dumps(found), flush=True)
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads abort some processes that exit by themselves
"""


def test_wrappers_send_statistics_before_a_step_and_sharding_never(
    on_two_ranks: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    """Whether two ranks see the same ones in each micro-batch of two steps of two."""
    assert on_two_ranks(tmp_path, TRAIN) == {
        "ddp once": [True, False, True, False],
        "ddp each": [True, True, True, True],
        "zero1 once": [True, False, True, False],
        "fsdp2 once": [True, False, False, False],
    }


def _tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4))


def _over_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    ids, targets = batch
    loss: torch.Tensor = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    return loss


IDS = torch.arange(16 * 6).reshape(16, 6) % 20


@pytest.mark.parametrize("ignored", [0, 2])
def test_padding_that_is_only_possible_is_a_note_and_no_warning(ignored: int) -> None:
    targets = IDS % 4
    targets[:, 6 - ignored :] = -100  # the same share of each sample, so that splits agree
    found = decided(_tagger, (IDS, targets), criterion=None, loss_fn=_over_tokens)
    assert found.why_kept is None
    (note,) = found.notes
    assert "-100" in note
    assert note.startswith(ACT) == bool(ignored)


@pytest.mark.parametrize("equal", [True, False])
def test_padding_of_the_batch_itself_is_compared(equal: bool) -> None:
    targets = IDS % 4
    for sample, valid in zip(targets, cycle([4] if equal else [6, 1]), strict=False):
        sample[valid:] = -100
    given: dict[str, Any] = {"criterion": None, "loss_fn": _over_tokens}
    found = decided(_tagger, (IDS, targets), **given)
    assert (found.why_kept is None) is equal
    assert len(found.notes) == 1
    given["loss_weight"] = lambda batch: float((batch[1] != -100).sum())
    assert decided(_tagger, (IDS, targets), **given).notes == ()


def _collated(samples: list[Any]) -> Any:
    return torch.stack(samples), torch.zeros(len(samples), 1)


def _drawing(samples: list[Any]) -> Any:
    return torch.stack(samples) + torch.randn(len(samples), 8), torch.zeros(len(samples), 1)


@pytest.mark.parametrize(
    ("batch", "more", "words"),
    [
        (lambda n: (torch.randn(5, n, 8), torch.zeros(5, n, 1)), {}, "collate_fn"),  # time first
        (list(X), {"collate_fn": _drawing}, "another batch"),
        ([X[0]] * 3, {"collate_fn": _collated}, "copies of one sample"),
        ((X[:1].expand(16, 8), Y), {"training_step": lambda *_: X}, "training_step decides"),
    ],
)
def test_what_cannot_be_compared_keeps_the_count_and_says_why(
    batch: Any, more: dict[str, Any], words: str
) -> None:
    found = decided(lambda: nn.Linear(8, 1), batch, **more)
    assert found.why_kept is not None
    assert found.comparison is None
    assert words in found.notes[0]
