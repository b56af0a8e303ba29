"""The pytest plugin, run by pytest itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]

WORKLOAD = """
    import torch
    from torch import nn
    from autofit.training.workload import Workload

    def make_workload():
        model = lambda: nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512))
        batch = torch.randn(8, 512), torch.randn(8, 512)
        return Workload(model, batch, criterion=nn.functional.mse_loss)
"""


@pytest.fixture
def run(pytester: pytest.Pytester):  # type: ignore[no-untyped-def]  # a function of the fixture
    def run(body: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(WORKLOAD + body)
        installed = any(entry.name == "autofit" for entry in entry_points(group="pytest11"))
        plugin = () if installed else ("-p", "autofit.pytest_plugin")
        return pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", *arguments)

    return run


def test_a_training_that_fits_passes_and_one_that_does_not_fails(run) -> None:  # type: ignore[no-untyped-def]  # a fixture
    result = run("""
    def test_small(autofit_check):
        verdict = autofit_check(make_workload(), vram_budget="2GiB", micro_batch=8, gpu="L4")
        assert verdict.method == "predict"

    def test_large(autofit_check):
        autofit_check(make_workload(), vram_budget="2GiB", micro_batch=99999, gpu="L4")
    """)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*99999 x 1 does not fit in 2.00 GiB*the largest micro-batch that fits is*"]
    )
    result.stdout.fnmatch_lines(["*required*GiB", "*allowed*2.00 GiB", "*activations*"])


def test_settings_and_the_option(run) -> None:  # type: ignore[no-untyped-def]  # a fixture
    result = run(
        """
    def test_reduced(autofit_check):
        verdict = autofit_check(
            make_workload(), vram_budget="2GiB", settings={"precision.dtype": "bfloat16"}
        )
        assert verdict.plan.settings == {"precision.dtype": "bfloat16"}
        assert verdict.method == "predict"
    """,
        "--autofit-method=predict",
    )
    result.assert_outcomes(passed=1)


def test_a_micro_batch_keeps_the_workloads_global_batch(run) -> None:  # type: ignore[no-untyped-def]  # a fixture
    result = run("""
    from dataclasses import replace
    from autofit import Plan

    def test_split(autofit_check):
        workload = replace(make_workload(), global_batch=20)
        verdict = autofit_check(workload, vram_budget="2GiB", micro_batch=10, gpu="L4")
        assert verdict.plan == Plan.split(20, 10)
        verdict = autofit_check(workload, vram_budget="2GiB", gpu="L4")
        assert verdict.plan == Plan.split(20, 8)
    """)
    result.assert_outcomes(passed=1)


def test_the_marker_selects_the_checks(run) -> None:  # type: ignore[no-untyped-def]  # a fixture
    result = run(
        """
    def test_check(autofit_check):
        autofit_check(make_workload(), vram_budget="2GiB", gpu="L4")

    def test_other():
        assert False
    """,
        "-m",
        "autofit",
        "--strict-markers",
    )
    result.assert_outcomes(passed=1, deselected=1)


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, autofit.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
