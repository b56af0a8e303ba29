"""Losses of large heads by chunks of rows agree with the plain ones, and hold less."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.checkpoint import checkpoint

import autofit
from autofit import Plan, Workload
from autofit.registry import load_strategies
from autofit.testing import check_strategy
from tests.strategies.trainings import offered, training

(STRATEGY,) = load_strategies(["head_loss"])
SETTING = "head_loss.rows"
without_logits: Any = import_module("autofit.strategies.deferred_logits")  # lies elsewhere
deferred, LogitsLost = without_logits.deferred, without_logits.LogitsLost

CLASSES, WIDTH, LENGTH = 4096, 16, 24
Loss = Callable[[Any, Tensor], Any]


class Language(nn.Module):
    """ids (n, length) -> logits (n, length, classes)."""

    def __init__(self, *, inner: int = 4 * WIDTH, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


class Recomputed(Language):
    """Runs its head a second time by torch's older checkpoint, which runs it in the backward."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.embedding(ids))
        return self.head(hidden) + checkpoint(self.head, hidden, use_reentrant=True)


def frozen(kind: type[Language] = Language) -> Language:
    made = kind()
    made.head.requires_grad_(False)
    return made


def batch(samples: int = 3) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(CLASSES, (samples, LENGTH + 1), generator=drawn)
    targets = ids[:, 1:].clone()
    targets[0, 5:] = -100
    return ids[:, :-1], targets


def flat(logits: Tensor, targets: Tensor, **given: Any) -> Any:
    targets = targets.where(targets >= 0, given.get("ignore_index", -100)).reshape(-1)
    return cross_entropy(logits.view(-1, CLASSES), targets, **given)


def transposed(logits: Tensor, targets: Tensor, **given: Any) -> Tensor:
    return cross_entropy(logits.transpose(1, 2), targets, **given)


def reshaped(logits: Tensor, targets: Tensor) -> Tensor:
    assert logits.shape[-1] == CLASSES
    assert logits.is_floating_point()
    rows = torch.reshape(logits.to(torch.float64), (len(logits) * LENGTH, -1))
    return cross_entropy(rows, targets.reshape(-1))


WEIGHT = torch.linspace(0.1, 2.0, CLASSES)
BY_CHUNKS: dict[str, Loss] = {
    "flat": flat,
    "shifted": lambda logits, targets: cross_entropy(
        logits[..., :-1, :].contiguous().float().view(-1, CLASSES), targets[..., 1:].reshape(-1)
    ),
    "transposed": transposed,
    "permuted": lambda logits, targets: nn.CrossEntropyLoss()(
        torch.permute(logits, (0, 2, 1)), targets
    ),
    "flattened": lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
    "reshaped": reshaped,
    "by named arguments": lambda logits, targets: cross_entropy(
        logits.transpose(dim0=1, dim1=2), targets
    ),
    "of some rows": lambda logits, targets: flat(logits[1:, ::2].contiguous(), targets[1:, ::2]),
    "of one sample": lambda logits, targets: cross_entropy(logits[0], targets[0]),
    "of a grid": lambda logits, targets: cross_entropy(
        logits.view(-1, 4, 6, CLASSES).permute(0, 3, 1, 2).float(), targets.view(-1, 4, 6)
    ),
    "sum": partial(flat, reduction="sum"),
    "other index": partial(flat, ignore_index=7),
    "smoothed": partial(flat, label_smoothing=0.1),
    "weighted": partial(flat, weight=WEIGHT),
    "all options": partial(flat, weight=WEIGHT, label_smoothing=0.1, ignore_index=7),
    "weighted sum": partial(transposed, weight=WEIGHT, reduction="sum"),
}


def changed_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.view(-1, CLASSES)
    logits[..., :10] = 0.5
    return cross_entropy(rows, targets.reshape(-1))


def divided_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.float().view(-1, CLASSES)
    rows.div_(2.0)
    return cross_entropy(rows, targets.reshape(-1))


