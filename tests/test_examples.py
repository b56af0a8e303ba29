"""Every script of examples/ runs, and does what its page of the documentation says it does.

The pages show docs/outputs: `python examples/lora.py > docs/outputs/lora.txt`, and so on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
_NEEDS = {"huggingface_trainer": ("transformers", "accelerate"), "lora": ("transformers", "peft")}


def trains_with_the_saved_plan(printed: str, folder: Path) -> None:
    assert autofit.load(folder / "report.json").best.plan.global_batch == 64
    assert len(re.findall(r"^step \d: loss \d", printed, re.MULTILINE)) == 5


def keeps_the_samples_of_a_step(printed: str, folder: Path) -> None:
    assert "trained 4 steps of 16 samples" in printed


def trains_the_adapters_alone(printed: str, folder: Path) -> None:
    (counts,) = re.findall(r"trains (\d+) of (\d+) parameters", printed)
    trained, all_of_them = map(int, counts)
    assert 0 < trained < all_of_them / 5
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+)", printed, re.MULTILINE)]
    assert len(losses) == 3


def keeps_the_accumulation(printed: str, folder: Path) -> None:
    assert "micro-batch 32, 2 micro-batches in a step" in printed


def says_what_fits(printed: str, folder: Path) -> None:
    (least,) = re.findall(r"L4: needs (\S+) GiB", printed)
    assert 0.5 < float(least) < 5  # 45 M parameters by 16 bytes are 0.7 GiB


def tunes_settings_of_the_users_own(printed: str, folder: Path) -> None:
    first, *others = re.findall(r"'micro_batch': (\d+)\} (\d+) samples/s(.*)", printed)
    assert first[0] == "16"
    fits = [int(speed) for _, speed, too_large in others if not too_large]
    assert max(fits) > int(first[1])
    assert f"{max([*fits, int(first[1])])} samples/s in {1 + len(others)} trials" in printed
    assert (folder / "history.html").exists() or "pip install plotly" in printed


def proposes_less_that_does_not_fit(printed: str, folder: Path) -> None:
    free, constrained = re.findall(r"constrained: (\d+) of 12 proposals do not fit", printed)
    assert 0 <= int(constrained) <= int(free) <= 12
    (spare,) = re.findall(r"(\S+) GiB to spare", printed)
    assert float(spare) >= 0


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "search_and_train": trains_with_the_saved_plan,
    "huggingface_trainer": keeps_the_samples_of_a_step,
    "lora": trains_the_adapters_alone,
    "cnn_batchnorm": keeps_the_accumulation,
    "capacity": says_what_fits,
    "optuna_sampler": tunes_settings_of_the_users_own,
    "optuna_fits": proposes_less_that_does_not_fit,
}


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is of torch 2.13")
def test_the_page_on_capacity_shows_what_its_example_prints(
    tmp_path: Path, run_python: Any
) -> None:
    """A prediction is the same on any machine, unlike what a search measures."""
    ran = run_python(ROOT / "examples" / "capacity.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == (ROOT / "docs" / "outputs" / "capacity.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script: Path, tmp_path: Path, run_python: Any) -> None:
    for name in _NEEDS.get(script.stem, ()):
        pytest.importorskip(name)
    ran = run_python(script, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    CHECKS[script.stem](ran.stdout, tmp_path)
