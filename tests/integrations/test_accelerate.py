"""Plans in a loop with a real Accelerator, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autofit import InvalidArgument, Plan, Report, Workload
from autofit.integrations import accelerate as integration
from tests.integrations.conftest import by_steps, compiled_graphs, losses_by_apply, report_of

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


def made(plan: Plan, units: tuple[str, ...] = ()) -> tuple[Report, Any]:
    """Return a report whose best plan is this one, and its model."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 3))
    batch = INPUTS[:4], TARGETS[:4]
    workload = Workload(model, batch, criterion=nn.CrossEntropyLoss(), global_batch=8)
    return report_of(workload, plan, units), model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Unlike Adam, it makes no whole step of a gradient that is zero but for its rounding."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def applied(report: Report, model: nn.Module, **given: Any) -> Any:
    """Apply the plan in a loop with an Accelerator of these arguments."""
    accelerator = accelerate.Accelerator(cpu=True, **given)
    return integration.applied(report, accelerator, model, sgd(model))


def check_losses(
    report: Report,
    model: nn.Module,
    make: Any = adamw,
    *,
    apart: float = 1e-5,
    arguments: dict[str, Any] | None = None,
) -> int:
    """Three steps of a loop have the losses of `report.apply`, and nothing is left on the model.

    Returns:
        The number of graphs that the loop compiled.
    """
    batches = zip(INPUTS.view(3, 8, 8), TARGETS.view(3, 8), strict=True)
    expected = losses_by_apply(report, model, make, batches)
    accelerator = accelerate.Accelerator(**arguments or integration.arguments(report))
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), report.plan.micro_batch)
    prepared, optimizer, loader = accelerator.prepare(model, make(model), loader)
    losses, before = [], compiled_graphs()
    with integration.applied(report, accelerator, prepared, optimizer):
        for inputs, target in loader:
            with accelerator.accumulate(prepared):
                loss = nn.functional.cross_entropy(prepared(inputs), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item() / report.plan.accumulation_steps)
    assert by_steps(losses, report.plan) == pytest.approx(expected, rel=apart)
    assert "_compiled_call_impl" not in vars(model)
    assert not any("forward" in vars(child) for child in model.children())
    return compiled_graphs() - before


@pytest.mark.parametrize(
    ("plan", "units"),
    [
        (Plan(2, accumulation_steps=4), ()),
        (Plan(4, accumulation_steps=2, settings={"precision.dtype": "bfloat16"}), ()),
        (
            Plan(8, settings={"checkpointing.level": 1, "optimizer.implementation": "fused"}),
            ("1", "2"),
        ),
    ],
    ids=["accumulation", "bfloat16", "placement"],
)
def test_three_steps_of_the_loop_have_the_losses_of_apply(
    plan: Plan, units: tuple[str, ...]
) -> None:
    report, model = made(plan, units)
    check_losses(report, model, arguments={"cpu": True, **integration.arguments(report)})


@pytest.mark.slow
@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_compiled_plan_has_the_losses_of_apply(is_its_own: bool) -> None:
    """By the Accelerator's own compilation, or on the model where it was made without."""
    plan = Plan(2, accumulation_steps=4, settings={"compile.mode": "default"})
    report, model = made(plan)
    given = {"cpu": True, **integration.arguments(report)}
    assert given["dynamo_plugin"].backend.value.lower() == "inductor"
    if not is_its_own:
        del given["dynamo_plugin"]
    assert check_losses(report, model, arguments=given) == 1


@pytest.mark.cuda
def test_three_steps_on_a_gpu_have_the_losses_of_apply() -> None:
    settings: dict[str, Any] = {"precision.dtype": "float16", "checkpointing.level": 1}
    report, model = made(Plan(4, accumulation_steps=2, settings=settings), ("1",))
    check_losses(report, model.cuda(), sgd, apart=5e-4)


def test_an_accelerator_that_compiles_what_the_plan_does_not_is_told() -> None:
    report, model = made(Plan(8))
    with (
        pytest.warns(UserWarning, match="compiles"),
        applied(report, model, dynamo_backend="inductor"),
    ):
        pass
    assert "dynamo_plugin" not in integration.arguments(report)


def test_accelerates_own_compilation_is_left_where_it_turns_tf32_on() -> None:
    """It does so on a GPU without mixed precision."""
    for settings, is_its_own in (({}, False), ({"precision.dtype": "bfloat16"}, True)):
        report, _ = made(Plan(8, settings={"compile.mode": "default", **settings}))
        environment = {**report.record.environment, "device": "cuda:0"}
        on_gpu = replace(report, record=replace(report.record, environment=environment))
        assert ("dynamo_plugin" in integration.arguments(on_gpu)) is is_its_own


def test_what_was_set_is_told_and_given_back() -> None:
    plan = Plan(2, accumulation_steps=4, settings={"checkpointing.level": 1})
    report, model = made(plan, ("1",))
    accelerator = accelerate.Accelerator(cpu=True)
    with integration.applied(report, accelerator, model, sgd(model)) as told:
        assert accelerator.gradient_accumulation_steps == 4
        assert "gradient_accumulation_steps=4 (was 1)" in str(told)
        assert "checkpointing.level=1 is applied to model and optimizer" in str(told)
        assert "forward" in vars(model[1])
    assert accelerator.gradient_accumulation_steps == 1
    assert "forward" not in vars(model[1])


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
    samples: int | None, batch_size: int, told: tuple[str, ...]
) -> None:
    report, model = made(Plan(2, accumulation_steps=4))
    accelerator = accelerate.Accelerator(cpu=True)
    if samples is not None:
        accelerator.prepare(DataLoader(TensorDataset(torch.zeros(samples, 2)), batch_size))
    with integration.applied(report, accelerator, model, sgd(model)) as shown:
        pass
    asked = [words for words in ("batch_size=2", "drop samples") if words in str(shown)]
    assert asked == list(told)


FLOAT16 = {"precision.dtype": "float16"}


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        (FLOAT16, {"mixed_precision": "no"}, "mixed_precision='no', but the plan needs another"),
        (
            FLOAT16,
            {"mixed_precision": "bf16"},
            "mixed_precision='bf16', but the plan needs another",
        ),
        ({"compile.mode": "reduce-overhead"}, {"dynamo_backend": "inductor"}, "compiles"),
    ],
)
def test_an_accelerator_of_other_arguments_than_the_plans_is_refused(
    settings: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    report, model = made(Plan(8, settings=settings))
    with pytest.raises(InvalidArgument, match=words), applied(report, model, **given):
        pass
    assert (integration.arguments(report).get("mixed_precision") == "fp16") is (settings == FLOAT16)
