"""The command line: exit codes, and what goes to which stream.

What depends on a process of its own runs in one; the rest calls the entry point here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from autofit.cli.console import export_report, show_report
from autofit.cli.main import app, main
from autofit.errors import AutofitError
from autofit.report.place import FLAGS, in_shell_words
from autofit.report.report import load

SOURCE = '''
import os
import torch
from torch import nn
from autofit import Workload

print("the user's module says hello")

def model():
    print("the user's factory says hello")
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

small = Workload(model, torch.randn(4, 8), global_batch=16)

def slow():
    """Steps long enough to be interrupted in the middle of a search."""
    wide = lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    return Workload(wide, torch.randn(64, 256), global_batch=512)

def failing():
    def loss_fn(model, batch):
        raise RuntimeError("the loss is nowhere to be found")
    return Workload(model, torch.randn(4, 8), loss_fn=loss_fn)

def exits():
    raise SystemExit(0)

def leaving():
    def loss_fn(model, batch):
        raise SystemExit(0)
    return Workload(model, torch.randn(4, 8), loss_fn=loss_fn)

def vanishing():
    """The folder for the report is removed meanwhile."""
    os.rmdir("gone")
    return small

def truncated():
    raise EOFError("the weights end too early")

def finished():
    import typer
    raise typer.Exit(0)

def cancelled():
    import asyncio
    raise asyncio.CancelledError("theirs")

class Closing(nn.Linear):
    def forward(self, inputs):
        raise GeneratorExit("theirs")

def closing():
    return Workload(Closing(8, 8), torch.randn(4, 8), loss_fn=lambda m, b: m(b).mean())

def broken():
    return undefined_name

def unlabelled():
    """Its criterion was forgotten."""
    return Workload(model, (torch.randn(4, 8), torch.randn(4, 3)))

def heavy():
    return Workload(lambda: nn.Linear(512, 512), torch.randn(4, 512))
'''
ON_CPU = ("--device", "cpu", "--vram-budget", "32MiB")


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def autofit(*arguments: str, cwd: Path) -> Ran:
    command = [sys.executable, "-m", "autofit", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=240)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture
def forked(
    folder: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., Ran]:
    """`autofit` in a process of its own, where torch is imported already."""

    def run(*arguments: str) -> Ran:
        ran = run_python("-m", "autofit", *arguments, cwd=folder)
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return run


@pytest.fixture
def here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ran]]:
    """`autofit` as a call of its entry point in this process, from the project's folder."""
    path, modules = list(sys.path), set(sys.modules)
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["autofit", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return Ran(int(end.value.code or 0), shown.out, shown.err)

    yield run
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name == "models":
            del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project")
    (path / "models.py").write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def searched(folder: Path) -> Ran:
    """One search through a worker process; it left report.json, report.txt and study.log."""
    outs = (
        "--out", "report.json", "--out", "report.txt", "--study", "study.log",
        "--profile", "trace.json",
    )  # fmt: skip
    limits = ("--device", "cpu", "--vram-budget", "32MiB", "--max-probes", "3", "--timeout", "300")
    return autofit("search", "models.py:small", *limits, *outs, cwd=folder)


def test_a_search_prints_the_report_and_nothing_else(searched: Ran, folder: Path) -> None:
    assert searched.code == 0, searched.err
    assert searched.out.startswith("small on cpu, torch ")
    assert len(searched.out.splitlines()) <= 15
    assert "samples/s" in searched.out
    assert "hello" not in searched.out
    assert searched.out == (folder / "report.txt").read_text()
    in_full = autofit("report", "report.json", "-v", cwd=folder)
    assert in_full.out.startswith(searched.out)
    assert len(searched.out) < len(in_full.out)


def test_strict_exits_with_5_where_nothing_was_decided(folder: Path) -> None:
    command = ("search", "models.py:small", *ON_CPU, "--max-probes", "1", "--json")
    for strict, code in (((), 0), (("--strict",), 5)):
        ran = autofit(*command, *strict, cwd=folder)
        assert ran.code == code, ran.err
        assert ran.json["search"]["undecided_because"] == "max_probes"
        assert ran.json["recommended"]["number"] == ran.json["baseline"]["number"]


def run_each_line(ran: Ran, folder: Path) -> Iterator[Ran]:
    """Run the Python and the commands of a printed result, as a shell in that folder would."""
    lines = dict(re.findall(r"^(Apply|More|Page): +(.*)$", ran.out, re.MULTILINE))
    assert lines.keys() >= {"Apply", "More"}
    program = (
        "import torch, autofit\n"
        "from models import small\n"
        "model = small.model()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "loss_fn = lambda model, batch: model(batch).square().mean()\n"
        f"training = {lines.pop('Apply')}\n"
        "print(type(training).__name__)\n"
    )
    commands = [shlex.join([sys.executable, "-c", program]), *lines.values()]
    for command in commands:
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, cwd=folder, timeout=240
        )
        yield Ran(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_each_printed_line_runs_as_printed(searched: Ran, folder: Path) -> None:
    shown = autofit("report", "report.json", "-v", cwd=folder)
    try:
        applied, in_full, page = run_each_line(shown, folder)
        assert "Training" in applied.out, applied.err
        assert in_full.out == shown.out, in_full.err
        assert page.code == 0, page.err
        assert (folder / "report.html").exists()
    finally:
        (folder / "report.html").unlink(missing_ok=True)


def test_progress_and_what_user_code_prints_go_to_standard_error(searched: Ran) -> None:
    assert "the user's module says hello" in searched.err
    assert re.search(r"^\[\d+:\d\d\] 4 x .*: [\d.]+ samples/s", searched.err, re.MULTILINE)
    assert re.search(r"best [\d.]+ samples/s \| probe 1 of 3", searched.err)
    assert "\x1b" not in searched.err
    assert "Warning" not in searched.err


def test_files_are_written_only_where_it_was_said(searched: Ran, folder: Path) -> None:
    names = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert names == {"models.py", "report.json", "report.txt", "study.log", "trace.json"}
    assert "traceEvents" in json.loads((folder / "trace.json").read_text())
    assert json.loads((folder / "report.json").read_text())["schema"] == 1


WITHOUT_TORCH = """
import sys
if len(sys.argv) > 2:  # a page shows code that strategies write, where they can be imported
    sys.modules["torch"] = None
from autofit.cli.main import main
sys.argv = ["autofit", "report", "report.json", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert end.code == 0
assert not any(sys.modules.get(name) for name in ("torch", "optuna", "pynvml"))
"""


def test_a_saved_report_is_shown_in_any_form_without_torch(
    searched: Ran, folder: Path, tmp_path: Path
) -> None:
    forms = [tmp_path / f"r{suffix}" for suffix in (".json", ".html", ".md", ".txt", ".csv")]
    command = [sys.executable, "-c", WITHOUT_TORCH, *(f"--out={form}" for form in forms)]
    shown = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    assert shown.stdout == searched.out
    assert sorted(shown.stderr.splitlines()) == sorted(f"autofit: wrote {form}" for form in forms)
    assert json.loads(forms[0].read_text()) == json.loads((folder / "report.json").read_text())
    assert forms[1].read_text().startswith("<!doctype html>")
    assert forms[2].read_text().startswith("### small on cpu")
    assert forms[3].read_text() == (folder / "report.txt").read_text()
    assert forms[4].read_text().startswith("number,kind,")
    as_json = subprocess.run(
        [*command[:3], "--json"], cwd=folder, check=True, capture_output=True, text=True
    )
    assert json.loads(as_json.stdout) == json.loads((folder / "report.json").read_text())


def test_two_reports_are_compared(
    searched: Ran, forked: Callable[..., Ran], folder: Path, tmp_path: Path
) -> None:
    changed = json.loads((folder / "report.json").read_text())
    changed["vram_budget_bytes"] *= 2
    later = tmp_path / "later.json"
    later.write_text(json.dumps(changed))
    ran = forked("report", "report.json", str(later), "--out", str(tmp_path / "changes.md"))
    assert (ran.code, ran.err) == (0, f"autofit: wrote {tmp_path / 'changes.md'}\n")
    assert re.search(r"^VRAM budget +32.0 MiB +64.0 MiB$", ran.out, re.MULTILINE), ran.out
    assert "| VRAM budget | 32.0 MiB | 64.0 MiB |" in (tmp_path / "changes.md").read_text()
    for refused in (["--json"], ["--out", str(tmp_path / "changes.csv")]):
        assert forked("report", "report.json", str(later), *refused).code == 2


def test_a_plan_can_be_taken_from_a_report(
    searched: Ran, here: Callable[..., Ran], folder: Path
) -> None:
    ran = here("probe", "models.py:small", *ON_CPU, "--plan-from", "report.json", "--json")
    assert ran.code == 0, ran.err
    best = json.loads((folder / "report.json").read_text())["recommended"]
    assert ran.json["plan"] == best["plan"]
    assert ran.json["outcome"] == "ok"
    assert ran.json["micro_batches_run"] == best["plan"]["accumulation_steps"]


@pytest.mark.parametrize(
    "command",
    [
        ("probe", "models.py:small", *ON_CPU, "--plan-from"),
        ("check", "models.py:small", "--device", "cpu", "--plan-from"),
    ],
)
def test_a_level_means_the_modules_that_the_report_names(
    command: tuple[str, ...], searched: Ran, here: Callable[..., Ran], folder: Path
) -> None:
    """A level that is not offered here, of a unit that this model lacks: the report's."""
    assert searched.code == 0
    report = json.loads((folder / "report.json").read_text())
    setting, payload = "checkpointing.level", {"units": ["nowhere"], "state": []}
    report["dimensions"][setting] = {"values": [0, 77], "payloads": [None, payload]}
    for trial in report["trials"]:
        if trial["number"] == report["recommended"]["number"]:
            trial["plan"]["settings"][setting] = 77
    (folder / "elsewhere.json").write_text(json.dumps(report))
    ran = here(*command, "elsewhere.json")
    assert ran.code == 2, ran.err
    assert "nowhere" in ran.err


def test_a_search_takes_another_global_batch(here: Callable[..., Ran], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    limits = (*ON_CPU, "--max-probes", "1", "--global-batch", "8", "--out", str(out))
    ran = here("search", "models.py:small", *limits)
    assert ran.code == 0, ran.err
    report = json.loads(out.read_text())
    assert report["workload"]["global_batch"] == 8
    assert {trial["plan"]["global_batch"] for trial in report["trials"]} == {8}


def test_a_probe_without_options_runs_the_baseline(here: Callable[..., Ran]) -> None:
    ran = here("probe", "models.py:small", *ON_CPU)
    assert ran.code == 0, ran.err
    assert re.fullmatch(
        r"4 x 4: [\d.]+ samples/s, [\d.]+ \w+ an optimizer step, held [\d.]+ MiB "
        r"\(peak allocated [\d.]+ \wiB, peak reserved [\d.]+ MiB, non-torch 0 B\); .*loss.*\n",
        ran.out,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search"], "Missing argument"),
        (["serach", "models.py:small"], "No such command 'serach'"),
        (["search", "models.py:small", "--vram-bugdet", "1GiB"], "--vram-bugdet"),
        (["search", "models.py:small", "--max-probes", "0"], "Invalid value"),
        (
            ["search", "models.py:small", "--vram-budget", "10XB"],
            "'--vram-budget': cannot read '10XB'",
        ),
        (["search", "models.py:small", "--strategies", "presicion"], "'--strategies': "),
        (["check", "models.py:small", "--gpu", "L5"], "'--gpu': "),
        (["probe", "models.py:small", "--set", "precision"], "'--set': write strategy.name=value"),
        (["search", "gone.py:small"], "gone.py"),
        (["search", "models.py:small", "--out", "report.yaml"], ".html, .md, .txt or .csv"),
        (["search", "models.py:small", "--out", "no/r.json"], "no/r.json"),
        (["search", "models.py:small", "--out", f"{'r' * 300}.json"], "too long"),
        (
            ["probe", "models.py:small", "--set", "a.b=1", "--set", "a.b=2"],
            "a.b is given twice, as a.b=1 and as a.b=2",
        ),
        (["check", "models.py:small", "--set", "a.b=1,c.d=2,a.b=1"], "a.b is given twice"),
        (["report", "gone.json"], "gone.json"),
        (["report", "models.py"], "autofit: models.py is not a JSON"),
    ],
)
def test_usage_that_is_wrong_exits_with_2(
    here: Callable[..., Ran], arguments: list[str], words: str
) -> None:
    ran = here(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert words in re.sub(r"[\s│]+", " ", ran.err)
    assert "Traceback" not in ran.err


REFUSED_AT_ONCE = """
import sys
from autofit.cli.main import main
for arguments in {cases!r}:
    sys.argv = ["autofit", *arguments]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, arguments
    assert "torch" not in sys.modules, arguments
"""


def test_what_cannot_be_meant_is_refused_before_torch_is_imported(folder: Path) -> None:
    target = "models.py:small"  # importing it imports torch
    cases = [
        *(["search", target, *more.split()] for more in (
            "--typo", "--vram-budget 24X", "--vram-budget 1.5", "--device tpu", "--strategies no",
            "--numerics sloppy", "--timeout 0", "--timeout nan", "--max-probes 0", "--effort none",
            "--seed -1", "--out no/r.json", "--study=", "--global-batch x",
        )),
        *(["probe", target, *more.split()] for more in (
            "--micro-batch 0", "--set no.such=1", "--set precision.dtype", "--plan-from gone.json",
            "--set precision.dtype=bfloat16 --set precision.dtype=default",
        )),
        *(["check", target, *more.split()] for more in (
            "--gpu L5", "--max-regression 5", "--baseline gone.json",
            "--plan-from gone.json", "--micro-batch 0 --gpu L4",
        )),
        ["predict", target, "--gpu", "L5"], ["predict", target, "--gpu", "L4,L5"],
        ["doctor", "--device", "tpu"],
        ["search", "gone.py:small"], ["search", "models"], ["check", "no-module:x", "--gpu", "L4"],
    ]  # fmt: skip
    program = [sys.executable, "-c", REFUSED_AT_ONCE.format(cases=cases)]
    ran = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        # a plan that does not fit, and a search where nothing fits
        (
            "probe models.py:heavy --device cpu --vram-budget 8MiB --micro-batch 100000",
            1,
            "100000 x 1.*: oom: ",
            "",
        ),
        (
            "search models.py:heavy --device cpu --vram-budget 1048576",
            1,
            r"\Z",
            r"(?m)^autofit: .*1\.00 MiB.*\n\Z",
        ),
        # the user's own errors, with their traceback
        (
            "search models.py:failing --device cpu --vram-budget 32MiB",
            3,
            r"\Z",
            r"(?s)models\.py.*RuntimeError: the loss is nowhere to be found",
        ),
        (
            "search models.py:broken --device cpu --vram-budget 32MiB",
            3,
            r"\Z",
            r"(?s)models\.py.*NameError: name 'undefined_name' is not defined",
        ),
    ],
)
def test_what_did_not_end_well_exits_with_its_code(
    here: Callable[..., Ran], words: str, code: int, out: str, err: str
) -> None:
    ran = here(*words.split())
    assert ran.code == code
    assert re.match(out, ran.out)
    assert re.search(err, ran.err)


