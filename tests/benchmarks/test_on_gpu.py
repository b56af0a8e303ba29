"""The script for a real GPU, rehearsed on an emulated one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import emulated_gpu
from emulated_gpu import Machine

pytestmark = [pytest.mark.emulated, pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).parents[2] / "benchmarks/on_gpu.sh"
REPORTS = {"search-tiny_gpt.json", "strategy-attention.json", "strategy-offload.json"}
STEPS = {path.removesuffix(".json") for path in REPORTS}
STEPS |= {"by_hand-tiny_gpt", "predictions-tiny_gpt", "faults", "tests-test_gpu_catalogue"}


def test_every_step_of_the_script_for_a_gpu_leaves_its_result(
    tmp_path: Path, machine: Machine
) -> None:
    found_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outer = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    variables = emulated_gpu.environment(machine=machine, base=outer)
    variables |= {"REHEARSAL": "1", "PATH": found_first}
    ran = subprocess.run(
        [SCRIPT, tmp_path, "9000"], env=variables, capture_output=True, text=True, check=True
    )
    failed = [path.read_text() for path in tmp_path.glob("*.failed")]
    assert (ran.stdout.splitlines()[-1], failed) == ("nothing is left", [])
    results = {path.stem.split("-", 3)[3]: path.read_text() for path in tmp_path.glob("20*.txt")}
    assert set(results) == STEPS
    assert all("\nexit code 0, " in text for text in results.values())
    assert {path.name for path in tmp_path.iterdir() if path.stat().st_size} >= REPORTS
    *plans, last = map(json.loads, re.findall(r"^\{.*\}$", results["by_hand-tiny_gpt"], re.M))
    assert len(plans) >= 8
    assert [plan["outcome"] for plan in plans] == ["ok"] * len(plans)
    assert last["autofit over it"] > 0
