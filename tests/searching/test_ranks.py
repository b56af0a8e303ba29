"""Searches of several ranks, started as torchrun starts them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.gpu_catalogue import find_gpu
from autofit.plan import Plan
from autofit.prediction.predict import predict_resolved
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.survey import Survey
from autofit.registry import load_strategies, resolve
from autofit.searching import trial_codec
from autofit.searching.predicted_lines import Predicted, predicted_lines
from autofit.training.workload import Workload
from autofit.units import GIB, MIB
from tests.torchrun import GRACE_S, WORKLOAD, ranks_of, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import json
import os

import autofit
from train import make_workload

report = autofit.search(
    make_workload(), device="cpu", vram_budget="64MiB", strategies=["parallel"], max_probes=4
)
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump(report.to_dict(), file)
"""
SEARCH = ["-m", "autofit", "search", "train.py:make_workload", "--device", "cpu"]
SEARCH += ["--strategies", "parallel"]
SPECIFIED = f'"{trial_codec.SPEC}"'.encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(WORKLOAD)
    return tmp_path


def test_every_rank_gets_the_same_report(folder: Path) -> None:
    (folder / "search.py").write_text(SCRIPT)
    process = started(folder, "search.py")
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["environment"]["ranks"] == 2
    plan, trial = first["best"]["plan"], first["best"]
    assert plan["ranks"] == 2
    assert plan["global_batch"] == 8
    assert len(trial["ranks"]) == 2
    assert trial["peak_reserved_bytes"] == max(r["peak_reserved_bytes"] for r in trial["ranks"])
    assert first["baseline"]["plan"]["settings"]["parallel.mode"] == "ddp"


def test_an_error_is_said_once_and_ends_every_rank_with_its_code(
    folder: Path, run_ranks: Any
) -> None:
    output, errors, codes = run_ranks(folder, *SEARCH, "--vram-budget", "1MiB")
    assert output == ""
    assert errors.count("autofit: nothing fits") == 1
    assert codes == {1}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_all_and_the_study_goes_on(
    folder: Path, rank: int, run_ranks: Any
) -> None:
    study = folder / "study.log"
    options = ["--vram-budget", "64MiB", "--max-probes", "5", "--study", str(study)]
    process = started(folder, *SEARCH, *options)
    while not (study.exists() and SPECIFIED in study.read_bytes()):
        assert process.poll() is None
        time.sleep(0.2)
    os.kill(dict(ranks_of(process.pid))[rank], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    output, errors, codes = run_ranks(folder, *SEARCH, *options, "--json")
    assert codes == {0}, errors
    assert json.loads(output)["search"]["probes"] <= 5
    assert study.read_bytes().count(SPECIFIED) == 1  # the second search took up the first one's


def test_ctrl_c_ends_all_ranks_and_is_said_once(folder: Path) -> None:
    slow = WORKLOAD.replace("for block", "time.sleep(0.1)\n        for block")
    (folder / "train.py").write_text(f"import time\n{slow}")  # it does not end before Ctrl-C comes
    study = folder / "study.log"
    process = started(folder, *SEARCH, "--vram-budget", "64MiB", "--study", str(study))
    while not (study.exists() and study.read_bytes().count(b"autofit_trial") > 1):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # torchrun sends it on to every rank
    _, errors = process.communicate(timeout=GRACE_S)
    assert process.returncode != 0
    said = [line for line in errors.splitlines() if line.startswith("autofit: interrupted")]
    assert len(said) == 1, errors


def test_ranks_on_two_machines_are_refused_in_words(folder: Path, run_ranks: Any) -> None:
    (folder / "search.py").write_text(SCRIPT)
    _, errors, codes = run_ranks(folder, "search.py", LOCAL_WORLD_SIZE="1")
    assert 0 not in codes
    assert errors.count("1 of 2 ranks are on this machine") == 2


def test_this_process_starts_the_ranks_itself(folder: Path, run_python: Any) -> None:
    limits = ["--vram-budget", "64MiB", "--max-probes", "3", "--ranks", "2", "--json"]
    ran = run_python(*SEARCH, *limits, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["environment"]["ranks"] == 2
    assert found["best"]["plan"]["ranks"] == 2
    assert len(found["best"]["ranks"]) == 2


# -- Memory lines of several ranks, predicted beside two that wait in a gloo group.

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BUDGET = 1000 * MIB
H100 = find_gpu("H100")
CHOSEN = load_strategies(["parallel"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(inputs)))
        return inputs + added


def net() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(8)))


def workload_of(build: Callable[[], nn.Module], *shape: int) -> Workload:
    batch = (torch.randn(4, *shape), torch.randn(4, *shape))
    return Workload(build, batch, criterion=nn.MSELoss())


def predicted(prober: Prober, workload: Workload) -> tuple[Survey, Predicted]:
    """Predict as on a GPU, which the ranks here have not: with no bound on the time it takes."""
    survey = prober.survey()
    environment = replace(
        survey.environment, gpu=H100.name, capability="9.0", total_bytes=H100.total_bytes
    )
    survey = replace(survey, environment=environment, vram_budget_bytes=BUDGET)
    apart = partial(open_prober, workload, CHOSEN, Target("cpu"))
    return survey, predicted_lines(prober, survey, survey.space(), apart, timeout_s=500.0)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return workload_of(net, 64, 256)


@pytest.fixture(scope="module")
def found(workload: Workload) -> Iterator[tuple[Survey, Predicted, Any]]:
    """The survey of two ranks, what was predicted, and a probe of them after that."""
    with open_prober(workload, CHOSEN, Target("cpu", GIB, ranks=2)) as prober:
        survey, lines = predicted(prober, workload)
        plan = Plan(2, settings={"parallel.mode": "fsdp2"}, ranks=2)
        probe = prober.probe(ProbeRequest(resolve(plan, survey.space(), CHOSEN)))
        yield survey, lines, probe.measurement


def required_bytes(workload: Workload, survey: Survey, plan: Plan) -> int:
    resolved = resolve(plan, survey.space(), CHOSEN)
    return predict_resolved(workload, resolved, H100).required_bytes


def test_every_mode_has_the_line_of_a_rank(
    workload: Workload, found: tuple[Survey, Predicted, Any]
) -> None:
    survey, (lines, times, notes), measured = found
    assert notes == ()
    assert times == {}
    modes = {dict(key)["parallel.mode"]: (dict(key), line) for key, line in lines.items()}
    assert set(modes) == {"ddp", "ddp_view", "zero1", "fsdp2", "fsdp2_keep"}
    for settings, (fixed, per_sample) in modes.values():
        needs = required_bytes(workload, survey, Plan(30, settings=settings, ranks=2))
        assert fixed + 30 * per_sample == pytest.approx(needs, rel=0.02)
    sharded, whole = (modes[mode][1][0] - H100.context_bytes for mode in ("fsdp2", "ddp"))
    assert sharded < 0.9 * whole
    assert measured.ok
    assert len(measured.ranks) == 2
