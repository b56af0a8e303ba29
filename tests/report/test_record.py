"""The report file: its keys are the contract, and a later version's further keys are ignored."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import replace
from typing import Any

import pytest

from autofit.errors import InvalidArgument
from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Plan
from autofit.report.record import Record, Undecided, frontier
from autofit.report.text import render
from tests.report.conftest import compared

TRIAL_KEYS = {
    "number",
    "kind",
    "plan",
    "outcome",
    "detail",
    "samples_per_second",
    "samples_per_second_low",
    "samples_per_second_high",
    "step_times_s",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "non_torch_bytes",
    "predicted_peak_bytes",
    "allocator_retries",
    "paste",
}
KEYS = {
    "schema",
    "autofit",
    "created",
    "environment",
    "workload",
    "vram_budget_bytes",
    "search",
    "dimensions",
    "calibration",
    "best",
    "baseline",
    "frontier",
    "trials",
    "skipped",
}


CONTRACT = {
    "": KEYS,
    "environment": {
        "device",
        "gpu",
        "capability",
        "total_bytes",
        "driver",
        "cuda",
        "torch",
        "python",
    },
    "workload": {"fingerprint", "parameters", "global_batch", "loss", "sample_shapes"},
    "search": {"probes", "oom_probes", "seconds", "stopped_because", "seed"},
    "dimensions/folding.level": {"values", "payloads"},
    "skipped/0": {"settings", "why"},
    **dict.fromkeys(("best", "baseline", "frontier/0", "frontier/1"), TRIAL_KEYS),
    **dict.fromkeys((f"trials/{number}" for number in range(8)), TRIAL_KEYS),
    "trials/7/plan": {
        "micro_batch",
        "accumulation_steps",
        "global_batch",
        "settings",
        "ranks",
    },
}
"""Where keys stand -> keys that are there."""


def through_json(record: Record) -> dict[str, Any]:
    return json.loads(json.dumps(record.to_dict(), allow_nan=False))


@pytest.mark.parametrize("place", CONTRACT)
def test_it_has_every_key_of_the_contract(record: Record, place: str) -> None:
    found: Any = through_json(record)
    for key in filter(None, place.split("/")):
        found = found[int(key) if isinstance(found, list) else key]
    assert found.keys() >= CONTRACT[place]


def test_what_it_wrote_it_reads(record: Record) -> None:
    again = Record.from_dict(through_json(record))
    assert again.to_dict() == record.to_dict()
    assert again.trials == record.trials
    assert again.payloads({"folding.level": 1}) == {"folding.level": ["blocks.0"]}


def test_keys_it_does_not_know_are_ignored(record: Record) -> None:
    data = through_json(record)
    parts = [data, data["environment"], data["search"], data["dimensions"]["folding.level"]]
    for part in [*parts, *data["trials"], data["trials"][0]["plan"], data["skipped"][0]]:
        part["of a later version"] = {"x": [1]}
    assert Record.from_dict(data).trials == record.trials


NEEDED = sorted(KEYS - {"schema", "frontier", "calibration"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((operator.methodcaller("pop", key), key) for key in NEEDED),
        (lambda data: data.update(schema=2), r"schema 2.*reads 1"),
        (lambda data: data["best"].update(number=99), "99"),
        (lambda data: data["trials"].append(data["trials"][0]), "two trials have the same"),
        *(
            (lambda data, shape=shape: data["workload"]["sample_shapes"].update(x=shape), "shapes")
            for shape in ("float32", "float32[8, j1]", "float32[8, 2", "int64[[]]", "[-1]")
        ),
        (lambda data: data["workload"].update(may_change_accumulation="no"), "accumulation"),
        (lambda data: data["workload"].update(allow_accumulation_change="no"), "accumulation"),
    ],
)
def test_a_report_that_lacks_a_key_or_cannot_be_is_refused(
    record: Record, change: Any, words: str
) -> None:
    data = through_json(record)
    change(data)
    with pytest.raises(InvalidArgument, match=words):
        Record.from_dict(data)


def test_the_baseline_beside_the_best_is_its_turn_that_was_disturbed_least(record: Record) -> None:
    repeated = replace(record.trials[0], number=8, kind=TrialKind.VETOED)
    assert replace(record, trials=(*record.trials, repeated)).baseline_beside_best.number == 7
    three = compared(record, best=[190], baseline=[390, 420, 400])
    assert three.baseline_beside_best.number == 7
    alone = replace(record, trials=record.trials[:7])
    assert alone.baseline_beside_best is record.trials[0]


def test_of_two_as_lean_only_the_faster_stays_and_of_a_plan_its_confirmation(
    record: Record,
) -> None:
    def ran(number: int, seconds: float, held: int) -> Trial:
        measurement = Measurement(Outcome.OK, step_times_s=[seconds], peak_reserved_bytes=held)
        return Trial(number, TrialKind.SEARCH, Plan(number + 1), measurement)

    assert numbers(frontier([ran(8, 0.5, 500), ran(0, 0.9, 100), ran(7, 0.1, 500)])) == [7, 0]
    assert numbers(frontier(record.trials[:6])) == [3, 5]
    assert numbers(frontier(record.trials)) == [6, 5]


def numbers(trials: tuple[Trial, ...]) -> list[int]:
    return [trial.number for trial in trials]


def test_of_two_as_lean_only_the_faster_stays() -> None:
    def ran(number: int, seconds: float, held: int) -> Trial:
        measurement = Measurement(Outcome.OK, step_times_s=[seconds], peak_reserved_bytes=held)
        return Trial(number, TrialKind.SEARCH, Plan(number + 1), measurement)

    fast, slow, lean = ran(7, 0.1, 500), ran(7, 0.5, 500), ran(0, 0.9, 100)
    slow = replace(slow, number=8, plan=Plan(9))
    assert numbers(frontier([slow, lean, fast])) == [7, 0]


def test_the_factor_is_that_of_the_final_comparison_alone(record: Record) -> None:
    assert record.is_confirmed
    assert record.factor == pytest.approx(400 / 190, rel=0.01)
    before = replace(record, trials=record.trials[:7])
    assert before.factor is None  # the baseline was measured long before
    blocks = compared(record, best=[200, 180, 190], baseline=[390, 420, 400])
    assert blocks.factor == pytest.approx(400 / 190, rel=0.06)
    undecided = replace(record.search, undecided_because=Undecided.TIMEOUT)
    assert replace(record, search=undecided).factor is None


def _disturbed(trial: Trial, seconds: float, slow_s: float) -> Trial:
    """Return the trial with two fast steps of nine, and others that work of others slowed down."""
    times = [seconds, seconds, *[slow_s] * 7]
    return replace(trial, measurement=replace(trial.measurement, step_times_s=times))


@pytest.mark.parametrize("comparison_ended", [True, False])
@pytest.mark.parametrize("slow_s", [0.2, 0.5])
def test_the_speeds_that_are_shown_are_those_of_trials(
    record: Record, comparison_ended: bool, slow_s: float
) -> None:
    """Also where the machine disturbed one plan alone: medians then give another factor."""
    trials = tuple(
        _disturbed(trial, 0.19, slow_s) if trial.plan == record.best.plan else trial
        for trial in record.trials
    )
    search = replace(record.search, comparison_ended=comparison_ended)
    given = replace(record, trials=trials, search=search)
    speeds: list[Any] = []
    for trial in (given.best, given.baseline_beside_best):
        speeds.append(given.speed_of(trial))
        assert speeds[-1] in {t.samples_per_second for t in trials if t.plan == trial.plan}
        low, high = given.speed_range(trial)
        assert (low or 0.0) <= speeds[-1] <= (high or 0.0)
    ahead = given.ahead(given.best.plan, given.baseline_beside_best.plan)
    is_apart = not ahead.low <= math.log(speeds[0] / speeds[1]) <= ahead.high
    assert is_apart == (slow_s > 0.4)
    # the text says how the factor was made
    assert ("fastest run" in render(given, verbose=True)) == is_apart


def test_where_nothing_was_decided_the_baseline_is_what_is_run(record: Record) -> None:
    search = replace(record.search, undecided_because=Undecided.NOISE)
    kept = replace(record, search=search, recommended_number=7)
    again = Record.from_dict(through_json(kept))
    assert again.search.undecided_because is Undecided.NOISE
    assert (again.recommended.number, again.best.number) == (7, 6)
    assert again.plan_to_rerun == record.trials[0].plan.without(record.default_settings)
    assert again.to_dict()["recommended"]["plan"]["micro_batch"] == 4
    with pytest.raises(InvalidArgument, match="recommended"):
        replace(record, recommended_number=99)


WHOLE = {
    "how": "dry run",
    "phases": [{"name": "forward", "first": 0}],
    "bytes": {"weights": [1, 2]},
    "peak": 1,
    "modules": [{"name": "", "class": "Net", "count": 1, "bytes": {"weights": 2}}],
}


@pytest.mark.parametrize(
    "use",
    [
        {key: value for key, value in WHOLE.items() if key != "phases"},
        WHOLE | {"bytes": {}},
        WHOLE | {"bytes": {"weights": [1, 2], "gradients": [1]}},
        WHOLE | {"peak": 2},
        WHOLE | {"modules": []},
        WHOLE | {"modules": [{"name": "a"}]},
        WHOLE | {"phases": [["forward", 0]]},
    ],
)
def test_memory_over_a_step_that_is_not_whole_is_refused(record: Record, use: Any) -> None:
    with pytest.raises(InvalidArgument):
        Record.from_dict(record.to_dict() | {"memory": {"best": use}})


@pytest.mark.parametrize("use", [WHOLE, {"why_not": "it is compiled"}])
def test_memory_over_a_step_is_read_back(record: Record, use: Any) -> None:
    read = Record.from_dict(record.to_dict() | {"memory": {"best": use}})
    assert read.memory == {"best": use}
