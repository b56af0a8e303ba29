"""Searches from scripts and notebooks: models that no other process could import by name."""

from __future__ import annotations

import subprocess
import sys
import textwrap
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


Run = Callable[..., subprocess.CompletedProcess[str]]


def found_by(ran: subprocess.CompletedProcess[str]) -> str:
    """What a script printed after the line of the search, which ran once."""
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("found ")
    assert ran.stdout.count("found ") == 1, "the worker ran the script a second time"
    return ran.stdout


def in_an_interpreter(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = [sys.executable, "train.py"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=240)


@pytest.mark.slow
def test_classes_of_a_script_arrive_from_a_spawned_process_too(tmp_path: Path) -> None:
    """There the script is the module __mp_main__, which no other process can import."""
    search = textwrap.indent(SEARCH.replace("MODEL", "Mine()"), "    ")
    main = "if __name__ == '__main__':\n    torch.multiprocessing.spawn(train, nprocs=1)\n"
    text = f"{MODEL}{LOSS}\ndef train(rank):\n{search}\n\n{main}"
    found_by(in_an_interpreter(tmp_path, text))


@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    found_by(in_an_interpreter(tmp_path, MODEL + LOSS + SEARCH.replace("MODEL", "Mine()")))


def test_a_notebook_cell_may_hold_the_model(run_python: Run, tmp_path: Path) -> None:
    """As a kernel runs cells: code with no file, in the namespace of __main__."""
    cells = [MODEL, LOSS, SEARCH.replace("MODEL", "Mine"), "print(repr(report))"]
    kernel = (
        "import __main__\n"
        f"for number, cell in enumerate({cells!r}):\n"
        "    exec(compile(cell, f'<cell {number}>', 'exec'), __main__.__dict__)\n"
    )
    assert "<Report of " in found_by(run_python("-c", kernel, cwd=tmp_path))


def test_a_module_beside_the_script_is_found_by_the_worker(
    run_python: Run, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "my_models.py").write_text(MODEL)
    script = tmp_path / "train.py"
    script.write_text("from my_models import *\n" + LOSS + SEARCH.replace("MODEL", "Mine"))
    found_by(run_python(script, cwd=tmp_path_factory.mktemp("elsewhere")))
