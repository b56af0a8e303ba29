"""Both kinds of prober are one thing to those who hold a workload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import InvalidRequest
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.isolation import open_prober
from autofit.probing.prober import ProbeRequest, Target
from autofit.probing.worker_client import WorkerProber
from autofit.training.workload import Workload
from autofit.units import MIB

WORKLOAD = Workload(nn.Linear(6, 4), torch.ones(4, 6))


@pytest.mark.parametrize("isolation", ["process", "inprocess"])
def test_it_surveys_probes_compares_and_takes_another_budget(isolation: str) -> None:
    opened = open_prober(WORKLOAD, (), Target("cpu", "64MiB", isolation=isolation))
    with opened as prober:
        assert prober.survey().space().baseline == Plan(4)
        assert prober.vram_budget_bytes == 64 * MIB
        assert prober.probe(ProbeRequest(ResolvedPlan(Plan(4)))).ok
        assert prober.compare(ResolvedPlan(Plan(4)), ResolvedPlan(Plan.split(4, 2)), 4).equal
        prober.rebudget(32 * MIB)
        assert prober.vram_budget_bytes == prober.survey().vram_budget_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"isolation": "thread"}, "isolation.*process, inprocess.*'thread'"),
        ({"isolation": ["process"]}, r"isolation.*\['process'\]"),
        ({"device": "tpu"}, "device.*'tpu'"),
        ({"device": ""}, "device.*''"),
        ({"vram_budget": b"3GiB"}, "vram_budget.*24GiB.*b'3GiB'"),
        ({"vram_budget": -1}, "bytes.*-1"),
        ({"seed": -1}, "seed.*4294967295.*-1"),
        ({"seed": None}, "seed.*None"),
        ({"seed": 1.5}, "seed.*1.5"),
        ({"seed": 2**70}, "seed.*1180591620717411303424"),
    ],
)
def test_what_means_nothing_is_refused_before_a_worker_is_started(
    said: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerProber, "__init__", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(InvalidRequest, match=words):
        open_prober(WORKLOAD, (), Target(**{"device": "cpu"} | said))


def test_a_model_without_values_is_refused() -> None:
    empty = Workload(nn.Linear(6, 4, device="meta"), torch.ones(4, 6))
    with pytest.raises(InvalidRequest, match="meta device"):
        open_prober(empty, (), Target("cpu"))
