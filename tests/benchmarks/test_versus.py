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
import torch

from benchmarks.versus.__main__ import sizes_tried
from benchmarks.versus.roster import PEERS
from benchmarks.versus.state import changes, state_of
from benchmarks.versus.table import Comparison, Row, markdown

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


def test_every_peer_has_a_tool_to_call() -> None:
    from benchmarks.versus import peers

    assert all(callable(getattr(peers, peer.tool)) for peer in PEERS.values())


def test_a_change_of_what_is_the_users_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, optimizer)
    assert changes(before, state_of(model, optimizer)) == []
    model.eval()(torch.ones(3, 2)).sum().backward()
    assert changes(before, state_of(model, optimizer)) == ["gradients", "training mode"]
    model.train()(torch.randn(3, 2))
    optimizer.step()
    assert set(changes(before, state_of(model, optimizer))) == {
        "parameters",
        "buffers",
        "gradients",
        "optimizer",
        "torch's random state",
    }


def test_a_trial_is_a_run_of_batches_of_one_size() -> None:
    def forward(samples: int, model: int = 0) -> dict[str, Any]:
        return {"pid": 1, "event": "forward", "samples": samples, "model": model}

    oom = {"pid": 1, "event": "oom"}
    assert sizes_tried([forward(2), forward(2), forward(4), oom, forward(2), forward(2, 1)]) == 4
    assert sizes_tried([]) == 0


def test_a_table_says_what_died_and_what_changed() -> None:
    answer = {"micro_batch": 24, "precision": "float32", "accumulation_steps": None, "report": None}
    found = {"answer": answer, "seconds": 3.2, "changed": ["buffers"]}
    dead = {"survives": False, "died_of": "OutOfMemoryError"}
    rows = [
        Row("a peer", "float32", found, 5, 3, 2, dead),
        Row("another", "float32", {"error": "TypeError: no"}, 0, 0, 0),
    ]
    told = Comparison("tiny_gpt", 2**26, "cpu", 32, 10, {"float32": 16}, None, rows)
    lines = list(markdown(told))
    assert lines[-2] == (
        "| a peer | float32 | 24 | 1.50 | - | - | **no** | 5 | 3 | 2 | 3 s | buffers | 32 to 24 |"
    )
    assert "none: TypeError: no" in lines[-1]
