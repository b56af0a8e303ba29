"""A search's view of its worker: it answers, and nothing of the user's is touched."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidArgument, WorkerFailed
from autofit.measurement import Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.prober import Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.worker_channel import WorkerChannel
from autofit.registry import load_strategies
from autofit.testing.digest import differences, digest
from autofit.training.workload import Workload
from autofit.units import format_bytes

BUDGET = 64 * 2**20
HOPELESS: Any = {"incumbent_samples_per_second": 1e12}
"""A rate that no plan beats: probes are as short as can be."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def _criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy; a larger batch than any real one makes it fail."""
    print("user code may print", len(output))
    if len(output) == 77:
        raise LookupError("sample 7 is broken")
    return nn.functional.cross_entropy(output, target)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: Any = [{"params": trained[:2], "lr": 0.1}, {"params": trained[2:]}]
    return torch.optim.AdamW(groups)


class Live:
    """A training in progress and its prober."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = _adam(self.model)
        for _ in range(2):
            self.model(torch.randn(4, 6)).sum().backward()
            self.optimizer.step()
        self.batch = (torch.randn(4, 6), torch.randint(0, 4, (4,)))
        self.workload = Workload(
            self.model,
            self.batch,
            criterion=_criterion,
            optimizer=self.optimizer,
            global_batch=12,
        )
        self.before = self.digest()
        self.prober = open_prober(self.workload, load_strategies(None), Target("cpu", BUDGET))

    def probe(self, micro_batch: int, **more: Any) -> Any:
        """Probe that micro-batch."""
        return self.prober.probe(ProbeRequest(ResolvedPlan(Plan(micro_batch)), **more))

    def digest(self) -> dict[str, str]:
        objects = {"model": self.model, "optimizer": self.optimizer, "batch": self.batch}
        facts = digest(objects)
        return {name: fact for name, fact in facts.items() if name.startswith(tuple(objects))}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    opened = Live()
    yield opened
    opened.prober.close()


@pytest.fixture(autouse=True)
def _untouched(live: Live) -> Iterator[None]:
    yield
    assert differences(live.before, live.digest()) == []


def test_the_optimizers_state_is_part_of_what_a_plan_holds(live: Live) -> None:
    """What is there before the first step must count as what a first step makes."""
    fresh = Workload(live.model, live.batch, criterion=_criterion, optimizer=_adam(live.model))
    with open_prober(fresh, target=Target("cpu", BUDGET)) as prober:
        probed: Any = prober.probe(ProbeRequest(ResolvedPlan(Plan(4)), **HOPELESS))
    made = probed.measurement.peak_allocated_bytes
    brought = live.probe(4, **HOPELESS).measurement.peak_allocated_bytes
    # On the CPU, step counts that a first step makes count too; those that are brought do not.
    counts = len(live.optimizer.state)
    assert made - brought == 512 * counts


def test_the_users_error_begins_with_what_was_tried(live: Live) -> None:
    raised = live.probe(77).user_exception
    said = "".join(traceback.format_exception(raised))
    before, found, _ = said.partition("Traceback (most recent call last)")
    assert found
    assert "autofit was probing 77 x 1" in before


def test_closing_ends_the_worker_and_removes_the_payload(
    live: Live, running: Callable[[int], bool]
) -> None:
    assert live.probe(4, **HOPELESS).measurement.ok
    prober: Any = live.prober
    channel, worker = prober._channel, prober.worker_pid
    assert channel.payload.exists()
    live.prober.close()
    assert not channel.payload.exists()
    assert not running(worker)
    live.prober.close()


def test_what_cannot_be_opened_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model: Any = nn.Linear(6, 4)
    with pytest.raises(InvalidArgument, match="device"):
        open_prober(Workload(model, torch.randn(4, 6)), target=Target("cpu", "1000TiB"))
    model.thing = (n for n in range(3))
    with pytest.raises(InvalidArgument, match="function"):
        open_prober(Workload(model, torch.randn(4, 6)), target=Target("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_computes_as_its_parent_does() -> None:
    """A model built under another default dtype, or with TF32 allowed, is measured with them."""

    def build() -> nn.Module:
        assert torch.get_num_threads() == threads
        assert torch.get_float32_matmul_precision() == "medium"
        return nn.Linear(4, 2)  # of the default dtype, as the batch is

    before = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        workload = Workload(build, torch.randn(3, 4))
        with open_prober(workload, target=Target("cpu", BUDGET)) as prober:
            probed = prober.probe(ProbeRequest(ResolvedPlan(Plan(3)), **HOPELESS))
            assert probed.measurement.outcome is Outcome.OK
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(before)


def _can_flush_denormals() -> bool:
    can = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    return can


@pytest.mark.skipif(not _can_flush_denormals(), reason="not possible on this processor")
def test_a_probe_on_a_processor_computes_without_denormal_numbers() -> None:
    """A training that begins with them would be timed at a fraction of its later speed."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        denormal = torch.full((2**20,), 1e-39) * 0.5  # enough for every thread
        assert not denormal.any()
        return model(batch).sum()

    with open_prober(
        Workload(nn.Linear(4, 2), torch.randn(3, 4), loss_fn=loss), target=Target("cpu", BUDGET)
    ) as prober:
        probed = prober.probe(ProbeRequest(ResolvedPlan(Plan(3)), **HOPELESS))
    assert probed.measurement.outcome is Outcome.OK, probed.measurement.detail
    assert (torch.full((), 1e-39) * 0.5).item() > 0  # the caller's process is left as it was


@pytest.mark.cuda
def test_what_the_caller_holds_on_the_gpu_is_named_with_the_way_to_free_it() -> None:
    model = nn.Linear(1024, 1024).cuda()
    with open_prober(Workload(model, torch.randn(4, 1024)), target=Target("cuda")) as prober:
        survey = prober.survey()
    held = sum(4 * p.numel() for p in model.parameters())
    assert format_bytes(held) in survey.notes[-1]
    assert "model.cpu()" in survey.notes[-1]


class _ReadSlowly:
    """Takes a second to be read."""

    def __reduce__(self) -> Any:
        return time.sleep, (1.0,)


def test_a_worker_that_another_thread_ends_while_it_starts_is_not_replaced() -> None:
    """As Ctrl-C ends what runs at several places."""
    model = nn.Linear(2, 2)
    vars(model)["slow"] = _ReadSlowly()
    channel = WorkerChannel(Workload(model, torch.ones(2, 2)), device="cpu")
    try:
        with ThreadPoolExecutor(1) as thread:
            opening = thread.submit(channel.open)
            while channel.pid is None:
                time.sleep(0.01)
            channel.drop()
            with pytest.raises(WorkerFailed):
                opening.result()
        assert channel.pid is None
        assert channel.open().total_bytes
    finally:
        channel.close()