AS_BEFORE: dict[str, Loss] = {
    "capped": lambda logits, targets: flat(torch.tanh(logits / 30) * 30, targets),
    "of each row": lambda logits, targets: flat(logits, targets, reduction="none").square().mean(),
    "of probabilities": lambda logits, targets: cross_entropy(
        logits.view(-1, CLASSES),
        one_hot(targets.clamp(min=0), CLASSES).float().view(-1, CLASSES),
    ),
    "changed in place": changed_in_place,
    "divided in place": divided_in_place,
    "across classes": lambda logits, targets: flat(logits[..., list(range(CLASSES))], targets),
    "of some classes": lambda logits, targets: cross_entropy(
        logits[..., : CLASSES // 2].reshape(-1, CLASSES // 2),
        targets.clamp(max=CLASSES // 2 - 1).reshape(-1),
    ),
    "through a mask": lambda logits, targets: cross_entropy(
        logits[targets >= 0], targets[targets >= 0]
    ),
}


def stepped(
    made: nn.Module, loss: Loss, rows: int, within: AbstractContextManager[Any] | None = None
) -> tuple[Tensor, dict[str, Tensor], list[bool]]:
    """Return loss, gradients by name, and for each run of the head whether it went by chunks."""
    runs: list[Any] = []
    heads = [each for each in made.modules() if isinstance(each, nn.Linear)][-1:] if rows else []
    ids, targets = batch()
    with deferred(heads, rows or 1, runs.append), within or nullcontext():
        value = loss(made(ids), targets)
    value.backward()
    gradients = {n: p.grad for n, p in made.named_parameters() if p.grad is not None}
    return value.detach(), gradients, [run.logits is None for run in runs]


def check_equal(
    build: Callable[[], nn.Module], loss: Loss, rows: int = 7, apart: float = 1e-4, **given: Any
) -> list[bool]:
    """Compare a step with a plain one; return for each run of the head if it went by chunks."""
    plain, of_plain, _ = stepped(build(), loss, 0, **given)
    value, gradients, by_chunks = stepped(build(), loss, rows, **given)
    torch.testing.assert_close(value, plain, rtol=apart / 10, atol=1e-6)
    assert gradients.keys() == of_plain.keys()
    for name, gradient in gradients.items():
        assert (gradient - of_plain[name]).norm() <= apart * of_plain[name].norm(), name
    return by_chunks


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 7) for name in BY_CHUNKS), ("flat", 1), ("flat", 1000)]
)
def test_a_loss_by_chunks_is_the_plain_one(name: str, rows: int) -> None:
    assert check_equal(partial(Language, bias=True), BY_CHUNKS[name], rows) == [True]


@pytest.mark.parametrize("name", AS_BEFORE)
def test_other_losses_take_the_logits(name: str) -> None:
    assert check_equal(Language, AS_BEFORE[name]) == [False]


def test_logits_that_are_needed_besides_are_made_too() -> None:
    def with_a_penalty(logits: Tensor, targets: Tensor) -> Any:
        return flat(logits, targets) + 1e-3 * logits.logsumexp(-1).square().mean()

    check_equal(partial(Language, tied=True), with_a_penalty)


@pytest.mark.parametrize(
    ("build", "by_chunks"),
    [(partial(Language, tied=True), True), (frozen, True), (Recomputed, False)],
)
def test_a_head_gets_the_gradients_of_all_its_uses(
    build: Callable[[], nn.Module], by_chunks: bool
) -> None:
    assert check_equal(build, flat)[0] is by_chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_as_much_as_plain_training(dtype: torch.dtype) -> None:
    within = torch.autocast("cpu", dtype)
    assert check_equal(Language, flat, apart=0.02, within=within) == [True]


