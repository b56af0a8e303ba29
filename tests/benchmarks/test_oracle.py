"""The emulated card that predictions are held against."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autofit import Plan, Workload
from benchmarks.emulation_models import told_by_the_card
from benchmarks.oracle.look import ValuesAsked


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return output.float().square().mean()


def positive(model: nn.Module, batch: Tensor) -> Tensor:
    loss = squares(model, batch)
    return loss if loss > 0 else -loss


@pytest.mark.emulated
def test_a_loss_scale_has_the_card_compute_nothing_and_a_loss_that_is_read_does() -> None:
    plan = Plan(4, settings={"precision.dtype": "float16"})
    training = Workload(nn.Linear(64, 64), torch.randn(4, 64), loss_fn=squares)
    _, need = told_by_the_card(training, plan, None, may_compute=False)
    assert not need.computed_values
    reads = Workload(nn.Linear(64, 64), torch.randn(4, 64), loss_fn=positive)
    with pytest.raises(ValuesAsked, match="loss > 0"):
        told_by_the_card(reads, plan, None, may_compute=False)
