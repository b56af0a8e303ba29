"""What users call, on a real GPU: each road once, with models that take a moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.measurement import TrialKind
from autofit.plan import Scalar, variant_key
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.registry import installed_names, load_strategies, resolve
from autofit.searching.predicted_lines import predicted_lines
from autofit.testing import check_strategy
from autofit.testing.digest import differences, digest
from autofit.units import parse_bytes

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
BUDGET = "4GiB"
SAMPLES = 512
WITH_TESTS_OF_THEIR_OWN = {
    "attention",
    "convolution",
    "compile",
    "cuda_allocator",
    "head_loss",
    "offload",
    "parallel",
}
"""In tests/emulation and tests/strategies."""

IN_A_SCRIPT = f"""
import torch
from torch import nn
import autofit

model, batch = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.ones(4, 16)
report = autofit.search(model, batch, device="{DEVICE}", vram_budget="{BUDGET}", max_probes=6,
                        options=autofit.SearchOptions(max_micro_batch=16))
workload = autofit.Workload(model, batch)
verdict = autofit.check(workload, vram_budget="{BUDGET}", allow_stand_in_loss=True)
print(report.best.measurement.ok, verdict.fits, torch._C._cuda_hasPrimaryContext(0))
"""


class Block(nn.Module):
    """Holds more in activations than in weights from a hundred samples on."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.tanh(nn.functional.gelu(self.up(inputs))))
        return inputs + added


def workload() -> autofit.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)), nn.Linear(128, 4))
    batch = torch.randn(SAMPLES, 128), torch.randint(0, 4, (SAMPLES,))
    return autofit.Workload(model, batch, criterion=nn.functional.cross_entropy)


def opened(*strategies: str) -> Prober:
    return open_prober(workload(), load_strategies(strategies), Target(DEVICE, BUDGET))


def probed(prober: Prober, settings: dict[str, Scalar]) -> Any:
    space = prober.survey().space()
    plan = autofit.Plan(SAMPLES, settings={**space.baseline.settings, **settings})
    return prober.probe(ProbeRequest(resolve(plan, space, prober.strategies))).measurement


def test_a_search_ends_with_a_plan_that_ran_within_the_budget() -> None:
    given = workload()
    options = autofit.SearchOptions(max_micro_batch=2 * SAMPLES)
    report = autofit.search(
        given, device=DEVICE, vram_budget=BUDGET, max_probes=24, options=options
    )
    assert report.best.kind is TrialKind.CONFIRMATION
    best: Any = report.best.measurement
    assert best.ok
    assert best.held_bytes <= parse_bytes(BUDGET)
    assert report.record.environment["device"].startswith(DEVICE)

    model: Any = given.model
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    with report.apply(model, optimizer) as training:
        losses = [float(training.step(given.batch(SAMPLES))) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_a_search_and_a_check_leave_no_context_in_the_parent(run_python: Any) -> None:
    ran = run_python("-c", IN_A_SCRIPT)
    assert ran.stdout == "True True False\n", ran.stderr


def test_a_search_in_this_process_leaves_model_and_process_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16, device=DEVICE)).sum().backward()
    optimizer.step()
    batch = torch.randn(4, 16)
    objects = {"model": model, "optimizer": optimizer}
    before = digest(objects)
    report = autofit.search(
        model,
        batch,
        optimizer=optimizer,
        vram_budget=BUDGET,
        max_probes=6,
        device=DEVICE,
        options=autofit.SearchOptions(max_micro_batch=16),
    )
    assert report.best.measurement.ok
    assert differences(before, digest(objects)) == []


def test_after_a_search_in_this_process_all_of_the_gpu_is_the_users_again() -> None:
    before = torch.cuda.get_per_process_memory_fraction()
    trial = autofit.probe(workload(), plan=autofit.Plan(4), vram_budget=BUDGET, device=DEVICE)
    assert trial.measurement.ok
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(before)


def test_lines_are_predicted_for_this_gpu() -> None:
    with opened("precision") as prober:
        survey = prober.survey()
        measured = probed(prober, {})
        space = survey.space()
        lines, _, _ = predicted_lines(prober, survey, space)
    if not lines:
        pytest.skip(f"{survey.environment.gpu} is not among the GPUs that are known")
    fixed, per_sample = lines[variant_key(space.baseline.settings)]
    assert 0.5 < (fixed + per_sample * SAMPLES) / measured.held_bytes < 2


def test_float16_trains_with_a_scaler() -> None:
    with opened("precision") as prober:
        values = prober.survey().dimensions["precision.dtype"].values
        if "float16" not in values:
            pytest.skip(f"this GPU is offered {values}")
        measured = probed(prober, {"precision.dtype": "float16"})
    assert measured.ok, measured.detail
    assert measured.loss is not None


def test_checkpointing_takes_less_memory_than_plain_training() -> None:
    with opened("checkpointing") as prober:
        levels = prober.survey().dimensions["checkpointing.level"].values
        assert len(levels) > 1, prober.survey().notes
        first, last = (
            probed(prober, {"checkpointing.level": each}) for each in (levels[0], levels[-1])
        )
    assert first.ok
    assert last.ok
    assert last.peak_allocated_bytes < first.peak_allocated_bytes


@pytest.fixture
def _same_bits_each_time() -> Iterator[None]:
    """The suite compares to the bit, and within a tolerance that is finer than TF32's."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        yield
    torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)


@pytest.mark.usefixtures("_same_bits_each_time")
@pytest.mark.parametrize("name", sorted(set(installed_names()) - WITH_TESTS_OF_THEIR_OWN))
def test_every_strategy_conforms(name: str) -> None:
    assert check_strategy(name, device=DEVICE) >= 2