def test_a_head_in_half_precision_is_added_up_in_float32() -> None:
    value, _, by_chunks = stepped(Language().bfloat16(), flat, 7)
    exact, _, _ = stepped(Language().bfloat16().float(), flat, 0)
    assert by_chunks == [True]
    assert value.dtype == torch.bfloat16
    torch.testing.assert_close(value.float(), exact, rtol=4e-3, atol=0.0)


def test_metrics_and_hooks_see_the_logits() -> None:
    seen: list[Tensor] = []
    made, (ids, targets) = Language(), batch()
    wanted = made(ids).detach()
    made.head.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    with deferred([made.head], 7):
        logits = made(ids)
        loss = flat(logits, targets)
        right = (logits.argmax(-1) == wanted.argmax(-1)).all()
    loss.backward()
    assert right
    torch.testing.assert_close(seen[0], wanted)
    torch.testing.assert_close(logits.detach(), wanted)
    torch.testing.assert_close(torch.ops.aten.exp(logits), wanted.exp())  # no torch function
    assert made.head.weight.grad is not None


# What sees no torch function: gradients reach the model as in plain training. Transforms, hooks,
# checkpoints, penalties and compiled losses are in `test_every_usage`.


class Function(torch.autograd.Function):
    """Does to its input what it is told; the gradient goes back multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, act: Callable[[Any, Tensor], Tensor], by: float) -> Any:
        ctx.factor = by
        return act(ctx, logits)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        return outer[0] * ctx.factor, None, None


apply: Any = Function.apply


def overwritten(targets: Tensor, ctx: Any, logits: Tensor) -> Tensor:
    """A loss that writes its gradient over the logits, as fused kernels do."""
    with torch.enable_grad():
        rows = logits.detach().clone().requires_grad_()
        loss = cross_entropy(rows, targets)
    (gradient,) = torch.autograd.grad(loss, rows)
    ctx.factor = logits.detach().copy_(gradient)
    return loss.detach()


def halved(logits: Tensor) -> Tensor:
    return apply(logits, lambda ctx, given: given * 0.5, 0.5)


def of_a_function(logits: Tensor, targets: Tensor) -> Any:
    return flat(halved(logits.view(-1, CLASSES).float()), targets)


def of_logits_marked_dirty(logits: Tensor, targets: Tensor) -> Any:
    rows = logits.view(-1, CLASSES)
    apply(logits, lambda ctx, given: ctx.mark_dirty(given.mul_(0.5)) or given, 0.5)
    return flat(rows, targets)


def changed_in_place_before_a_function(logits: Any, targets: Tensor) -> Any:
    logits.mul_(0.5)
    return hooked_before_a_function(logits, targets)


def hooked_before_a_function(logits: Any, targets: Tensor) -> Any:
    logits.register_hook(lambda gradient: gradient * 2)
    return of_a_function(logits, targets)


@torch.jit.script
def _scripted(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.view(-1, logits.size(-1)) * 0.5, targets.view(-1)
    )


def of_a_view_without_gradients(logits: Tensor, targets: Tensor) -> Any:
    with torch.no_grad():
        rows = logits.view(-1, CLASSES)
    return flat(rows, targets)


def of_a_copy_before_a_change(logits: Tensor, targets: Tensor) -> Any:
    loss = flat(logits.double(), targets)
    logits.mul_(2)
    return loss


UNSEEN: dict[str, Loss] = {
    "a function": of_a_function,
    "reversed gradients": lambda logits, targets: flat(
        apply(logits, lambda ctx, given: given, -1.0), targets
    ),
    "marked dirty": of_logits_marked_dirty,
    "a fused kernel": lambda logits, targets: apply(
        logits.view(-1, CLASSES), partial(overwritten, targets.reshape(-1)), 1.0
    ),
    "changed before a function": changed_in_place_before_a_function,
    "hooked before a function": hooked_before_a_function,
    "scripted": lambda logits, targets: _scripted(logits, targets.contiguous()),
    "view without gradients": of_a_view_without_gradients,
    "copy before a change": of_a_copy_before_a_change,
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_sees_no_torch_function_trains_the_model(name: str) -> None:
    assert check_equal(partial(Language, bias=True), UNSEEN[name]) == [False]


# What plain training refuses or gives another value for: refused.

CHANGES: dict[str, Callable[[Language, Tensor], Any]] = {
    "hidden": lambda made, hidden: hidden.mul_(0.5),
    "a view": lambda made, hidden: hidden.view(-1)[:5].zero_(),
    "bias": lambda made, hidden: made.head.bias.detach().add_(1),
    "weight": lambda made, hidden: torch._foreach_mul_([made.head.weight.detach()], 0.5),
}


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_the_head_ran_gives_no_other_loss(
    change: str, is_frozen: bool
) -> None:
    made, (ids, targets) = Language(bias=True), batch()
    made.head.requires_grad_(not is_frozen)
    with deferred([made.head], 7):
        hidden = made.body(made.embedding(ids))
        logits = made.head(hidden)
        CHANGES[change](made, hidden)
        with pytest.raises(LogitsLost, match=r"changed in place.*head_loss\.rows=0"):
            flat(logits, targets)


def test_logits_cannot_be_made_of_other_weights() -> None:
    made, (inputs, targets) = Language(), batch()
    with deferred([made.head], 16):
        logits = made(inputs)
        flat(logits, targets).backward()
        made.head.weight.detach().add_(1)
        with pytest.raises(LogitsLost, match=r"head_loss\.rows=0"):
            logits.argmax(-1)


def test_a_weight_that_is_replaced_after_the_head_ran_is_not_used() -> None:
    def replaced(logits: Tensor, targets: Tensor) -> Any:
        made.head.weight = nn.Parameter(torch.zeros_like(made.head.weight))
        return flat(logits, targets)

    made = Language()
    value, _, by_chunks = stepped(made, replaced, 7)
    assert by_chunks == [True]
    torch.testing.assert_close(value, stepped(Language(), flat, 0)[0])


@pytest.mark.parametrize("chunks", [1, 4])
def test_targets_that_are_more_than_the_rows_are_refused(chunks: int) -> None:
    """Also where the rows are whole chunks, so that each chunk has targets enough."""
    made, (ids, targets) = Language(), batch()
    with deferred([made.head], -(-targets.numel() // chunks)):
        rows = made(ids).view(-1, CLASSES)
        with pytest.raises(ValueError, match="batch_size"):
            cross_entropy(rows, targets.reshape(-1).repeat(2))


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, logits: logits.register_hook(lambda gradient: gradient * 2),
        lambda loss, logits: torch.autograd.grad(loss, [logits], allow_unused=True),
    ],
    ids=["hook", "gradients"],
)
def test_gradients_of_logits_cannot_be_asked_for_after_the_loss(ask: Loss) -> None:
    made, (ids, targets) = Language(), batch()
    with deferred([made.head], 7):
        logits = made(ids)
        loss = flat(logits, targets)
        with pytest.raises(LogitsLost, match=r"gradient.*head_loss\.rows=0"):
            ask(loss, logits)


def test_evaluation_gets_plain_logits_and_leaving_restores_the_head() -> None:
    made, (ids, _) = Language(), batch()
    with deferred([made.head], 7):
        with torch.no_grad():
            assert type(made(ids)) is Tensor
        assert type(made(ids)) is without_logits.DeferredLogits
    assert "forward" not in vars(made.head)
    assert type(made(ids)) is Tensor


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_made_meanwhile_runs_plainly_with_its_own_weights(copied: Any) -> None:
    made, (ids, _) = Language(), batch()
    with deferred([made.head], 7):
        other = copied(made)
    nn.init.zeros_(other.head.weight)
    logits = other(ids)
    assert type(logits) is Tensor
    assert not logits.any()


def test_gradients_of_many_chunks_are_added_up_in_float32() -> None:
    """Each chunk adds about as much; in bfloat16 the sum would stop growing."""
    torch.manual_seed(0)
    head, rows = nn.Linear(WIDTH, 64).bfloat16(), torch.randn(4096, WIDTH).bfloat16()
    exact = copy.deepcopy(head).double()
    targets = torch.zeros(len(rows), dtype=torch.long)
    with deferred([head], 4):
        torch.autograd.backward(cross_entropy(head(rows), targets))
    torch.autograd.backward(cross_entropy(exact(rows.double()), targets))
    pairs: Any = zip(head.parameters(), exact.parameters(), strict=True)
    for given, wanted in pairs:
        assert (given.grad - wanted.grad).norm() < 0.02 * wanted.grad.norm()


@pytest.mark.parametrize("is_half", [True, False])
def test_rows_of_one_class_do_not_outgrow_float16(is_half: bool) -> None:
    """Of an input of 40 they add up to 80,000, before the mean is taken."""

    def gradient(rows: int) -> Tensor:
        torch.manual_seed(0)
        head: Any = nn.Linear(WIDTH, 64)
        inputs, targets = 40 + torch.randn(2048, WIDTH), torch.zeros(2048, dtype=torch.long)
        if is_half:
            head, inputs = head.half(), inputs.half()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with deferred([head] if rows else [], rows), torch.autocast("cpu", torch.float16):
            loss = cross_entropy(head(inputs), targets)
        torch.autograd.backward(scaler.scale(loss))
        return head.weight.grad.float()

    plain = gradient(0)
    assert (gradient(2048) - plain).norm() < 1e-3 * plain.norm()


def twice(loss: Tensor, model: Language) -> None:
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


def with_a_graph(loss: Tensor, model: Language) -> None:
    torch.autograd.grad(loss, model.embedding.weight, create_graph=True)


@pytest.mark.parametrize(
    ("differentiate", "words"), [(with_a_graph, "differentiated once"), (twice, "once")]
)
def test_a_loss_is_differentiated_once(
    differentiate: Callable[[Tensor, Language], None], words: str
) -> None:
    made, (inputs, targets) = Language(), batch()
    with deferred([made.head], 16):
        loss = flat(made(inputs), targets)
    with pytest.raises(RuntimeError, match=words):
        differentiate(loss, made)


ON_TWO_RANKS = """
import json
import os
from functools import partial

