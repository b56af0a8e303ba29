"""memory_format.layout: activations are channels-last, and the weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from autofit.errors import Unsupported
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.strategy import Strategy
from autofit.testing import PlainContext
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

SETTINGS = {"memory_format.layout": "channels_last"}


@pytest.fixture
def memory_format() -> Strategy:
    return load_strategies(["memory_format"])[0]


def _training(strategy: Strategy, model: nn.Module, optimizer: Any = None) -> Training:
    return Training(
        model,
        optimizer or torch.optim.AdamW(model.parameters(), 0.01),
        Recipe(),
        ResolvedPlan(Plan(2, settings=SETTINGS), strategies=[strategy]),
        device=torch.device("cpu"),
    )


def _conv(dimensions: int) -> nn.Module:
    kind = nn.Conv2d if dimensions == 2 else nn.Conv3d
    return nn.Sequential(kind(4, 6, 3), nn.ReLU(), kind(6, 4, 3))


def _laid_out(model: nn.Module) -> nn.Module:
    for weight in model.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


@pytest.mark.parametrize(
    ("model", "offered"),
    [
        (_conv(2), True),
        (_conv(3), True),
        (nn.Sequential(weight_norm(nn.Conv2d(4, 6, 3))), True),
        (nn.Conv1d(4, 6, 3), False),
        (nn.Conv2d(4, 6, 1), False),
        (nn.Linear(4, 4), False),
        (_laid_out(_conv(2)), False),
    ],
    ids=["2-d", "3-d", "weight norm", "1-d", "1x1", "no convolution", "already"],
)
def test_it_is_offered_where_there_is_something_to_lay_out(
    memory_format: Strategy, model: nn.Module, offered: bool
) -> None:
    context = PlainContext(lambda: Workload(model, torch.zeros(2, 4)))
    (layouts,) = memory_format.dimensions(context).values()
    assert list(layouts.values) == ["default", *["channels_last"] * offered]


@pytest.mark.parametrize("dimensions", [2, 3])
def test_activations_are_channels_last(memory_format: Strategy, dimensions: int) -> None:
    model: Any = _conv(dimensions)
    wanted = torch.channels_last if dimensions == 2 else torch.channels_last_3d
    batch, plain = torch.randn(2, 4, *[7] * dimensions), {*vars(model[0])["_forward_pre_hooks"]}
    with _training(memory_format, model):
        assert model(batch).is_contiguous(memory_format=wanted)
        assert not model(batch).is_contiguous()
        assert model[0](input=batch).is_contiguous(memory_format=wanted)
        torch.testing.assert_close(model(batch[0]), model(batch)[0])  # an image without a batch
    assert model(batch).is_contiguous()
    assert {*vars(model[0])["_forward_pre_hooks"]} == plain


class _TiedByData(nn.Module):
    """Two convolutions of one memory, and a third that lies in one flat storage with its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.other.weight.data = self.one.weight.data
        self.flat = nn.Conv2d(4, 4, 3)
        self.memory = torch.randn(4 * 4 * 3 * 3 + 4)
        self.flat.weight.data = self.memory[:-4].view(4, 4, 3, 3)
        self.flat.bias = nn.Parameter(self.memory[-4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flat(self.other(self.one(x)))


def test_all_that_shares_memory_with_a_weight_sees_it_trained(memory_format: Strategy) -> None:
    torch.manual_seed(0)
    model, plain = _TiedByData(), _TiedByData()
    plain.load_state_dict(model.state_dict())
    taken = model.state_dict()
    aliases = {name: parameter.detach() for name, parameter in model.named_parameters()}
    batches = [torch.randn(2, 4, 9, 9) for _ in range(3)]
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    with _training(memory_format, model, torch.optim.SGD(model.parameters(), 0.01)) as training:
        for batch in batches:
            training.step(batch)
            plain(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter, plain.get_parameter(name), msg=name)
                assert torch.equal(taken[name], parameter)
                assert torch.equal(aliases[name], parameter)
            torch.testing.assert_close(model.memory, plain.memory)


def test_a_live_optimizer_goes_on_with_its_state(memory_format: Strategy) -> None:
    model, plain = _conv(2), _conv(2)
    plain.load_state_dict(model.state_dict())
    batches = [torch.randn(2, 4, 7, 7) for _ in range(3)]
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (model, plain)]
    for number, batch in enumerate(batches):
        strategies = [memory_format] if number == 1 else []
        for one, optimizer, chosen in (
            (model, optimizers[0], strategies),
            (plain, optimizers[1], []),
        ):
            with Training(
                one,
                optimizer,
                Recipe(),
                ResolvedPlan(Plan(2, settings=SETTINGS), strategies=chosen),
                device=torch.device("cpu"),
            ) as training:
                training.step(batch)
    for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, other, msg=name)
        state = optimizers[0].state[weight]["exp_avg"]
        torch.testing.assert_close(state, optimizers[1].state[other]["exp_avg"])


