"""`soak` of a report and `check` of several ranks, as torchrun starts them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import WORKLOAD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TARGET = "train.py:make_workload"
FOR_LONGER = "--plan-from", "r.json", "--steps"


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
    output, errors, codes = run("soak", TARGET, *FOR_LONGER, "12", "--json")
    said = json.loads(output)  # which it would not be if both ranks printed
    assert codes == {0 if said["passed"] else 1}, errors
    assert said["steps"] == 12
    assert said["plan"] == report["recommended"]["plan"]
    assert said["measurement"]["outcome"] == "ok"
    assert len(said["measurement"]["ranks"]) == 2
    for trial in (report["best"], report["recommended"], *report["trials"]):
        trial["ranks"][1]["peak_allocated_bytes"] //= 2
    (folder / "half.json").write_text(json.dumps(report))
    output, errors, codes = run("soak", TARGET, "--plan-from", "half.json", "--steps", "8")
    assert output.count("rank 1: peak allocated rose from") == 1
    assert "ranks hold" in output
    assert codes == {1}


@pytest.mark.parametrize(
    "command",
    [
        ["soak", TARGET, *FOR_LONGER, "8"],
        ["probe", TARGET, "--plan-from", "r.json"],
        ["check", TARGET, "--plan-from", "r.json"],
        ["check", TARGET, "--ranks", "2", "--gpu", "L4"],
    ],
    ids=["soak", "probe", "check", "asked"],
)
def test_a_report_of_another_number_of_ranks_is_refused(run: Any, command: list[str]) -> None:
    output, errors, codes = run(*command, ranks=3)
    assert output == ""
    refused = "the plan is for 2 ranks, but this is 3 ranks"
    assert errors.count(refused) == 1
    assert codes == {2}


def test_one_process_starts_the_ranks_of_a_report(folder: Path, run_python: Any) -> None:
    soaked: subprocess.CompletedProcess[str] = run_python(
        "-m", "autofit", "soak", TARGET, *FOR_LONGER, "8", "--json", cwd=folder
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
    assert (verdict["plan"]["ranks"], verdict["plan"]["global_batch"]) == (2, 8)
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
    assert (verdict["plan"]["ranks"], verdict["plan"]["global_batch"]) == (2, 8)
