"""Steps that start alike are compared, to the bit or to the device's noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.equivalence.steps import StepComparer
from autofit.errors import InvalidArgument
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.strategy import PYTHON, Capabilities, Comparison
from autofit.testing import PlainContext
from autofit.testing.conformance import attention, convolutions
from autofit.training.evaluation import checksum
from autofit.training.loss import Recipe
from autofit.training.training import Training
from autofit.training.workload import Workload

X = torch.linspace(-1, 1, 24).view(4, 6)


class Net(nn.Module):
    """Leaves something behind in every place that a step may."""

    moved: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.calls, self.seen, self.kept = 0, [0.0], {"mean": torch.zeros(6)}
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        self.kept["mean"] += x.mean(0)
        x = self.norm(self.inner(x)) * torch.rand(6, generator=self.own) * torch.rand(6)
        return self.out(x).square().mean() * random.random() * np.random.rand()


def _comparer(model: nn.Module, batch: torch.Tensor = X, **more: Any) -> StepComparer:
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    plan = ResolvedPlan(Plan(len(batch)))
    training = Training(model, optimizer, Recipe(), plan, device=torch.device("cpu"))
    return StepComparer(training, batch, **more)


def _compare(comparer: StepComparer, apply: Any = nullcontext, **more: Any) -> Comparison:
    return comparer.compare(apply, nullcontext, "plain", **({"seed": 0, "update": False} | more))


@pytest.mark.parametrize("update", [False, True])
def test_every_step_starts_alike(update: bool) -> None:
    """Weights, buffers, attributes, what they hold, and random numbers of every kind."""
    comparer = _comparer(Net())
    for _ in range(2):
        found = _compare(comparer, update=update)
        assert found.equal
        assert (found.loss, found.gradient, found.tolerance) == (0.0, 0.0, 0.0)
    assert found.ran == {"", "inner", "norm", "out"}


@contextmanager
def _twice(training: Training) -> Iterator[None]:
    """Run the forward of each micro-batch twice, as a recomputation does."""
    handle = training.model.register_forward_pre_hook(lambda m, args: (m.forward(*args), None)[1])
    try:
        yield
    finally:
        handle.remove()


def test_differences_are_named_loss_and_gradients_first() -> None:
    found = _compare(_comparer(Net()), _twice)
    assert not found.equal
    assert found.gradient > 0.01
    assert found.differences[0] == "the loss"
    expected = {"the gradient of out.weight", "buffer norm.running_mean", "attribute calls", PYTHON}
    assert expected <= set(found.differences)
    assert set(found.modules) <= {"inner", "norm", "out"}


@pytest.mark.parametrize("held", ["number", "items", "inner", "names", "noise", "root"])
def test_what_a_module_holds_is_compared_and_nan_equals_itself(held: str) -> None:
    class Holding(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 2)
            self.number, self.items, self.names = 0, [1.0], {"a"}
            self.inner: dict[str, Any] = {"deep": [(float("nan"), torch.zeros(1))]}
            self.noise, self.lowest = torch.Generator().manual_seed(1), 0.0
            self.root: dict[str, Any] = {"children": [{"seen": 0}]}
            self.root["children"][0]["parent"] = self.root  # which holds itself

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.lowest = float("nan")
            return super().forward(x).mean()

    @contextmanager
    def changing(training: Training) -> Iterator[None]:
        model: Any = training.model
        changes: dict[str, Callable[[], object]] = {
            "number": lambda: setattr(model, "number", 1),
            "items": lambda: model.items.append(2.0),
            "inner": lambda: model.inner["deep"][0][1].add_(1),
            "names": lambda: model.names.add("b"),
            "noise": lambda: torch.rand(1, generator=model.noise),
            "root": lambda: model.root["children"][0].update(seen=1),
        }
        changes[held]()
        yield

    comparer = _comparer(Holding())
    assert _compare(comparer).equal
    (name,) = _compare(comparer, changing).differences
    assert name.startswith(f"attribute {held}")
    assert _compare(comparer).equal


def test_updates_are_compared_where_that_is_asked() -> None:
    @contextmanager
    def faster(training: Training) -> Iterator[None]:
        assert isinstance(training.optimizer, torch.optim.Optimizer)
        (group,) = training.optimizer.param_groups
        group["lr"] *= 2
        try:
            yield
        finally:
            group["lr"] /= 2

    model = Net()
    before = model.inner.weight.detach().clone()
    assert _compare(_comparer(model), faster).equal
    assert torch.equal(model.inner.weight, before)
    found = _compare(_comparer(model), faster, update=True)
    assert found.gradient == 0.0
    assert found.differences[0].startswith("parameter ")


def test_a_step_that_raises_differs_and_says_how() -> None:
    @contextmanager
    def raising(training: Training) -> Iterator[None]:
        raise LookupError("nowhere\nto be found")
        yield

    assert _compare(_comparer(Net()), raising).differences == ("it raises LookupError: nowhere",)
    with pytest.raises(LookupError):
        _comparer(Net()).compare(nullcontext, raising, "raising", seed=0, update=False)


class Jitters(nn.Module):
    """As with a kernel that adds in any order: no two runs are alike to the bit."""

    def __init__(self, size: float = 1e-6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.jitter = cycle([0.1, 0.7, 0.3, 0.9, 0.5])
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inner(x)) * (1 + self.size * next(self.jitter))
        return x.exp().mean()


@contextmanager
def _bent(training: Training) -> Iterator[None]:
    handle = training.model.register_forward_pre_hook(lambda _, args: (args[0].exp(),))
    try:
        yield
    finally:
        handle.remove()


def test_noise_of_the_device_is_no_difference() -> None:
    comparer = _comparer(Jitters(), is_exact=False)
    found = _compare(comparer)
    assert found.equal
    assert 0 < found.gradient <= found.tolerance < 1e-3
    assert not _compare(comparer, _bent).equal


def test_noise_that_shows_now_and_then_is_no_difference_either() -> None:
    """As where a kernel rounds by where in memory its operands lie."""
    model = Jitters()
    model.jitter = cycle([0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.2])
    comparer = _comparer(model, is_exact=True)
    assert not _compare(comparer, _bent).equal  # the first step, this one, and the first again
    found = _compare(comparer, lambda training: nullcontext())
    assert found.equal
    assert 0 < found.gradient < 1e-6


@pytest.mark.parametrize(("size", "is_exact"), [(1e-6, True), (1.0, False)])
def test_a_step_that_cannot_be_repeated_says_so(size: float, is_exact: bool) -> None:
    """A GPU's noise is small; a CPU has none."""
    found = _compare(_comparer(Jitters(size), is_exact=is_exact))
    assert not found.is_repeatable
    assert not found.equal
    assert "two identical steps" in found.differences[0]


