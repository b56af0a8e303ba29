"""What a result says of how its search ended, and what may follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autofit
from autofit.errors import WorkerFailed
from autofit.measurement import TrialKind
from autofit.probing.messages import ProbeRequest, ProbeResult
from autofit.searching import events
from autofit.searching.engine import run_search
from autofit.searching.result import INTERRUPTED, difference_of, memory_of
from autofit.testing import SimulatedProber
from tests.simulated import SimulatedDevice


class _EndingAt(SimulatedProber):
    """Its n-th probe raises."""

    def __init__(self, device: SimulatedDevice, at: int, error: BaseException) -> None:
        super().__init__(device.budget, device.memory, device.step_time)
        self._at, self._error = at, error

    def probe(self, request: ProbeRequest) -> ProbeResult:
        if len(self.probed) == self._at:
            raise self._error
        return super().probe(request)


def test_more_time_is_not_asked_for_where_probes_were_the_limit(device: SimulatedDevice) -> None:
    result = run_search(device.prober(), device.spec(), max_probes=5, timeout_s=1e8)
    assert result.stopped_because == "max_probes=5 was reached"
    assert result.with_more_time is None


def test_more_time_is_asked_for_where_the_timeout_ended_the_search(
    device: SimulatedDevice,
) -> None:
    prober = device.prober()
    result = run_search(
        prober, device.spec(), timeout_s=100.0, clock=lambda: 20.0 * len(prober.probed), began=0.0
    )
    assert result.stopped_because == "the timeout of 100 s was reached"
    assert result.with_more_time is not None
    assert result.with_more_time not in {trial.plan for trial in result.trials}


@pytest.mark.slow
def test_a_comparison_that_the_timeout_ended_is_told_apart_from_the_search(
    device: SimulatedDevice,
) -> None:
    whole = run_search(device.prober(), device.spec())
    searched = sum(trial.kind is not TrialKind.CONFIRMATION for trial in whole.trials)
    prober = device.prober()
    cut = run_search(
        prober,
        device.spec(),
        timeout_s=1e6,
        clock=lambda: 0.0 if len(prober.probed) <= searched else 1e6,
        began=0.0,
    )
    assert not cut.comparison_ended
    assert cut.stopped_because == (
        f"{whole.stopped_because}, and its final comparison because the timeout of 1000000 s "
        "was reached"
    )


class _Gone:
    """A prober whose worker is gone; it notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise WorkerFailed("no worker starts")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkerFailed("no worker starts")], ids=repr)
def test_nothing_more_is_run_after_an_interrupt_or_without_a_worker(
    device: SimulatedDevice, error: BaseException
) -> None:
    result = run_search(_EndingAt(device, 4, error), device.spec(), timeout_s=1e8)
    assert result.stopped_because in (INTERRUPTED, "no worker starts")
    assert result.best.plan != result.baseline.plan
    assert not result.may_probe
    assert result.with_more_time is None
    prober: Any = _Gone()
    assert difference_of(prober, result) is None
    assert memory_of(prober, result) == {}
    assert prober.asked == []


def test_what_begins_after_the_search_tells_what_it_found() -> None:
    seen: list[events.Event] = []
    report = autofit.search(
        torch.nn.Linear(8, 4), torch.randn(4, 8), global_batch=8, device="cpu", seed=1,
        vram_budget="8MiB", strategies=["precision"], max_probes=4,
        progress=seen.append,
    )  # fmt: skip
    last = [each for each in seen if isinstance(each, events.StageStarted)][-1]
    assert last.stage == "writing the report"
    assert last.progress.probes == report.record.search.probes > 0
    assert last.progress.best is not None
