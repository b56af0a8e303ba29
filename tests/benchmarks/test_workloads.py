"""The workloads that the README's examples and the comparisons train."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads import WORKLOADS

MILLIONS = {
    "small_gpt": 2.6,
    "small_resnet": 2.1,
    "small_unet": 2.7,
    "small_lstm": 3.2,
    "small_encoder": 2.8,
    "small_separable": 1.5,
    "medium_vit": 2.9,
    "medium_cnn": 2.8,
    "medium_gpt": 5.0,
    "gpt2_small": 124,
    "resnet50": 26,
}


@pytest.mark.parametrize("name", sorted(n for n in WORKLOADS if n.startswith(("tiny", "small"))))
def test_a_small_workload_gives_every_parameter_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    model = workload.build_model()
    loss, _ = workload.recipe.loss_and_source(model, workload.batch(4))
    loss.backward()  # type: ignore[no-untyped-call]  # torch left it so
    assert loss.isfinite()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


@pytest.mark.parametrize("name", sorted(MILLIONS))
def test_a_workload_has_as_many_parameters_as_it_says(name: str) -> None:
    with torch.device("meta"):
        model = WORKLOADS[name]().build_model()
    digits = 1 if name.startswith(("small", "medium")) else None
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, digits) == MILLIONS[name]