SETTINGS: dict[str, tuple[Callable[[], Workload], str, str]] = {
    "precision": (attention, "precision.dtype", "bfloat16"),
    "memory_format": (convolutions, "memory_format.layout", "channels_last"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_context_compares_a_strategys_settings(name: str) -> None:
    build, setting, value = SETTINGS[name]
    (strategy,) = load_strategies([name])
    context = PlainContext(build)
    assert context.capabilities == Capabilities("cpu", bfloat16=True, float16=True, tf32=True)
    plain = context.compare({}, {}, strategy)
    assert plain.equal
    found = context.compare({setting: value}, {}, strategy)
    assert 0 < found.gradient < (0.1 if name == "precision" else 1e-4)
    assert context.compare({setting: value}, {}, strategy, reference=({setting: value}, {})).equal
    assert context.compare({}, {}, strategy, micro_batch=4, seed=1, update=True).equal
    context.close()


def test_on_the_meta_device_nothing_is_compared() -> None:
    (strategy,) = load_strategies(["precision"])
    with pytest.raises(InvalidArgument, match="meta"):
        PlainContext(attention, "meta").compare({}, {}, strategy)


# -- A checksum of a tensor changes with its values, their order and their bits

MANY = 2**20 + 5  # elements of more than one piece


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int8])
def test_values_that_change_places_are_seen(dtype: torch.dtype) -> None:
    one = torch.zeros(MANY, dtype=dtype)
    one[0] = 1
    sums = {checksum(one.roll(places)) for places in (0, 1, MANY // 2, MANY - 3, MANY - 1)}
    assert len(sums) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_a_value_that_moves_far_is_seen(dtype: torch.dtype) -> None:
    """The low bits of 1.0 are zero: the more of them in a number, the fewer hold its place."""
    one = torch.zeros(2**13, dtype=dtype)
    one[0] = 1
    assert len({checksum(one.roll(2**power)) for power in range(13)}) == 13


def test_the_last_bit_of_one_value_is_seen() -> None:
    values = torch.randn(7, 9).t()
    changed = values.clone()
    changed[4, 3] = torch.nextafter(changed[4, 3], torch.tensor(10.0))
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(changed)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Counts values that the host reads, for each of which it waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_the_host_reads_one_value_of_each_tensor() -> None:
    with _Reads() as reads:  # type: ignore[no-untyped-call]  # torch's own hook
        checksum(torch.zeros(2 * MANY, dtype=torch.int8))
    assert reads.count == 1


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.complex128, torch.bfloat16])
def test_each_type_and_shape_has_a_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.zeros(shape, dtype=dtype)
    assert checksum(values) == checksum(values.clone()) != checksum(torch.ones_like(values))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
def test_quantized_values_are_seen(dtype: torch.dtype) -> None:
    one, same, other = (
        torch.quantize_per_tensor(torch.tensor(values), 1.0, 0, dtype)
        for values in ([1.0, 2.0], [1.0, 2.0], [2.0, 1.0])
    )
    assert checksum(one) == checksum(same) != checksum(other)


def test_scripted_parts_are_compared_too() -> None:
    """Their containers of buffers are torch's own, and cannot be iterated over."""
    script: Any = torch.jit.script
    norm = script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    found = _compare(_comparer(nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 2))))
    assert found.equal
    assert {name for name in found.changes if "running_mean" in name} == {"1.1.running_mean"}
