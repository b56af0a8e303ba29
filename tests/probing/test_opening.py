"""Both kinds of prober are one thing to those who hold a workload."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autofit.errors import InvalidRequest
from autofit.plan import Plan
from autofit.probing.opening import open_prober
from autofit.probing.prober import ProbeRequest
from autofit.units import MIB
from autofit.workload import Workload

WORKLOAD = Workload(nn.Linear(6, 4), torch.ones(4, 6))


@pytest.mark.parametrize("isolation", ["process", "inprocess"])
def test_it_surveys_probes_compares_and_takes_another_budget(isolation: str) -> None:
    opened = open_prober(
        WORKLOAD, (), device="cpu", vram_budget="64MiB", seed=0, isolation=isolation
    )
    with opened as prober:
        assert prober.survey().space().baseline == Plan(4)
        assert prober.vram_budget_bytes == 64 * MIB
        assert prober.probe(ProbeRequest(Plan(4))).ok
        assert prober.compare(Plan(4), Plan.split(4, 2), ({}, {}), 4).equal
        prober.rebudget(32 * MIB)
        assert prober.vram_budget_bytes == prober.survey().vram_budget_bytes == 32 * MIB


def test_an_isolation_that_there_is_not() -> None:
    with pytest.raises(InvalidRequest, match="one of process, inprocess, got 'thread'"):
        open_prober(WORKLOAD, (), device="cpu", vram_budget=None, seed=0, isolation="thread")
