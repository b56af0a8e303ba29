"""A toy library whose batch-size finder is autofit's, as docs/embedding.md tells its author."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.testing.digest import digest

PAGE = Path(__file__).parents[1] / "docs" / "embedding.md"
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def library() -> Any:
    """The trainer of the page, as its reader has it."""
    text = PAGE.read_text().partition('title="trainer.py"\n')[2].partition("```")[0]
    made: dict[str, Any] = {"__name__": "trainer"}
    exec(text, made)
    assert made["autofit"].find_batch_size is autofit.find_batch_size
    return made["Trainer"]


def around(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What a search must leave as it was."""
    dice = torch.get_rng_state().tolist(), random.getstate()
    return (
        digest({"model": model, "optimizer": optimizer}),
        [(module.training, len(module._forward_hooks)) for module in model.modules()],
        dice,
        (torch.get_default_dtype(), torch.get_num_threads()),
    )


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("loss", "budget", "raised"),
    [
        (squares, "64MiB", None),
        (squares, "1MiB", autofit.NoFeasiblePlan),
        (squares, "much", autofit.InvalidArgument),
        (failing, "64MiB", KeyError),
    ],
    ids=["found", "nothing fits", "no budget", "an error of the user's"],
)
def test_a_toy_library_finds_a_size_and_leaves_all_as_it_was(
    loss: Loss, budget: str, raised: type[Exception] | None, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.Dropout(), nn.Linear(1024, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(squares(model, torch.ones(2, 64)))
    optimizer.step()

    def noted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        (tmp_path / str(os.getpid())).touch()
        return loss(model, batch)

    trainer = library()(model, noted, optimizer)
    dataset = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    before = around(model, optimizer)
    with nullcontext() if raised is None else pytest.raises(raised):
        trainer.scale_batch_size(dataset, vram_budget=budget, device="cpu", max_probes=3)
    assert trainer.batch_size * trainer.accumulation_steps == (48 if raised is None else 1)
    assert around(model, optimizer) == before
    workers = [path.name for path in tmp_path.iterdir()]
    assert bool(workers) == (budget != "much")
    status = [Path(f"/proc/{pid}/stat") for pid in workers]
    assert [one for one in status if one.exists() and ") Z " not in one.read_text()] == []
