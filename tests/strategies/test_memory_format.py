"""memory_format.layout: activations are channels-last, and the weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from autofit import Plan, Training, Workload
from autofit.errors import Unsupported
from autofit.registry import load_strategies
from autofit.training.loss import Recipe
from tests.strategies.trainings import WAYS_TO_COMPILE, offered, training

LAYOUT, PRECISION = (load_strategies([name])[0] for name in ("memory_format", "precision"))
SETTING = "memory_format.layout"
SETTINGS = {SETTING: "channels_last"}
Between = Callable[[Tensor], Tensor]


def conv(dimensions: int) -> Any:
    kind = nn.Conv2d if dimensions == 2 else nn.Conv3d
    return nn.Sequential(kind(4, 6, 3), nn.ReLU(), kind(6, 4, 3))


@pytest.mark.parametrize(
    ("model", "is_offered"),
    [
        (conv(2), True),
        (conv(3), True),
        (nn.Sequential(weight_norm(nn.Conv2d(4, 6, 3))), True),
        (nn.Conv1d(4, 6, 3), False),
        (nn.Conv2d(4, 6, 1), False),
        (nn.Linear(4, 4), False),
        (conv(2).to(memory_format=torch.channels_last), False),
    ],
    ids=["2-d", "3-d", "weight norm", "1-d", "1x1", "no convolution", "already"],
)
def test_it_is_offered_where_there_is_something_to_lay_out(
    model: nn.Module, is_offered: bool
) -> None:
    layouts, _ = offered(LAYOUT, SETTING, lambda: Workload(model, torch.zeros(2, 4)))
    assert list(layouts.values) == ["default", *["channels_last"] * is_offered]


@pytest.mark.parametrize("dimensions", [2, 3])
def test_activations_are_channels_last(dimensions: int) -> None:
    model = conv(dimensions)
    wanted = torch.channels_last if dimensions == 2 else torch.channels_last_3d
    batch, plain = torch.randn(2, 4, *[7] * dimensions), {*vars(model[0])["_forward_pre_hooks"]}
    with training(model, LAYOUT, settings=SETTINGS):
        assert model(batch).is_contiguous(memory_format=wanted)
        assert not model(batch).is_contiguous()
        assert model[0](input=batch).is_contiguous(memory_format=wanted)
        torch.testing.assert_close(model(batch[0]), model(batch)[0])  # an image without a batch
    assert model(batch).is_contiguous()
    assert {*vars(model[0])["_forward_pre_hooks"]} == plain


class TiedByData(nn.Module):
    """Two convolutions of one memory, and a third that lies in one flat storage with its bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.other.weight.data = self.one.weight.data
        self.flat = nn.Conv2d(4, 4, 3)
        self.memory = torch.randn(4 * 4 * 3 * 3 + 4)
        self.flat.weight.data = self.memory[:-4].view(4, 4, 3, 3)
        self.flat.bias = nn.Parameter(self.memory[-4:])

    def forward(self, x: Tensor) -> Tensor:
        return self.flat(self.other(self.one(x)))


def test_all_that_shares_memory_with_a_weight_sees_it_trained() -> None:
    model, plain = TiedByData(), TiedByData()
    taken = model.state_dict()
    with training(model, LAYOUT, settings=SETTINGS) as ours, training(plain) as other:
        for batch in torch.randn(3, 2, 4, 9, 9):
            ours.step(batch)
            other.step(batch)
            assert_alike(model, plain)
            assert all(torch.equal(taken[name], each) for name, each in model.named_parameters())
            torch.testing.assert_close(model.memory, plain.memory)