@pytest.mark.parametrize("target", ["exits", "leaving"])
def test_a_check_never_ends_with_the_code_of_a_sys_exit_in_the_users_code(
    forked: Callable[..., Ran], folder: Path, target: str
) -> None:
    """0 would mean that the training fits."""
    ran = forked("check", f"models.py:{target}", "--gpu", "L4", "--junit-xml", "check.xml")
    assert ran.code == 3, ran.err
    assert "SystemExit: 0" in ran.err
    assert "SystemExit" in (folder / "check.xml").read_text()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("truncated", "EOFError: the weights end too early"),
        ("finished", "Exit"),
        ("cancelled", "CancelledError: theirs"),
        ("closing", "GeneratorExit: theirs"),
    ],
)
def test_no_error_of_the_users_code_is_taken_for_an_answer(
    here: Callable[..., Ran], folder: Path, target: str, words: str
) -> None:
    """Python and the library behind the command line give these codes of their own: 1 and 0."""
    ran = here("check", f"models.py:{target}", "--gpu", "L4", "--junit-xml", f"{target}.xml")
    (folder / f"{target}.xml").unlink()
    assert ran.code == 3
    assert words in ran.err


def test_a_forgotten_criterion_is_reported_from_a_worker_too(forked: Callable[..., Ran]) -> None:
    ran = forked("search", "models.py:unlabelled", "--device", "cpu", "--vram-budget", "32MiB")
    assert ran.code == 3
    assert "(input, target)" in ran.err.splitlines()[-1]
    assert ran.err.count("Traceback") == 1
    said, _, _ = ran.err.partition("Traceback")
    assert re.search(r"autofit: your code raised TypeError while probing 4 x 1", said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_output_that_cannot_be_written_is_not_blamed_on_the_workload(
    searched: Ran, folder: Path
) -> None:
    command = [sys.executable, "-m", "autofit", "report", "report.json"]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder, timeout=60
        )
    assert ran.returncode == 4
    assert ran.stderr == (
        "autofit: cannot write the result to standard output: No space left on device\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_result_that_cannot_be_printed_is_kept_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    report = load(Path(__file__).parents[1] / "report" / "tiny_resnet.json")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(AutofitError) as raised:
            show_report(report, (), as_json)
    (kept,) = tmp_path.iterdir()
    assert str(kept) in str(raised.value)
    assert kept.stat().st_mode & 0o077 == 0
    assert load(kept).record == report.record


def test_each_file_that_is_written_is_named_on_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = Path(__file__).parents[1] / "report" / "tiny_resnet.json"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = tmp_path / "train.py"
    export_report(saved, "pytorch", [out])
    assert capsys.readouterr() == ("", f"autofit: wrote {out}\n")
    show_report(load(saved), (), as_json=False)
    (kept,) = tmp_path.glob("*.json")
    shown = capsys.readouterr()
    assert shown.err.startswith(f"autofit: wrote {kept}, which")
    assert str(kept) in shown.out
    show_report(load(saved), (), as_json=False, loaded_from=saved)
    assert capsys.readouterr().err == ""


def test_a_report_that_no_folder_takes_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load(Path(__file__).parents[1] / "report" / "tiny_resnet.json")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    show_report(report, (), as_json=False)
    assert "samples/s" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_printed_and_the_other_files_are_written(
    forked: Callable[..., Ran], folder: Path, tmp_path: Path
) -> None:
    (folder / "gone").mkdir()
    outs = ("--out", "gone/r.json", "--out", str(tmp_path / "r.json"))
    ran = forked("search", "models.py:vanishing", *ON_CPU, "--max-probes", "1", *outs)
    assert ran.code == 2
    assert ran.out.startswith("vanishing on cpu")
    assert f"report {tmp_path / 'r.json'} -v" in ran.out
    assert (tmp_path / "r.json").exists()
    assert "gone/r.json: No such file" in ran.err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_exits_with_4(forked: Callable[..., Ran]) -> None:
    ran = forked("search", "models.py:small", "--device", "cuda")
    assert ran.code == 4
    assert re.match("autofit: .*cuda", ran.err.splitlines()[-1])


def test_ctrl_c_prints_the_report_of_what_was_measured(
    folder: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    ends_with_a_report(signal.SIGINT, folder, python)


@pytest.mark.slow
def test_sigterm_does_so_too_where_sigint_is_ignored(
    folder: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    """As a script's shell starts what ends in "&"."""
    program = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from autofit.cli.main import main\n"
        "main()\n"
    )
    ends_with_a_report(
        signal.SIGTERM,
        folder,
        lambda *command, **pipes: python("-c", program, *command[2:], **pipes),
    )


def ends_with_a_report(
    number: signal.Signals, folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Start a search and send it the signal after its baseline."""
    process: Any = start(
        "-m", "autofit", "search", "models.py:slow", "--device", "cpu",
        "--vram-budget", "256MiB", "--out", "cut_short.json",
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        for line in process.stderr:
            if "| probe 1" in line or "| 1 probe" in line:
                break
        os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == (
        "autofit: interrupted: the report holds what was measured until then"
    )
    assert "Not confirmed: " in out or "Not decided" in out, err  # as noise has it
    report = json.loads((folder / "cut_short.json").read_text())
    assert report["best"]["outcome"] == "ok"
    assert report["search"]["stopped_because"] == "interrupted"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_budget_of_a_gpu_where_there_is_none_names_the_cpu(here: Callable[..., Ran]) -> None:
    ran = here("search", "models.py:small", "--vram-budget", "1000TiB")
    assert ran.code == 2
    assert re.search(r"pass --device cpu and a smaller --vram-budget$", ran.err.strip())


def test_the_shell_is_told_of_flags_and_python_of_arguments() -> None:
    for said, in_shell in (
        ("Pass global_batch= to keep it", "Pass --global-batch to keep it"),
        ('use device="cpu", or wait', "use --device cpu, or wait"),
        ("allow_accumulation_change=True tries", "--allow-accumulation-change tries"),
        (
            "use micro_batch=8, or leave global_batch out",
            "use --micro-batch 8, or leave --global-batch out",
        ),
        ("gpu='L4' asks", "--gpu L4 asks"),
        ("give study='first try'", "give --study 'first try'"),
        ("pass the report as plan=, or probe", "pass the report as --plan-from, or probe"),
        ("pass loss_weight= or criterion=", "pass loss_weight= or criterion="),
        ("the device is busy", "the device is busy"),
        ("Workload(global_batch=8)", "Workload(global_batch=8)"),
        ("settings.device=cpu in my_device=3", "settings.device=cpu in my_device=3"),
    ):
        assert in_shell_words(said) == in_shell
    options = {
        option.removeprefix("--")
        for command in get_command(app).commands.values()  # type: ignore[attr-defined]
        for each in command.params
        for option in each.opts
    }
    assert {name.replace("_", "-") for name in FLAGS} <= options


COMMANDS = ("search", "probe", "predict", "check", "report", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_no_word_and_fits_a_screen(command: str) -> None:
    narrow = CliRunner(env={"COLUMNS": "60"}).invoke(app, [command, "--help"])
    assert narrow.exit_code == 0
    assert "\u2026" not in narrow.output
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [command, "--help"])
    assert len(shown.output.splitlines()) <= 40


def test_there_are_six_commands_and_at_most_62_options() -> None:
    group: Any = get_command(app)
    assert list(group.commands) == list(COMMANDS)
    options = [
        p
        for command in group.commands.values()
        for p in command.params
        if p.param_type_name == "option"
    ]
    assert len(options) <= 62