import torch
from torch import nn

from autofit.equivalence.steps import StrategyContext
from autofit.devices.cpu import CpuDevice
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import collect_dimensions, load_strategies
from autofit.strategy import World
from autofit.training.builder import TrainingBuilder
from autofit.training.workload import Workload

rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
seen = set()


def loss(model, batch):
    logits = model(batch[0])
    seen.add(type(logits).__name__)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4096, 8), nn.Linear(8, 4096))
    torch.manual_seed(rank)
    words = torch.randint(0, 4096, (4, 6))
    make = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
    return Workload(model, (words, words), loss_fn=loss, optimizer=make)


strategies = load_strategies(["head_loss", "parallel"], ranks=2)
builder = TrainingBuilder(workload, CpuDevice(), 0, World(rank, rank, 2))
offered = collect_dimensions([each for each in strategies if each.name == "head_loss"],
                             StrategyContext(builder, []))["head_loss.rows"]
found = {}
for mode in offered.when["parallel.mode"][:-1]:
    for rows in (0, 7):
        settings = {"parallel.mode": mode, "head_loss.rows": rows}
        payloads = {"head_loss.rows": offered.payloads[256]} if rows else {}
        plan = Plan(2, accumulation_steps=2, settings=settings, ranks=2)
        seen.clear()
        made = workload()
        with builder.training(made, ResolvedPlan(plan, payloads, strategies)) as training:
            losses = [float(training.step(made.batch(4))) for _ in range(2)]
        weights = torch.cat([p.detach().flatten() for p in made.model.parameters()])
        found[f"{mode} {rows}"] = [losses, float(weights.square().sum()), sorted(seen)]
