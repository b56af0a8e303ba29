"""The study on disk: nothing finished is lost, and nobody else's study is touched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autofit.codec import to_json
from autofit.errors import StudyError, WorkloadFailed
from autofit.measurement import Measurement, Outcome, Trial
from autofit.plan import Dimension, Plan
from autofit.planning.search_spec import Effort
from autofit.report.record import INTERRUPTED
from autofit.searching import events, storage
from autofit.searching.engine import run_search
from autofit.searching.storage import _start_ticks, is_live, this_process
from autofit.searching.study import Store
from tests.simulated import IDENTITY, MakeDevice, SimulatedDevice, make_trial

_SEARCH = """
import os, signal, sys
sys.path[:0] = {path!r}
from autofit.searching.engine import run_search
from autofit.searching.study import Store
from autofit.space import Space
from tests.simulated import FEW_DIMENSIONS, IDENTITY, SimulatedDevice

device = SimulatedDevice(Space(FEW_DIMENSIONS, sample_batch_size=4))
prober = device.prober()
probe = prober.probe

def counted(request):
    if len(prober.probed) == {after}:
        {then}
    return probe(request)

prober.probe = counted
with Store.open({study!r}, IDENTITY) as store:
    print(run_search(prober, device.spec(), store=store).search.stopped_because, file=sys.stderr)
