"""precision.dtype: what is offered for which model and device; it acts, and is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autofit import Workload
from autofit.registry import load_strategies
from autofit.strategy import Capabilities
from autofit.training.loss import Recipe
from tests.strategies.trainings import offered, training

(PRECISION,) = load_strategies(["precision"])
SETTING = "precision.dtype"
EVERYTHING = Capabilities("cuda", bfloat16=True, float16=True, tf32=True)


def values(model: nn.Module, capabilities: Capabilities = EVERYTHING) -> list[Any]:
    weights = [torch.zeros(1, requires_grad=True)]  # a model may have none
    workload = Workload(model, torch.zeros(2, 4), optimizer=lambda _: torch.optim.SGD(weights))
    return list(offered(PRECISION, SETTING, lambda: workload, capabilities=capabilities)[0].values)


@pytest.mark.parametrize(
    ("capabilities", "wanted"),
    [
        (EVERYTHING, ["default", "tf32", "bfloat16", "float16"]),
        (Capabilities("cuda", float16=True), ["default", "float16"]),
        (Capabilities("cpu", bfloat16=True), ["default", "bfloat16"]),
        (Capabilities("cpu"), ["default"]),
    ],
)
def test_only_what_the_device_does_is_offered(
    capabilities: Capabilities, wanted: list[str]
) -> None:
    assert values(nn.Linear(4, 4), capabilities) == wanted


def with_a_spectrum(*, is_trained: bool) -> nn.Module:
    model, spectrum = nn.Linear(4, 4), torch.ones(4, dtype=torch.complex64)
    model.register_parameter("spectrum", nn.Parameter(spectrum, requires_grad=is_trained))
    return model


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (nn.Linear(4, 4).bfloat16(), []),
        (nn.Linear(4, 4).half(), []),
        (nn.Linear(4, 4).double(), []),
        (nn.Identity(), []),
        (
            nn.Sequential(nn.Linear(64, 64), nn.Linear(4, 4).half()),
            ["tf32", "bfloat16"],
        ),
        (with_a_spectrum(is_trained=True), ["tf32", "bfloat16"]),
        (with_a_spectrum(is_trained=False), ["tf32", "bfloat16", "float16"]),
    ],
    ids=["bfloat16", "float16", "float64", "none", "few in float16", "complex", "complex, frozen"],
)
def test_weights_rule_out_types_that_they_cannot_train_in(
    model: nn.Module, wanted: list[str]
) -> None:
    assert values(model) == ["default", *wanted]


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


def test_tf32_that_is_on_already_is_not_offered(matmul: Any) -> None:
    matmul.fp32_precision = "tf32"
    assert "tf32" not in values(nn.Linear(4, 4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_forward_runs_in_fewer_bits(dtype: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    with training(model, PRECISION, settings={SETTING: dtype}) as live:
        with live.context():
            assert model(batch).dtype == getattr(torch, dtype)
        assert model.weight.dtype == torch.float32
        assert (live.scaler is not None) is (dtype == "float16")
        before = model.weight.detach().clone()
        assert live.step(batch).isfinite()
        assert not torch.equal(before, model.weight)
    assert live.scaler is None
    with live.context():
        assert model(batch).dtype == torch.float32


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_tf32_is_on_inside_and_as_it_was_outside(matmul: Any, before: str, raises: bool) -> None:
    matmul.fp32_precision = before
    readable = allow_tf32()
    with suppress(KeyError), training(nn.Linear(8, 8), PRECISION, settings={SETTING: "tf32"}):
        assert matmul.fp32_precision == "tf32"
        assert allow_tf32() == (None if readable is None else True)
        if raises:
            raise KeyError
    assert matmul.fp32_precision == before
    assert allow_tf32() == readable


def allow_tf32() -> bool | None:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return None


# The cache of casts.


class Recomputed(nn.Linear):
    """Casts its weight again in the backward pass, where a cache of the forward is gone."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def twice() -> nn.Module:
    """One layer that runs twice, after a frozen one."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), layer, layer)


def reference_by(write: Any) -> Any:
    """A loss that swaps other weights in for a second forward, as of a reference policy."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch)
        live = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            write(model, [torch.ones_like(p) for p in live])
            reference = model(batch)
            write(model, live)
        return (logits - reference).float().square().mean()

    return loss


def by_data(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def by_foreach(model: nn.Module, values: list[Tensor]) -> None:
    torch._foreach_copy_(list(model.parameters()), values)


def by_state_dict(model: nn.Module, values: list[Tensor]) -> None:
    model.load_state_dict(dict(zip(dict(model.named_parameters()), values, strict=True)))


def by_vector(model: nn.Module, values: list[Tensor]) -> None:
    vector = nn.utils.parameters_to_vector(values)
    nn.utils.vector_to_parameters(vector, model.parameters())


def by_setattr(model: nn.Module, values: list[Tensor]) -> None:
    for (path, parameter), value in zip(list(model.named_parameters()), values, strict=True):
        module, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        other = nn.Parameter(value, requires_grad=parameter.requires_grad)
        setattr(module, name, other if value.eq(1).all() else parameter)
        parameter.data.copy_(value)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def one_layer() -> nn.Module:
    return nn.Linear(4, 4)


def payloads_of(build: Any, loss: Any) -> Any:
    def workload() -> Workload:
        return Workload(build(), torch.ones(4, 4), loss_fn=loss, optimizer=torch.optim.SGD)

    cpu = Capabilities("cpu", bfloat16=True)
    return offered(PRECISION, SETTING, workload, capabilities=cpu)[0].payloads


@pytest.mark.parametrize(
    ("build", "loss", "is_kept"),
    [
        (twice, mean_square, True),
        (one_layer, mean_square, False),
        (lambda: Recomputed(4, 4), mean_square, False),
        (twice, reference_by(by_data), False),
        (twice, reference_by(by_vector), False),
    ],
)
def test_casts_are_kept_where_that_saves_some_and_no_weight_is_written_to(
    build: Any, loss: Any, is_kept: bool
) -> None:
    assert payloads_of(build, loss) == ({"bfloat16": {"cache": True}} if is_kept else {})


@pytest.mark.parametrize(
    ("build", "write"),
    [
        *((one_layer, write) for write in (by_data, by_foreach, by_state_dict)),
        *((one_layer, write) for write in (by_vector, by_setattr)),
        *((twice, write) for write in (by_data, by_vector, by_setattr)),  # autograd allows these
    ],
)
def test_a_step_that_writes_weights_computes_with_them(build: Any, write: Any) -> None:
    recipe = Recipe(loss_fn=reference_by(write))
    payloads = payloads_of(build, recipe.loss_fn)

    def loss(dtype: str) -> float:
        torch.manual_seed(0)
        model, payload = build(), {SETTING: payloads[dtype]} if dtype in payloads else {}
        still, chosen = torch.optim.SGD(model.parameters(), 0.0), {SETTING: dtype}
        made = training(
            model, PRECISION, optimizer=still, payloads=payload, recipe=recipe, settings=chosen
        )
        with made as live:
            return float(live.step(torch.ones(4, 4)))

    plain = loss("default")
    assert plain > 1.0
    assert loss("bfloat16") == pytest.approx(plain, rel=0.05)
