"""Exclusions that follow from faults of earlier probes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest

from autofit.measurement import Measurement, Outcome
from autofit.plan import Plan, Scalar
from autofit.planning.feasibility import Sizes, exclusions_of
from autofit.planning.search_spec import SearchSpec
from autofit.searching.engine import run_search
from autofit.space import Space
from autofit.units import GIB
from tests.simulated import HALF, LEVEL, PLAIN, SimulatedDevice, make_trial

OK, OOM, LIMIT, HOST_OOM, UNSUPPORTED = (
    Outcome.OK,
    Outcome.OOM,
    Outcome.SIZE_LIMIT,
    Outcome.HOST_OOM,
    Outcome.UNSUPPORTED,
)
SECOND: dict[str, Scalar] = {**PLAIN, LEVEL: 2}
HALF_SECOND: dict[str, Scalar] = {**HALF, LEVEL: 2}
HALF_FIRST: dict[str, Scalar] = {**HALF, LEVEL: 1}
CONTENDED: dict[str, Any] = {"contended": True}
Ran: TypeAlias = (
    tuple[int, dict[str, Scalar], Outcome] | tuple[int, dict[str, Scalar], Outcome, dict[str, Any]]
)
"""The micro-batch of a trial, its settings, how it ended, and what else was measured."""


def excluded(spec: SearchSpec, ran: list[Ran]) -> Any:
    trials = []
    for number, (size, settings, outcome, *more) in enumerate(ran):
        measured: dict[str, Any] = {"step_times_s": [0.1]} if outcome is OK else {"detail": "why"}
        plan = Plan(size, settings=settings)
        trials.append(make_trial(number, plan, outcome, **measured, **(more[0] if more else {})))
    return exclusions_of(spec, trials)


REFUSED: list[Ran] = [(4, PLAIN, OK), (64, HALF, LIMIT), (32, HALF_SECOND, LIMIT)]


@pytest.mark.parametrize(
    ("ran", "bounds"),
    [
        ([(4, PLAIN, OK), (16, PLAIN, OOM)], [(PLAIN, 15), (HALF, None)]),
        # memory that another process took bounds no size that fits
        ([(4, PLAIN, OK), (20, HALF, OK), (16, HALF, OOM, CONTENDED)], [(HALF, None)]),
        (
            [
                (4, PLAIN, OK),
                (20, HALF, OK),
                (16, HALF, OOM, CONTENDED),
                (24, HALF, OOM, CONTENDED),
            ],
            [(HALF, 23)],
        ),
        # a size that several variants are refused bounds what they share
        (REFUSED[:2], [(HALF_FIRST, None)]),
        (REFUSED, [(HALF_SECOND, 31), (HALF_FIRST, 63), (SECOND, None)]),
        ([*REFUSED, (21, PLAIN, LIMIT)], [(SECOND, 31)]),
        ([*REFUSED, (21, PLAIN, LIMIT), (100, HALF_FIRST, OK)], [(HALF_FIRST, None)]),
        ([(4, PLAIN, OK), (64, HALF, OOM), (32, HALF_SECOND, OOM)], [(HALF_FIRST, None)]),
    ],
    ids=[
        "out of memory",
        "contended",
        "larger and contended",
        "one is refused",
        "two are refused",
        "all are refused",
        "disproved",
        "memory",
    ],
)
def test_a_fault_bounds_the_sizes_of_its_variant_and_of_what_shares_it(
    device: SimulatedDevice, ran: list[Ran], bounds: list[tuple[dict[str, Scalar], int | None]]
) -> None:
    found = excluded(device.spec(), ran)
    assert [(settings, found.bound(settings)) for settings, _ in bounds] == bounds


def two_sizes(outcome: Outcome) -> list[Ran]:
    return [(8, PLAIN, OK), (32, HALF, outcome), (6, HALF_SECOND, outcome), (4, HALF, outcome)]


@pytest.mark.parametrize(
    ("ran", "blamed", "spared"),
    [
        ([(4, PLAIN, OK), (4, HALF_SECOND, Outcome.NONFINITE)], [HALF_SECOND], [HALF]),
        (
            [(4, PLAIN, OK), (4, HALF_SECOND, Outcome.NONFINITE), (4, SECOND, OK)],
            [HALF_SECOND, HALF],
            [SECOND],
        ),
        # a value that is refused at two sizes is to blame itself, if the level is not
        *(
            case
            for outcome in (LIMIT, HOST_OOM)
            for case in (
                (two_sizes(outcome)[:2], [], [HALF]),
                (two_sizes(outcome)[:3], [], [HALF]),
                (two_sizes(outcome), [HALF, HALF_SECOND], [PLAIN]),
                ([*two_sizes(outcome), (2, HALF, OK)], [], [HALF]),
            )
        ),
        # at larger sizes than ran alone: it is tried at smaller
        ([(8, PLAIN, OK), (64, HALF, LIMIT), (32, HALF, LIMIT)], [], [HALF]),
    ],
)
def test_a_fault_is_blamed_on_what_never_worked(
    device: SimulatedDevice, ran: list[Ran], blamed: list[Any], spared: list[Any]
) -> None:
    found = excluded(device.spec(), ran)
    assert {found.why(settings) for settings in blamed} <= {f"{ran[1][2].value}: why"}
    assert [found.why(settings) for settings in spared] == [None] * len(spared)


ONE_SAMPLE: list[Ran] = [
    (4, PLAIN, OOM),
    (1, HALF_SECOND, UNSUPPORTED),
    (1, HALF, UNSUPPORTED),
    (1, SECOND, UNSUPPORTED),
]
"""As of BatchNorm, which refuses one sample, where the baseline does not fit."""


@pytest.mark.parametrize(
    ("ran", "least"),
    [
        ([(4, PLAIN, OK), (1, HALF, UNSUPPORTED)], [(HALF, 4)]),
        (ONE_SAMPLE[:3], [(HALF_SECOND, 4), (HALF, 4), (SECOND, 1)]),  # half may be to blame
        (ONE_SAMPLE, [(HALF_SECOND, 2), (HALF, 2), (SECOND, 2), (PLAIN, 2)]),
    ],
)
def test_a_small_micro_batch_that_fails_is_not_the_variants_fault(
    device: SimulatedDevice, ran: list[Ran], least: list[tuple[dict[str, Scalar], int]]
) -> None:
    found = excluded(device.spec(), ran)
    assert len(ran) > 2 or found.why(HALF) is None
    assert [(settings, found.least(settings)) for settings, _ in least] == least


def test_a_whole_batch_that_fits_does_not_say_that_gradients_fit_beside_a_smaller_one() -> None:
    spec = SearchSpec(Space({}, 4, global_batch=24), GIB)
    trials = [
        make_trial(0, spec.space.plan(24, {}), step_times_s=[0.1]),
        make_trial(1, spec.space.plan(12, {}), OOM, contended=True),
    ]
    assert dict(exclusions_of(spec, trials).accumulating) == {(): 11}


def test_a_search_gives_a_value_up_that_no_size_runs_with(device: SimulatedDevice) -> None:
    def is_half(plan: Plan) -> bool:
        return plan.settings["precision.dtype"] == "bfloat16"

    prober = device.prober(lambda plan: Measurement(LIMIT) if is_half(plan) else None)
    run_search(prober, device.spec())
    assert 1 <= sum(is_half(request.plan) for request in prober.probed) <= 3


@pytest.mark.parametrize("even", [False, True])
def test_sizes_are_those_of_the_plans_of_the_space(even: bool) -> None:
    space, wanted = Space({}, 5, global_batch=12, even_split=even), range(14)
    sizes = Sizes(space, [1, 4])
    plans = [space.plan(size, {}).micro_batch if size else 0 for size in wanted]
    down = sizes.down(np.array([[size, size] for size in wanted], dtype=np.float64))
    assert down[:, 0].tolist() == plans
    assert down[:, 1].tolist() == [size if size >= 4 else 0 for size in plans]
    assert Sizes(space, [5]).smallest.tolist() == [6]