if rank == 0:
    print(json.dumps(found), flush=True)
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads abort some processes that exit by themselves
"""


@pytest.mark.slow
def test_replicas_of_two_ranks_train_alike(
    on_two_ranks: Callable[[Path, str], Any], tmp_path: Path
) -> None:
    found = on_two_ranks(tmp_path, ON_TWO_RANKS)
    assert len(found) == 6
    for mode in ("ddp", "ddp_view", "zero1"):
        (plain, of_plain, _), (losses, weights, seen) = found[f"{mode} 0"], found[f"{mode} 7"]
        assert seen == ["DeferredLogits"]
        assert plain[1] < 0.99 * plain[0]
        assert losses == pytest.approx(plain, rel=1e-5)
        assert weights == pytest.approx(of_plain, rel=1e-6)


def workload(loss: Loss = flat, build: Callable[[], nn.Module] = Language) -> Workload:
    return Workload(build, batch(4), criterion=loss)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_conformance(device: str) -> None:
    assert check_strategy("head_loss", workloads=[workload], device=device) == 3


def beside_a_transform(logits: Tensor, targets: Tensor) -> Any:
    return flat(logits, targets) + torch.func.grad(torch.sum)(torch.ones(3)).sum()


@pytest.mark.parametrize("loss", [flat, beside_a_transform])
def test_it_is_offered_where_a_transform_hides_what_is_saved_too(loss: Loss) -> None:
    """Nobody knows its share then, nor what it would save."""
    dimension, notes = offered(STRATEGY, SETTING, partial(workload, loss))
    assert dimension.values == (0, 2048, 256)
    assert bool(dimension.hints) is (loss is flat)
    assert not any("of a sample's memory" in note for note in notes)


class Overwritten(Language):
    """Changes the input of its head in place, which plain training allows of a frozen one."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.embedding(ids))
        logits = self.head(hidden)
        hidden.zero_()
        return logits


