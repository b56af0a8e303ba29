"""Faults of a device that happen by themselves, on a real GPU as on an emulated one.

What a driver answers when it is ill is injected in `test_fault_driver`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autofit.errors import WorkerFailed
from autofit.measurement import Outcome
from autofit.probing.prober import Deadlines, Target, open_prober
from autofit.registry import load_strategies
from autofit.training.workload import Workload
from autofit.units import MIB
from tests.faulty_model import (
    NO_FAULT,
    FaultyModel,
    runs_out_in_backward,
    runs_out_in_forward,
)

pytestmark = pytest.mark.cuda

FAULTY = 64


def asserts_on_the_device(model: Any, output: torch.Tensor) -> None:
    """Asynchronous: nothing in the step looks at the result."""
    output.new_zeros(4)[torch.tensor([10**6], device=output.device)]


def never_ends(model: Any, output: torch.Tensor) -> None:
    torch.cuda._sleep(1 << 45)  # type: ignore[no-untyped-call]  # torch left it so


FAULTS = {
    runs_out_in_forward: Outcome.OOM,
    runs_out_in_backward: Outcome.OOM,
    asserts_on_the_device: Outcome.POISONED,
    never_ends: Outcome.TIMEOUT,
}


@pytest.mark.parametrize(("fault", "outcome"), FAULTS.items())
def test_after_a_fault_of_the_device_the_search_goes_on(
    open_probing: Any, fault: Any, outcome: Outcome
) -> None:
    model = FaultyModel({FAULTY: fault})
    probing = open_probing(model, device="cuda", vram_budget="1.5GiB", shortest_s=8.0)
    assert probing.at(NO_FAULT).ok
    assert probing.at(FAULTY, patient=False).outcome is outcome
    assert (probing.worker is None) is (outcome is not Outcome.OOM)
    assert probing.at(NO_FAULT).ok


def test_the_cap_is_met_in_the_optimizer(open_probing: Any) -> None:
    """384 MiB of weights: with gradients and Adam's two states 1.5 GiB, at any micro-batch."""
    model = nn.Linear(16, 6 * MIB)
    measurement = open_probing(model, device="cuda", vram_budget="1.5GiB").at(NO_FAULT)
    assert measurement.outcome is Outcome.OOM
    assert "Tried to allocate" in str(measurement.detail)


@pytest.mark.parametrize("least", [NO_FAULT + 1, 1])
def test_a_device_that_dies_as_it_is_looked_at(least: int) -> None:
    """Looks of strategies run more samples than the sample batch has; others do not."""
    faults = dict.fromkeys(range(least, FAULTY), asserts_on_the_device)
    workload = Workload(FaultyModel(faults), torch.ones(NO_FAULT, 16))
    strategies = load_strategies(["checkpointing", "precision"])
    deadlines = Deadlines(shortest_s=30.0)
    with open_prober(workload, strategies, Target("cuda", "4GiB"), deadlines=deadlines) as prober:
        if least == 1:
            with pytest.raises(WorkerFailed, match="index out of range"):
                prober.survey()
            return
        survey = prober.survey()
    note = next(note for note in survey.notes if note.startswith("checkpointing"))
    assert "left out" in note
    assert "assert" in note
    assert list(survey.dimensions) == ["precision.dtype"]
