"""The benchmark of real architectures, on one of its own: what it measures and what it skips."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.placement_architectures import Architecture
from benchmarks.placement_models import measure, report


def _blocks() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"]).square().mean()
    return loss


def _architecture(package: str) -> Architecture:
    blocks = ("TransformerEncoderLayer",)
    return Architecture(package, _blocks, lambda: {"x": torch.randn(4, 12, 16)}, blocks, _squares)


def test_every_level_trains_alike_and_saves_what_blocks_save() -> None:
    result = measure("encoder", _architecture("torch"))
    assert result.levels > 3
    assert result.differing[0] == 0
    assert result.differing[1] > 3 * result.levels
    assert result.least_bytes <= result.own_bytes < result.plain_bytes


def test_a_package_that_is_missing_is_named_and_skipped() -> None:
    lines = list(report({"other": _architecture("not_installed_anywhere")}))
    assert any(line.startswith("Skipped, as not_installed_anywhere") for line in lines)
    assert not any(line.startswith("| other") for line in lines)