"""


@pytest.fixture
def start(python: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Start a search in a process of its own that does something at one of its probes."""

    def child(study: str, after: int, then: str) -> subprocess.Popen[str]:
        code = textwrap.dedent(_SEARCH).format(path=sys.path, study=study, after=after, then=then)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return python("-c", code, text=True, forks_workers=False, **pipes)

    return child


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a database."""
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture(params=["file", "sqlite"])
def study(request: pytest.FixtureRequest, path: Path, url: str) -> str:
    """A study of each kind of storage."""
    return str(path) if request.param == "file" else url


def test_a_killed_search_is_resumed_without_repeating_a_trial(
    device: SimulatedDevice, study: str, start: Any
) -> None:
    child = start(study, after=4, then="os.kill(os.getpid(), signal.SIGKILL)")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, errors
    prober = device.prober()
    with Store.open(study, IDENTITY) as store:
        before = store.trials
        assert len(before) == 4
        assert {t.state.name for t in store.study.trials} == {"COMPLETE", "FAIL"}
        prober._times_asked.update(t.plan for t in before)  # as if it had been the first one's
        result = run_search(prober, device.spec(), store=store)
    assert result.trials[:4] == before
    assert len(prober.probed) == result.search.probes - 4
    whole = run_search(device.prober(), device.spec())
    assert [trial.plan for trial in result.trials] == [trial.plan for trial in whole.trials]


def test_a_second_search_on_a_study_is_refused(study: str, start: Any) -> None:
    child = start(study, after=2, then="print('ready', flush=True); signal.pause()")
    try:
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(StudyError, match="using the study"):
            Store.open(study, IDENTITY)
    finally:
        child.kill()
        child.communicate()
    with Store.open(study, IDENTITY) as store:
        assert len(store.trials) == 2


def test_a_full_disk_ends_the_search_and_keeps_what_it_had(
    device: SimulatedDevice, path: Path, start: Any
) -> None:
    limit = (
        f"import resource; size = os.stat({str(path)!r}).st_size + 100; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))"
    )
    child = start(str(path), after=3, then=limit)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0
    assert "cannot write the study" in errors
    assert "3 finished trials" in errors
    with Store.open(path, IDENTITY) as store:
        assert len(store.trials) == 3
        assert run_search(device.prober(), device.spec(), store=store).best.ok


def _searched(device: SimulatedDevice, path: Path, max_probes: int = 8) -> tuple[Trial, ...]:
    """Search with a study; return all trials in it."""
    with Store.open(path, IDENTITY) as store:
        run_search(device.prober(), store.spec or device.spec(), store=store, max_probes=max_probes)
        return store.trials


def test_a_search_that_ended_is_answered_from_its_study(
    device: SimulatedDevice, path: Path
) -> None:
    with Store.open(path, IDENTITY) as store:
        first = run_search(device.prober(), device.spec(), store=store)
    prober = device.prober()
    with Store.open(path, IDENTITY) as store:
        again = run_search(prober, device.spec(), store=store)
    assert prober.probed == []
    assert (again.best, again.trials) == (first.best, first.trials)
    assert again.search.stopped_because == first.search.stopped_because


@pytest.mark.parametrize("attribute", ["autofit_facts", "autofit_trial"])
def test_a_study_whose_settings_are_code_is_refused(
    device: SimulatedDevice, path: Path, attribute: str
) -> None:
    """A study is data, from a colleague, say; strategies would write its values into code."""
    _searched(device, path)
    lines = path.read_text().splitlines(keepends=True)
    code = json.dumps("bfloat16\n__import__('os').system('true')\n#")
    changed = [
        line.replace('"bfloat16"', code) if f'"{attribute}"' in line else line for line in lines
    ]
    assert changed != lines
    path.write_text("".join(changed))
    with pytest.raises(StudyError, match="not a valid name or value of a setting"):
        Store.open(path, IDENTITY)


def test_what_a_stranger_wrote_into_a_study_moves_no_terminal(
    device: SimulatedDevice, path: Path
) -> None:
    _searched(device, path)
    written = path.read_text()
    assert '"detail":null' in written
    path.write_text(written.replace('"detail":null', '"detail":"\\u001b]0;a title\\u0007"'))
    with Store.open(path, IDENTITY) as store:
        details = [trial.measurement.detail for trial in store.trials]
    assert "\\x1b]0;a title\\x07" in details
    assert not any("\x1b" in (detail or "") for detail in details)


@pytest.mark.parametrize("content", [b"a letter\nto a friend", b'{"schema": 1}\n', b"no newline"])
def test_a_file_that_is_no_study_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "letter.txt"
    path.write_bytes(content)
    with pytest.raises(StudyError, match="not a study"):
        Store.open(path, IDENTITY)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("study", "words"),
    [
        ("nowhere/study.journal", "cannot write the study .*No such file"),
        (".", "cannot write the study"),
        ("nosql://host/x", "cannot open the study nosql://host/x"),
    ],
)
def test_a_study_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, study: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StudyError, match=words):
        Store.open(study, IDENTITY)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write anywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StudyError, match=r"cannot write the study .*denied"):
            Store.open(tmp_path / "study.journal", IDENTITY)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("kind", ["pipe", "/dev/null"])
def test_a_pipe_or_device_is_not_read(tmp_path: Path, kind: str) -> None:
    path = Path(kind)
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(StudyError, match="it is a pipe or a device"):
        Store.open(path, IDENTITY)


def _halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _scratch(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"op_code":', b'"op_kode":'))


def _delete_rows(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        for table in ("trials", "studies"):
            database.execute(f"DELETE FROM {table}")


def test_ctrl_c_as_optuna_lets_go_of_its_lock_ends_the_search_as_any_other(
    device: SimulatedDevice, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna then removes the lock once more, which fails: that is no fault of the study."""
    prober, unlink, pressed = device.prober(), os.unlink, list[str]()

    def interrupted(file: str) -> None:
        unlink(file)
        if len(prober.probed) == 3 and not pressed:
            pressed.append(file)
            signal.raise_signal(signal.SIGINT)

    with Store.open(path, IDENTITY) as store:
        monkeypatch.setattr(os, "unlink", interrupted)
        result = run_search(prober, device.spec(), store=store)
    assert pressed[0].startswith(f"{path}.lock")
    assert result.search.stopped_because == INTERRUPTED


