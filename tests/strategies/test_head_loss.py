"""Losses of large heads by chunks of rows agree with the plain ones, and hold less."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autofit
from autofit.equivalence.steps import PlainContext
from autofit.plan import Plan, ResolvedPlan
from autofit.testing.conformance import check_strategy
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

head_loss: Any = import_module("autofit.strategies.head_loss")  # lies elsewhere in the tree
HeadLoss: Any = head_loss.HeadLoss
without_logits: Any = import_module("autofit.strategies.deferred_logits")
deferred, LogitsLost = without_logits.deferred, without_logits.LogitsLost
DeferredLogits: Any = without_logits.DeferredLogits

CLASSES, WIDTH, LENGTH = 4096, 16, 24
Loss = Callable[[Tensor, Tensor], Any]


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Language(nn.Module):
    """ids (n, length) -> logits (n, length, classes)."""

    def __init__(self, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Sequential(*(_block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


def model(**given: bool) -> Language:
    torch.manual_seed(0)
    return Language(**given)


def batch(samples: int = 3) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(CLASSES, (samples, LENGTH + 1), generator=drawn)
    targets = ids[:, 1:].clone()
    targets[0, 5:] = -100
    return ids[:, :-1], targets


def flat(logits: Tensor, targets: Tensor, **given: Any) -> Any:
    targets = targets.where(targets >= 0, given.get("ignore_index", -100)).reshape(-1)
    return functional.cross_entropy(logits.view(-1, CLASSES), targets, **given)


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits[..., :-1, :].contiguous().float()
    return functional.cross_entropy(rows.view(-1, rows.size(-1)), targets[..., 1:].reshape(-1))


def transposed(logits: Tensor, targets: Tensor, **given: Any) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), targets, **given)


def permuted(logits: Tensor, targets: Tensor) -> Any:
    return nn.CrossEntropyLoss()(torch.permute(logits, (0, 2, 1)), targets)


def flattened(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def reshaped(logits: Tensor, targets: Tensor) -> Tensor:
    assert logits.shape[-1] == CLASSES
    assert logits.is_floating_point()
    rows = torch.reshape(logits.to(torch.float64), (len(logits) * LENGTH, -1))
    return functional.cross_entropy(rows, targets.reshape(-1))


def by_named_arguments(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(dim0=1, dim1=2), targets)


def of_some_rows(logits: Tensor, targets: Tensor) -> Any:
    return flat(logits[1:, ::2].contiguous(), targets[1:, ::2])


def of_one_sample(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits[0], targets[0])


def of_a_grid(logits: Tensor, targets: Tensor) -> Tensor:
    grid = logits.view(-1, 4, 6, CLASSES).permute(0, 3, 1, 2)
    return functional.cross_entropy(grid.float(), targets.view(-1, 4, 6))


WEIGHT = torch.linspace(0.1, 2.0, CLASSES)
BY_CHUNKS: Sequence[Loss] = (
    flat,
    shifted,
    transposed,
    permuted,
    flattened,
    reshaped,
    by_named_arguments,
    of_some_rows,
    of_one_sample,
    of_a_grid,
    partial(flat, reduction="sum"),
    partial(flat, ignore_index=7),
    partial(flat, label_smoothing=0.1),
    partial(flat, weight=WEIGHT),
    partial(flat, weight=WEIGHT, label_smoothing=0.1, ignore_index=7),
    partial(transposed, weight=WEIGHT, reduction="sum"),
)


def capped(logits: Tensor, targets: Tensor) -> Any:
    return flat(torch.tanh(logits / 30) * 30, targets)


def of_each_row(logits: Tensor, targets: Tensor) -> Any:
    return flat(logits, targets, reduction="none").square().mean()


def of_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    shares = functional.one_hot(targets.clamp(min=0), CLASSES).float().view(-1, CLASSES)
    return functional.cross_entropy(logits.view(-1, CLASSES), shares)


def changed_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.view(-1, CLASSES)
    logits[..., :10] = 0.5
    return functional.cross_entropy(rows, targets.reshape(-1))


def divided_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.float().view(-1, CLASSES)
    rows.div_(2.0)
    return functional.cross_entropy(rows, targets.reshape(-1))


def across_classes(logits: Tensor, targets: Tensor) -> Any:
    return flat(logits[..., list(range(CLASSES))], targets)


def of_some_classes(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits[..., : CLASSES // 2].reshape(-1, CLASSES // 2)
    return functional.cross_entropy(rows, targets.clamp(max=CLASSES // 2 - 1).reshape(-1))


def through_a_mask(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits[targets >= 0], targets[targets >= 0])


def with_a_penalty(logits: Tensor, targets: Tensor) -> Any:
    return flat(logits, targets) + 1e-3 * logits.logsumexp(-1).square().mean()


AS_BEFORE: Sequence[Loss] = (
    capped,
    of_each_row,
    of_probabilities,
    changed_in_place,
    divided_in_place,
    across_classes,
    of_some_classes,
    through_a_mask,
)


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


def check_equal(given: dict[str, Any], loss: Loss, rows: int) -> list[bool]:
    plain, of_plain, _ = stepped(model(**given), loss, 0)
    value, gradients, by_chunks = stepped(model(**given), loss, rows)
    torch.testing.assert_close(value, plain, rtol=1e-4, atol=1e-6)
    assert gradients.keys() == of_plain.keys()
    for name, gradient in gradients.items():
        assert (gradient - of_plain[name]).norm() <= 1e-4 * of_plain[name].norm()
    return by_chunks


@pytest.mark.parametrize(
    ("loss", "rows"), [*((loss, 7) for loss in BY_CHUNKS), (flat, 1), (flat, 1000)]
)
def test_a_loss_by_chunks_is_the_plain_one(loss: Loss, rows: int) -> None:
    assert check_equal({"bias": True}, loss, rows) == [True]


@pytest.mark.parametrize("loss", AS_BEFORE)
def test_other_losses_take_the_logits(loss: Loss) -> None:
    assert check_equal({}, loss, 7) == [False]


def test_logits_that_are_needed_besides_are_made_too() -> None:
    check_equal({"tied": True}, with_a_penalty, 7)


def test_a_tied_head_gets_the_gradients_of_both_uses() -> None:
    assert check_equal({"tied": True}, flat, 7) == [True]


class Recomputed(Language):
    """Runs its head a second time by torch's older checkpoint, which runs it in the backward."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.embedding(ids))
        return self.head(hidden) + checkpoint(self.head, hidden, use_reentrant=True)


