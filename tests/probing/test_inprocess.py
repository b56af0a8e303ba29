"""Probing in the user's own process leaves everything as it was, whatever the probes did."""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.cpu import CpuDevice
from autofit.devices.lock import DeviceLock
from autofit.errors import DeviceUnavailable, InvalidRequest
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Prober, Target, open_prober
from autofit.registry import load_strategies
from autofit.snapshot.snapshot import Snapshot, differences, digest
from autofit.training.workload import Workload
from autofit.units import MIB


class Net(nn.Module):
    """Changes more than its weights when it runs, and cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 64), nn.BatchNorm1d(64)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(64, 4)
        self.calls = {"forward": 0}
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["forward"] += 1
        random.random()
        out: torch.Tensor = self.last(self.drop(self.norm(self.first(x))))
        return out


def opened(
    workload: Workload,
    strategies: Any = (),
    device: str | None = None,
    vram_budget: str | None = None,
) -> Prober:
    return open_prober(workload, strategies, Target(device, vram_budget, isolation="inprocess"))


def _live() -> tuple[Net, torch.optim.Optimizer]:
    """A model in the midst of training: with state, gradients and a hook."""
    model = Net()
    groups: Any = [
        {"params": model.first.parameters(), "lr": 0.1},
        {"params": model.last.parameters()},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    model.first.register_forward_hook(lambda module, inputs, output: None)
    model.drop.eval()
    return model, optimizer


def _everything(prober_work: Any, **more: Any) -> list[str]:
    """What is different after some work with a prober on a live training."""
    model, optimizer = _live()
    batch = (torch.randn(4, 6), torch.randint(0, 4, (4,)))
    criterion = nn.CrossEntropyLoss(weight=torch.rand(4))
    arguments = {"optimizer": optimizer, "criterion": criterion, "global_batch": 16, **more}
    workload = Workload(model, batch, **arguments)
    objects = {"model": model, "optimizer": optimizer, "batch": batch, "criterion": criterion}
    torch.randn(1)  # whatever is set up at its first use is set up now
    before = digest(objects)
    with opened(workload, load_strategies(None), "cpu", "64MiB") as prober:
        prober_work(prober)
    return differences(before, digest(objects))


def _survey_and_probe(prober: Prober) -> None:
    survey = prober.survey()
    assert survey.resplit is not None
    assert not survey.may_resplit
    baseline = ResolvedPlan(survey.space().baseline)
    assert prober.probe(ProbeRequest(baseline, full_accumulation=True)).measurement.ok


def _in_other_precisions(prober: Prober) -> None:
    for dtype in ("bfloat16", "float16"):
        plan = Plan(4, settings={"precision.dtype": dtype})
        resolved = ResolvedPlan(plan, strategies=prober.strategies)
        assert prober.probe(ProbeRequest(resolved)).measurement.ok


def _out_of_memory(prober: Prober) -> None:
    assert prober.probe(ProbeRequest(ResolvedPlan(Plan(2**17)))).measurement.outcome is Outcome.OOM
    assert prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.ok


def _compare(prober: Prober) -> None:
    assert not prober.compare(ResolvedPlan(Plan(8)), ResolvedPlan(Plan.split(8, 3)), 8).equal


@pytest.mark.parametrize(
    "work", [_survey_and_probe, _in_other_precisions, _out_of_memory, _compare]
)
def test_the_users_objects_are_as_they_were(work: Any) -> None:
    assert _everything(work) == []


def test_also_after_the_users_code_raised() -> None:
    raised = LookupError("in the middle")

    def before_step(model: Any, optimizer: Any) -> None:
        if len(optimizer.state) > 2:
            raise raised

    def work(prober: Prober) -> None:
        result = prober.probe(ProbeRequest(ResolvedPlan(Plan(4))))
        assert result.measurement.outcome is Outcome.USER_ERROR
        assert result.user_exception is raised
        assert "in before_step" in str(raised.__cause__)

    assert _everything(work, before_step=before_step) == []


def test_also_where_the_user_interrupts() -> None:
    def before_step(model: Any, optimizer: Any) -> None:
        raise KeyboardInterrupt

    def work(prober: Prober) -> None:
        with pytest.raises(KeyboardInterrupt):
            prober.probe(ProbeRequest(ResolvedPlan(Plan(4))))

    assert _everything(work, before_step=before_step) == []


def test_each_probe_starts_from_the_users_weights() -> None:
    def work(prober: Prober) -> None:
        losses = [
            prober.probe(ProbeRequest(ResolvedPlan(Plan(4)), **hopeless)).measurement.loss
            for _ in range(2)
        ]
        assert losses[0] == losses[1]

    hopeless: Any = {"incumbent_samples_per_second": 1e12}
    assert _everything(work) == []


def test_functions_that_build_are_welcome_too() -> None:
    """Also where one sample would be too few: `Net` normalizes over the batch."""
    workload = Workload(Net, lambda n: torch.randn(n, 6), optimizer=torch.optim.SGD)
    with opened(workload, (), "cpu", "64MiB") as prober:
        assert prober.probe(
            ProbeRequest(ResolvedPlan(prober.survey().space().baseline))
        ).measurement.ok


def test_a_request_carries_its_own_budget() -> None:
    model = nn.Linear(512, 512)
    with opened(Workload(model, torch.randn(4, 512)), (), "cpu") as prober:
        assert prober.vram_budget_bytes == prober.survey().vram_budget_bytes
        assert prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.ok
        small = ProbeRequest(ResolvedPlan(Plan(4)), 2 * MIB)
        assert prober.probe(small).measurement.outcome is Outcome.OOM
        prober.renew()


def test_what_cannot_be_opened_is_refused_at_once() -> None:
    workload = Workload(nn.Linear(6, 4), torch.randn(4, 6))
    with pytest.raises(InvalidRequest, match=r"budget.*device"):
        opened(workload, (), "cpu", "1000TiB")
    with pytest.raises(InvalidRequest, match="device"):
        opened(workload, (), "tpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceUnavailable):
            opened(workload, (), "cuda")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_is_the_users_again() -> None:
    torch.cuda.set_device(0)
    workload = Workload(nn.Linear(6, 4), torch.randn(4, 6))
    with opened(workload, (), "cuda:1") as prober:
        assert prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.ok
    assert torch.cuda.current_device() == 0
    with pytest.raises(InvalidRequest, match=r"budget.*device"):
        opened(workload, (), "cuda:1", "1000TiB")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_under_a_mode_of_the_caller_s_it_trains_as_a_worker_would(mode: Any) -> None:
    model, batch = nn.Linear(8, 3), torch.randn(2, 8)
    with mode():
        before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        with opened(Workload(model, batch), (), "cpu") as prober:
            seen = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
            assert (
                prober.probe(ProbeRequest(ResolvedPlan(Plan(2)))).measurement.outcome is Outcome.OK
            )
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == before
    assert seen == (True, False)


def test_a_batch_that_repeats_its_memory_is_put_back() -> None:
    batch = torch.randn(1, 8).expand(4, 8)
    before = batch.clone()
    with opened(Workload(nn.Linear(8, 3), batch), (), "cpu") as prober:
        assert prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.outcome is Outcome.OK
    assert torch.equal(batch, before)
    assert batch.stride() == (0, 1)


def test_within_the_caller_s_autocast_no_cast_weight_outlives_its_probe() -> None:
    workload = Workload(nn.Linear(8, 3), torch.randn(2, 8))
    with (
        torch.autocast("cpu", torch.bfloat16),
        opened(workload, load_strategies(["precision"]), "cpu") as prober,
    ):
        _in_other_precisions(prober)
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


class Mortal(CpuDevice):
    """Dies of the forward that sets `is_dead`; giving it back is noticed, and raises by then."""

    exclusive_key = f"test-inprocess-{os.getpid()}"
    is_dead = is_closed = False

    def check_health(self) -> None:
        if self.is_dead:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def close(self) -> None:
        self.is_closed = True
        self.check_health()


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Mortal:
    """The next prober's device; while it is dead, its part of a snapshot cannot be restored."""
    device, restore = Mortal(), Snapshot.restore

    def restore_what_can_be(snapshot: Snapshot) -> None:
        restore(snapshot)
        if device.is_dead:
            raise ExceptionGroup("not all", [RuntimeError("CUDA error: device-side assert")])

    monkeypatch.setattr(Snapshot, "restore", restore_what_can_be)
    monkeypatch.setattr("autofit.probing.inprocess.open_device", lambda name: device)
    return device


