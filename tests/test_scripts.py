"""Searches from scripts and notebooks: models that no other process could import by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MODEL = """
import torch
from torch import nn
import autofit

class Mine(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.last(helper(self.first(x)))

def helper(x):
    return x.relu() * SCALE

SCALE = 0.5
labels = torch.randint(0, 3, (4,))
"""
SEARCH = """
report = autofit.search(
    MODEL, (torch.randn(4, 8), labels), loss_fn=lambda model, b: loss_of(model(b[0]), b[1]),
    device="cpu", vram_budget="32MiB", max_probes=1, strategies=["precision"],
)
assert report.best.ok and report.baseline.ok
print("found", report.best.plan.micro_batch)
"""
LOSS = """
def loss_of(output, target):
    return nn.functional.cross_entropy(output, target)
"""


def output_of(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_classes_of_a_script_arrive_from_a_spawned_process_too(tmp_path: Path) -> None:
    """There the script is the module __mp_main__, which no other process can import."""
    script = tmp_path / "train.py"
    search = SEARCH.replace("MODEL", "Mine()").strip().replace("\n", "\n    ")
    main = "if __name__ == '__main__':\n    torch.multiprocessing.spawn(train, nprocs=1)\n"
    script.write_text(f"{MODEL}{LOSS}\ndef train(rank):\n    {search}\n\n{main}")
    command = [sys.executable, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert output_of(ran).startswith("found ")


@pytest.mark.slow
def test_a_script_needs_no_main_guard_and_loads_few_modules(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    count = "import sys\nprint(sum(name.startswith('autofit.') for name in sys.modules))\n"
    search = SEARCH.replace("MODEL", "Mine()").replace(', strategies=["precision"]', "")
    script.write_text(MODEL + LOSS + search + count)
    command = [sys.executable, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    shown = output_of(ran)
    found, modules = shown.splitlines()[-2:]
    assert found.startswith("found ")
    assert 20 < int(modules) < 125
    assert shown.count("found") == 1, "the worker ran the script a second time"


def test_a_notebook_cell_may_hold_the_model(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """As a kernel runs cells: code with no file, in the namespace of __main__."""
    cells = [MODEL, LOSS, SEARCH.replace("MODEL", "Mine"), "print(repr(report))"]
    kernel = (
        "import __main__\n"
        f"for number, cell in enumerate({cells!r}):\n"
        "    exec(compile(cell, f'<cell {number}>', 'exec'), __main__.__dict__)\n"
    )
    shown = output_of(run_python("-c", kernel, cwd=tmp_path))
    assert shown.startswith("found ")
    assert "<Report of " in shown


def test_a_module_beside_the_script_is_found_by_the_worker(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "my_models.py").write_text(MODEL)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    script = tmp_path / "train.py"
    imports = "from my_models import *\n"
    script.write_text(imports + LOSS + SEARCH.replace("MODEL", "Mine"))
    assert output_of(run_python(script, cwd=folder)).startswith("found ")