Between = Callable[[torch.Tensor], torch.Tensor]


class _Written(nn.Module):
    """Two convolutions with a function of one's own between, which may write in place."""

    def __init__(self, between: Between, dimensions: int = 2) -> None:
        super().__init__()
        kind: Any = nn.Conv2d if dimensions == 2 else nn.Conv3d
        self.first, self.second = kind(3, 6, 3, padding=1), kind(6, 4, 3, padding=1)
        self.between = between
        self.head = nn.LazyLinear(5)
        self.head(self.second(self.first(torch.zeros(1, 3, *[4] * dimensions))).flatten(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.second(self.between(self.first(x))).flatten(1))
        return output


def _through_reshape(h: torch.Tensor) -> torch.Tensor:
    h.reshape(len(h), -1)[:, ::2] = 0
    return h


def _through_flatten_and_pointwise(h: torch.Tensor) -> torch.Tensor:
    h = h * 1.0
    torch.flatten(h, 1).mul_(torch.linspace(0, 1, h[0].numel()))
    return h


def _before_its_flat_view_is_read(h: torch.Tensor) -> torch.Tensor:
    flat = h.reshape(len(h), -1)
    h.mul_(2)
    return h + flat.sum(1)[:, None, None, None]


def _through_contiguous(h: torch.Tensor) -> torch.Tensor:
    same = h.contiguous()
    same.mul_(2)
    return h + same


def _into_a_contiguous_copy(h: torch.Tensor) -> torch.Tensor:
    last = h.permute(0, 2, 3, 1).contiguous()
    last.mul_(2)
    return h + last.permute(0, 3, 1, 2)


def _into_a_reshaped_copy(h: torch.Tensor) -> torch.Tensor:
    flat = h.movedim(1, -1).reshape(len(h), -1)
    flat += 1
    return h * flat.mean()


def _with_a_view_of_it(h: torch.Tensor) -> torch.Tensor:
    h.data.reshape(-1).narrow(0, 5, 40).zero_()
    return h.clone()


def _by_address(h: torch.Tensor) -> torch.Tensor:
    return h + h.as_strided((len(h), 1, 1, 1), (h[0].numel(), 1, 1, 1), 3)


def _ours_and_plain(
    strategy: Strategy, model: nn.Module, batches: list[torch.Tensor], **given: Any
) -> tuple[nn.Module, nn.Module]:
    """Return the model trained with the setting, and trained without."""
    models = [model, deepcopy(model)]
    for each, strategies in zip(models, ([strategy], []), strict=True):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        plan = ResolvedPlan(Plan(4, settings=SETTINGS), strategies=strategies)
        cpu = torch.device("cpu")
        with Training(each, optimizer, Recipe(**given), plan, device=cpu) as training:
            for batch in batches:
                training.step(batch)
    return models[0], models[1]


def _batches(dimensions: int = 2) -> list[torch.Tensor]:
    return [torch.randn(4, 3, *[4] * dimensions) for _ in range(3)]


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize(
    "between",
    [
        _through_reshape,
        _through_flatten_and_pointwise,
        _before_its_flat_view_is_read,
        _through_contiguous,
        _with_a_view_of_it,
        _by_address,
    ],
)
def test_a_write_that_would_be_lost_is_refused(
    memory_format: Strategy, between: Between, dimensions: int
) -> None:
    if dimensions == 3 and between is _by_address:
        pytest.skip("of images")
    model = _Written(between, dimensions)
    with pytest.raises(Unsupported, match="order"):
        _ours_and_plain(memory_format, model, _batches(dimensions))


Read = Callable[[torch.Tensor], Any]


@pytest.mark.parametrize(
    "read",
    [
        lambda flat: flat.tolist()[0][0],
        lambda flat: flat.numpy()[0, 0].item(),
        lambda flat: np.asarray(flat)[0, 0].item(),
        lambda flat: torch.equal(flat, torch.zeros_like(flat)),
        lambda flat: torch.allclose(flat, flat),
    ],
    ids=["tolist", "numpy", "__array__", "equal", "allclose"],
)
def test_values_that_are_read_as_no_tensor_are_seen_too(
    memory_format: Strategy, read: Read
) -> None:
    def between(h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        flat = h.detach().flatten(1)
        h[0] = 2.0
        return h * read(flat)

    with pytest.raises(Unsupported, match="orders"):
        _ours_and_plain(memory_format, _Written(between), _batches())


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, int, float, complex])
def test_a_single_value_that_is_read_is_seen_too(memory_format: Strategy, read: Read) -> None:
    def between(h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        one = h.detach().flatten(1)[0, 0]
        h[0] = 2.0
        return h * abs(read(one))

    with pytest.raises(Unsupported, match="orders"):
        _ours_and_plain(memory_format, _Written(between), _batches())


@pytest.mark.parametrize("between", [_into_a_contiguous_copy, _into_a_reshaped_copy])
def test_a_write_that_would_reach_more_is_refused(
    memory_format: Strategy, between: Between
) -> None:
    with pytest.raises(Unsupported, match="orders"):
        _ours_and_plain(memory_format, _Written(between), _batches())


def test_a_write_of_the_loss_is_seen_too(memory_format: Strategy) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = model(batch)
        output.flatten(1)[:, 1] = 0
        return output.square().mean()

    with pytest.raises(Unsupported, match="orders"):
        _ours_and_plain(memory_format, _conv(2), [torch.randn(4, 4, 7, 7)], loss_fn=loss)


def _flat_copy_that_alone_is_read(h: torch.Tensor) -> torch.Tensor:
    flat = nn.functional.dropout(h.flatten(1), 0.0, inplace=True)
    flat[:, ::3] = 0
    return flat.view_as(h).mul_(2)


def _contiguous_copy_that_alone_is_read(h: torch.Tensor) -> torch.Tensor:
    shape = h.shape
    last = h.permute(0, 2, 3, 1).contiguous()
    last.mul_(torch.arange(6))
    assert h.shape == shape  # reads no value
    return last.permute(0, 3, 1, 2)


def _copy_that_is_overwritten(h: torch.Tensor) -> torch.Tensor:
    """What was lost of it before is never read."""
    overwrites: list[Between] = [
        torch.Tensor.zero_,
        lambda flat: flat.fill_(2.0),
        lambda flat: flat.copy_(h.flatten(1)),
    ]
    for overwrite in overwrites:
        other = h.clone()
        flat = other.reshape(len(h), -1)
        other.mul_(2)
        h = h + overwrite(flat).view_as(h)
    return h


def _written_before_it_is_reshaped(h: torch.Tensor) -> torch.Tensor:
    h.mul_(2)
    flat = h.reshape(len(h), -1).cumsum(1)
    words = h.permute(0, 2, 3, 1).contiguous()
    return h + flat.view_as(h) + words.permute(0, 3, 1, 2)


def _views_in_both(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, ::2].mul_(3)
    h.permute(0, 2, 3, 1)[..., 0] += 1
    h.flatten(2).transpose(1, 2)[:, ::3].zero_()
    return h.add_(1).clamp_(-1, 1)


def _of_ones_own_order(h: torch.Tensor) -> torch.Tensor:
    """Copies in both orders: the user's own channels-last tensor is no work of the setting."""
    own = torch.ones(4, 4, 4, 6).permute(0, 3, 1, 2) * 2
    copied = own.contiguous()
    copied.mul_(3)
    return h * own + copied


def _branches(h: torch.Tensor) -> torch.Tensor:
    """As residual networks have them, with values that only a run can tell."""
    largest = int(h.flatten(1).argmax(1)[0])
    out = nn.functional.max_pool2d(h, 3, 1, 1).clamp_(-1)
    out += h
    return out[out.detach().sum((1, 2, 3)).argsort()] + largest % 2


def _one_channel(h: torch.Tensor) -> torch.Tensor:
    """Lies alike in both orders."""
    one = h.mean(1, keepdim=True)
    one.reshape(len(one), -1)[:, ::2] = 0
    return h * one


@pytest.mark.parametrize(
    "between",
    [
        _flat_copy_that_alone_is_read,
        _contiguous_copy_that_alone_is_read,
        _copy_that_is_overwritten,
        _written_before_it_is_reshaped,
        _views_in_both,
        _of_ones_own_order,
        _branches,
        _one_channel,
    ],
)
def test_writes_that_no_order_changes_train_alike(
    memory_format: Strategy, between: Between
) -> None:
    torch.manual_seed(0)
    ours, plain = _ours_and_plain(memory_format, _Written(between), _batches())
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)