def _dying(device: Mortal) -> Workload:
    """Its forward kills the device."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        device.is_dead = True
        raise RuntimeError("CUDA error: device-side assert triggered")

    return Workload(nn.Linear(6, 4), torch.randn(4, 6), loss_fn=loss_fn)


@pytest.mark.parametrize("end", ["probe", "survey", "compare"])
def test_a_device_that_died_is_reported_and_all_the_rest_is_given_back(
    mortal: Mortal, end: str
) -> None:
    gc.unfreeze()
    before = torch.is_grad_enabled()
    with torch.no_grad(), opened(_dying(mortal)) as prober:
        if end == "probe":
            assert (
                prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.outcome
                is Outcome.POISONED
            )
        elif end == "survey":
            prober.survey()
        else:
            with pytest.raises(RuntimeError, match="assert"):
                prober.compare(ResolvedPlan(Plan(4)), ResolvedPlan(Plan.split(4, 2)), 4)
        with pytest.raises(DeviceUnavailable, match="beyond use"):
            prober.probe(ProbeRequest(ResolvedPlan(Plan(4))))
    assert mortal.is_closed
    assert gc.get_freeze_count() == 0
    assert torch.is_grad_enabled() == before
    DeviceLock(Mortal.exclusive_key).release()


def test_the_device_is_left_as_it_was(mortal: Mortal) -> None:
    with opened(Workload(nn.Linear(6, 4), torch.randn(4, 6))) as prober:
        assert prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).measurement.ok
        assert not mortal.is_closed
    assert mortal.is_closed
    mortal.is_closed = False
    with pytest.raises(InvalidRequest, match=r"budget.*device"):
        opened(Workload(nn.Linear(6, 4), torch.randn(4, 6)), (), None, "1000TiB")
    assert mortal.is_closed
