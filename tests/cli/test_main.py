"""The command line: exit codes, and what goes to which stream.

What depends on a process of its own runs in one; the rest calls the entry point here.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from autofit.cli.console import show_report
from autofit.cli.main import app
from autofit.errors import AutofitError
from autofit.report.place import FLAGS, in_shell_words
from autofit.report.report import load
from tests.command_line import Ran, run_here

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
CPU = "--device cpu --vram-budget 32MiB"
ON_CPU = tuple(CPU.split())
SAVED = Path(__file__).parents[1] / "report" / "tiny_resnet.json"
FULL = Path("/dev/full")
PROBED = (
    r"4 x 4: [\d.]+ samples/s, [\d.]+ \w+ an optimizer step, held [\d.]+ MiB "
    r"\(peak allocated [\d.]+ \wiB, peak reserved [\d.]+ MiB, non-torch 0 B\); .*loss.*\n\Z"
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


Run = Callable[..., Ran]


@pytest.fixture
def here(folder: Path) -> Run:
    """`autofit` in this process, from the project's folder."""
    return functools.partial(run_here, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project")
    (path / "models.py").write_text(SOURCE)
    return path


def program(*command: str, folder: Path, **options: Any) -> Ran:
    """A command in a process of its own."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    ran = subprocess.run(command, text=True, cwd=folder, timeout=240, **given)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


AUTOFIT = (sys.executable, "-m", "autofit")


@pytest.fixture(scope="module")
def searched(folder: Path) -> Ran:
    """One search through a worker process; it left report.json, report.txt and study.log."""
    outs = [
        "--out",
        "report.json",
        "--out",
        "report.txt",
        "--study",
        "study.log",
        "--profile",
        "trace.json",
    ]
    limits = (*ON_CPU, "--max-probes", "3", "--timeout", "300")
    return program(*AUTOFIT, "search", "models.py:small", *limits, *outs, folder=folder)


@pytest.fixture(scope="module")
def report(searched: Ran, folder: Path) -> Any:
    """What is in the file of that search."""
    assert searched.code == 0, searched.err
    return json.loads((folder / "report.json").read_text())


def test_a_search_prints_the_report_and_nothing_else(
    searched: Ran, report: Any, here: Run, folder: Path
) -> None:
    assert searched.out.startswith("small on cpu, torch ")
    assert len(searched.out.splitlines()) <= 15
    assert "samples/s" in searched.out
    assert "hello" not in searched.out
    assert searched.out == (folder / "report.txt").read_text()
    in_full = here("report", "report.json", "-v")
    assert in_full.out.startswith(searched.out)
    assert len(searched.out) < len(in_full.out)


APPLIED = """
import torch, autofit
from models import small
model = small.model()
optimizer = torch.optim.AdamW(model.parameters())
loss_fn = lambda model, batch: model(batch).square().mean()
print(type({}).__name__)
"""


@pytest.mark.slow
def test_each_printed_line_runs_as_printed(report: Any, here: Run, folder: Path) -> None:
    shown = here("report", "report.json", "-v").out
    lines = dict(re.findall(r"^(Apply|More|Page): +(.*)$", shown, re.MULTILINE))
    code = APPLIED.format(lines["Apply"])
    assert "Training" in program(sys.executable, "-c", code, folder=folder).out
    assert program("bash", "-c", lines["More"], folder=folder).out == shown
    assert program("bash", "-c", lines["Page"], folder=folder).code == 0
    (folder / "report.html").unlink()


def test_progress_and_what_user_code_prints_go_to_standard_error(searched: Ran) -> None:
    assert "the user's module says hello" in searched.err
    assert re.search(r"^\[\d+:\d\d\] 4 x .*: [\d.]+ samples/s", searched.err, re.MULTILINE)
    assert re.search(r"best [\d.]+ samples/s \| probe 1 of 3", searched.err)
    assert not re.search("\x1b|Warning", searched.err)


def test_files_are_written_only_where_it_was_said(report: Any, folder: Path) -> None:
    names = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert names == {"models.py", "report.json", "report.txt", "study.log", "trace.json"}
    assert "traceEvents" in json.loads((folder / "trace.json").read_text())
    assert report["schema"] == 1


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
    searched: Ran, report: Any, folder: Path, tmp_path: Path
) -> None:
    forms = [tmp_path / f"r{suffix}" for suffix in (".json", ".html", ".md", ".txt", ".csv")]
    command = (sys.executable, "-c", WITHOUT_TORCH)
    shown = program(*command, *(f"--out={form}" for form in forms), folder=folder)
    assert (shown.code, shown.out) == (0, searched.out)
    assert sorted(shown.err.splitlines()) == sorted(f"autofit: wrote {form}" for form in forms)
    beginnings = "", "<!doctype html>", "### small on cpu", searched.out, "number,kind,"
    for form, beginning in zip(forms, beginnings, strict=True):
        assert form.read_text().startswith(beginning)
    assert json.loads(forms[0].read_text()) == report
    assert program(*command, "--json", folder=folder).json == report


def test_two_reports_are_compared(report: Any, here: Run, tmp_path: Path) -> None:
    later, out = tmp_path / "later.json", tmp_path / "changes.md"
    later.write_text(json.dumps(report | {"vram_budget_bytes": 2 * report["vram_budget_bytes"]}))
    ran = here("report", "report.json", str(later), "--out", str(out))
    assert (ran.code, ran.err) == (0, f"autofit: wrote {out}\n")
    assert re.search(r"^VRAM budget +32.0 MiB +64.0 MiB$", ran.out, re.MULTILINE), ran.out
    assert "| VRAM budget | 32.0 MiB | 64.0 MiB |" in out.read_text()
    assert here("report", "report.json", str(later), "--json").code == 2
    assert here("report", "report.json", str(later), "--out", f"{tmp_path}/changes.csv").code == 2


def test_a_plan_can_be_taken_from_a_report(report: Any, here: Run) -> None:
    ran = here("probe", "models.py:small", *ON_CPU, "--plan-from", "report.json", "--json")
    assert ran.code == 0, ran.err
    best = report["recommended"]["plan"]
    assert (ran.json["plan"], ran.json["outcome"]) == (best, "ok")
    assert ran.json["micro_batches_run"] == best["accumulation_steps"]


@pytest.mark.parametrize(
    "command", [("probe", "models.py:small", *ON_CPU), ("check", "models.py:small", *ON_CPU[:2])]
)
def test_a_level_means_the_modules_that_the_report_names(
    command: tuple[str, ...], report: Any, here: Run, tmp_path: Path
) -> None:
    """A level that is not offered here, of a unit that this model lacks: the report's."""
    setting, payload = "checkpointing.level", {"units": ["nowhere"], "state": []}
    dimension = {setting: {"values": [0, 77], "payloads": [None, payload]}}
    other = copy.deepcopy(report) | {"dimensions": report["dimensions"] | dimension}
    other["trials"][report["recommended"]["number"]]["plan"]["settings"][setting] = 77
    (tmp_path / "elsewhere.json").write_text(json.dumps(other))
    ran = here(*command, "--plan-from", str(tmp_path / "elsewhere.json"))
    assert ran.code == 2, ran.err
    assert "nowhere" in ran.err


def test_a_search_takes_another_global_batch(here: Run) -> None:
    limits = (*ON_CPU, "--max-probes", "1", "--global-batch", "8")
    ran = here("search", "models.py:small", *limits, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["workload"]["global_batch"] == 8
    assert {trial["plan"]["global_batch"] for trial in ran.json["trials"]} == {8}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search"], "missing TARGET"),
        (["serach", "models.py:small"], "no such command 'serach'"),
        (["search", "models.py:small", "--vram-bugdet", "1GiB"], "do you mean --vram-budget?"),
        (["search", "models.py:small", "--max-probes", "0"], "--max-probes: must be .* 1, got '0'"),
        (["search", "models.py:small", "--seed", "-1"], "--seed: must be .* got '-1'"),
        (["search", "models.py:small", "--timeout", "x"], "--timeout: must be a number, got 'x'"),
        (["search", "models.py:small", "--timeout", "0"], "--timeout: must be .* got 0"),
        (["search", "models.py:small", "--effort", "x"], "--effort: must be one of quick, .*'x'"),
        (["search", "models.py:small", "--numerics", "x"], "--numerics: must be one of exact, "),
        (["report", "report.json", "--price-per-hour", "-1"], "--price-per-hour: must be "),
        (["check", "models.py:small", "--max-regression", "x"], "--max-regression: cannot read"),
        (["check", "models.py:small", "--max-regression", "5%"], "--max-regression: needs --base"),
        (
            ["search", "models.py:small", "--vram-budget", "10XB"],
            "--vram-budget: cannot read '10XB'",
        ),
        (["search", "models.py:small", "--strategies", "presicion"], "--strategies: unknown"),
        (["check", "models.py:small", "--gpu", "L5"], "--gpu: unknown"),
        (["probe", "models.py:small", "--set", "precision"], "--set: write strategy.name=value"),
        (["search", "gone.py:small"], "gone.py"),
        (["search", "models.py:small", "--out", "r.yaml"], "--out: r.yaml must end in .* or .svg"),
        (["search", "models.py:small", "--out", "no/r.json"], "--out: the folder of no/r.json"),
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
def test_usage_that_is_wrong_exits_with_2(here: Run, arguments: list[str], words: str) -> None:
    """One line says what is wrong, and with which option, whoever found it."""
    ran = here(*arguments)
    assert (ran.code, ran.out) == (2, "")
    (line,) = ran.err.splitlines()
    assert line.startswith("autofit: ")
    assert re.search(f"autofit: {words}" if words.startswith("--") else words, line)


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
    ran = program(sys.executable, "-c", REFUSED_AT_ONCE.format(cases=cases), folder=folder)
    assert ran.code == 0, ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (f"probe models.py:small {CPU}", 0, PROBED, ""),
        # nothing was decided
        (
            f"search models.py:small {CPU} --max-probes 1 --json --strict",
            5,
            r'(?s).*"undecided_because": "max_probes"',
            "",
        ),
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
        (
            "search models.py:unlabelled --device cpu --vram-budget 32MiB",
            3,
            r"\Z",
            r"(?s)autofit: your code raised TypeError while probing 4 x 1.*Traceback"
            r"(?!.*Traceback).*\(input, target\)[^\n]*\n\Z",
        ),
        # a device that is not there
        pytest.param(
            "search models.py:small --device cuda", 4, r"\Z", "autofit: .*cuda", marks=no_gpu
        ),
        pytest.param(
            "search models.py:small --vram-budget 1000TiB",
            2,
            r"\Z",
            r"pass --device cpu and a smaller --vram-budget\n\Z",
            marks=no_gpu,
        ),
    ],
)
def test_a_command_answers_and_exits_with_its_code(
    here: Run, words: str, code: int, out: str, err: str
) -> None:
    ran = here(*words.split())
    assert ran.code == code
    assert re.match(out, ran.out)
    assert re.search(err, ran.err)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("exits", "SystemExit: 0"),
        ("leaving", "SystemExit: 0"),
        ("truncated", "EOFError: the weights end too early"),
        ("finished", "Exit"),
        ("cancelled", "CancelledError: theirs"),
        ("closing", "GeneratorExit: theirs"),
    ],
)
def test_no_error_of_the_users_code_is_taken_for_an_answer(
    here: Run, tmp_path: Path, target: str, words: str
) -> None:
    """Python and the library behind the command line give these codes of their own: 1 and 0.

    0 would mean that the training fits.
    """
    junit = tmp_path / "check.xml"
    ran = here("check", f"models.py:{target}", "--gpu", "L4", "--junit-xml", str(junit))
    assert ran.code == 3
    assert words in ran.err
    assert words.partition(":")[0] in junit.read_text()


