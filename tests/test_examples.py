"""Every script of examples/ runs, and does what its page of the documentation says it does.

The pages show docs/outputs: `python examples/lora.py > docs/outputs/lora.txt`, and so on.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
_NEEDS = {"huggingface_trainer": ("transformers", "accelerate"), "lora": ("transformers", "peft")}


def tunes_settings_of_the_users_own(printed: str) -> None:
    first, *others = re.findall(r"'micro_batch': (\d+)\} (\d+) samples/s(.*)", printed)
    assert first[0] == "16"
    best = max(int(speed) for _, speed, too_large in others if not too_large)
    assert best > int(first[1])
    assert f"{best} samples/s in {1 + len(others)} trials" in printed


def proposes_less_that_does_not_fit(printed: str) -> None:
    free, constrained = re.findall(r"constrained: (\d+) of 12 proposals do not fit", printed)
    assert 0 <= int(constrained) <= int(free) <= 12
    (spare,) = re.findall(r"(\S+) GiB to spare", printed)
    assert float(spare) >= 0


SAYS: dict[str, str] = {
    "search_and_train": r"(?s)(step \d: loss \d.*){5}",
    "huggingface_trainer": "trained 4 steps of 16 samples",
    "lora": r"(?s)trains \d{4} of \d{6} parameters.*(step \d: loss \d.*){3}",
    "cnn_batchnorm": "micro-batch 32, 2 micro-batches in a step",
    "capacity": r"L4: needs [0-4]\.\d+ GiB",  # 45 M parameters by 16 bytes are 0.7 GiB
    "optuna_sampler": "",
    "optuna_fits": "",
}
CHECKS = {
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
    assert re.search(SAYS[script.stem], ran.stdout)
    CHECKS.get(script.stem, str)(ran.stdout)