def test_a_head_that_is_recomputed_gets_the_gradients_of_both_runs() -> None:
    ids, targets = batch()
    plain, other = Recomputed(), Recomputed()
    other.load_state_dict(plain.state_dict())
    flat(plain(ids), targets).backward()
    with deferred([other.head], 7):
        flat(other(ids), targets).backward()
    for one, wanted in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def test_a_frozen_head_gets_no_gradient() -> None:
    frozen = model()
    frozen.head.requires_grad_(False)
    _, gradients, by_chunks = stepped(frozen, flat, 7)
    _, plain, _ = stepped(model(), flat, 0)
    assert by_chunks == [True]
    assert "head.weight" not in gradients
    torch.testing.assert_close(gradients["body.0.0.weight"], plain["body.0.0.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_as_much_as_plain_training(dtype: torch.dtype) -> None:
    plain, of_plain, _ = stepped(model(), flat, 0, torch.autocast("cpu", dtype))
    value, gradients, by_chunks = stepped(model(), flat, 7, torch.autocast("cpu", dtype))
    assert by_chunks == [True]
    assert value.dtype == plain.dtype
    torch.testing.assert_close(value, plain, rtol=2e-3, atol=0.0)
    for name, gradient in gradients.items():
        apart = (gradient - of_plain[name]).norm() / of_plain[name].norm()
        assert apart < 0.02


def test_a_head_in_half_precision_is_added_up_in_float32() -> None:
    value, _, by_chunks = stepped(model().bfloat16(), flat, 7)
    exact, _, _ = stepped(model().bfloat16().float(), flat, 0)
    assert by_chunks == [True]
    assert value.dtype == torch.bfloat16
    torch.testing.assert_close(value.float(), exact, rtol=4e-3, atol=0.0)


def test_metrics_and_hooks_see_the_logits() -> None:
    seen: list[Tensor] = []
    made, (ids, targets) = model(), batch()
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


# What sees no torch function: gradients reach the model as in plain training.


class Scaled(torch.autograd.Function):
    """Half of its input, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits * 0.5

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        return outer[0] * 0.5


class Reversed(torch.autograd.Function):
    """Returns its very input, and the opposite of its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        return -outer[0]


class Halved(torch.autograd.Function):
    """Halves its input in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits.mul_(0.5))
        return logits

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        return outer[0] * 0.5


class Overwriting(torch.autograd.Function):
    """A loss that writes its gradient over the logits, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            rows = logits.detach().clone().requires_grad_()
            loss = functional.cross_entropy(rows, targets)
            (gradient,) = torch.autograd.grad(loss, rows)
        ctx.save_for_backward(logits.detach().copy_(gradient))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * outer[0], None


def of_a_function(logits: Tensor, targets: Tensor) -> Any:
    return flat(Scaled.apply(logits.view(-1, CLASSES).float()), targets)  # type: ignore[no-untyped-call]  # torch's


def of_reversed_gradients(logits: Tensor, targets: Tensor) -> Any:
    return flat(Reversed.apply(logits), targets)  # type: ignore[no-untyped-call]  # torch's


def of_logits_marked_dirty(logits: Tensor, targets: Tensor) -> Any:
    rows = logits.view(-1, CLASSES)
    Halved.apply(logits)  # type: ignore[no-untyped-call]  # torch's
    return flat(rows, targets)


def by_a_fused_kernel(logits: Tensor, targets: Tensor) -> Any:
    return Overwriting.apply(logits.view(-1, CLASSES), targets.reshape(-1))  # type: ignore[no-untyped-call]  # torch's


def changed_in_place_before_a_function(logits: Any, targets: Tensor) -> Any:
    logits.mul_(0.5)
    logits.register_hook(lambda gradient: gradient * 2)
    return of_a_function(logits, targets)


def hooked_before_a_function(logits: Any, targets: Tensor) -> Any:
    logits.register_hook(lambda gradient: gradient * 2)
    return of_a_function(logits, targets)


def of_each_sample_by_vmap(logits: Tensor, targets: Tensor) -> Any:
    return torch.vmap(functional.cross_entropy)(logits, targets.clamp(min=0)).mean()


def in_a_reentrant_checkpoint(logits: Tensor, targets: Tensor) -> Any:
    return checkpoint(flat, logits, targets, use_reentrant=True)


@torch.jit.script
def _scripted(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)) * 0.5, targets.view(-1))


