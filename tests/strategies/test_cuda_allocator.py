"""cuda_allocator.expandable_segments: offered where nobody has chosen, in force while it trains."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.plan import Plan, ResolvedPlan
from autofit.strategy import Capabilities
from autofit.testing import PlainContext
from autofit.testing.conformance import attention, check_strategy
from autofit.training.training import Training
from autofit.training.workload import Workload
from autofit.units import MIB

HOPPER = Capabilities("cuda", bfloat16=True, float16=True, tf32=True, compute_capability=(9, 0))
VARIABLES: tuple[str, ...] = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
if torch.__version__ < "2.9":  # which does not read the other
    VARIABLES = VARIABLES[1:]
module: Any = import_module("autofit.strategies.cuda_allocator")  # lies elsewhere in the tree
SETTING, STRATEGY = module.SETTING, module.ExpandableSegments()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_dry_run_and_another_device_do_not_choose_it() -> None:
    context = PlainContext(attention, "meta", HOPPER)
    assert list(STRATEGY.dimensions(context)[SETTING].values) == [False]
    assert "not predicted" in context.notes[0]
    assert STRATEGY.dimensions(PlainContext(attention, "cpu", Capabilities("cpu"))) == {}
    plan = Plan(4, settings={SETTING: True})
    with pytest.raises(autofit.PredictionUnavailable, match="can only be measured"):
        autofit.predict(attention(), plan=plan, gpu="H100", strategies=[STRATEGY])


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", [True, False])
def test_who_sets_the_variable_has_chosen(
    name: str, value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"max_split_size_mb:512,expandable_segments:{value}")
    assert STRATEGY.dimensions(PlainContext(attention, "meta", HOPPER)) == {}


def test_the_line_to_paste_keeps_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    scope: dict[str, Any] = {}
    monkeypatch.setenv(VARIABLES[0], "max_split_size_mb:256")
    exec("\n".join(STRATEGY.describe({SETTING: True}, {})), scope)
    found = scope["os"].environ[VARIABLES[0]]
    assert found == "max_split_size_mb:256,expandable_segments:True"
    assert STRATEGY.describe({SETTING: False}, {}) == []


def net() -> Workload:
    torch.manual_seed(0)
    return Workload(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), torch.randn(8, 64))


@pytest.mark.cuda
def test_it_is_offered_on_a_gpu_at_the_cost_of_a_worker() -> None:
    dimension = STRATEGY.dimensions(PlainContext(net, "cuda", HOPPER))[SETTING]
    assert list(dimension.values) == [False, True]
    assert dimension.fresh_worker
    assert dimension.is_costly


@pytest.mark.cuda
def test_segments_grow_while_it_is_in_force_and_not_after() -> None:
    def grows() -> bool:
        torch.cuda.empty_cache()
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch's
        own = [s for s in segments if s["total_size"] >= held.nbytes]
        return any(segment["is_expandable"] for segment in own)

    workload, plan = net(), ResolvedPlan(Plan(8, settings={SETTING: True}), {}, (STRATEGY,))
    model = workload.build_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recipe = Workload(model, workload.batch(8), loss_fn=lambda m, b: m(b).mean()).recipe
    assert not grows()
    with Training(model, optimizer, recipe, plan, device=torch.device("cuda")) as training:
        training.step(workload.batch(8))
        assert grows()
    assert not grows()


@pytest.mark.cuda
def test_conformance_on_a_gpu() -> None:
    assert check_strategy(STRATEGY, device="cuda", capabilities=HOPPER) == 4


@pytest.mark.cuda
def test_a_probe_of_it_holds_no_more_than_pages_allow() -> None:
    held = []
    for value in (False, True):
        plan = Plan(8, settings={SETTING: value})
        trial = autofit.probe(net(), plan=plan, device="cuda", steps=3, strategies=[STRATEGY])
        assert trial.ok, trial.measurement.detail
        held.append(trial.measurement.peak_reserved_bytes or 0)
    assert held[1] <= held[0] + 40 * MIB
