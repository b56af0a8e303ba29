"""`probe` of a report and `check` of several ranks, as torchrun starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import WORKLOAD, ranks_of, started, tree_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TARGET = "train.py:make_workload"
FOR_LONGER = "--plan-from", "r.json", "--steps"
SCRIPT = """
import json
import os

import autofit
from train import make_workload

result = autofit.probe(make_workload(), plan=autofit.load("r.json"), steps=8)
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump(result.to_dict(), file)
"""


@pytest.fixture(scope="module")
def folder(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload beside the report of a search on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(WORKLOAD)
    limits = ["--vram-budget", "64MiB", "--strategies", "parallel", "--max-probes", "2"]
    search = ("-m", "autofit", "search", TARGET, "--device", "cpu", *limits, "--json")
    output, errors, codes = run_ranks(folder, *search)
    assert codes == {0}, errors
    (folder / "r.json").write_text(output)
    return folder


@pytest.fixture
def run(run_ranks: Any, folder: Path) -> Callable[..., tuple[str, str, set[int]]]:
    """Run a command of autofit on so many ranks."""
    return lambda *command, ranks=2: run_ranks(folder, "-m", "autofit", *command, ranks=ranks)


def test_a_soak_is_trained_by_all_ranks_and_holds_each_to_the_report(
    folder: Path, run: Any
) -> None:
    report: dict[str, Any] = json.loads((folder / "r.json").read_text())
    output, errors, codes = run("probe", TARGET, *FOR_LONGER, "12", "--json")
    said = json.loads(output)  # which it would not be if both ranks printed
    assert codes == {0 if said["passed"] else 1}, errors
    assert said["steps"] == 12
    assert said["plan"] == report["best"]["plan"]
    assert said["measurement"]["outcome"] == "ok"
    assert len(said["measurement"]["ranks"]) == 2
    for trial in (report["best"], *report["trials"]):
        trial["ranks"][1]["peak_allocated_bytes"] //= 2
    (folder / "half.json").write_text(json.dumps(report))
    output, errors, codes = run("probe", TARGET, "--plan-from", "half.json", "--steps", "8")
    assert output.count("rank 1: peak allocated rose from") == 1
    assert "on each rank" in output
    assert codes == {1}


def test_a_script_soaks_on_every_rank_alike(folder: Path, run_ranks: Any) -> None:
    (folder / "soak.py").write_text(SCRIPT)
    _, errors, codes = run_ranks(folder, "soak.py")
    assert codes == {0}, errors
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["measurement"]["outcome"] == "ok"
    assert len(first["measurement"]["ranks"]) == 2


@pytest.mark.parametrize(
    "command",
    [
        ["probe", TARGET, *FOR_LONGER, "8"],
        ["check", TARGET, "--plan-from", "r.json"],
        ["check", TARGET, "--world-size", "2"],
    ],
    ids=["probe", "check", "asked"],
)
def test_a_report_of_another_number_of_ranks_is_refused(run: Any, command: list[str]) -> None:
    output, errors, codes = run(*command, ranks=3)
    assert output == ""
    refused = "the plan is for 2 ranks, but this is 3 ranks"
    assert errors.count(refused) == 1
    assert codes == {2}


def test_one_process_starts_the_ranks_of_a_report(folder: Path, run_python: Any) -> None:
    soaked: subprocess.CompletedProcess[str] = run_python(
        "-m", "autofit", "probe", TARGET, *FOR_LONGER, "8", "--json", cwd=folder
    )
    said = json.loads(soaked.stdout)
    assert soaked.returncode == (0 if said["passed"] else 1), soaked.stderr
    assert len(said["measurement"]["ranks"]) == 2


def test_a_check_probes_all_ranks(folder: Path, run: Any) -> None:
    here = ["--device", "cpu", "--micro-batch", "2", "--set", "parallel.mode=fsdp2"]
    output, errors, codes = run("check", TARGET, *here, "--vram-budget", "64MiB", "--json")
    verdict = json.loads(output)
    assert codes == {0}, errors
    assert (verdict["fits"], verdict["method"], verdict["device"]) == (True, "probe", "cpu")
    assert (verdict["plan"]["world_size"], verdict["plan"]["global_batch"]) == (2, 8)
    assert verdict["plan"]["settings"] == {"parallel.mode": "fsdp2"}
    junit = folder / "capacity.xml"
    page = ["--junit-xml", str(junit), "--vram-budget", "1MiB"]
    output, errors, codes = run("check", TARGET, *here, *page)
    assert output.count("does not fit in 1.00 MiB") == 1
    assert codes == {1}
    assert junit.read_text().count("<testcase") == 1


def test_a_check_without_a_device_predicts_one_of_the_ranks(run: Any) -> None:
    asked = ["--gpu", "H100", "--set", "parallel.mode=fsdp2", "--micro-batch", "2", "--json"]
    output, errors, codes = run("check", TARGET, *asked)
    verdict = json.loads(output)
    assert codes == {0}, errors
    assert (verdict["fits"], verdict["method"], verdict["gpu"]) == (True, "predict", "H100")
    assert (verdict["plan"]["world_size"], verdict["plan"]["global_batch"]) == (2, 8)


def test_a_rank_that_is_killed_amid_a_soak_ends_all(folder: Path) -> None:
    process = started(folder, "-m", "autofit", "probe", TARGET, *FOR_LONGER, "1000000")
    while len(tree_of(process.pid)) < 5:  # torchrun, two ranks, and two workers of rank 0
        assert process.poll() is None
        time.sleep(0.2)
    all_of_it = tree_of(process.pid)
    os.kill(dict(ranks_of(process.pid))[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert output == ""
    assert process.returncode != 0
    left = set(all_of_it)
    end = time.monotonic() + 60
    while left and time.monotonic() < end:
        left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
        time.sleep(0.1)
    assert not left