def scripted(logits: Tensor, targets: Tensor) -> Any:
    return _scripted(logits, targets.contiguous())


@torch.compile(backend="aot_eager")
def _compiled(rows: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(rows * 0.5, targets)


def compiled(logits: Tensor, targets: Tensor) -> Any:
    return _compiled(logits.view(-1, CLASSES), targets.reshape(-1))


def under_a_gradient_penalty(logits: Tensor, targets: Tensor) -> Any:
    loss = flat(Scaled.apply(logits), targets)  # type: ignore[no-untyped-call]  # torch's
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    return loss + 100 * gradient.square().sum()


def of_a_view_without_gradients(logits: Tensor, targets: Tensor) -> Any:
    with torch.no_grad():
        rows = logits.view(-1, CLASSES)
    return flat(rows, targets)


def of_a_copy_before_a_change(logits: Tensor, targets: Tensor) -> Any:
    loss = flat(logits.double(), targets)
    logits.mul_(2)
    return loss


@pytest.mark.parametrize(
    "loss",
    [
        of_a_function,
        of_reversed_gradients,
        of_logits_marked_dirty,
        by_a_fused_kernel,
        changed_in_place_before_a_function,
        hooked_before_a_function,
        of_each_sample_by_vmap,
        in_a_reentrant_checkpoint,
        scripted,
        compiled,
        under_a_gradient_penalty,
        of_a_view_without_gradients,
        of_a_copy_before_a_change,
    ],
)
def test_what_sees_no_torch_function_trains_the_model(loss: Loss) -> None:
    assert check_equal({"bias": True}, loss, 7) == [False]


@pytest.mark.parametrize("where", ["full", "pre", "global"])
def test_backward_hooks_of_the_head_leave_the_gradients(where: str) -> None:
    def gradients(rows: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        made, seen = model(), list[Tensor]()

        def note(module: nn.Module, *gradients: Any) -> None:
            if module is made.head:
                seen.append(gradients[-1][0].detach().clone())

        register: Any = {
            "full": made.head.register_full_backward_hook,
            "pre": made.head.register_full_backward_pre_hook,
            "global": nn.modules.module.register_module_full_backward_hook,
        }[where]
        handle = register(note)
        try:
            return stepped(made, flat, rows)[1], seen
        finally:
            handle.remove()

    (found, seen), (wanted, plainly_seen) = gradients(7), gradients(0)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(seen, plainly_seen)


def transformed(module: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    parameters = dict(module.named_parameters())

    def loss(parameters: Any) -> Any:
        return flat(torch.func.functional_call(module, parameters, (ids,)), targets)

    return torch.func.grad(loss)(parameters)["head.weight"]


def of_a_direction(module: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    weight = module.get_parameter("embedding.weight").detach()

    def loss(weight: Tensor) -> Any:
        return flat(torch.func.functional_call(module, {"embedding.weight": weight}, ids), targets)

    return torch.stack(torch.func.jvp(loss, (weight,), (torch.ones_like(weight),)))


@pytest.mark.parametrize("transform", [transformed, of_a_direction])
def test_transforms_see_the_logits(transform: Callable[..., Tensor]) -> None:
    made = model()
    wanted = transform(made, *batch())
    with deferred([made.head], 7):
        torch.testing.assert_close(transform(made, *batch()), wanted)


# What plain training refuses or gives another value for: refused.


def of_changed_hidden(made: Language, hidden: Tensor) -> None:
    hidden.mul_(0.5)


def of_a_changed_view(made: Language, hidden: Tensor) -> None:
    hidden.view(-1)[:5].zero_()


def of_a_changed_bias(made: Language, hidden: Tensor) -> None:
    with torch.no_grad():
        made.head.bias.add_(1)


def of_a_changed_weight(made: Language, hidden: Tensor) -> None:
    torch._foreach_mul_([made.head.weight.detach()], 0.5)


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize(
    "change", [of_changed_hidden, of_a_changed_view, of_a_changed_bias, of_a_changed_weight]
)
def test_what_has_changed_since_the_head_ran_gives_no_other_loss(
    change: Callable[[Language, Tensor], None], is_frozen: bool
) -> None:
    made, (ids, targets) = model(bias=True), batch()
    made.head.requires_grad_(not is_frozen)
    with deferred([made.head], 7):
        hidden = made.body(made.embedding(ids))
        logits = made.head(hidden)
        change(made, hidden)
        with pytest.raises(LogitsLost, match=r"changed in place.*head_loss\.rows=0"):
            flat(logits, targets)


def test_a_weight_that_is_replaced_after_the_head_ran_is_not_used() -> None:
    def replaced(logits: Tensor, targets: Tensor) -> Any:
        made.head.weight = nn.Parameter(torch.zeros_like(made.head.weight))
        return flat(logits, targets)

    made = model()
    value, _, by_chunks = stepped(made, replaced, 7)
    wanted, _, _ = stepped(model(), flat, 0)
    assert by_chunks == [True]
    torch.testing.assert_close(value, wanted)


@pytest.mark.parametrize("chunks", [1, 4])
def test_targets_that_are_more_than_the_rows_are_refused(chunks: int) -> None:
    """Also where the rows are whole chunks, so that each chunk has targets enough."""
    made, (ids, targets) = model(), batch()
    with deferred([made.head], -(-targets.numel() // chunks)):
        rows = made(ids).view(-1, CLASSES)
        with pytest.raises(ValueError, match="batch_size"):
            functional.cross_entropy(rows, targets.reshape(-1).repeat(2))


def by_a_late_hook(loss: Tensor, logits: Any) -> None:
    logits.register_hook(lambda gradient: gradient * 2)


def by_late_gradients(loss: Tensor, logits: Tensor) -> None:
    torch.autograd.grad(loss, [logits], allow_unused=True)


@pytest.mark.parametrize("ask", [by_a_late_hook, by_late_gradients])
def test_gradients_of_logits_cannot_be_asked_for_after_the_loss(
    ask: Callable[[Tensor, Tensor], None],
) -> None:
    made, (ids, targets) = model(), batch()
    with deferred([made.head], 7):
        logits = made(ids)
        loss = flat(logits, targets)
        with pytest.raises(LogitsLost, match=r"gradient.*head_loss\.rows=0"):
            ask(loss, logits)


def test_evaluation_gets_plain_logits_and_leaving_restores_the_head() -> None:
    made, (ids, _) = model(), batch()
    with deferred([made.head], 7):
        with torch.no_grad():
            assert type(made(ids)) is Tensor
        assert type(made(ids)) is DeferredLogits
    assert "forward" not in vars(made.head)
    assert type(made(ids)) is Tensor


def test_a_copy_made_meanwhile_runs_plainly_with_its_own_weights() -> None:
    made, (ids, _) = model(), batch()
    with deferred([made.head], 7):
        copies = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    for each in copies:
        with torch.no_grad():
            each.head.weight.zero_()
        logits = each(ids)
        assert type(logits) is Tensor
        assert not logits.any()


def test_gradients_of_many_chunks_are_added_up_in_float32() -> None:
    """Each chunk adds about as much; in bfloat16 the sum would stop growing."""
    torch.manual_seed(0)
    head, rows = nn.Linear(WIDTH, 64).bfloat16(), torch.randn(4096, WIDTH).bfloat16()
    exact = nn.Linear(WIDTH, 64).double()
    exact.load_state_dict(head.state_dict())
    targets = torch.zeros(len(rows), dtype=torch.long)
    with deferred([head], 4):
        torch.autograd.backward(functional.cross_entropy(head(rows), targets))
    torch.autograd.backward(functional.cross_entropy(exact(rows.double()), targets))
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
            loss = functional.cross_entropy(head(inputs), targets)
        torch.autograd.backward(scaler.scale(loss))
        return head.weight.grad.float()

    plain = gradient(0)
    assert (gradient(2048) - plain).norm() < 1e-3 * plain.norm()


def test_logits_cannot_be_made_of_other_weights() -> None:
    made, (inputs, targets) = model(), batch()
    with deferred([made.head], 16):
        logits = made(inputs)
        flat(logits, targets).backward()
        with torch.no_grad():
            made.head.weight += 1
        with pytest.raises(LogitsLost, match=r"head_loss\.rows=0"):
            logits.argmax(-1)


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
    made, (inputs, targets) = model(), batch()
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


strategies = load_strategies(["head_loss", "parallel"], world_size=2)
builder = TrainingBuilder(workload, CpuDevice(), 0, World(rank, rank, 2))
offered = collect_dimensions([each for each in strategies if each.name == "head_loss"],
                             StrategyContext(builder, []))["head_loss.rows"]
found = {}
for mode in offered.when["parallel.mode"][:-1]:
    for rows in (0, 7):
        settings = {"parallel.mode": mode, "head_loss.rows": rows}
        payloads = {"head_loss.rows": offered.payloads[256]} if rows else {}
        plan = Plan(2, accumulation_steps=2, settings=settings, world_size=2)
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


def workload(loss: Loss = flat, build: Callable[[], nn.Module] = model) -> Workload:
    return Workload(build, batch(4), criterion=loss)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_conformance(device: str) -> None:
    assert check_strategy("head_loss", workloads=[workload], device=device) == 3


@pytest.mark.parametrize("loss", [capped, of_each_row])
def test_it_is_not_offered_where_the_loss_needs_the_logits(loss: Loss) -> None:
    context = PlainContext(partial(workload, loss), "cpu")
    assert HeadLoss().dimensions(context) == {}


def beside_a_transform(logits: Tensor, targets: Tensor) -> Any:
    return flat(logits, targets) + torch.func.grad(torch.sum)(torch.ones(3)).sum()


def test_it_is_offered_where_a_transform_hides_what_is_saved() -> None:
    """Nobody knows its share then, nor what it would save."""
    context = PlainContext(partial(workload, beside_a_transform), "cpu")
    dimension = HeadLoss().dimensions(context)[head_loss.SETTING]
    assert list(dimension.values) == [0, *head_loss.ROWS]
    assert not dimension.hints


class Overwritten(Language):
    """Changes the input of its frozen head in place, which plain training allows."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.embedding(ids))
        logits = self.head(hidden)
        hidden.zero_()
        return logits


def test_it_is_not_offered_where_the_input_of_the_head_is_overwritten() -> None:
    def build() -> nn.Module:
        made = Overwritten()
        made.head.requires_grad_(False)
        return made

    context = PlainContext(partial(workload, flat, build), "cpu")
    assert HeadLoss().dimensions(context) == {}
    assert "head_loss.rows skipped" in context.notes[0]


class Wide(Language):
    """Holds far more in its body than logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = (nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))
        self.body = nn.Sequential(*inner)


@pytest.mark.parametrize(("width", "is_offered"), [(64, True), (16 * CLASSES, False)])
def test_logits_that_are_few_beside_activations_are_left_whole(
    width: int, is_offered: bool
) -> None:
    """Without them a micro-batch could hardly be larger."""

    def made() -> Workload:
        torch.manual_seed(0)
        return Workload(Wide(width), batch(), criterion=flat)

    context = PlainContext(made, "cpu")
    assert (head_loss.SETTING in HeadLoss().dimensions(context)) is is_offered
    assert any("of what a sample holds" in note for note in context.notes) is not is_offered


@pytest.mark.parametrize("classes", [100, CLASSES])
def test_it_is_not_offered_for_small_logits(classes: int) -> None:
    """Those of few classes, and of one row a sample."""

    def small() -> Workload:
        made = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, classes))
        samples = torch.randn(4, 8), torch.randint(100, (4,))
        return Workload(made, samples, criterion=functional.cross_entropy)

    assert HeadLoss().dimensions(PlainContext(small, "cpu")) == {}


@pytest.mark.slow
def test_a_plan_with_it_holds_less_beside_any_other_setting() -> None:
    """Beside checkpointing and accumulation; `test_pairs` has the rest."""
    made = workload()
    cases: Sequence[dict[str, Any]] = ({}, {"checkpointing.level": 1})
    for others in cases:
        peaks, losses = [], []
        for rows in (0, 256):
            plan = Plan.split(160, 80, settings={**others, "head_loss.rows": rows})
            trial = autofit.probe(made, plan=plan, device="cpu", vram_budget="512MiB", steps=3)
            assert trial.ok, trial.measurement.detail
            peaks.append(trial.measurement.peak_allocated_bytes or 0)
            losses.append(trial.measurement.loss)
        assert peaks[1] < 0.7 * peaks[0]
        assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_another_model_than_the_searched_one_is_refused_in_words() -> None:
    settings = {"head_loss.rows": 256}
    plan = ResolvedPlan(
        Plan(3, settings=settings), {"head_loss.rows": {"heads": ["head"]}}, (HeadLoss(),)
    )
    other = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with pytest.raises(autofit.AutofitError, match=r"head_loss\.rows.*head"):
        Training(other, optimizer, Recipe(), plan, device=torch.device("cpu"))
