"""Damaged files and senseless arguments, at random with a fixed seed: every refusal is in words.

Only autofit's own errors may come out, and from the command line only its exit codes. What is
damaged lies in `recorded/`: `python -m tests.test_fuzz` searches for it anew where the format of
reports or studies has changed.
"""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import autofit
from autofit.checks.verdict import Verdict, compare_with
from autofit.errors import AutofitError, StudyError
from autofit.searching.engine import run_search
from autofit.searching.study import Store
from autofit.space import Space
from tests.command_line import run_here
from tests.simulated import DIMENSIONS, IDENTITY, SimulatedDevice

REPORTS, BYTES, STUDIES, COMMANDS, CALLS = 60, 20, 30, 30, 50
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, 2**62, 10**400, -(10**400), 1e308, 1e-320, float("nan"),
    float("inf"), "", "x", "nan", "\ud800", "\x00", "24GiB", "cuda:99999", [], {}, [[]], [None],
    {"": None}, {"number": 0}, [0, "a"], "é" * 300,
]  # fmt: skip


RECORDED = Path(__file__).parent / "recorded"
REPORT = (RECORDED / "report.json").read_text()
STUDY = RECORDED / "study.log"
DEVICE = SimulatedDevice(Space(DIMENSIONS, 4))
FUZZED = """
import torch, autofit
batch = torch.zeros(4, 2**17, 8)  # so large that few fit, which is soon found
ok = autofit.Workload(torch.nn.Linear(8, 4), batch, global_batch=8)
number = 3
"""


def record() -> None:
    """Search for the report and the study that the tests damage."""
    rows: Any = torch.randn(64, 8)  # a tensor is a dataset of its rows
    given: Any = {"global_batch": 8, "loader": functools.partial(DataLoader, rows)}
    found = autofit.search(
        autofit.Workload(torch.nn.Linear(8, 4), torch.randn(4, 8), **given),
        device="cpu",
        vram_budget="8MiB",
        max_probes=4,
        strategies=["precision", "memory_format"],  # for a layer there are no others
    )
    found.save(RECORDED / "report.json")
    STUDY.unlink(missing_ok=True)
    with Store.open(STUDY, IDENTITY) as store:
        run_search(DEVICE.prober(), DEVICE.spec(), store=store, max_probes=3)


@pytest.fixture(scope="module")
def workload() -> autofit.Workload:
    torch.manual_seed(0)
    return autofit.Workload(torch.nn.Linear(8, 4), torch.randn(4, 8), global_batch=8)


def test_what_is_damaged_was_whole(tmp_path: Path) -> None:
    assert autofit.load(RECORDED / "report.json").to_dict() == json.loads(REPORT)
    (tmp_path / "study.log").write_bytes(STUDY.read_bytes())
    with Store.open(tmp_path / "study.log", IDENTITY) as store:
        assert (store.spec, len(store.trials)) == (DEVICE.spec(), 3)


def damaged(data: Any, draw: random.Random) -> Any:
    """Return a copy in which one to three places, anywhere, are gone, doubled or something else."""
    data = copy.deepcopy(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        parent: Any = None
        key: Any = None
        value: Any = data
        while isinstance(value, (dict, list)) and value and (parent is None or draw.random() < 0.8):
            parent = value
            key = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            value = parent[key]
        if parent is None:
            continue
        kind = draw.random()
        if kind < 0.3:
            del parent[key]
        elif kind < 0.9:
            parent[key] = copy.deepcopy(draw.choice(ODD))
        else:
            parent[key] = {"inside": value} if isinstance(parent, dict) else [value, value]
    return data


def torn(content: bytes, draw: random.Random) -> bytes:
    """Return bytes of which some are cut off, replaced or repeated."""
    place, length = draw.randrange(len(content)), draw.choice([1, 1, 4, 50])
    begin, other = content[:place], draw.randbytes(length)
    rests = b"", other + content[place + length :], other + content[place:]
    return begin + draw.choice([*rests, content[max(0, place - length) :]])


def in_words(action: Callable[[], object], case: object) -> bool:
    """Run what may be refused by autofit, and raise nothing else; return whether it was not."""
    try:
        action()
    except AutofitError:
        return False
    except Exception as error:
        raise AssertionError(f"{error!r} for {case!r}") from error
    return True


def use(path: Path, workload: autofit.Workload) -> None:
    """Do with a report whatever can be done without running the plan."""
    report = autofit.load(path)
    report.to_text(width=60, verbose=True)
    for form in (report.to_text, report.to_html, report.to_markdown, report._repr_html_, repr):
        form(*([report] if form is repr else []))
    report.save(path.with_name("again.json"))
    assert report.frontier is not None
    assert report.speedup is None or report.speedup > 0
    record = report.record
    record.payloads(report.best.plan.settings)
    in_words(record.resolve_plan, path)
    in_words(lambda: predicted(workload, record.plan_to_rerun), path)
    in_words(lambda: report.apply(torch.nn.Linear(8, 4), torch.optim.SGD).undo(), path)


@functools.cache
def predicted(workload: autofit.Workload, plan: autofit.Plan) -> Any:
    return autofit.predict(workload, plan=plan, gpu="1GiB")


@pytest.mark.slow
def test_a_damaged_report_is_refused_in_words(workload: autofit.Workload, tmp_path: Path) -> None:
    draw, path = random.Random(5), tmp_path / "r.json"
    now = Verdict(True, autofit.Plan(4), "probe", 2**30, 2**20, device="cpu")
    loaded = 0
    for number in range(REPORTS):
        data = damaged(json.loads(REPORT), draw)
        path.write_text(json.dumps(data))
        in_words(lambda: use(path, workload), data)
        in_words(lambda: compare_with(now, path, 0.05), data)
        if number % 10 == 0:
            in_words(lambda: autofit.load(path).save(path.with_suffix(".csv")), data)
            in_words(lambda: autofit.load(path).save(path.with_suffix(".txt")), data)
        loaded += in_words(lambda: autofit.load(path), data)
    assert 0 < loaded < REPORTS / 2  # else the damage is too small, or too large
    for _ in range(BYTES):
        path.write_bytes(torn(REPORT.encode(), draw))
        in_words(lambda: use(path, workload), path.read_bytes())


@pytest.mark.slow
def test_a_damaged_study_is_refused_in_words(tmp_path: Path) -> None:
    draw, path, journal = random.Random(5), tmp_path / "study.log", STUDY.read_bytes()

    def resume() -> None:
        with Store.open(path, IDENTITY) as store:
            run_search(DEVICE.prober(), store.spec or DEVICE.spec(), store=store, max_probes=4)

    for number in range(STUDIES):
        if number % 2:
            path.write_bytes(torn(journal, draw))
        else:
            entries = [json.loads(line) for line in journal.splitlines()]
            place = draw.randrange(len(entries))
            entries[place] = damaged(entries[place], draw)
            path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        in_words(resume, path.read_bytes())


def test_a_bad_byte_amid_a_study_is_found_where_it_is(tmp_path: Path) -> None:
    path, lines = tmp_path / "study.log", STUDY.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:6], b"\xff" + lines[6][1:], *lines[7:]]))
    with pytest.raises(StudyError, match=r"line 7\b.*damaged"):
        Store.open(path, IDENTITY)