def classified(classes: int) -> Workload:
    """Of one row a sample."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, classes))
    samples = torch.randn(4, 8), torch.randint(100, (4,))
    return Workload(model, samples, criterion=cross_entropy)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (partial(workload, AS_BEFORE["capped"]), ""),
        (partial(workload, AS_BEFORE["of each row"]), ""),
        (partial(workload, flat, partial(frozen, Overwritten)), "head_loss.rows skipped"),
        (partial(classified, 100), ""),
        (partial(classified, CLASSES), ""),
        (partial(workload, flat, partial(Language, inner=16 * CLASSES)), "of a sample's memory"),
    ],
    ids=["capped", "each row", "overwritten", "few classes", "few rows", "large body"],
)
def test_it_is_not_offered_where_the_logits_are_needed_or_few(
    build: Callable[[], Workload], words: str
) -> None:
    dimension, notes = offered(STRATEGY, SETTING, build)
    assert dimension is None
    assert words in "".join(notes)


@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, {"checkpointing.level": 1}])
def test_a_plan_with_it_holds_less_beside_any_other_setting(others: dict[str, Any]) -> None:
    """Beside checkpointing and accumulation; `test_pairs` has the rest."""
    peaks, losses = [], []
    for rows in (0, 256):
        plan = Plan.split(160, 80, settings={**others, SETTING: rows})
        trial = autofit.soak(workload(), plan=plan, device="cpu", vram_budget="512MiB", steps=8)
        assert trial.ok, trial.measurement.detail
        peaks.append(trial.measurement.peak_allocated_bytes or 0)
        losses.append(trial.measurement.loss)
    assert peaks[1] < 0.7 * peaks[0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_another_model_than_the_searched_one_is_refused_in_words() -> None:
    other = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES))
    payloads = {SETTING: {"heads": ["head"]}}
    with pytest.raises(autofit.AutofitError, match=r"head_loss\.rows.*head"):
        training(other, STRATEGY, payloads=payloads, settings={SETTING: 256})
