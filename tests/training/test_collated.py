"""Samples and a collate_fn: memory and gradients are those of the batches that it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from autofit.devices.cpu import CpuDevice
from autofit.devices.gpu_catalogue import find_gpu
from autofit.equivalence.accumulation import compare_split_gradients
from autofit.memory.replay import replay
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.dry_run import dry_run
from autofit.probing.measure import measure
from autofit.probing.requests import ProbeRequest
from autofit.training.batch import describe
from autofit.training.builder import TrainingBuilder
from autofit.training.samples import Collated
from autofit.training.training import Training
from autofit.training.watch import BatchWatch
from autofit.training.workload import Workload
from autofit.units import MIB
from tests.workloads.collated import CASES, PERIOD, Case

GPU = find_gpu("A100")
MORE = 6 * PERIOD


def workload(case: Case, count: int = PERIOD, **more: Any) -> Workload:
    return Workload(
        case.build, case.samples(count), collate_fn=case.collate, loss_fn=case.loss_fn, **more
    )


def really_collated(case: Case, count: int) -> Workload:
    """Return the training of a batch of so many other samples, which is not grown."""
    batch = case.collate(case.samples(count, first=PERIOD))
    return Workload(case.build, lambda samples: batch, loss_fn=case.loss_fn)


def held(given: Workload, plan: Plan) -> int:
    device = CpuDevice()
    device.limit(256 * MIB)
    builder = TrainingBuilder(lambda: given, device, seed=0)
    return (
        measure(builder, ProbeRequest(ResolvedPlan(plan), steps=1), 256 * MIB).peak_allocated_bytes
        or 0
    )


def predicted(given: Workload, plan: Plan) -> int:
    run = dry_run(given, ResolvedPlan(plan), GPU)
    return replay(run.recording_on(GPU)).peak_allocated_bytes


@pytest.mark.parametrize("name", CASES)
def test_memory_is_that_of_a_batch_of_as_many_real_samples(name: str) -> None:
    case, plan = CASES[name], Plan(MORE)
    for told_by in (held, predicted):
        fewer = told_by(workload(case), Plan(PERIOD))  # weights and workspaces are in it
        told, true = told_by(workload(case), plan), told_by(really_collated(case, MORE), plan)
        assert told - fewer == pytest.approx(true - fewer, rel=0.02)
        assert true > fewer


@pytest.mark.parametrize("name", CASES)
def test_split_gradients_are_those_of_the_whole_collated_batch(name: str) -> None:
    case = CASES[name]
    samples = case.samples(7)
    seen: list[torch.Tensor] = []

    def note(model: torch.nn.Module, optimizer: Any) -> None:
        seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

    given = workload(case, before_step=note, global_batch=7)
    model, optimizer = _model_of(case)
    plan = ResolvedPlan(Plan.split(7, 3))
    device = torch.device("cpu")
    with Training(
        model, optimizer, given.recipe, plan, device=device, samples=given.samples
    ) as training:
        loss = training.step(samples)
    other, _ = _model_of(case)
    whole = case.loss_fn(other, case.collate(samples))
    whole.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, whole.detach())
    expected = [p.grad for p in other.parameters() if p.grad is not None]
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_that_these_may_be_split(name: str) -> None:
    given = workload(CASES[name], global_batch=PERIOD)
    device = CpuDevice()
    device.limit(256 * MIB)
    found = compare_split_gradients(TrainingBuilder(lambda: given, device, seed=0), given)
    assert found.why_kept is None, found.notes
    assert found.comparison is not None
    assert found.notes == ()


def test_a_step_takes_a_data_set_without_slices() -> None:
    case = CASES[next(iter(CASES))]
    given, samples = workload(case, global_batch=7), case.samples(9)
    losses = []
    data: Any = samples
    given_to_steps: list[Any] = [samples[1:8], Subset(data, range(1, 8))]
    for chosen in given_to_steps:
        model, optimizer = _model_of(case)
        with _training(given, model, optimizer) as training:
            losses.append(training.step(chosen))
    torch.testing.assert_close(*losses)


def _ragged(n: int) -> list[tuple[torch.Tensor, int]]:
    random = torch.Generator().manual_seed(0)
    return [(torch.randn(1 + at % 5, 4, generator=random), at % 3) for at in range(n)]


def _of_parts(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    hidden = torch.stack([part.mean(0) for part in model(batch[0]).unbind()])
    return torch.nn.functional.cross_entropy(hidden, batch[1])


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_trained_as_the_whole_batch(layout: torch.layout) -> None:
    def collate(samples: list[Any]) -> Any:
        parts, targets = zip(*samples, strict=True)
        nested = torch.nested.nested_tensor([*parts], layout=layout)
        return nested, torch.tensor(targets)

    case = Case(lambda: torch.nn.Linear(4, 3), lambda number: None, collate, _of_parts)
    samples = _ragged(7)
    given = Workload(
        case.build, samples, collate_fn=collate, loss_fn=_of_parts, global_batch=len(samples)
    )
    shapes = describe(given.batch(len(samples)))
    assert shapes == {"[0]": "float32[7, 5, 4]", "[1]": "int64[7]"}
    device = CpuDevice()
    device.limit(256 * MIB)
    found = compare_split_gradients(TrainingBuilder(lambda: given, device, seed=0), given)
    assert found.why_kept is None, found.notes
    model, optimizer = _model_of(case)
    whole = _of_parts(model, collate(samples)).detach()
    watch = BatchWatch(Plan.split(7, 3), shapes, samples=given.samples)
    with _training(given, model, optimizer, watch) as training:
        torch.testing.assert_close(training.step(samples), whole)


def _training(
    given: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    watch: BatchWatch | None = None,
) -> Training:
    return Training(
        model,
        optimizer,
        given.recipe,
        ResolvedPlan(Plan.split(7, 3)),
        device=torch.device("cpu"),
        samples=given.samples,
        watch=watch,
    )


def _model_of(case: Case) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.build()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_two_samples_whose_tensors_have_the_names_of_a_batchs_are_samples() -> None:
    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return (x, torch.ones_like(x)), (y, torch.ones_like(y))

    pairs = [(torch.randn(6), torch.randn(6)) for _ in range(4)]
    samples = Workload(nn.Linear(6, 6), pairs, collate_fn=collate).samples
    assert isinstance(samples, Collated)
    assert not samples.is_batch(pairs[:2])
    assert samples.is_batch(collate(pairs[:2]))
