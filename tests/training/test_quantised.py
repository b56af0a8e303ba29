"""LoRA adapters beside frozen linears that bitsandbytes keeps in 4 or 8 bits, on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autofit

bnb: Any = pytest.importorskip("bitsandbytes")
WIDTH, RANK = 256, 8


class Adapted(nn.Module):
    """A frozen linear and what is trained beside it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


LINEARS = {
    4: partial(bnb.nn.Linear4bit, compute_dtype=torch.float32),
    8: partial(bnb.nn.Linear8bitLt, has_fp16_weights=False),
}


def workload(bits: int) -> autofit.Workload:
    make = partial(LINEARS[bits], WIDTH, WIDTH, bias=False)
    model = nn.Sequential(*(Adapted(make()) for _ in range(2))).to("cpu")  # which quantises
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    return autofit.Workload(model, batch, criterion=nn.functional.mse_loss)


@pytest.mark.parametrize("bits", LINEARS)
def test_a_prediction_counts_the_bits_of_frozen_weights(bits: int) -> None:
    predicted = autofit.predict(workload(bits), gpu="L4")
    frozen, trained = WIDTH * WIDTH * bits // 8, 2 * WIDTH * RANK * 4
    assert predicted.breakdown["weights"] >= 2 * (frozen + trained)
    assert predicted.breakdown["weights"] < 2 * 1.1 * (frozen + trained)
    assert 0 < predicted.breakdown["optimizer_state"] < 2 * 2.1 * trained


def test_a_prediction_says_that_outliers_are_found_by_their_values() -> None:
    linear = bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False, threshold=6.0)
    model = nn.Sequential(Adapted(linear)).to("cpu")
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    given = autofit.Workload(model, batch, criterion=nn.functional.mse_loss)
    with pytest.raises(autofit.PredictionUnavailable, match="int8_vectorwise_quant"):
        autofit.predict(given, gpu="L4")


@pytest.mark.parametrize("bits", LINEARS)
def test_a_search_trains_the_adapters_alone(bits: int) -> None:
    given = workload(bits)
    before = {name: tensor.clone() for name, tensor in given.build_model().state_dict().items()}
    options: dict[str, Any] = {
        "device": "cpu",
        "vram_budget": "64MiB",
        "max_probes": 2,
        "progress": False,
    }
    report = autofit.search(given, strategies=["checkpointing"], **options)
    assert report.best.measurement.ok
    after = given.build_model().state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
