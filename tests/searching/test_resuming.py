"""What a search that resumes a study makes of the one before, and what it may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autofit.errors import StudyError, WorkloadFailed
from autofit.measurement import Measurement, Outcome
from autofit.plan import Dimension
from autofit.searching import events
from autofit.searching.engine import run_search
from autofit.searching.study import Store
from tests.simulated import IDENTITY, MakeDevice, SimulatedDevice


@pytest.mark.parametrize(
    "broken", [Outcome.USER_ERROR, Outcome.NONFINITE, Outcome.LEAK], ids=lambda each: each.value
)
def test_a_workload_that_failed_is_measured_again(
    device: SimulatedDevice, path: Path, broken: Outcome
) -> None:
    """As it is, it fails again; mended, it is searched as if it had never failed."""
    seen: list[events.Event] = []
    for _ in range(2):
        prober = device.prober(lambda plan: Measurement(broken, detail="on purpose"))
        with Store.open(path, IDENTITY) as store, pytest.raises(WorkloadFailed):
            run_search(prober, device.spec(), store=store, max_probes=4, on_event=seen.append)
    finished = [each for each in seen if isinstance(each, events.ProbeFinished)]
    assert [each.progress.probes for each in finished] == [1, 1]
    with Store.open(path, IDENTITY) as store:
        mended = run_search(device.prober(), device.spec(), store=store, max_probes=4)
    untouched = run_search(device.prober(), device.spec(), max_probes=4)
    assert [trial.plan for trial in mended.trials] == [trial.plan for trial in untouched.trials]
    assert mended.baseline.ok


@pytest.mark.parametrize("there", [0, 500])
def test_settings_that_planned_steps_leaves_out_are_told_by_its_name(
    device: SimulatedDevice, path: Path, there: int
) -> None:
    costly = {**IDENTITY, "costly settings": "compile.mode"}
    asked = {0: IDENTITY, 500: costly}
    samples = there * device.space.baseline.samples_per_step or None
    with Store.open(path, asked[there], planned_steps=there) as store:
        store.begin(replace(device.spec(), identity=asked[there], planned_samples=samples))
    with pytest.raises(StudyError) as raised:
        Store.open(path, asked[500 - there], planned_steps=500 - there)
    assert f"planned_steps={there} there, {500 - there} here" in str(raised.value)
    with pytest.raises(StudyError) as raised:  # as where a compiler is missing now
        Store.open(path, {**asked[there], "costly settings": "other"}, planned_steps=700)
    assert ("planned_steps" in str(raised.value)) is (there == 0)


def test_a_study_without_its_baseline_is_refused(device: SimulatedDevice, path: Path) -> None:
    with Store.open(path, IDENTITY) as store:
        run_search(device.prober(), device.spec(), store=store, max_probes=4)
    path.write_text(path.read_text().replace('"baseline"', '"search"'))
    with Store.open(path, IDENTITY) as store, pytest.raises(StudyError, match="baseline"):
        run_search(device.prober(), store.spec or device.spec(), store=store, max_probes=4)


def test_another_length_of_the_training_goes_on_where_a_search_ended(
    device: SimulatedDevice, path: Path
) -> None:
    for planned_samples, goes_on in ((400, True), (400, False), (800, True), (None, True)):
        spec = replace(device.spec(), planned_samples=planned_samples)
        with Store.open(path, IDENTITY) as store:
            store.begin(spec)
            assert (store.ended is None) is goes_on
            store.mark_ended("nothing is left")
        with Store.open(path, IDENTITY) as store:
            assert store.spec == spec


def test_a_study_has_the_whole_specification(make_device: MakeDevice, path: Path) -> None:
    meant = Dimension((0, 1, 2), payloads={1: {"names": ("a", "b")}, 2: None})
    spec = make_device(dimensions={"folding.level": meant}).spec()
    plain = spec.space.baseline.variant
    spec = replace(
        spec,
        space=replace(spec.space, fixed={"only.one": "value"}),
        predicted_lines={plain: (3e8, 2e8)},
        predicted_times={plain: (2e-3, 1e-4)},
    )
    for _ in range(2):
        with Store.open(path, IDENTITY) as store:
            store.begin(spec)
    with Store.open(path, IDENTITY) as store:
        assert store.spec == spec