def test_a_live_optimizer_goes_on_with_its_state() -> None:
    def end(value: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = conv(2)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for layout in ("default", value, "default"):
            with training(model, LAYOUT, optimizer=optimizer, settings={SETTING: layout}) as live:
                live.step(torch.randn(2, 4, 7, 7))
        return dict(model.state_dict()), optimizer.state_dict()["state"]

    torch.testing.assert_close(end("channels_last"), end("default"))


class Written(nn.Module):
    """Two convolutions with a function of one's own between, which may write in place."""

    def __init__(self, between: Between, dimensions: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind: Any = nn.Conv2d if dimensions == 2 else nn.Conv3d
        self.first, self.second = kind(3, 6, 3, padding=1), kind(6, 4, 3, padding=1)
        self.between, self.head = between, nn.Linear(4 * 4**dimensions, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.between(self.first(x))).flatten(1))


def batches(dimensions: int = 2) -> list[Tensor]:
    return list(torch.randn(3, 4, 3, *[4] * dimensions))


def ours_and_plain(
    model: nn.Module, given: list[Tensor], **recipe: Any
) -> tuple[nn.Module, nn.Module]:
    """Return the model trained with the setting, and trained without."""
    models = [model, deepcopy(model)]
    for each, strategies in zip(models, ([LAYOUT], []), strict=True):
        with training(each, *strategies, recipe=Recipe(**recipe), settings=SETTINGS) as live:
            for batch in given:
                live.step(batch)
    return models[0], models[1]


def assert_alike(ours: nn.Module, plain: nn.Module, **tolerance: Any) -> None:
    of_ours, of_plain = (dict(each.named_parameters()) for each in (ours, plain))
    torch.testing.assert_close(of_ours, of_plain, **tolerance)


def through_reshape(h: Tensor) -> Tensor:
    h.reshape(len(h), -1)[:, ::2] = 0
    return h


def through_flatten_and_pointwise(h: Tensor) -> Tensor:
    h = h * 1.0
    torch.flatten(h, 1).mul_(torch.linspace(0, 1, h[0].numel()))
    return h


def before_its_flat_view_is_read(h: Tensor) -> Tensor:
    flat = h.reshape(len(h), -1)
    return h.mul_(2) + flat.sum(1)[:, None, None, None]


def through_contiguous(h: Tensor) -> Tensor:
    same = h.contiguous()
    return same.mul_(2) + h


def through_a_view_of_it(h: Tensor) -> Tensor:
    h.data.reshape(-1).narrow(0, 5, 40).zero_()
    return h.clone()


def by_address(h: Tensor) -> Tensor:
    return h + h.as_strided((len(h), 1, 1, 1), (h[0].numel(), 1, 1, 1), 3)


def into_a_contiguous_copy(h: Tensor) -> Tensor:
    last = h.permute(0, 2, 3, 1).contiguous()
    return h + last.mul_(2).permute(0, 3, 1, 2)


def into_a_reshaped_copy(h: Tensor) -> Tensor:
    flat = h.movedim(1, -1).reshape(len(h), -1)
    return h * flat.add_(1).mean()


def read_by(read: Callable[[Tensor], Any], h: Tensor) -> Tensor:
    """Values that are read as no tensor, from a flat view that a write has changed."""
    h = h.clone()
    flat = h.detach().flatten(1)
    h[0] = 2.0
    return h * abs(read(flat))


LOST = [
    through_reshape,
    through_flatten_and_pointwise,
    before_its_flat_view_is_read,
    through_contiguous,
    through_a_view_of_it,
]
READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda flat: flat.tolist()[0][0],
    "numpy": lambda flat: flat.numpy()[0, 0].item(),
    "__array__": lambda flat: np.asarray(flat)[0, 0].item(),
    "equal": lambda flat: torch.equal(flat, torch.zeros_like(flat)),
    "allclose": lambda flat: torch.allclose(flat, flat),
    "item": lambda flat: flat[0, 0].item(),
    "bool": lambda flat: bool(flat[0, 0]),
    "int": lambda flat: int(flat[0, 0]),
    "float": lambda flat: float(flat[0, 0]),
    "complex": lambda flat: complex(flat[0, 0]),
}


