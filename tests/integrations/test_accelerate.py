"""Plans in a loop with a real Accelerator, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autofit.errors import InvalidArgument
from autofit.integrations import accelerate as integration
from autofit.plan import Plan
from autofit.report.report import Report
from autofit.training.workload import Workload

accelerate: Any = pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install -e . --group dev"
)
INPUTS = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(24) % 3


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state for a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 3))


def workload_of(model: nn.Module) -> Workload:
    return Workload(
        model, (INPUTS[:4], TARGETS[:4]), criterion=nn.CrossEntropyLoss(), global_batch=8
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Unlike Adam, it makes no whole step of a gradient that is zero but for its rounding."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def losses_of(report: Report, accelerator: Any, model: nn.Module, make: Any) -> list[float]:
    optimizer = make(model)
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), report.plan.micro_batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    with integration.applied(report, accelerator, model, optimizer):
        for inputs, target in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    steps = report.plan.accumulation_steps
    return [sum(losses[at : at + steps]) / steps for at in range(0, len(losses), steps)]


PLANS: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "accumulation": (Plan(2, accumulation_steps=4), ()),
    "bfloat16": (Plan(4, accumulation_steps=2, settings={"precision.dtype": "bfloat16"}), ()),
    "placement": (
        Plan(8, settings={"checkpointing.level": 1, "optimizer.implementation": "fused"}),
        ("1", "2"),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_three_steps_of_the_loop_have_the_losses_of_apply(
    name: str,
    make_report: Callable[..., Report],
    losses_of_apply: Callable[..., list[float]],
) -> None:
    plan, units = PLANS[name]
    model = model_of()
    report = make_report(workload_of(model), plan, units)
    batches = [(INPUTS[at : at + 8], TARGETS[at : at + 8]) for at in (0, 8, 16)]
    expected = losses_of_apply(report, model, adamw, batches)
    accelerator = accelerate.Accelerator(cpu=True, **integration.arguments(report))
    assert losses_of(report, accelerator, model, adamw) == pytest.approx(expected, rel=1e-5)
    assert not any("forward" in vars(child) for child in model.modules() if child is not model)


@pytest.mark.slow
@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_compiled_plan_has_the_losses_of_apply(
    is_its_own: bool,
    make_report: Callable[..., Report],
    losses_of_apply: Callable[..., list[float]],
) -> None:
    """By the Accelerator's own compilation, or on the model where it was made without."""
    model = model_of()
    plan = Plan(2, accumulation_steps=4, settings={"compile.mode": "default"})
    report = make_report(workload_of(model), plan)
    batches = [(INPUTS[at : at + 8], TARGETS[at : at + 8]) for at in (0, 8, 16)]
    expected = losses_of_apply(report, model, adamw, batches)
    given = integration.arguments(report)
    assert given["dynamo_plugin"].backend.value.lower() == "inductor"
    if not is_its_own:
        del given["dynamo_plugin"]
    accelerator, before = accelerate.Accelerator(cpu=True, **given), compiled_graphs()
    assert losses_of(report, accelerator, model, adamw) == pytest.approx(expected, rel=1e-5)
    assert compiled_graphs() == before + 1
    assert "_compiled_call_impl" not in vars(model)


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_an_accelerator_that_compiles_what_the_plan_does_not_is_told(
    make_report: Callable[..., Report],
) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="inductor")
    report = make_report(workload_of(model), Plan(8))
    with (
        pytest.warns(UserWarning, match="compiles"),
        integration.applied(report, accelerator, model, optimizer),
    ):
        pass
    other = make_report(workload_of(model), Plan(8, settings={"compile.mode": "reduce-overhead"}))
    with (
        pytest.raises(InvalidArgument, match="compiles"),
        integration.applied(other, accelerator, model, optimizer),
    ):
        pass
    assert "dynamo_plugin" not in integration.arguments(report)


def test_accelerates_own_compilation_is_left_where_it_turns_tf32_on(
    make_report: Callable[..., Report],
) -> None:
    """It does so on a GPU without mixed precision."""
    for settings, is_its_own in (({}, False), ({"precision.dtype": "bfloat16"}, True)):
        plan = Plan(8, settings={"compile.mode": "default", **settings})
        report = make_report(workload_of(model_of()), plan)
        environment = {**report.record.environment, "device": "cuda:0"}
        on_gpu = replace(report, record=replace(report.record, environment=environment))
        assert ("dynamo_plugin" in integration.arguments(on_gpu)) is is_its_own


@pytest.mark.cuda
def test_three_steps_on_a_gpu_have_the_losses_of_apply(make_report: Callable[..., Report]) -> None:
    model = model_of().cuda()
    settings: dict[str, Any] = {"precision.dtype": "float16", "checkpointing.level": 1}
    plan = Plan(4, accumulation_steps=2, settings=settings)
    report = make_report(workload_of(model), plan, ("1",))
    other = copy.deepcopy(model)
    with report.apply(other, sgd(other)) as training:
        expected = [
            training.step((INPUTS[at : at + 8], TARGETS[at : at + 8])).item() for at in (0, 8, 16)
        ]
    accelerator = accelerate.Accelerator(**integration.arguments(report))
    assert losses_of(report, accelerator, model, sgd) == pytest.approx(expected, rel=5e-4)


def test_what_was_set_is_told_and_given_back(make_report: Callable[..., Report]) -> None:
    model = model_of()
    plan = Plan(2, accumulation_steps=4, settings={"checkpointing.level": 1})
    report = make_report(workload_of(model), plan, ("1",))
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with integration.applied(report, accelerator, model, optimizer) as applied:
        assert accelerator.gradient_accumulation_steps == 4
        assert "gradient_accumulation_steps=4 (was 1)" in str(applied)
        assert "checkpointing.level=1 is applied to model and optimizer" in str(applied)
        assert "forward" in vars(model[1])  # type: ignore[index]  # a Sequential
    assert accelerator.gradient_accumulation_steps == 1
    assert "forward" not in vars(model[1])  # type: ignore[index]  # likewise


@pytest.mark.parametrize(
    ("samples", "batch_size", "told"),
    [
        (24, 2, ()),
        (24, 4, ("batch_size=2",)),
        (23, 2, ("drop samples",)),
        (None, 2, ("batch_size=2", "drop samples")),
    ],
)
def test_what_the_loader_has_already_is_not_asked_for(
    samples: int | None, batch_size: int, told: tuple[str, ...], make_report: Callable[..., Report]
) -> None:
    model = model_of()
    report = make_report(workload_of(model), Plan(2, accumulation_steps=4))
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if samples is not None:
        accelerator.prepare(DataLoader(TensorDataset(torch.zeros(samples, 2)), batch_size))
    with integration.applied(report, accelerator, model, optimizer) as applied:
        shown = str(applied)
    for words in ("batch_size=2", "drop samples"):
        assert (words in shown) is (words in told)


@pytest.mark.parametrize("has", ["no", "bf16"])
def test_another_precision_than_the_plans_is_refused(
    has: str, make_report: Callable[..., Report]
) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=has)
    report = make_report(workload_of(model), Plan(8, settings={"precision.dtype": "float16"}))
    with (
        pytest.raises(
            InvalidArgument, match=f"mixed_precision='{has}', but the plan needs another"
        ),
        integration.applied(report, accelerator, model, optimizer),
    ):
        pass
    assert integration.arguments(report)["mixed_precision"] == "fp16"
