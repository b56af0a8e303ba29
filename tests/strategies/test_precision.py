"""precision.dtype: what is offered for which model and device; it acts, and is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.strategy import Capabilities, Strategy
from autofit.testing import PlainContext
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

EVERYTHING = Capabilities("cuda", bfloat16=True, float16=True, tf32=True)


@pytest.fixture
def precision() -> Strategy:
    return load_strategies(["precision"])[0]


def _values(strategy: Strategy, model: nn.Module, capabilities: Capabilities) -> list[Any]:
    weights = [torch.zeros(1, requires_grad=True)]  # a model may have none
    workload = Workload(model, torch.zeros(2, 4), optimizer=lambda _: torch.optim.SGD(weights))
    context = PlainContext(lambda: workload, capabilities=capabilities)
    return list(strategy.dimensions(context)["precision.dtype"].values)


@pytest.mark.parametrize(
    ("capabilities", "values"),
    [
        (EVERYTHING, ["default", "tf32", "bfloat16", "float16"]),
        (Capabilities("cuda", float16=True), ["default", "float16"]),
        (Capabilities("cpu", bfloat16=True), ["default", "bfloat16"]),
        (Capabilities("cpu"), ["default"]),
    ],
)
def test_only_what_the_device_does_is_offered(
    precision: Strategy, capabilities: Capabilities, values: list[str]
) -> None:
    assert _values(precision, nn.Linear(4, 4), capabilities) == values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_type_keeps_it(precision: Strategy, dtype: torch.dtype) -> None:
    assert _values(precision, nn.Linear(4, 4).to(dtype), EVERYTHING) == ["default"]


def test_a_few_half_precision_weights_only_rule_out_loss_scaling(precision: Strategy) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(4, 4).half())
    assert _values(precision, model, EVERYTHING) == ["default", "tf32", "bfloat16"]


@pytest.mark.parametrize("is_trained", [True, False])
def test_complex_weights_that_are_trained_rule_out_loss_scaling(
    precision: Strategy, is_trained: bool
) -> None:
    model = nn.Linear(4, 4)
    spectrum = torch.ones(4, dtype=torch.complex64)
    model.register_parameter("spectrum", nn.Parameter(spectrum, requires_grad=is_trained))
    offered = _values(precision, model, EVERYTHING)
    assert offered == ["default", "tf32", "bfloat16", *["float16"] * (not is_trained)]


def test_a_model_without_weights_has_nothing_to_choose(precision: Strategy) -> None:
    assert _values(precision, nn.Identity(), EVERYTHING) == ["default"]


@pytest.fixture
def matmul() -> Iterator[Any]:
    """Where torch keeps the flag for matrix products; it is put back after the test."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("from torch 2.9")
    before = matmul.fp32_precision
    yield matmul
    matmul.allow_tf32 = False
    matmul.fp32_precision = before


def test_tf32_that_is_on_already_is_not_offered(precision: Strategy, matmul: Any) -> None:
    matmul.fp32_precision = "tf32"
    assert "tf32" not in _values(precision, nn.Linear(4, 4), EVERYTHING)


