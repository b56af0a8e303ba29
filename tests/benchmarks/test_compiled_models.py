"""Compiled plans of models of others train as eager ones do, in uneven micro-batches."""

from __future__ import annotations

import pytest

from autofit.devices.cuda import open_device
from autofit.plan import Scalar
from benchmarks.compiled_models import BUDGET, REGION, Eager, space_of, trained

SAMPLES, STEPS = 5, 20
MAX_OF_SPREAD = 10.0  # as the benchmark's page judges


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "region", "budget"),
    [("llama", "blocks", 0.05), ("vit", "blocks", 0.5), ("scan", "whole", 1.0)],
)
def test_losses_are_those_of_eager_training(name: str, region: str, budget: float) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    device = open_device("cpu")
    space = space_of(name, SAMPLES, device)
    settings: dict[str, Scalar] = {"compile.mode": "default", REGION: region, BUDGET: budget}
    assert space.allows({**space.default_settings, **settings})
    eager = Eager.of(name, space, device, STEPS)
    found = trained(name, space, settings, device, STEPS)
    assert eager.plain.losses[-1] != eager.plain.losses[0]
    assert eager.times_spread(found) <= MAX_OF_SPREAD
    assert not any("run eagerly" in note or "ran eagerly" in note for note in found.notes)
