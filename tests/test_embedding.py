"""A toy library whose batch-size finder is autofit's, as docs/embedding.md tells its author."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit

PAGE = Path(__file__).parents[1] / "docs" / "embedding.md"
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def library() -> Any:
    """The trainer of the page, as its reader has it."""
    text = PAGE.read_text().partition('title="trainer.py"\n')[2].partition("```")[0]
    made: dict[str, Any] = {"__name__": "trainer"}
    exec(text, made)
    assert made["autofit"].find_batch_size is autofit.find_batch_size
    return made["Trainer"]


def still_running(pids: list[str]) -> list[str]:
    """Those of these processes that have not ended."""
    status = [Path(f"/proc/{pid}/stat") for pid in pids]
    return [str(one) for one in status if one.exists() and ") Z " not in one.read_text()]


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    gradients = [parameter.grad for parameter in model.parameters()]
    held = [model.state_dict(), gradients, optimizer.state_dict()["state"], torch.get_rng_state()]
    return copy.deepcopy(held)


def others(model: nn.Module) -> Any:
    modules = [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in model.modules()]
    return modules, random.getstate(), torch.get_default_dtype(), torch.get_num_threads()


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise KeyError("labels")


def noting(loss: Loss, log: Path) -> Loss:
    """The loss, which notes the process that it runs in."""

    def noted(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return loss(model, batch)

    return noted


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
    log = tmp_path / "pids"
    log.touch()
    trainer = library()(model, noting(loss, log), optimizer)
    before, rest = tensors(model, optimizer), others(model)

    def find() -> None:
        trainer.scale_batch_size(
            torch.randn(48, 64, generator=torch.Generator().manual_seed(0)),
            vram_budget=budget,
            device="cpu",
            max_probes=3,
        )

    if raised is None:
        find()
        assert log.read_text()
        assert trainer.batch_size * trainer.accumulation_steps == 48
    else:
        with pytest.raises(raised):
            find()
        assert (trainer.batch_size, trainer.accumulation_steps) == (1, 1)
    torch.testing.assert_close(tensors(model, optimizer), before, rtol=0, atol=0)
    assert others(model) == rest
    assert not still_running(log.read_text().split())