@pytest.mark.parametrize(
    ("between", "dimensions"),
    [
        *((between, dimensions) for between in LOST for dimensions in (2, 3)),
        *((between, 2) for between in (by_address, into_a_contiguous_copy, into_a_reshaped_copy)),
        *(pytest.param(partial(read_by, read), 2, id=name) for name, read in READS.items()),
    ],
)
def test_a_write_that_is_lost_or_reaches_more_is_refused(between: Between, dimensions: int) -> None:
    with pytest.raises(Unsupported, match="order"):
        ours_and_plain(Written(between, dimensions), batches(dimensions))


def test_a_write_of_the_loss_is_seen_too() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return through_reshape(model(batch)).square().mean()

    with pytest.raises(Unsupported, match="orders"):
        ours_and_plain(conv(2), [torch.randn(4, 4, 7, 7)], loss_fn=loss)


def flat_copy_that_alone_is_read(h: Tensor) -> Tensor:
    flat = nn.functional.dropout(h.flatten(1), 0.0, inplace=True)
    flat[:, ::3] = 0
    return flat.view_as(h).mul_(2)


def contiguous_copy_that_alone_is_read(h: Tensor) -> Tensor:
    shape = h.shape
    last = h.permute(0, 2, 3, 1).contiguous()
    last.mul_(torch.arange(6))
    assert h.shape == shape  # reads no value
    return last.permute(0, 3, 1, 2)


def overwritten(by: Callable[[Tensor, Tensor], Tensor], h: Tensor) -> Tensor:
    """A copy, of which nobody reads what was lost before."""
    other = h.clone()
    flat = other.reshape(len(h), -1)
    other.mul_(2)
    return h + by(flat, h).view_as(h)


def written_before_it_is_reshaped(h: Tensor) -> Tensor:
    h.mul_(2)
    flat = h.reshape(len(h), -1).cumsum(1)
    words = h.permute(0, 2, 3, 1).contiguous()
    return h + flat.view_as(h) + words.permute(0, 3, 1, 2)


def views_in_both(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, ::2].mul_(3)
    h.permute(0, 2, 3, 1)[..., 0] += 1
    h.flatten(2).transpose(1, 2)[:, ::3].zero_()
    return h.add_(1).clamp_(-1, 1)


def of_ones_own_order(h: Tensor) -> Tensor:
    """Copies in both orders: the user's own channels-last tensor is no work of the setting."""
    own = torch.ones(4, 4, 4, 6).permute(0, 3, 1, 2) * 2
    return own.contiguous().mul_(3) + h * own


def branches(h: Tensor) -> Tensor:
    """As residual networks have them, with values that only a run can tell."""
    largest = int(h.flatten(1).argmax(1)[0])
    out = nn.functional.max_pool2d(h, 3, 1, 1).clamp_(-1)
    out += h
    return out[out.detach().sum((1, 2, 3)).argsort()] + largest % 2


def one_channel(h: Tensor) -> Tensor:
    """Lies alike in both orders."""
    one = h.mean(1, keepdim=True)
    return h * through_reshape(one)


@pytest.mark.parametrize(
    "between",
    [
        flat_copy_that_alone_is_read,
        contiguous_copy_that_alone_is_read,
        pytest.param(partial(overwritten, lambda flat, h: flat.zero_()), id="zeros"),
        pytest.param(partial(overwritten, lambda flat, h: flat.fill_(2.0)), id="filled"),
        pytest.param(partial(overwritten, lambda flat, h: flat.copy_(h.flatten(1))), id="copied"),
        written_before_it_is_reshaped,
        views_in_both,
        of_ones_own_order,
        branches,
        one_channel,
    ],
)
def test_writes_that_no_order_changes_train_alike(between: Between) -> None:
    assert_alike(*ours_and_plain(Written(between), batches()), rtol=1e-3, atol=1e-5)