@pytest.mark.parametrize(
    ("url", "damage"),
    [("{}", _halve), ("{}", _scratch), ("{}", Path.unlink), ("sqlite:///{}", _delete_rows)],
    ids=["cut", "scratched", "deleted", "rows deleted"],
)
def test_a_study_that_others_damage_meanwhile_ends_in_a_report_of_what_was_measured(
    device: SimulatedDevice, url: str, damage: Callable[[Path], None], path: Path
) -> None:
    def listen(event: events.Event) -> None:
        if isinstance(event, events.ProbeStarted) and event.progress.probes == 2:
            damage(path)

    prober = device.prober()
    with Store.open(url.format(path), IDENTITY) as store:
        result = run_search(prober, device.spec(), store=store, max_probes=5, on_event=listen)
    assert result.best.ok
    assert len(result.trials) >= 2
    assert {trial.plan for trial in result.trials} <= {each.plan for each in prober.probed}


def test_another_programs_study_of_the_same_name_is_refused(url: str) -> None:
    optuna.create_study(study_name="autofit", storage=url, direction="minimize")
    with pytest.raises(StudyError, match="another program"):
        Store.open(url, IDENTITY)


def test_a_torn_last_line_is_cut_off(device: SimulatedDevice, path: Path) -> None:
    trials = _searched(device, path, 4)
    path.write_bytes(path.read_bytes() + b'{"op_code":8,"worker_id":"x","trial')
    with Store.open(path, IDENTITY) as store:
        assert store.trials == trials
    assert len(_searched(device, path, 6)) > len(trials)
    for line in path.read_text().splitlines():
        json.loads(line)


def _ran(number: int, plan: Plan) -> Trial:
    return make_trial(number, plan, step_times_s=[0.1], peak_reserved_bytes=2**30)


def test_of_searches_that_claim_a_study_at_the_same_instant_one_goes_on(
    device: SimulatedDevice, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "is_live", lambda claim: False)  # neither sees the other's yet
    with Store.open(url, IDENTITY) as first, Store.open(url, IDENTITY) as second:
        first.begin(device.spec())
        second.begin(device.spec())
        with pytest.raises(StudyError, match="has taken over"):
            first.ask(device.space.baseline)
        second.ask(device.space.baseline)
        second.abandon()


@pytest.mark.parametrize(
    ("seen_s_ago", "words"), [(0, "is using the study"), (-7200, "last seen 0 s ago")]
)
def test_a_search_that_may_be_alive_elsewhere_keeps_its_study(
    url: str, seen_s_ago: float, words: str
) -> None:
    """In another container on a host of this name; its clock may be ahead."""
    with Store.open(url, IDENTITY) as first:
        claim = this_process() | {"namespace": 1, "seen": time.time() - seen_s_ago}
        first.study.set_user_attr("autofit_claim", claim)
        with pytest.raises(StudyError, match=words):
            Store.open(url, IDENTITY)


def test_a_search_that_was_taken_for_ended_is_told_so(device: SimulatedDevice, url: str) -> None:
    """As one that was not heard of for an hour."""
    plan = device.space.baseline
    with Store.open(url, IDENTITY) as first:
        first.begin(device.spec())
        claim = this_process() | {"namespace": 1, "seen": time.time() - 7200}
        first.study.set_user_attr("autofit_claim", claim)
        with Store.open(url, IDENTITY) as second:
            with pytest.raises(StudyError, match="has taken over"):
                first.ask(plan)
            second.record(second.ask(plan), _ran(0, plan))
        assert len(second.trials) == 1


def test_a_trial_that_another_program_ended_is_no_crash(device: SimulatedDevice, url: str) -> None:
    plan = device.space.baseline
    with Store.open(url, IDENTITY) as store:
        store.begin(device.spec())
        asked = store.ask(plan)
        store.study.tell(asked.number, state=TrialState.FAIL)
        with pytest.raises(StudyError, match="another program"):
            store.record(asked, _ran(0, plan))


def test_a_trial_recorded_just_before_a_kill_is_not_lost(
    device: SimulatedDevice, path: Path
) -> None:
    with Store.open(path, IDENTITY) as store:
        store.begin(device.spec())
        asked = store.ask(device.space.baseline)
        trial = _ran(asked.number, device.space.baseline)
        asked.set_user_attr("autofit_trial", to_json(trial))
    with Store.open(path, IDENTITY) as store:
        assert store.trials == (trial,)
        assert [each.state for each in store.study.trials] == [TrialState.FAIL]


