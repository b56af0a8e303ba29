"""Covering units of a live model: nothing shows, everything works on, and it is taken back."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.errors import InvalidArgument

checkpointed: Callable[..., AbstractContextManager[None]] = importlib.import_module(
    "autofit.strategies.checkpointing.checkpointed"
).checkpointed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.flat = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flat(self.blocks(x))


UNITS = ("blocks.1", "blocks.2", "flat[1:4]")
X = torch.randn(2, 8)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def _gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _count_forwards(block: nn.Module) -> list[int]:
    runs: list[int] = []
    block.get_submodule("wide").register_forward_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize(("grad", "runs"), [(True, [1, 2, 2, 1]), (False, [1, 1, 1, 1])])
def test_units_run_twice_where_there_is_a_backward(model: Net, grad: bool, runs: list[int]) -> None:
    ran = [_count_forwards(block) for block in model.blocks]
    with checkpointed(model, UNITS), torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(X).sum()
        if grad:
            loss.backward()
    assert [len(each) for each in ran] == runs


@pytest.mark.parametrize("raises", [False, True])
def test_undo_restores_every_dict(model: Net, raises: bool) -> None:
    """Also the user's own forward."""
    model.blocks[2].forward = lambda x: 2 * x
    before = [list(vars(module).items()) for module in model.modules()]
    with pytest.raises(KeyError) if raises else nullcontext(), checkpointed(model, UNITS):
        assert "forward" in vars(model.blocks[1])
        assert torch.equal(model.blocks[2](X), 2 * X)
        if raises:
            raise KeyError
    after = [list(vars(module).items()) for module in model.modules()]
    assert [[(k, id(v)) for k, v in items] for items in after] == [
        [(k, id(v)) for k, v in items] for items in before
    ]


def test_a_whole_model_is_saved_and_loads_as_a_plain_one(model: Net) -> None:
    with checkpointed(model, UNITS):
        stream = io.BytesIO()
        torch.save(model, stream, pickle_module=pickle)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        assert torch.equal(loaded(X), model(X))
        assert all(map(torch.equal, _gradients(loaded, X), _gradients(model, X)))


@pytest.mark.slow
def test_a_full_graph_is_compiled(model: Net) -> None:
    plain = _gradients(model, X)
    with checkpointed(model, UNITS):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        model.zero_grad()
        compiled(X).square().mean().backward()
        found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, plain)


def test_under_torch_func_it_is_off_and_says_so(model: Net) -> None:
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(model, weights, (X,))
        return y.square().mean()

    plain = torch.func.grad(loss)(weights)
    with checkpointed(model, UNITS), pytest.warns(UserWarning, match=r"torch\.func"):
        found = torch.func.grad(loss)(weights)
    torch.testing.assert_close(found, plain)


def test_an_error_in_a_unit_leaves_the_next_step_right(model: Net) -> None:
    plain = _gradients(model, X)

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with checkpointed(model, UNITS):
        loss = model(X).square().mean()
        handle = model.blocks.get_submodule("1.narrow").register_forward_pre_hook(refuse)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        handle.remove()
        assert all(map(torch.equal, plain, _gradients(model, X)))


@pytest.mark.parametrize("unit", ["blocks.9", "flat[2:7]", "blocks.0[0:1]"])
def test_a_unit_that_is_not_there_is_refused(model: Net, unit: str) -> None:
    before = [dict(module.__dict__) for module in model.modules()]
    with (
        pytest.raises(InvalidArgument, match="search again"),
        checkpointed(model, ["blocks.0", unit]),
    ):
        pass
    assert [dict(module.__dict__) for module in model.modules()] == before