OPTIONS: dict[str, list[str]] = {
    "search": ["--vram-budget", "--global-batch", "--device", "--strategies", "--numerics",
               "--max-micro-batch", "--max-probes", "--timeout", "--study", "--seed",
               "--out", "--effort"],
    "probe": ["--micro-batch", "--global-batch", "--set", "--plan-from", "--vram-budget",
              "--device"],
    "soak": ["--micro-batch", "--global-batch", "--set", "--plan-from", "--steps",
             "--vram-budget", "--device"],
    "predict": ["--gpu", "--micro-batch", "--global-batch", "--set", "--plan-from"],
    "check": ["--vram-budget", "--gpu", "--micro-batch", "--global-batch", "--set", "--plan-from",
              "--device", "--baseline", "--max-regression", "--junit-xml"],
    "report": [],
    "doctor": ["--device"],
}  # fmt: skip
TARGETS = ["fuzzed.py:nothing", "fuzzed.py:number", "fuzzed:ok.model", "fuzzed.py", ":", "no.py:x",
           "no.such:x", "fuzzed.py:", "..:x", "", "r.json", "\udcff.py:x",
           "a" * 5000 + ".py:x"]  # fmt: skip
VALUES = ["0", "-1", "1.5", "nan", "inf", "1e400", "9" * 30, "", "x", "24GiB", "0GiB", "24", "cpu",
          "cuda:99", "a=b", "precision.dtype=bfloat16", "precision.dtype=3", "=", "no.json",
          "r.json", ".", "/", "a/b.json", "50%", "500%", "sqlite:///no/no.db", "http://x", "L4",
          "\u0661", "\udcff"]  # fmt: skip


@pytest.mark.slow
def test_senseless_commands_are_refused_in_words(tmp_path: Path) -> None:
    """Targets of commands that would run something are none; any report is shown."""
    draw = random.Random(5)
    (tmp_path / "fuzzed.py").write_text(FUZZED)
    for _ in range(COMMANDS):
        name = draw.choice(list(OPTIONS))
        (tmp_path / "r.json").write_text(json.dumps(damaged(json.loads(REPORT), draw)))
        target = "fuzzed.py:ok" if name == "predict" else draw.choice(TARGETS)
        arguments = [name] if name == "doctor" else [name, target]
        for option in draw.sample(OPTIONS[name], min(len(OPTIONS[name]), draw.randrange(4))):
            arguments += [option, draw.choice(VALUES)]
        ran = run_here(*arguments, cwd=tmp_path)
        assert "Traceback" not in ran.out + ran.err, arguments
        allowed = {1, 2, 4, 5} | ({0} if name in ("report", "doctor", "predict") else set())
        assert ran.code in allowed, arguments


def test_senseless_arguments_are_refused_in_words(
    workload: autofit.Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(5)
    odd = [value for value in ODD if value is not None]
    names = ("global_batch", "vram_budget", "device", "strategies", "numerics",
             "max_probes", "timeout", "study", "seed", "progress", "loss_fn", "criterion",
             "optimizer", "options")  # fmt: skip
    tuned = ("max_micro_batch", "sampler", "allow_accumulation_change", "even_split", "effort",
             "executor", "workers", "ranks", "profile")  # fmt: skip
    model: Any = workload.model
    search = functools.partial(autofit.search, model, workload.sample_batch)
    for _ in range(CALLS):
        # Were all that is drawn valid, the last argument would be refused.
        given = {name: draw.choice(odd) for name in draw.sample(names, 2)}
        in_words(functools.partial(search, **({"timeout": -1} | given)), given)
        options = {name: draw.choice(odd) for name in draw.sample(tuned, 2)}
        in_words(functools.partial(autofit.SearchOptions, **options), options)
        plan = {name: draw.choice(odd) for name in ("accumulation_steps", "global_batch")}
        in_words(functools.partial(autofit.Plan, draw.choice(odd), **plan), plan)
        where = {name: draw.choice(odd) for name in ("plan", "vram_budget", "gpu")}
        in_words(functools.partial(autofit.check, workload, **where), where)


if __name__ == "__main__":
    record()