class _Image(torch.Tensor):
    """Takes the functions that it knows, and no others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("conv2d", "contiguous", "dim", "relu", "flatten", "add_"):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return made.as_subclass(cls) if isinstance(made, torch.Tensor) else made


@pytest.mark.parametrize("is_written", [False, True])
def test_batches_of_a_strict_subclass_are_taken_and_followed(
    memory_format: Strategy, is_written: bool
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.first(x).relu()
            if is_written:
                h.flatten(1).add_(1)
            output: torch.Tensor = self.second(h)
            return output

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch.as_subclass(_Image)).as_subclass(torch.Tensor).square().mean()

    if is_written:
        with pytest.raises(Unsupported, match="orders"):
            _ours_and_plain(memory_format, Model(), _batches(), loss_fn=loss)
        return
    ours, plain = _ours_and_plain(memory_format, Model(), _batches(), loss_fn=loss)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_the_look_draws_no_random_number_and_is_over_after_the_first_forward(
    memory_format: Strategy,
) -> None:
    states, calls = [], []
    stack: Any = torch.overrides._get_current_function_mode_stack

    def between(h: torch.Tensor) -> torch.Tensor:
        calls.append(stack())
        return nn.functional.dropout(h.flatten(1), 0.5).view_as(h) + torch.rand_like(h)

    for strategies in ([memory_format], []):
        torch.manual_seed(0)
        model = _Written(between)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = ResolvedPlan(Plan(2, settings=SETTINGS), strategies=strategies)
        cpu = torch.device("cpu")
        with Training(model, optimizer, Recipe(), plan, device=cpu) as training:
            for batch in _batches():
                training.step(batch)  # of two micro-batches
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert [len(each) for each in calls] == [1, *[0] * 11]


def _raises(module: nn.Module, args: Any) -> None:
    raise RuntimeError("this forward fails")


def _evaluate(training: Training, batch: torch.Tensor) -> None:
    with torch.no_grad():
        training.loss(batch)


def _infer(training: Training, batch: torch.Tensor) -> None:
    with torch.inference_mode():
        training.loss(batch)


def _evaluate_with_gradients(training: Training, batch: torch.Tensor) -> None:
    training.model.eval()
    training.loss(batch)
    training.model.train()


def _fail(training: Training, batch: torch.Tensor) -> None:
    hook = training.model.get_submodule("first").register_forward_pre_hook(_raises)
    with pytest.raises(RuntimeError, match="this forward fails"):
        training.loss(batch)
    hook.remove()


@pytest.mark.parametrize("before", [_evaluate, _infer, _evaluate_with_gradients, _fail])
def test_the_look_is_at_a_forward_that_trains(
    memory_format: Strategy, before: Callable[[Training, torch.Tensor], None]
) -> None:
    def between(h: torch.Tensor) -> torch.Tensor:
        return _through_reshape(h) if model.training and torch.is_grad_enabled() else h

    model, (batch, *_) = _Written(between), _batches()
    with _training(memory_format, model) as training:
        before(training, batch)
        for _ in range(2):  # it stays refused, too
            with pytest.raises(Unsupported, match="orders"):
                training.step(batch)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.convolution(x).relu()
        return output


def _wrapped(block: nn.Module, compiled: Any) -> nn.Module:
    made: nn.Module = compiled(block)
    return made


def _in_place(block: nn.Module, compiled: Any) -> nn.Module:
    block.compile(backend=compiled.keywords["backend"], fullgraph=True)
    return block


def _by_its_forward(block: nn.Module, compiled: Any) -> nn.Module:
    vars(block)["forward"] = compiled(block.forward)
    return block


@pytest.mark.parametrize("compile_it", [_wrapped, _in_place, _by_its_forward])
def test_a_compiled_part_of_the_model_is_compiled_once(
    memory_format: Strategy, compile_it: Callable[[nn.Module, Any], nn.Module]
) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    block = compile_it(_Block(), partial(torch.compile, backend=backend, fullgraph=True))
    with _training(memory_format, nn.Sequential(nn.Conv2d(3, 6, 3), block)) as training:
        for _ in range(2):
            training.step(torch.randn(2, 3, 8, 8))
    assert len(graphs) == 1


def test_under_autocast_a_cast_is_a_copy_in_both_orders(memory_format: Strategy) -> None:
    def between(h: torch.Tensor) -> torch.Tensor:
        cast = h.float()
        cast.mul_(2)
        return h + cast

    settings = {**SETTINGS, "precision.dtype": "bfloat16"}
    (precision,) = load_strategies(["precision"])
    for writes in (between, _through_reshape):
        model = _Written(writes)
        plan = ResolvedPlan(Plan(4, settings=settings), strategies=[memory_format, precision])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Training(model, optimizer, Recipe(), plan, device=torch.device("cpu")) as training:
            if writes is between:
                training.step(_batches()[0])
            else:
                with pytest.raises(Unsupported, match="orders"):
                    training.step(_batches()[0])