@pytest.mark.parametrize(
    ("claim", "lives"),
    [
        ({}, True),
        ({"started": 1}, False),
        ({"host": "elsewhere", "seen_s_ago": 0}, True),
        ({"host": "elsewhere", "seen_s_ago": 7200}, False),
        # in a container its ids are not those of this process
        ({"namespace": 1, "started": 1, "seen_s_ago": 0}, True),
        ({"namespace": 1, "started": 1, "seen_s_ago": 7200}, False),
    ],
)
def test_whether_a_claim_is_live_depends_on_the_start_of_its_process_too(
    claim: dict[str, Any], lives: bool
) -> None:
    seen = {"seen": time.time() - claim["seen_s_ago"]} if "seen_s_ago" in claim else {}
    assert is_live(this_process() | claim | seen) is lives


def test_a_process_that_has_ended_claims_nothing() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = this_process() | {"pid": child.pid, "started": _start_ticks(child.pid)}
    assert not is_live(zombie)
    child.wait()
    assert not is_live(zombie)


# -- What a search that resumes a study makes of the one before, and what it may change.


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


def test_a_study_without_its_baseline_is_refused(device: SimulatedDevice, path: Path) -> None:
    _searched(device, path, 4)
    path.write_text(path.read_text().replace('"baseline"', '"search"'))
    with pytest.raises(StudyError, match="baseline"):
        _searched(device, path, 4)


@pytest.mark.parametrize("there", [0, 500])
def test_settings_that_planned_steps_leaves_out_are_told_by_its_name(
    device: SimulatedDevice, path: Path, there: int
) -> None:
    asked = {0: IDENTITY, 500: {**IDENTITY, "costly settings": "compile.mode"}}
    samples = there * device.space.baseline.samples_per_step or None
    with Store.open(path, asked[there], planned_steps=there) as store:
        store.begin(replace(device.spec(), identity=asked[there], planned_samples=samples))
    with pytest.raises(StudyError, match=f"planned_steps={there} there, {500 - there} here"):
        Store.open(path, asked[500 - there], planned_steps=500 - there)
    with pytest.raises(StudyError) as raised:  # as where a compiler is missing now
        Store.open(path, {**asked[there], "costly settings": "other"}, planned_steps=700)
    assert ("planned_steps" in str(raised.value)) is (there == 0)


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        ({}, {"effort": Effort.QUICK}, False),
        ({}, {"effort": Effort.THOROUGH}, True),
        ({"planned_samples": 400}, {"planned_samples": 400}, False),
        ({"planned_samples": 400}, {"planned_samples": 800}, True),
        ({"planned_samples": 800}, {"planned_samples": None}, True),
    ],
)
def test_another_effort_or_length_of_the_training_may_go_on_where_a_search_ended(
    device: SimulatedDevice, path: Path, before: Any, now: Any, goes_on: bool
) -> None:
    with Store.open(path, IDENTITY) as store:
        store.begin(replace(device.spec(), **before))
        store.mark_ended("nothing is left")
    spec = replace(device.spec(), **now)
    with Store.open(path, IDENTITY) as store:
        store.begin(spec)
        assert (store.ended is None) is goes_on
    with Store.open(path, IDENTITY) as store:
        assert store.spec == spec


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        ({"workload": "other"}, "another workload"),
        ({**IDENTITY, "ranks": "2"}, "ranks: none there, 2 here"),
    ],
)
def test_a_changed_workload_is_refused_and_named(
    device: SimulatedDevice, path: Path, identity: dict[str, str], words: str
) -> None:
    with Store.open(path, IDENTITY) as store:
        store.begin(device.spec())
    with pytest.raises(StudyError, match=words):
        Store.open(path, identity)


def test_a_study_has_the_whole_specification_and_refuses_another(
    make_device: MakeDevice, path: Path
) -> None:
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
        with pytest.raises(StudyError, match="another space, budget or seed"):
            store.begin(make_device(max_micro_batch=7).spec())