has_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")


@has_full
def test_output_that_cannot_be_written_is_not_blamed_on_the_workload(folder: Path) -> None:
    with FULL.open("w") as full:
        ran = program(*AUTOFIT, "report", str(SAVED), folder=folder, stdout=full)
    assert (ran.code, ran.err) == (
        4,
        "autofit: cannot write the result to standard output: No space left on device\n",
    )


@has_full
@pytest.mark.parametrize("as_json", [False, True])
def test_a_result_that_cannot_be_printed_is_kept_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with FULL.open("w") as full, redirect_stdout(full), pytest.raises(AutofitError) as raised:
        show_report(load(SAVED), (), as_json)
    (kept,) = tmp_path.iterdir()
    assert str(kept) in str(raised.value)
    assert kept.stat().st_mode & 0o077 == 0
    assert load(kept).record == load(SAVED).record


def test_each_file_that_is_written_is_named_on_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    show_report(load(SAVED), (), as_json=False)
    (kept,) = tmp_path.glob("*.json")
    shown = capsys.readouterr()
    assert shown.err.startswith(f"autofit: wrote {kept}, a temporary file")
    assert str(kept) in shown.out
    show_report(load(SAVED), (), as_json=False, loaded_from=SAVED)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    show_report(load(SAVED), (), as_json=False)
    assert "samples/s" in capsys.readouterr().out, "what no folder takes is printed all the same"


