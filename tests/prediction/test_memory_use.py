"""Where memory goes: every byte of the measured peak has one kind and one part of the model."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from autofit import Workload
from autofit.devices.base import Environment
from autofit.devices.cpu import CpuDevice
from autofit.devices.gpu_catalogue import find_gpu
from autofit.plan import Plan, ResolvedPlan
from autofit.prediction.breakdown import KINDS, MAX_PARTS, MOMENTS, divided
from autofit.prediction.memory_use import memory_uses
from autofit.prediction.predict import predict
from autofit.probing.requests import ProbeRequest
from autofit.probing.session import Session
from benchmarks.workloads import tiny_gpt, tiny_resnet


def on_cpu(workload: Any, plan: Plan) -> dict[str, Any]:
    session = Session(workload, (), CpuDevice())
    use: dict[str, Any] = memory_uses(session, {"best": ResolvedPlan(plan)})["best"]
    assert "why_not" not in use, use
    return use


def totals(use: dict[str, Any]) -> list[int]:
    return [sum(held) for held in zip(*use["bytes"].values(), strict=True)]


@pytest.mark.parametrize("make", [tiny_gpt, tiny_resnet])
def test_on_the_cpu_the_peak_is_the_probes(make: Any) -> None:
    """A probe keeps one scalar more: 512 bytes."""
    plan = make().plan()
    use = on_cpu(make, plan)
    session = Session(make, (), CpuDevice())
    measured: Any = session.probe(ProbeRequest(ResolvedPlan(plan), 2**30, steps=1)).value
    assert 0 <= measured.peak_allocated_bytes - max(totals(use)) <= 512
    assert max(totals(use)) == totals(use)[use["peak"]]
    assert sum(sum(part["bytes"].values()) for part in use["modules"]) == max(totals(use))
    at_peak = {kind: held[use["peak"]] for kind, held in use["bytes"].items()}
    by_kind = {kind: sum(part["bytes"].get(kind, 0) for part in use["modules"]) for kind in KINDS}
    assert by_kind == at_peak


class SaysItIsAnL4(CpuDevice):
    """The CPU, with the environment of a GPU: where memory goes is then told by a dry run."""

    def __init__(self) -> None:
        super().__init__()
        self.environment = Environment("cuda", "NVIDIA L4", "8.9", find_gpu("L4").total_bytes)


def with_rests() -> Workload:
    """Blocks of freed activations are taken whole where the rest is too small to split off."""
    sizes, layers = (64, 330, 300, 290, 8), list[nn.Module]()
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.GELU()]
    return Workload(
        lambda: nn.Sequential(*layers), torch.randn(9000, 64), optimizer=partial(SGD, lr=0.1)
    )


@pytest.mark.parametrize("make", [tiny_gpt, with_rests])
def test_on_a_gpu_the_peak_is_that_of_the_prediction(make: Any) -> None:
    workload = make()
    session = Session(make, (), SaysItIsAnL4())
    use = memory_uses(session, {"best": ResolvedPlan(workload.plan())}, {"best": 1e9})["best"]
    assert use["how"] == "dry run"
    predicted = predict(workload, gpu="L4")
    assert max(totals(use)) == predicted.peak_allocated_bytes
    at_peak = {kind: held[use["peak"]] for kind, held in use["bytes"].items()}
    assert at_peak == {kind: predicted.breakdown[kind] for kind in KINDS}


def test_weights_gradients_state_and_phases_are_what_they_are() -> None:
    use = on_cpu(lambda: tiny_gpt(), Plan(4, accumulation_steps=8))
    parameters = sum(p.numel() * 4 for p in tiny_gpt().build_model().parameters())
    held = use["bytes"]
    for kind, copies in (("weights", 1), ("gradients", 1), ("optimizer_state", 2)):
        assert max(held[kind]) == pytest.approx(copies * parameters, rel=0.02)
    assert set(held["weights"]) == {max(held["weights"])}
    assert [phase["name"] for phase in use["phases"]] == ["forward", "backward"] * 2 + ["update"]
    starts = [phase["first"] for phase in use["phases"]]
    assert starts == sorted(starts)
    assert all(len(each) == len(totals(use)) <= MOMENTS for each in held.values())
    forward, backward, second = starts[:3]
    assert held["activations"][forward] < held["activations"][backward]
    assert held["activations"][second] < held["activations"][backward] / 2
    assert held["gradients"][0] == 0 < held["gradients"][second]


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(30))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.body:
            x = part(x)
        return self.head(x)


def test_a_step_of_few_allocations_shows_all_of_them() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    use = on_cpu(lambda: Workload(model, torch.randn(16, 64)), Plan(16))
    names = [phase["name"] for phase in use["phases"]]
    assert (names[0], names[-1]) == ("forward", "update")
    assert "backward" in names
    assert 10 < len(totals(use)) < MOMENTS


def test_alike_modules_are_one_part() -> None:
    workload = Workload(Twin, torch.randn(512, 8))
    use = on_cpu(lambda: workload, Plan(512))
    names = {(part["name"], part["class"]): part["count"] for part in use["modules"]}
    assert names["body.*.*", "Linear"] == 30
    assert names["body.*.*", "ReLU"] == 30
    assert names["head", "Linear"] == 1
    assert len(use["modules"]) <= MAX_PARTS


def test_what_a_container_holds_itself_is_a_part_of_its_own() -> None:
    classes = {"": "Net", "a": "Box", "a.x": "Linear", "a.y": "Linear"}
    held = {
        ("activations", "a"): 5,
        ("weights", "a.x"): 3,
        ("weights", "a.y"): 2,
        ("temporaries", ""): 1,
    }
    parts = divided(held, classes)
    assert [(part["name"], part["class"], part["bytes"]) for part in parts] == [
        ("a", "Box", {"activations": 5}),
        ("a.x", "Linear", {"weights": 3}),
        ("a.y", "Linear", {"weights": 2}),
        ("", "Net", {"temporaries": 1}),
    ]


def test_real_steps_that_take_long_are_not_run() -> None:
    def never() -> Workload:
        return Workload(Twin, torch.randn(4, 8), global_batch=4 * 8)

    session = Session(never, (), CpuDevice())
    plans = {"best": ResolvedPlan(Plan(4, accumulation_steps=8))}
    for step_s, is_run in ((35.0, True), (45.0, False)):  # two of eight micro-batches, two steps
        found = memory_uses(session, plans, {"best": step_s})["best"]
        assert ("why_not" in found) is not is_run


def test_a_plan_that_cannot_be_looked_at_says_why() -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("no loss today")

    workload = Workload(Twin, torch.randn(4, 8), loss_fn=broken)
    session = Session(lambda: workload, (), CpuDevice())
    found = memory_uses(session, {"best": ResolvedPlan(Plan(4))})
    assert found == {"best": {"why_not": "ZeroDivisionError: no loss today"}}
