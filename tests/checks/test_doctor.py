"""What `autofit doctor` finds on machines that are well and ill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

import emulated_gpu
from autofit import registry
from autofit.checks.doctor import Diagnosis, Finding, diagnose
from autofit.errors import InvalidArgument
from autofit.memory.allocator import VARIABLES, configured_by
from emulated_gpu import Fault, Machine, find_card


def found(diagnosis: Diagnosis, subject: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.subject == subject)


def test_a_machine_that_can_search_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "there.is:none", registry.GROUP)
    before = torch.get_rng_state()
    diagnosis = diagnose("cpu")
    assert diagnosis.can_search
    assert diagnosis.facts["device"] == "cpu"
    assert diagnosis.facts["torch"] == torch.__version__
    assert "float32" in diagnosis.facts["native types"]
    assert {"checkpointing", "precision"} <= set(diagnosis.facts["strategies"].split(", "))
    assert "trained a small model on cpu" in found(diagnosis, "worker").found
    assert json.loads(json.dumps(diagnosis.to_dict()))["can_search"] is True
    assert all(str(finding) in str(diagnosis) for finding in diagnosis.findings)
    assert torch.equal(before, torch.get_rng_state())

    installed = registry._installed
    monkeypatch.setattr(
        registry, "_installed", lambda *groups: {"broken": broken} | installed(*groups)
    )
    diagnosis = diagnose("cpu")
    assert not diagnosis.can_search
    assert "broken cannot be used" in found(diagnosis, "strategies").found


def test_a_device_that_is_not_there_stops_searches_and_a_wrong_name_is_refused() -> None:
    if not torch.cuda.is_available():
        diagnosis = diagnose("cuda")
        assert not diagnosis.can_search
        why = found(diagnosis, "device")
        assert "torch finds no CUDA device" in why.found
        assert str(why).startswith("stop")
    with pytest.raises(InvalidArgument, match="tpu"):
        diagnose("tpu")


def test_a_variable_of_the_allocator_that_torch_does_not_read_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = VARIABLES
    monkeypatch.setenv(first, "expandable_segments:True")
    monkeypatch.setenv(second, "expandable_segments:False")
    findings = [one for one in diagnose("cuda").findings if one.subject == "allocator"]
    assert [one.advice is None for one in findings] == [True, False]
    assert f"not read {second}=" in findings[1].found


@pytest.mark.cuda
def test_a_gpu_is_described() -> None:
    diagnosis = diagnose("cuda")
    assert diagnosis.can_search, str(diagnosis)
    assert diagnosis.facts["gpu"] == torch.cuda.get_device_name()
    assert "trained a small model on cuda:0" in found(diagnosis, "worker").found


def doctor(machine: Machine, code: int, **options: Any) -> dict[str, Any]:
    """Return the JSON of the command on an emulated card, which must end with that code."""
    variables = options.pop("variables", {})
    environment = emulated_gpu.environment(
        [find_card("L4")], machine=machine, values=False, **options
    )
    ran = subprocess.run(
        [sys.executable, "-m", "autofit", "doctor", "--json"],
        env={**os.environ, **environment, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.emulated
def test_a_silent_nvml_and_settings_of_the_allocator_are_named(machine: Machine) -> None:
    variables = {configured_by()[-1]: "expandable_segments:True"}
    answer = doctor(machine, 0, nvml=["refuse"], variables=variables)
    of = {each["subject"]: each for each in answer["findings"]}
    assert answer["facts"]["gpu"] == "NVIDIA L4"
    assert "estimated" in of["NVML"]["advice"]
    assert "expandable_segments" in of["allocator"]["found"]


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"faults": [Fault("launch", times=10**6, error=700)]}, ""),
        ({"variables": {configured_by()[-1]: "backend:cudaMallocAsync"}}, "unset it"),
    ],
)
def test_a_device_that_cannot_train_stops_searches(
    machine: Machine, options: dict[str, Any], advice: str
) -> None:
    answer = doctor(machine, 4, **options)
    assert not answer["can_search"]
    assert any(each["stops_searches"] and each["advice"] for each in answer["findings"])
    assert any(advice in (each["advice"] or "") for each in answer["findings"])


def test_a_strategy_that_lacks_something_here_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    why = found(diagnose("cpu"), "strategies").found
    assert why.startswith("compile: ")
    assert "no-such-compiler" in why
