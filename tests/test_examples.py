"""Every script of examples/ runs, and does what its page of the documentation says it does.

`python -m tests.test_examples` writes what they print into docs/outputs, which the pages show.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import autofit

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
_NEEDS = {"huggingface_trainer": ("transformers", "accelerate"), "lora": ("transformers", "peft")}
_SECONDS = 540  # on a machine that is busy; alone each takes less than half a minute


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


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "search_and_train": trains_with_the_saved_plan,
    "huggingface_trainer": keeps_the_samples_of_a_step,
    "lora": trains_the_adapters_alone,
    "cnn_batchnorm": keeps_the_accumulation,
    "capacity": says_what_fits,
}


def printed_by(script: Path, folder: Path) -> str:
    """Run a script in a folder; return what it prints to standard output."""
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    for name in _NEEDS.get(script.stem, ()):
        pytest.importorskip(name)
    CHECKS[script.stem](printed_by(script, tmp_path), tmp_path)


def _write(script: Path) -> None:
    if all(map(find_spec, _NEEDS.get(script.stem, ()))):
        with TemporaryDirectory() as folder:
            printed = printed_by(script, Path(folder))
            CHECKS[script.stem](printed, Path(folder))
        (ROOT / "docs" / "outputs" / f"{script.stem}.txt").write_text(printed)


if __name__ == "__main__":
    for each in SCRIPTS:
        _write(each)