class Averaging(nn.Module):
    """Its output depends on a buffer that each forward changes."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean(0)
        return torch.sin(self.linear(x)) * self.average


def test_buffers_are_shown_as_before_and_changed_once() -> None:
    """Called twice in one forward, so each recomputation must see its own past."""
    torch.manual_seed(0)
    model, x = Averaging(), torch.randn(4, 8)
    twin = copy.deepcopy(model)

    def train(net: nn.Module) -> list[torch.Tensor]:
        net(net(x)).square().mean().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    plain = train(twin)
    holder = nn.ModuleDict({"inner": model})
    with checkpointed(holder, ["inner"], ["inner.average"]):
        assert all(map(torch.equal, plain, train(model)))
    assert torch.equal(model.average, twin.average)


def test_a_model_is_checkpointed_by_one_training_at_a_time(model: Net) -> None:
    plain = _gradients(model, X)
    with checkpointed(model, UNITS):
        with pytest.raises(InvalidArgument, match="training"), checkpointed(model, UNITS):
            pass
        assert all(map(torch.equal, plain, _gradients(model, X)))


def test_a_deep_copy_runs_its_own_weights(model: Net) -> None:
    with checkpointed(model, UNITS):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(twin(X), torch.zeros(2, 8))
        assert not torch.equal(model(X), torch.zeros(2, 8))


class Drawing(nn.Module):
    """Draws numbers where its weights lie, and is given no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, rows: int) -> torch.Tensor:
        noise = torch.randn(rows, 8, device=self.scale.weight.device)
        return torch.tanh(self.scale(noise))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_unit_that_is_given_no_tensor_draws_the_same_numbers_again(device: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"draw": Drawing()}).to(device)

    def trained(units: list[str]) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with checkpointed(model, units):
            loss = model["draw"](4).square().mean()
            torch.randn(3, device=device)
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(map(torch.equal, trained([]), trained(["draw"])))


class Shared(nn.Module):
    """One block under two names, which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = self.second = Block()
        self.inner = nn.Sequential(nn.Linear(8, 8), self.first, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.second(self.first(x)))


@pytest.mark.parametrize("units", [("first", "second"), ("first~", "inner.1~"), ("second",)])
def test_a_module_under_two_names_is_covered_once(units: tuple[str, ...]) -> None:
    found = []
    for chosen in ((), units):
        model = Shared()
        with checkpointed(model, chosen):
            model(X).square().mean().backward()
        assert "forward" not in vars(model.first)
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_module_that_is_named_in_two_ways_is_refused_by_its_names() -> None:
    refusal = pytest.raises(InvalidArgument, match="'first' and 'second' name the same module")
    with refusal, checkpointed(Shared(), ["first", "second~"]):
        pass


class Growing(nn.Module):
    """Writes to an argument by one name and reads it by another."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, one: Any, *, other: Any) -> Any:
        one["kept"].append(self.block(one["kept"][0]))
        return other[-1] * other[0] + len(other)


class Comparing(Growing):
    """Goes another way where its inputs are one tensor, as attention does."""

    def forward(self, one: Any, *, other: Any) -> Any:
        return self.block(one) * other if one is other else one.exp() * other


def _one_list(x: torch.Tensor) -> tuple[Any, Any]:
    items: list[Any] = [x]
    return {"kept": items, "itself": [items]}, items


def _list_in_itself(x: torch.Tensor) -> tuple[Any, Any]:
    (named, items) = _one_list(x)
    named["again"] = named
    return named, items


@pytest.mark.parametrize("unit", ["0", "0~"])
@pytest.mark.parametrize("outer", [False, True], ids=["", "within torch's own"])
@pytest.mark.parametrize(
    ("kind", "given"),
    [(Growing, _one_list), (Growing, _list_in_itself), (Comparing, lambda x: (x, x))],
)
def test_what_is_given_twice_is_one_in_a_recomputation(
    kind: type[Growing], given: Callable[[Any], tuple[Any, Any]], outer: bool, unit: str
) -> None:
    def trained(units: list[str]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(kind(), nn.Linear(8, 8))

        def run(x: torch.Tensor) -> torch.Tensor:
            one, other = given(model[1](x))
            made: torch.Tensor = model[0](one, other=other)
            return made.square().mean()

        with checkpointed(model, units):
            (checkpoint(run, X, use_reentrant=False) if outer else run(X)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, trained([]), trained([unit])))
