"""Which values of a parallel strategy are left where some give other gradients than one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autofit.equivalence.ranks import without_unequal
from autofit.plan import CostHint, Dimension
from autofit.strategy import Phase
from autofit.testing import PlainContext
from autofit.training.workload import Workload
from tests.plugin import Plugin


class Sharing(Plugin):
    name = "sharing"
    phase = Phase.PARALLEL


def test_a_value_that_raises_leaves_nothing_of_itself_behind() -> None:
    known: dict[str, Mapping[Any, Any]] = {
        "payloads": {"other": {"modules": []}},
        "hints": {"other": CostHint(bytes_per_sample=0.5)},
        "trial_costs_s": {"other": 3.0},
        "accumulation": {"other": True},
    }
    dimension = Dimension(["plain", "other", "third"], lever="other", **known)  # type: ignore[arg-type]  # by name
    raised = {
        ("sharing.mode", "plain"): None,
        ("sharing.mode", "other"): "RuntimeError: boom",
        ("sharing.mode", "third"): None,
    }
    builder = PlainContext(lambda: Workload(nn.Linear(2, 1), torch.ones(2, 2)))._builder
    left, notes = without_unequal(builder, [Sharing()], {"sharing.mode": dimension}, raised)  # type: ignore[arg-type]  # values of one kind
    assert left == {"sharing.mode": Dimension(["plain", "third"])}
    assert any("sharing.mode=other was skipped: RuntimeError: boom" in note for note in notes)
