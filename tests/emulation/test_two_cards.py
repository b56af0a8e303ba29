"""A search whose plans run on two emulated cards at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

WORKLOAD = """
import torch
from torch import nn

import autofit


def make():
    batch = (torch.randn(8, 64), torch.randn(8, 64))
    return autofit.Workload(nn.Linear(64, 64), batch, criterion=nn.MSELoss(), global_batch=32)
"""


def search(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(WORKLOAD)
    card = ("--gpu", "L4", "--devices", "2")
    limits = ("--max-probes", "4", "--vram-budget", "2GiB", "--strategies", "checkpointing")
    asked = ("-m", "autofit", "search", "train.py:make", *limits, "--json", *options)
    return subprocess.run(
        [sys.executable, "-m", "emulated_gpu", "run", *card, "--", sys.executable, *asked],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
    )


def test_plans_run_on_every_card(tmp_path: Path) -> None:
    ran = search(tmp_path, "--device", "all")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    numbers = [trial["number"] for trial in found["trials"]]
    assert numbers == sorted(set(numbers))
    assert found["best"]["outcome"] == "ok"


def test_a_card_that_is_not_there_is_refused(tmp_path: Path) -> None:
    ran = search(tmp_path, "--device", "cuda:0,cuda:5")
    assert ran.returncode == 4, ran.stderr
    assert "cuda:5" in ran.stderr