def test_a_report_that_cannot_be_written_is_printed_and_the_other_files_are_written(
    here: Run, folder: Path, tmp_path: Path
) -> None:
    (folder / "gone").mkdir()
    outs = ("--out", "gone/r.json", "--out", str(tmp_path / "r.json"))
    ran = here("search", "models.py:vanishing", *ON_CPU, "--max-probes", "1", *outs)
    assert ran.code == 2
    assert ran.out.startswith("vanishing on cpu")
    assert f"report {tmp_path / 'r.json'} -v" in ran.out
    assert (tmp_path / "r.json").exists()
    assert "gone/r.json: No such file" in ran.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("number", "before"),
    [
        (signal.SIGINT, ""),
        # As a script's shell starts what ends in "&".
        pytest.param(
            signal.SIGTERM, "signal.signal(signal.SIGINT, signal.SIG_IGN)", marks=pytest.mark.slow
        ),
    ],
)
def test_a_signal_prints_the_report_of_what_was_measured(
    folder: Path, tmp_path: Path, python: Any, number: signal.Signals, before: str
) -> None:
    code = f"import signal\n{before}\nfrom autofit.cli.main import main\nmain()"
    out = tmp_path / "cut_short.json"
    process = python(
        "-c", code, "search", "models.py:slow", "--device", "cpu", "--vram-budget", "256MiB",
        "--out", out, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        while "| probe 1" not in (line := process.stderr.readline()) and "| 1 probe" not in line:
            assert line, "the search ended first"
        os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group
        shown, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == (
        "autofit: interrupted: the report holds what was measured until then"
    )
    assert re.search("Not confirmed: |Not decided", shown), err  # as noise has it
    assert load(out).record.search.stopped_because == "interrupted"
    assert load(out).best.ok


@pytest.mark.parametrize(
    ("said", "in_shell"),
    [
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
    ],
)
def test_the_shell_is_told_of_flags_and_python_of_arguments(said: str, in_shell: str) -> None:
    assert in_shell_words(said) == in_shell


def test_the_shell_is_told_of_flags_that_there_are() -> None:
    commands = get_command(app).commands.values()  # type: ignore[attr-defined]
    options = {flag for command in commands for each in command.params for flag in each.opts}
    assert {f"--{name.replace('_', '-')}" for name in FLAGS} <= options


COUNTED = """
import torch
from torch.utils.flop_counter import FlopCounterMode  # imports Triton, where there is one
import autofit

def loss_fn(model, batch):
    return model(batch).sum()

workload = autofit.Workload(torch.nn.Linear(8, 4), torch.ones(8, 8), loss_fn=loss_fn)
"""


def test_the_end_of_a_process_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    command = (*AUTOFIT, "predict", "counted.py:workload", "--gpu", "L4")
    ran = program(*command, folder=tmp_path)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("command", get_command(app).commands)  # type: ignore[attr-defined]
def test_help_cuts_no_word_and_fits_a_screen(command: str) -> None:
    narrow = CliRunner(env={"COLUMNS": "60"}).invoke(app, [command, "--help"])
    assert narrow.exit_code == 0
    assert "\u2026" not in narrow.output
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [command, "-h"])
    assert len(shown.output.splitlines()) <= 60
    assert max(map(len, shown.output.splitlines())) <= 80


