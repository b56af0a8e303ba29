"""Dry runs: faithful to the training, harmless to the user's objects, honest where they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.gpu_catalogue import find_gpu
from autofit.errors import InvalidArgument, PredictionUnavailable
from autofit.memory.replay import replay
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.dry_run import DryRun, dry_run
from autofit.testing.digest import differences, digest
from autofit.training.workload import Workload

GPU = find_gpu("A100")


class Net(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def batch(samples: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 32), torch.randint(0, 4, (samples,))


def workload(model: Any = Net, **options: Any) -> Workload:
    given = {"criterion": nn.functional.cross_entropy} | options
    return Workload(model, batch(), **given)


def ran(made: Workload, plan: Plan | None = None) -> DryRun:
    return dry_run(made, ResolvedPlan(plan or made.plan()), GPU)


def peak(made: Workload, plan: Plan | None = None) -> int:
    return replay(ran(made, plan).recording_on(GPU)).peak_allocated_bytes


def held(made: Workload) -> Mapping[str, int]:
    """Return the bytes of each kind at the peak."""
    run = ran(made)
    return run.labels.at_peak(run.recording_on(GPU))


def test_the_users_objects_and_process_are_left_alone() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    live = {"model": model, "optimizer": optimizer}
    made = workload(model, optimizer=optimizer)
    before = digest(live)
    ran(made)
    assert differences(before, digest(live)) == []


class Counting(nn.Linear):
    """A layer that counts its calls in an attribute of its weight."""

    weight: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.count.add_(1)
        return super().forward(x)


def test_an_attribute_of_a_parameter_is_a_copy() -> None:
    model = Counting(32, 4)
    model.weight.count = torch.tensor(0)
    assert peak(workload(model)) > 0
    assert model.weight.count == 0


def reads_a_value() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
    return Net(int(512 * rates[-1]))


def does_without_a_value() -> nn.Module:
    try:
        return Net(int(torch.tensor(256)))
    except Exception:
        return Net(4096)


@pytest.mark.parametrize("build", [lambda: Net().cuda(), reads_a_value, does_without_a_value])
def test_a_model_that_builds_itself_on_the_gpu_or_by_values(build: Any) -> None:
    assert abs(peak(workload(build)) - peak(workload(Net))) < 4096


class Tied(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        if tie:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).float().mean()


def test_tied_weights_count_once() -> None:
    ids = torch.randint(0, 1000, (4, 8))
    tied, untied = (held(Workload(Tied(tie), ids))["weights"] for tie in (True, False))
    assert untied == 2 * tied


def test_frozen_parameters_get_neither_gradients_nor_state() -> None:
    def state(*, trains: bool) -> int:
        model = Net(4096)
        model.body.requires_grad_(trains)
        trained = [each for each in model.parameters() if each.requires_grad]
        return held(workload(model, optimizer=torch.optim.AdamW(trained)))["optimizer_state"]

    assert state(trains=False) < state(trains=True) / 100


def test_gradients_are_resident_in_the_second_micro_batch() -> None:
    one, two, many = (
        peak(workload(lambda: Net(8192)), Plan(16, accumulation_steps=steps)) for steps in (1, 2, 8)
    )
    assert one < two == many


def test_a_live_optimizers_state_is_there_from_the_start() -> None:
    model = Net(8192)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kinds = held(workload(model, optimizer=optimizer))
    assert kinds["optimizer_state"] >= 2 * kinds["weights"] * 0.99


def fails(loss_fn: Callable[..., torch.Tensor]) -> PredictionUnavailable:
    with pytest.raises(PredictionUnavailable) as caught:
        ran(workload(criterion=None, loss_fn=loss_fn))
    return caught.value


@pytest.mark.parametrize(
    "ask", [torch.cuda.current_blas_handle, torch.cuda.random.get_rng_state, torch.cuda.ipc_collect]
)
def test_what_would_make_a_context_on_a_gpu_is_refused(ask: Callable[[], object]) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with suppress(Exception):
            ask()
        return model(batch[0]).mean()

    error = str(fails(loss_fn))
    assert "GPU" in error
    assert Path(__file__).name in error


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.item,
        torch.Tensor.tolist,
        lambda loss: loss.detach().numpy(),
        bool,
        int,
        lambda loss: f"{loss:.3f}",
        lambda loss: torch.tensor([loss, loss]),
        torch.unique,
    ],
)
def test_a_value_that_is_asked_for_leaves_no_number_whatever_came_of_the_error(
    read: Callable[[torch.Tensor], Any],
) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0]).mean()
        try:
            read(loss)
        except Exception:
            return loss.detach()  # nor is the answer that this cannot be trained
        return loss

    assert Path(__file__).name in str(fails(loss_fn))


@pytest.mark.parametrize("makes", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_may_look_at_the_numbers_of_its_batch(padded: bool, makes: bool) -> None:
    """Whether there is padding stands in the sample batch, and what is made of constants too."""
    longest = 5 if padded else 8

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, mask = batch
        causal = torch.ones(8, 8, device=mask.device).tril()
        lengths = mask.sum(-1)
        assert bool(mask.bool().all()) is not padded
        assert (int(lengths.max()), int(causal.sum().item())) == (longest, 36)
        assert torch.unique(lengths).tolist() == [longest]
        assert (mask[:, [0, -1]] == torch.tensor([1, int(not padded)], device=mask.device)).all()
        return model(x[:, : lengths.max()]).mean()

    def make(samples: int) -> Any:
        mask = torch.ones(samples, 8, dtype=torch.long)
        mask[:, 5:] -= int(padded)
        return torch.randn(samples, 8, 32), mask

    made = Workload(lambda: nn.Linear(32, 64), make if makes else make(4), loss_fn=loss_fn)
    assert peak(made, Plan(6, accumulation_steps=2)) > 0


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.ASGD])
def test_an_optimizer_that_scales_by_a_value_can_be_predicted(optimizer: Any) -> None:
    """What an update takes does not hang on it."""
    plain, scaled = (
        peak(workload(lambda: Net(4096), optimizer=each)) for each in (torch.optim.SGD, optimizer)
    )
    assert scaled > plain


ROWS = torch.randint(0, 1000, (4, 8))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("padding", [None, 0])  # with padding the backward fails before a gradient
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SparseAdam, lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)]
)
def test_sparse_gradients_are_not_guessed_at(kind: Any, padding: Any, optimizer: Any) -> None:
    tables = nn.Sequential(nn.Sequential(kind(1000, 64, sparse=True, padding_idx=padding)))
    with pytest.raises(PredictionUnavailable, match=r"sparse gradient.*0\.0\.weight"):
        ran(Workload(tables, ROWS, optimizer=optimizer))


def test_frozen_rows_have_no_sparse_gradients() -> None:
    table = nn.Embedding(1000, 64, sparse=True, padding_idx=0).requires_grad_(False)
    assert peak(Workload(nn.Sequential(table, nn.Linear(64, 4)), ROWS)) > 0


def test_a_mask_that_needs_values_is_said_in_words() -> None:
    def loss_fn(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        out = model(rows)
        return out[out > 0].mean()

    made = Workload(nn.Linear(8, 4), torch.randn(4, 8), loss_fn=loss_fn)
    with pytest.raises(PredictionUnavailable, match=r"elements of a tensor are not zero.*out > 0"):
        ran(made)


@pytest.mark.parametrize("makes", [False, True])
def test_a_huge_batch_takes_no_memory(makes: bool) -> None:
    huge = 10**12
    made = Workload(
        lambda: nn.Linear(32, 4), (lambda n: torch.randn(n, 32)) if makes else torch.randn(4, 32)
    )
    assert peak(made, Plan(huge)) > huge * 32 * 4


@pytest.mark.parametrize("samples", [10**18, 10**19, 10**25])
def test_a_batch_beyond_what_a_tensor_can_be_is_refused(samples: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{samples} x 1.*micro-batch"):
        ran(workload(), Plan(samples))


def test_a_ctc_loss_with_lengths_on_the_host_keeps_a_table() -> None:
    """Of 2 * (longest target) + 1 numbers a step and sample, twice in the backward (LossCTC.cu)."""

    def peak_with(longest: int) -> int:
        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            samples, steps = batch.shape[:2]
            scores = model(batch).log_softmax(-1).transpose(0, 1)
            targets = torch.ones(samples, longest, dtype=torch.long, device=batch.device)
            lengths = torch.full((samples,), steps), torch.full((samples,), longest)
            return nn.functional.ctc_loss(scores, targets, *lengths)

        return peak(Workload(lambda: nn.Linear(8, 16), torch.randn(4, 512, 8), loss_fn=loss_fn))

    row = 4 * 512 * 4
    assert peak_with(128) - peak_with(64) == pytest.approx(2 * 2 * 64 * row, rel=0.01)


def compiled_in_part() -> nn.Module:
    model = Net()
    model.head.compile()
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: torch.jit.script(nn.Linear(32, 4)), r"torch\.jit"),
        (lambda: torch.compile(Net()), "compile"),
        (compiled_in_part, "compile"),
    ],
)
def test_a_scripted_or_compiled_model_is_not_guessed_at(build: Any, words: str) -> None:
    with pytest.raises(PredictionUnavailable, match=words):
        ran(workload(build))


def test_the_users_own_error_is_raised_as_it_is() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's") as caught:
        ran(workload(criterion=None, loss_fn=loss_fn))
    assert any("dry run" in note for note in caught.value.__notes__)


def test_a_tensor_that_was_made_on_the_cpu_is_distinguished_from_what_needs_a_gpu() -> None:
    error = fails(lambda model, batch: model(batch[0] + torch.randn(batch[0].shape)).mean())
    assert "device=batch.device" in str(error)
    assert "torch.randn(batch[0].shape)" in str(error)


@torch.compile
def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ k


class Compiled(nn.Module):
    """A model whose forward calls a function that its user compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.head(scores(x, x))


def compiled_method() -> nn.Module:
    model = Net()
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"model": Compiled},
        {"model": compiled_method},
        {"criterion": torch.compile(nn.CrossEntropyLoss())},
        {"criterion": None, "loss_fn": torch.compile(lambda model, x: model(x[0]).mean())},
    ],
    ids=["function", "method", "criterion", "loss_fn"],
)
def test_compiled_functions_run_as_they_are_written_and_are_named(options: Any) -> None:
    run = ran(workload(**options))
    assert len(run.uncompiled) == 1
    if options.get("model") is Compiled:
        assert "scores(x, x)" in run.uncompiled[0]
    assert ran(workload()).uncompiled == ()


def test_a_dry_run_leaves_compiled_functions_compiled() -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    doubled = torch.compile(lambda x: 2 * x, backend=backend)

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        loss: torch.Tensor = doubled(model(given[0])).mean()
        return loss

    ran(workload(criterion=None, loss_fn=loss_fn))
    assert not seen
    doubled(torch.ones(2))
    assert len(seen) == 1
