"""autofit and its peers on the CPU device: what noise cannot touch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), str(ROOT / "emulated_gpu" / "src")]
WORKLOAD = "tiny_resnet"
QUICK: dict[str, Any] = {"max_probes": 4, "strategies": ["precision"]}


@pytest.mark.slow
@pytest.mark.timeout(600)  # 51 s of processor time; more where others use the machine
@pytest.mark.skipif(not find_spec("accelerate"), reason="needs accelerate: the extra `bench`")
def test_peers_run_out_of_memory_where_autofit_does_not(tmp_path: Path) -> None:
    names = ["accelerate find_executable_batch_size", "rule of Composer, halving", "autofit"]
    command = [sys.executable, "-m", "benchmarks.versus", f"{WORKLOAD}=32MiB", "--only", *names]
    command += ["--steps", "2", "--repeats", "0", "--precisions", "float32", "--json"]
    ran = subprocess.run(
        [*command, str(tmp_path / "found.json")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "VERSUS_SEARCH": json.dumps(QUICK)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    [told] = json.loads((tmp_path / "found.json").read_text())["comparisons"]
    rows = {row["peer"]: row for row in told["rows"]}
    shrinking, halving, ours = (rows[name] for name in names)
    for row in rows.values():
        assert row["verdict"]["survives"], row
        assert row["verdict"]["peak_bytes"] <= told["budget_bytes"]
        assert not {"parameters", "buffers", "optimizer", "training mode"} & set(
            row["found"]["changed"]
        )
    assert all(row["refusals"] == row["ooms"] for row in rows.values())  # no cuDNN here
    assert shrinking["ooms"] == shrinking["probes"] - 1 > halving["ooms"] > 0
    assert ours["ooms"] < shrinking["ooms"]
    assert ours["found"]["changed"] == []
    assert ours["probes"] <= QUICK["max_probes"]
    largest = told["largest"]["float32"]
    assert shrinking["found"]["answer"]["micro_batch"] <= largest * 65 / 64 + 1
    assert 2 * halving["found"]["answer"]["micro_batch"] > largest