COMMANDS: Any = get_command(app)


@pytest.mark.parametrize("command", COMMANDS.commands)
def test_the_examples_of_the_help_are_commands_that_there_are(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "-h"]).output.partition("Examples:")[2]
    examples = [line.split() for line in shown.splitlines() if line.strip()]
    assert examples
    for program, name, *arguments in examples:
        assert (program, name) == ("autofit", command)
        options = {flag for each in COMMANDS.commands[name].params for flag in each.opts}
        assert {word for word in arguments if word.startswith("-")} <= options


def test_the_list_of_commands_cuts_no_summary() -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["-h"])
    assert "..." not in shown.output.partition("Commands:")[2]
    alone = CliRunner(env={"COLUMNS": "80"}).invoke(app, [])
    assert alone.exit_code == 2
    assert set(COMMANDS.commands) <= set(alone.output.split())


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("autofit sea", "search"),
        ("autofit search --num", "--numerics"),
        ("autofit search --numerics ex", "exact"),
    ],
)
def test_a_shell_completes_commands_options_and_values(words: str, completed: str) -> None:
    environment = {
        "_AUTOFIT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    shown = CliRunner(env=environment).invoke(app, [], prog_name="autofit")
    assert shown.output.split() == [completed]


def test_quiet_prints_the_result_alone(here: Run, tmp_path: Path) -> None:
    limits = (*ON_CPU, "--max-probes", "1", "--out", str(tmp_path / "r.json"))
    ran = here("search", "models.py:small", *limits, "--quiet")
    assert ran.code == 0
    assert ran.out.startswith("small on cpu")
    assert set(ran.err.splitlines()) <= {
        "the user's module says hello",
        "the user's factory says hello",
    }
    wrong = here("search", "models.py:smalll", *limits, "-q")
    assert wrong.err.splitlines()[-1].startswith("autofit: models.py has no 'smalll'")