class Image(Tensor):
    """Takes the functions that it knows, and no others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("conv2d", "contiguous", "dim", "relu", "flatten", "add_"):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return made.as_subclass(cls) if isinstance(made, Tensor) else made


def test_batches_of_a_strict_subclass_are_taken_and_followed() -> None:
    def loss(model: Any, batch: Tensor) -> Tensor:
        h = model[0](batch.as_subclass(Image)).relu()
        if is_written:
            h.flatten(1).add_(1)
        return model[1](h).as_subclass(Tensor).square().mean()

    model, is_written = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)), False
    assert_alike(*ours_and_plain(model, batches(), loss_fn=loss))
    is_written = True
    with pytest.raises(Unsupported, match="orders"):
        ours_and_plain(model, batches(), loss_fn=loss)


def test_the_look_draws_no_random_number_and_is_over_after_the_first_forward() -> None:
    calls: list[list[Any]] = []

    def between(h: Tensor) -> Tensor:
        calls.append(torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]  # torch's
        return nn.functional.dropout(h.flatten(1), 0.5).view_as(h) + torch.rand_like(h)

    def random_state_after(value: str) -> Tensor:
        plan = Plan.split(4, 2, settings={SETTING: value})
        with training(Written(between), LAYOUT, plan=plan) as live:
            for batch in batches():
                live.step(batch)
        return torch.get_rng_state()

    assert torch.equal(*map(random_state_after, ("channels_last", "default")))
    assert [len(each) for each in calls] == [1, *[0] * 11]


def raises(module: nn.Module, args: Any) -> None:
    raise RuntimeError("this forward fails")


def evaluate(within: Any, live: Training, batch: Tensor) -> None:
    with within():
        live.loss(batch)


def evaluate_with_gradients(live: Training, batch: Tensor) -> None:
    live.model.eval()
    live.loss(batch)
    live.model.train()


def fail(live: Training, batch: Tensor) -> None:
    first = live.model.get_submodule("first")
    with (
        first.register_forward_pre_hook(raises),
        pytest.raises(RuntimeError, match="this forward fails"),
    ):
        live.loss(batch)


@pytest.mark.parametrize(
    "before",
    [
        partial(evaluate, torch.no_grad),
        partial(evaluate, torch.inference_mode),
        evaluate_with_gradients,
        fail,
    ],
    ids=["without gradients", "inference", "evaluation", "failure"],
)
def test_the_look_is_at_a_forward_that_trains(before: Callable[[Training, Tensor], None]) -> None:
    def between(h: Tensor) -> Tensor:
        return through_reshape(h) if model.training and torch.is_grad_enabled() else h

    model, (batch, *_) = Written(between), batches()
    with training(model, LAYOUT, settings=SETTINGS) as live:
        before(live, batch)
        for _ in range(2):  # it stays refused, too
            with pytest.raises(Unsupported, match="orders"):
                live.step(batch)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).relu()


@pytest.mark.parametrize("compiled", WAYS_TO_COMPILE)
def test_a_compiled_part_of_the_model_is_compiled_once(compiled: Any) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    block = compiled(Block(), backend=backend, fullgraph=True)
    with training(nn.Sequential(nn.Conv2d(3, 6, 3), block), LAYOUT, settings=SETTINGS) as live:
        for _ in range(2):
            live.step(torch.randn(2, 3, 8, 8))
    assert len(graphs) == 1


def test_under_autocast_a_cast_is_a_copy_in_both_orders() -> None:
    def between(h: Tensor) -> Tensor:
        cast = h.float()
        return cast.mul_(2) + h

    settings = {**SETTINGS, "precision.dtype": "bfloat16"}
    with training(Written(between), LAYOUT, PRECISION, settings=settings) as live:
        live.step(batches()[0])
    with (
        training(Written(through_reshape), LAYOUT, PRECISION, settings=settings) as live,
        pytest.raises(Unsupported, match="orders"),
    ):
        live.step(batches()[0])