def _training(strategy: Strategy, dtype: str) -> Training:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return Training(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        Recipe(),
        ResolvedPlan(Plan(4, settings={"precision.dtype": dtype}), strategies=[strategy]),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_forward_runs_in_fewer_bits(precision: Strategy, dtype: str) -> None:
    with _training(precision, dtype) as training:
        with training.context():
            assert training.model(torch.randn(4, 8)).dtype == getattr(torch, dtype)
        assert training.model.weight.dtype == torch.float32
        assert (training.scaler is not None) is (dtype == "float16")
        before = training.model.weight.detach().clone()  # type: ignore[operator]  # a Linear
        assert training.step(torch.randn(4, 8)).isfinite()
        assert not torch.equal(before, training.model.weight)  # type: ignore[arg-type]  # a Linear
    assert training.scaler is None
    with training.context():
        assert training.model(torch.randn(4, 8)).dtype == torch.float32


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_tf32_is_on_inside_and_as_it_was_outside(
    precision: Strategy, matmul: Any, before: str, raises: bool
) -> None:
    matmul.fp32_precision = before
    readable = _allow_tf32()
    with suppress(KeyError), _training(precision, "tf32"):
        assert matmul.fp32_precision == "tf32"
        assert _allow_tf32() == (None if readable is None else True)
        if raises:
            raise KeyError
    assert matmul.fp32_precision == before
    assert _allow_tf32() == readable


def _allow_tf32() -> bool | None:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return None


# The cache of casts.


class Recomputed(nn.Linear):
    """Casts its weight again in the backward pass, where a cache of the forward is gone."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


class Twice(nn.Module):
    """Runs one layer of its own twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.layer(self.frozen(x))
        return self.layer(first)


def _reference_by(write: Any) -> Any:
    """A loss that swaps other weights in for a second forward, as of a reference policy."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch)
        live = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            write(model, [torch.ones_like(p) for p in live])
            reference = model(batch)
            write(model, live)
        return (logits - reference).float().square().mean()

    return loss


def _by_data(model: nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def _by_foreach(model: nn.Module, values: list[torch.Tensor]) -> None:
    torch._foreach_copy_(list(model.parameters()), values)


def _by_state_dict(model: nn.Module, values: list[torch.Tensor]) -> None:
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(zip(names, values, strict=True)))


def _by_vector(model: nn.Module, values: list[torch.Tensor]) -> None:
    vector = nn.utils.parameters_to_vector(values)
    nn.utils.vector_to_parameters(vector, model.parameters())


def _by_setattr(model: nn.Module, values: list[torch.Tensor]) -> None:
    for (path, parameter), value in zip(list(model.named_parameters()), values, strict=True):
        module, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        other = nn.Parameter(value, requires_grad=parameter.requires_grad)
        setattr(module, name, other if value.eq(1).all() else parameter)
        parameter.data.copy_(value)


def _mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch)
    return output.float().square().mean()


def _offer(strategy: Strategy, build: Any, loss: Any) -> Any:
    def workload() -> Workload:
        return Workload(build(), torch.ones(4, 4), loss_fn=loss, optimizer=torch.optim.SGD)

    context = PlainContext(workload, capabilities=Capabilities("cpu", bfloat16=True))
    return strategy.dimensions(context)["precision.dtype"]


WRITES = [_by_data, _by_foreach, _by_state_dict, _by_vector, _by_setattr]


@pytest.mark.parametrize(
    ("build", "loss", "is_kept"),
    [
        (Twice, _mean_square, True),
        (lambda: nn.Linear(4, 4), _mean_square, False),
        (Recomputed, _mean_square, False),
        (Twice, _reference_by(_by_data), False),
        (Twice, _reference_by(_by_vector), False),
    ],
)
def test_casts_are_kept_where_that_saves_some_and_no_weight_is_written_to(
    precision: Strategy, build: Any, loss: Any, is_kept: bool
) -> None:
    payloads = _offer(precision, build, loss).payloads
    assert payloads == ({"bfloat16": {"cache": True}} if is_kept else {})


@pytest.mark.parametrize(
    ("build", "write"),
    [
        *((lambda: nn.Linear(4, 4), write) for write in WRITES),
        *((Twice, write) for write in (_by_data, _by_vector, _by_setattr)),  # autograd allows these
    ],
)
def test_a_step_that_writes_weights_computes_with_them(
    precision: Strategy, build: Any, write: Any
) -> None:
    loss = _reference_by(write)
    payloads = _offer(precision, build, loss).payloads
    found = {}
    for dtype in ("default", "bfloat16"):
        torch.manual_seed(0)
        model = build()
        settings = {"precision.dtype": dtype} if dtype != "default" else {}
        payload = {"precision.dtype": payloads[dtype]} if dtype in payloads else {}
        resolved = ResolvedPlan(Plan(4, settings=settings), payload, [precision])
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        cpu = torch.device("cpu")
        with Training(model, optimizer, Recipe(loss_fn=loss), resolved, device=cpu) as training:
            found[dtype] = float(training.step(torch.ones(4, 4)))
    assert found["default"] > 1.0
    assert found["bfloat16"] == pytest.approx(found["default"], rel=0.05)
