"""Memory lines of several ranks, predicted beside two that wait in a gloo group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.gpu_catalogue import find_gpu
from autofit.plan import Plan
from autofit.prediction.predict import predict_resolved
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.survey import Survey
from autofit.registry import load_strategies, resolve
from autofit.searching.predicted_lines import Predicted, predicted_lines
from autofit.training.workload import Workload
from autofit.units import GIB, MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BUDGET = 1000 * MIB
H100 = find_gpu("H100")
CHOSEN = load_strategies(["parallel"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(inputs)))
        return inputs + added


def net() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(8)))


def workload_of(build: Callable[[], nn.Module], *shape: int) -> Workload:
    batch = (torch.randn(4, *shape), torch.randn(4, *shape))
    return Workload(build, batch, criterion=nn.MSELoss())


def predicted(prober: Prober, workload: Workload) -> tuple[Survey, Predicted]:
    """Predict as on a GPU, which the ranks here have not: with no bound on the time it takes."""
    survey = prober.survey()
    environment = replace(
        survey.environment, gpu=H100.name, capability="9.0", total_bytes=H100.total_bytes
    )
    survey = replace(survey, environment=environment, vram_budget_bytes=BUDGET)
    apart = partial(open_prober, workload, CHOSEN, Target("cpu"))
    return survey, predicted_lines(prober, survey, survey.space(), apart, timeout_s=500.0)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return workload_of(net, 64, 256)


@pytest.fixture(scope="module")
def found(workload: Workload) -> Iterator[tuple[Survey, Predicted, Any]]:
    """The survey of two ranks, what was predicted, and a probe of them after that."""
    with open_prober(workload, CHOSEN, Target("cpu", GIB, ranks=2)) as prober:
        survey, lines = predicted(prober, workload)
        plan = Plan(2, settings={"parallel.mode": "fsdp2"}, world_size=2)
        probe = prober.probe(ProbeRequest(resolve(plan, survey.space(), CHOSEN)))
        yield survey, lines, probe.measurement


def required_bytes(workload: Workload, survey: Survey, plan: Plan) -> int:
    resolved = resolve(plan, survey.space(), CHOSEN)
    return predict_resolved(workload, resolved, H100).required_bytes


def test_every_mode_has_the_line_of_a_rank(
    workload: Workload, found: tuple[Survey, Predicted, Any]
) -> None:
    survey, (lines, times, notes), measured = found
    assert notes == ()
    assert times == {}
    modes = {dict(key)["parallel.mode"]: (dict(key), line) for key, line in lines.items()}
    assert set(modes) == {"ddp", "ddp_view", "zero1", "fsdp2", "fsdp2_keep"}
    for settings, (fixed, per_sample) in modes.values():
        needs = required_bytes(workload, survey, Plan(30, settings=settings, world_size=2))
        assert fixed + 30 * per_sample == pytest.approx(needs, rel=0.02)
    sharded, whole = (modes[mode][1][0] - H100.context_bytes for mode in ("fsdp2", "ddp"))
    assert sharded < 0.9 * whole
    assert measured.ok
    assert len(measured.ranks) == 2
