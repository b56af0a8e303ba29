"""A plan stepped on the CPU device: what its peaks, times and outcome are made of."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from autofit.devices.cpu import CpuDevice
from autofit.measurement import NEVER_UPDATED, Outcome
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.measure import (
    MAX_TIMED_STEPS,
    MIN_TIMED_STEPS,
    SURE_TIMED_STEPS,
    Growth,
    bytes_per_step,
    enough_steps,
    growth_over,
    measure,
    start_up_s,
)
from autofit.probing.requests import ProbeRequest
from autofit.registry import load_strategies
from autofit.training.builder import TrainingBuilder
from autofit.training.workload import Workload
from autofit.units import GIB, MIB, format_bytes


def _net(width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))


def _measured(
    make: Callable[[], Workload],
    plan: Plan,
    *,
    limit: int = 256 * MIB,
    budget: int | None = None,
    device: CpuDevice | None = None,
    **request: Any,
) -> Any:
    device = device or CpuDevice()
    device.limit(limit)
    builder = TrainingBuilder(make, device, seed=0)
    resolved = ResolvedPlan(plan, strategies=load_strategies(["precision"]))
    return measure(builder, ProbeRequest(resolved, **request), budget or limit)


def _plain(**more: Any) -> Callable[[], Workload]:
    return lambda: Workload(_net(), torch.randn(4, 64), **more)


def test_a_plan_that_runs_says_what_it_held_and_how_long_its_steps_took() -> None:
    measured = _measured(_plain(), Plan(16))
    weights = sum(4 * p.numel() for p in _net().parameters())
    assert measured.ok
    assert measured.detail is None
    assert 4 * weights < measured.peak_allocated_bytes <= measured.peak_reserved_bytes
    assert measured.non_torch_bytes == 0
    assert measured.allocator_retries == 0
    assert measured.micro_batches_run == 1
    assert measured.loss is not None
    assert MIN_TIMED_STEPS <= len(measured.step_times_s) <= MAX_TIMED_STEPS
    assert all(seconds > 0 for seconds in measured.step_times_s)


def test_the_clock_is_the_machines_whatever_the_users_code_does_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
        return model(batch).square().mean()

    assert all(seconds > 0 for seconds in _measured(_plain(loss_fn=loss), Plan(16)).step_times_s)


def test_peaks_grow_with_the_micro_batch_and_repeat_exactly() -> None:
    peaks = [_measured(_plain(), Plan(size)).peak_allocated_bytes for size in (64, 256, 1024)]
    assert peaks == sorted(set(peaks), key=lambda peak: peak or 0)
    assert _measured(_plain(), Plan(256)).peak_allocated_bytes == peaks[1]


def test_an_odd_split_runs_the_sizes_of_the_plan() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        sizes.append(len(batch))
        return model(batch).mean()

    _measured(_plain(loss_fn=loss), Plan.split(10, 4), full_accumulation=True)
    assert sizes[:4] == [4, 3, 4, 3]  # two steps of warm-up
    assert sizes[4:10] == [4, 3, 3, 4, 3, 3]
    sizes.clear()
    _measured(_plain(loss_fn=loss), Plan.split(10, 4))
    assert sizes[:4] == [4, 3, 4, 3]


class _OwnClock(CpuDevice):
    """A CPU whose time only passes where a test lets it pass."""

    now_s = 0.0

    def mark(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("micro_batch", "fixed_s"), [(32, 0.1), (16, 0.0), (11, 0.0), (11, 0.1), (5, 0.1)]
)
def test_a_part_of_a_step_takes_as_long_as_all_of_it_in_proportion(
    micro_batch: int, fixed_s: float
) -> None:
    device = _OwnClock()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        device.now_s += fixed_s + 0.004 * len(batch)
        return model(batch).mean()

    plan = Plan.split(32, micro_batch)
    part, whole = (
        _measured(_plain(loss_fn=loss), plan, device=device, full_accumulation=full).step_time_s
        for full in (False, True)
    )
    assert part == pytest.approx(whole, rel=1e-6)
    assert whole == pytest.approx(0.004 * 32 + fixed_s * plan.accumulation_steps)


def test_a_search_runs_few_micro_batches_however_many_a_plan_has() -> None:
    run = [_measured(_plain(), Plan.split(64, size)).micro_batches_run for size in (64, 8, 5, 33)]
    assert run == [1, 2, 3, 2]


def test_a_train_step_always_gets_the_whole_global_batch() -> None:
    sizes: list[int] = []

    def step(training: Any, batch: Any) -> torch.Tensor:
        sizes.append(len(batch))
        return training.accumulate(batch)

    assert _measured(_plain(training_step=step), Plan.split(12, 4)).micro_batches_run == 3
    assert set(sizes) == {12}


def test_timing_stops_as_soon_as_the_incumbent_is_out_of_reach() -> None:
    hopeless = _measured(_plain(), Plan(4), incumbent_samples_per_second=1e12)
    assert MIN_TIMED_STEPS <= len(hopeless.step_times_s) <= SURE_TIMED_STEPS


def test_more_than_the_budget_is_over_budget_with_both_numbers() -> None:
    measured = _measured(_plain(), Plan(16), budget=MIB)
    assert measured.outcome is Outcome.OVER_BUDGET
    held = format_bytes(measured.held_bytes)
    assert measured.detail == f"held {held} of 1.00 MiB allowed"
    assert measured.step_times_s


def test_an_evaluation_over_the_budget_is_told_from_the_training() -> None:
    make = _plain(eval_step=lambda model, batch: model(batch), eval_batch=4096)
    free = _measured(make, Plan(16))
    trained, evaluated = free.held_bytes, free.evaluation_held_bytes
    assert evaluated > trained + MIB
    measured = _measured(make, Plan(16), budget=trained)
    assert measured.outcome is Outcome.OVER_BUDGET
    assert measured.is_of_evaluation
    assert measured.step_times_s


def test_a_loss_that_is_not_finite_is_reported_and_kept_out_of_json() -> None:
    steps: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        steps.append(1)
        return model(batch).mean() * (float("nan") if len(steps) > 4 else 1.0)

    measured = _measured(_plain(loss_fn=loss), Plan(4))
    assert measured.outcome is Outcome.NONFINITE
    assert measured.detail == "the loss became nan"
    assert measured.loss is None


def test_a_cache_that_is_flushed_in_every_step_is_reported() -> None:
    """Each step wants a larger block than any that is cached, and there is no room for both."""
    steps: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        steps.append(1)
        block = torch.zeros((10 + 2 * len(steps)) * MIB, dtype=torch.uint8)
        return model(batch).mean() + 0 * block[0]

    measured = _measured(_plain(loss_fn=loss), Plan(4), limit=24 * MIB)
    assert measured.outcome is Outcome.RETRIES
    assert measured.allocator_retries == 1
    assert measured.detail == "the allocator flushed its cache 1 time in the timed steps"


def test_float16_is_warmed_up_until_the_optimizer_has_made_its_state() -> None:
    """The first scale of 2**16 overflows here, and steps that overflow are left out."""
    updates: list[int] = []

    class Counting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            updates.append(1)
            return super().step(closure)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return 40 * model(batch).float().sum(1).mean()

    plan = Plan(2, settings={"precision.dtype": "float16"})
    measured = _measured(_plain(loss_fn=loss, optimizer=Counting), plan)
    weights = sum(4 * p.numel() for p in _net().parameters())
    assert measured.ok
    assert measured.peak_allocated_bytes > 4 * weights
    assert len(updates) >= 3


# How many steps are timed.

SCATTERED = [0.9, 1.0, 1.1]
"""Seconds; 10 samples each, so between 9.1 and 11.1 samples per second."""
SHORT = [0.005, 0.0055, 0.006]
"""Slices of 5 ms that hit a third of all steps hit three in a row in one probe of thirty."""
MANY = [0.05, 0.15] * MAX_TIMED_STEPS


@pytest.mark.parametrize(
    ("steps", "rate", "given", "enough"),
    [
        # a plan is cut short only where it is slower
        *((SCATTERED, rate, {}, False) for rate in (None, 5.0, 10.0, 11.1)),
        *((SCATTERED, rate, {}, True) for rate in (11.2, 20.0)),
        # an interval within one percent is close enough
        ([0.991, 1.0, 1.009], None, {}, True),
        ([0.989, 1.0, 1.011], None, {}, False),
        # and within three, where there is an incumbent that may be as fast
        ([0.971, 1.0, 1.029], 10.0, {}, True),
        ([0.971, 1.0, 1.029], None, {}, False),
        ([0.969, 1.0, 1.031], 10.0, {}, False),
        # fewer than three are never enough, nor three that other processes may all have hit
        ([1.0, 1.0], 1e9, {}, False),
        ([9.0, 9.0], None, {}, False),
        (SHORT, 1e9, {}, False),
        ([*SHORT, *SHORT], 1e9, {}, True),
        ([0.05, 0.055, 0.06], 1e9, {}, True),
        # there is an end by number and by seconds
        (MANY[: MAX_TIMED_STEPS - 1], None, {}, False),
        (MANY[:MAX_TIMED_STEPS], None, {}, True),
        ([1.0, 2.0, 3.0], None, {}, True),
        ([0.2, 0.3, 0.5], None, {"most_timed_seconds": 1.0}, True),
        ([0.2, 0.3, 0.5], None, {}, False),
        # a number that was asked for is the only rule
        ([10.0] * 4, 1e9, {"steps": 5}, False),
        ([10.0] * 5, 1e9, {"steps": 5}, True),
    ],
)
def test_how_many_steps_are_enough(
    steps: Sequence[float], rate: float | None, given: dict[str, Any], enough: bool
) -> None:
    asked = {"incumbent_samples_per_second": rate, "most_timed_seconds": 5.0, **given}
    assert enough_steps(steps, ProbeRequest(ResolvedPlan(Plan(10)), **asked)) is enough


# Growth at the step boundary: what is a leak, what a cycle, what nothing.


@pytest.mark.parametrize(
    ("boundaries", "per_step"),
    [
        ([100, 100, 100], None),
        ([100, 200], None),
        ([100, 200, 300], 100),
        ([100, 612, 612, 612], None),
        ([900, 100, 200, 300, 400, 500, 600, 700, 800, 900], 100),
        ([100, 200, 300, 250, 350], None),
        ([0, 10, 20, 1020], 10),
    ],
    ids=["flat", "too few", "steady", "one step up", "after warm-up", "dips", "median"],
)
def test_growth_is_steady_or_none(boundaries: Sequence[int], per_step: int | None) -> None:
    assert bytes_per_step(boundaries) == per_step
    found = growth_over(boundaries, boundaries[-1])
    assert (found.bytes_per_step if found else None) == per_step


def test_what_the_collector_takes_back_is_a_cycle() -> None:
    boundaries = [MIB, 2 * MIB, 3 * MIB]
    kept = growth_over(boundaries, collected_bytes=3 * MIB)
    cycle = growth_over(boundaries, collected_bytes=MIB)
    assert kept == Growth(MIB, collectable=False, steps=2)
    assert cycle == Growth(MIB, collectable=True, steps=2)
    assert kept.is_leak(GIB)
    assert not cycle.is_leak(GIB)
    assert "cycle" in cycle.words(GIB)


def test_a_leak_says_when_the_budget_is_reached() -> None:
    words = Growth(MIB, collectable=False).words(GIB)
    assert "1.00 MiB" in words
    assert "1024 steps" in words
    assert Growth(MIB, collectable=False).steps_until(-5) == 0


def _keeps(step: Callable[[int], torch.Tensor | None], most: int | None) -> Callable[[], Workload]:
    """A training that keeps what each of its steps returns, but no more than `most` of these."""
    kept: deque[torch.Tensor] = deque(maxlen=most)
    count = itertools.count()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if (made := step(next(count))) is not None:
            kept.append(made)
        return model(batch).square().mean()

    return _plain(loss_fn=loss)


def _a_kibibyte(step: int) -> torch.Tensor:
    return torch.zeros(1024, dtype=torch.uint8)


@pytest.mark.parametrize("most", [1, 5, 32, 64, 100], ids="a queue of {}".format)
def test_growth_that_ends_is_no_leak_and_counts_in_full(most: int) -> None:
    plain = _measured(_plain(loss_fn=lambda m, b: m(b).square().mean()), Plan(16))
    measured = _measured(_keeps(_a_kibibyte, most), Plan(16))
    assert measured.ok, measured.detail
    assert measured.step_times_s
    assert measured.peak_allocated_bytes == plain.peak_allocated_bytes + 1024 * most


class _TimesWhatItTracks(CpuDevice):
    """Accounts for timed steps too, as a GPU does."""

    tracked_steps = 0


@pytest.mark.parametrize("most", [20, 64, None])
def test_growth_in_timed_steps_is_watched_until_it_ends(most: int | None) -> None:
    device = _TimesWhatItTracks()
    with device.accounting():
        plain = _measured(_plain(loss_fn=lambda m, b: m(b).square().mean()), Plan(16))
        measured = _measured(_keeps(_a_kibibyte, most), Plan(16), device=device)
    assert measured.outcome is (Outcome.LEAK if most is None else Outcome.OK)
    assert MIN_TIMED_STEPS <= len(measured.step_times_s) <= MAX_TIMED_STEPS
    assert measured.peak_allocated_bytes >= plain.peak_allocated_bytes + 1024 * (most or 0)


def test_state_that_is_made_in_the_first_steps_is_no_leak() -> None:
    def late(step: int) -> torch.Tensor | None:
        return _a_kibibyte(step) if step < 4 else None

    assert _measured(_keeps(late, None), Plan(16)).ok


def _much(step: int) -> torch.Tensor:
    return torch.zeros(10 * MIB, dtype=torch.uint8)


def _a_cache_beside(step: int) -> torch.Tensor:
    return torch.zeros(100 * 1024 if step < 20 else 1024, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("step", "limits", "words"),
    [
        (_a_kibibyte, {"budget": 256 * MIB}, "1.00 KiB"),
        (_a_kibibyte, {"budget": 2 * MIB}, "1.00 KiB"),
        (_much, {"limit": 100 * MIB}, "10.0 MiB"),
        (_a_cache_beside, {}, "1.00 KiB"),
    ],
    ids=["far", "near", "before memory is full", "beside a cache that fills up"],
)
def test_growth_that_does_not_end_is_a_leak(
    step: Callable[[int], torch.Tensor], limits: dict[str, Any], words: str
) -> None:
    measured = _measured(_keeps(step, None), Plan(16), **limits)
    assert measured.outcome is Outcome.LEAK
    assert words in measured.detail


def test_the_seconds_of_a_start_are_those_beyond_plain_steps() -> None:
    assert start_up_s(21.0, 5, [0.2, 0.1, 9.0]) == pytest.approx(21.0 - 5 * 0.2)
    assert start_up_s(2.0, 3, [1.0]) == 0.0
    assert start_up_s(2.0, 1, []) is None


@pytest.mark.parametrize(
    "plan", [Plan(4), Plan(256), Plan(4, accumulation_steps=8, global_batch=32)], ids=str
)
def test_what_is_resident_is_parameters_gradients_and_state_at_any_size(plan: Plan) -> None:
    weights = sum(p.numel() * p.element_size() for p in _net(2048).parameters())
    measured = _measured(lambda: Workload(_net(2048), torch.randn(4, 64)), plan)
    assert measured.resident_bytes == pytest.approx(4 * weights, rel=0.02)
    assert measured.gradient_bytes == pytest.approx(weights, rel=0.02)  # which an update frees


def test_what_a_training_step_holds_between_is_unknown() -> None:
    def step(training: Any, batch: Any) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.model(batch).square().mean()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    measured = _measured(_plain(training_step=step), Plan(4))
    assert measured.resident_bytes is None
    assert measured.gradient_bytes is None


class _Forgetful(torch.optim.SGD):
    """Steps without a word, and does nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class _ByData(torch.optim.SGD):
    """Writes as older optimizers do, so that autograd counts no change."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


def _backward_only(training: Any, batch: Any) -> torch.Tensor:
    loss = training.model(batch).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("more", "is_named"),
    [
        ({"training_step": _backward_only}, True),
        ({"optimizer": lambda parameters: _Forgetful(parameters, lr=0.1)}, True),
        # as in a warm-up
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}, False),
        ({"optimizer": lambda p: torch.optim.AdamW(p, lr=0.0, weight_decay=0.0)}, False),
        ({"optimizer": lambda parameters: _ByData(parameters, lr=0.1)}, False),
    ],
)
def test_steps_that_change_no_parameter_are_named(more: dict[str, Any], is_named: bool) -> None:
    measured = _measured(_plain(**more), Plan(4))
    assert measured.outcome is Outcome.OK
    assert (NEVER_UPDATED in measured.notes) is is_named
