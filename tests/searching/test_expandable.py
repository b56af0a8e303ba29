"""Expandable segments are recommended where a fresh worker shows that they help, and only there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from autofit.measurement import Measurement, Outcome, Role, Trial
from autofit.memory.expandable import CONFIGURED_BY, expandable_segments
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.messages import ProbeRequest
from autofit.probing.prober import Prober, Target, open_prober
from autofit.searching.allocator import Candidates, candidates, try_expandable_segments
from autofit.training.workload import Workload
from autofit.units import MIB

SETTING = "PYTORCH_ALLOC_CONF=expandable_segments:True"
BUDGET = 512 * MIB


class Tanhs(nn.Module):
    """Keeps one tensor of the batch's size for each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows * self.scale
        for _ in range(12):
            rows = torch.tanh(rows)
        return rows


def tried(mib: int) -> dict[str, object]:
    """Try a plan whose activations have that size; segments of 20 MiB hold those below 10 MiB."""
    workload = Workload(Tanhs(), torch.ones(mib, MIB // 4))
    with open_prober(workload, (), Target("cpu", "512MiB")) as prober:
        before = dict(os.environ)
        found = try_expandable_segments(prober, ResolvedPlan(Plan(mib)), None, BUDGET)
        assert dict(os.environ) == before
    return found


@pytest.mark.slow
def test_they_help_where_tensors_leave_ends_of_segments_unused() -> None:
    found = tried(7)  # two to a segment, and 6 MiB of it lost
    assert (found["setting"], found["recommended"]) == (SETTING, True)
    held, before = found["held_bytes_with"], found["held_bytes"]
    assert isinstance(held, int)
    assert isinstance(before, int)
    assert held < 0.8 * before
    assert found["outcome_without_in_that"] in ("oom", "retries", "over_budget")


@pytest.mark.slow
def test_they_do_not_where_tensors_fill_their_segments() -> None:
    found = tried(16)
    assert (found["recommended"], found["lowers_required_bytes"]) == (False, False)


def trial(outcome: Outcome, speed: float, allocated: int, reserved: int) -> Trial:
    measurement = Measurement(
        outcome,
        step_times_s=[8 / speed],
        peak_allocated_bytes=allocated * MIB,
        peak_reserved_bytes=reserved * MIB,
        non_torch_bytes=0,
    )
    return Trial(int(speed), Role.SEARCH, Plan(8), measurement)


def test_only_where_memory_limits_a_search_is_anything_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in CONFIGURED_BY:
        monkeypatch.delenv(name, raising=False)
    scattered = trial(Outcome.OK, 10, 200, 300)
    refused = trial(Outcome.OOM, 1, 500, 512)
    assert candidates(scattered, [scattered], BUDGET).best is None
    assert candidates(scattered, [scattered, refused], BUDGET).best is scattered
    full = trial(Outcome.OK, 10, 400, 500)
    assert candidates(full, [full], BUDGET).best is full
    dense = trial(Outcome.OK, 10, 495, 500)
    assert candidates(dense, [dense, refused], BUDGET).best is None
    slow, quick = trial(Outcome.RETRIES, 5, 480, 512), trial(Outcome.RETRIES, 20, 480, 512)
    assert candidates(dense, [dense, slow, quick], BUDGET).flushing is quick
    assert candidates(dense, [dense, quick, slow], BUDGET).flushing is quick
    quickest = trial(Outcome.RETRIES, 30, 480, 512)
    assert candidates(dense, [quick, quickest], BUDGET).flushing is quickest
    assert candidates(dense, [dense, slow], BUDGET).flushing is None


@pytest.mark.parametrize("name", CONFIGURED_BY)
def test_what_the_user_has_chosen_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in CONFIGURED_BY:
        monkeypatch.delenv(each, raising=False)
    assert not expandable_segments()
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    assert expandable_segments()
    full = trial(Outcome.OK, 10, 400, 500)
    flushing = replace(full, measurement=replace(full.measurement, outcome=Outcome.RETRIES))
    assert candidates(full, [full, flushing], BUDGET).best is None
    assert candidates(full, [full, flushing], BUDGET).flushing is None


def test_torch_reads_the_newer_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert not expandable_segments()


class Recorded:
    """A prober of recorded measurements: with them, of the flushing plan, plain, in their bytes."""

    worker_pid: int | None = 1

    def __init__(self, *found: tuple[Outcome, int]) -> None:
        self.left, self.renewed = list(found), 0
        self.budgets: list[int | None] = []

    @contextmanager
    def environment(self, variables: Mapping[str, str]) -> Iterator[None]:
        yield

    def renew(self) -> None:
        self.renewed += 1

    def probe(self, request: ProbeRequest) -> Trial:
        outcome, held = self.left.pop(0)
        self.budgets.append(request.vram_budget_bytes)
        return trial(outcome, 10, held, held)


def recommended(prober: Any, flushing: ResolvedPlan | None = None) -> tuple[bool, bool]:
    found = try_expandable_segments(prober, ResolvedPlan(Plan(8)), flushing, BUDGET)
    return found["recommended"], found["lowers_required_bytes"]


OK, OOM, RETRIES = Outcome.OK, Outcome.OOM, Outcome.RETRIES


def test_what_runs_in_their_bytes_without_them_has_no_need_of_them() -> None:
    needy = Recorded((OK, 200), (OK, 300), (OOM, 200))
    assert recommended(needy) == (True, True)
    assert needy.budgets == [BUDGET, BUDGET, 200 * MIB]
    assert needy.renewed == 1  # what the allocator kept would hide it
    assert recommended(Recorded((OK, 200), (OK, 300), (OK, 200))) == (False, False)
    assert recommended(Recorded((OK, 299), (OK, 300))) == (False, False)  # next to nothing
    assert recommended(Recorded((OOM, 200), (OK, 300))) == (False, False)


def test_a_faster_plan_that_still_flushes_its_cache_is_no_reason() -> None:
    flushing = ResolvedPlan(Plan(16))
    assert recommended(Recorded((OK, 300), (OK, 300), (OK, 300)), flushing) == (True, False)
    assert recommended(Recorded((OK, 300), (RETRIES, 300), (OK, 300)), flushing) == (False, False)


def test_what_may_be_tried_takes_four_probes_at_most() -> None:
    fits = trial(Outcome.OK, 10, 200, 300)
    assert Candidates(None, None).most_probes == 0
    for flushing in (None, trial(Outcome.RETRIES, 20, 480, 512)):
        of_flushing = [(OK, 300)] if flushing else []
        prober = Recorded((OK, 200), *of_flushing, (OK, 300), (OOM, 200))
        resolved = None if flushing is None else ResolvedPlan(Plan(16))
        found = try_expandable_segments(
            cast("Prober", prober), ResolvedPlan(Plan(8)), resolved, BUDGET
        )
        most = Candidates(fits, flushing).most_probes
        assert found["probes"] == len(prober.budgets) <= most
    assert most == 4
