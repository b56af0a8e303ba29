"""The command line. Progress goes to standard error, the result to standard output.

Exit codes: 0 done, fits; 1 nothing fits, does not fit; 2 usage; 3 the workload's own code failed;
4 the device or the worker failed; 5 no answer (a check that can neither predict nor probe, a search
whose timeout came before anything that fits was measured, one with --strict that told no plan from
the baseline); 130 a search that Ctrl-C or SIGTERM ended, with what had been measured.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autofit.cli.console import (
    Commands,
    Interrupted,
    exit_code,
    exit_codes,
    export_report,
    leads,
    print_result,
    show_changes,
    show_report,
    start_server_ahead,
    stdout_for_results_only,
)
from autofit.cli.options import (
    AccumulationChange,
    AsJson,
    Budget,
    DeviceName,
    DeviceNames,
    Effort,
    EpochSamples,
    GlobalBatch,
    MaxMicroBatch,
    MaxProbes,
    MicroBatch,
    NumericsName,
    Out,
    PlanFrom,
    PlannedSteps,
    PricePerHour,
    Profile,
    Quiet,
    Ranks,
    Seed,
    SettingsGiven,
    StrategyNames,
    Strict,
    StudyName,
    Target,
    Timeout,
    Verbose,
    check_out,
    given_plan,
    load_target,
    read_budget,
    whole,
)
from autofit.cli.predict_and_check import check, predict
from autofit.codec import to_json
from autofit.errors import InvalidArgument, SearchTimedOut
from autofit.interrupts import ended_after, ended_like_interrupted, interrupts_remembered
from autofit.measurement import Outcome
from autofit.plan import PLANNED_STEPS, Plan
from autofit.report.report import Report, load
from autofit.streams import complain, lossy_standard_streams

app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long words
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the fastest way to train a PyTorch model within a GPU memory budget.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print_result(f"autofit {version('torch-autofit')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command; without one the help is shown."""
    if context.invoked_subcommand is None:
        complain(context.get_help())
        raise typer.Exit(2)


def search(
    target: Target,
    vram_budget: Budget = None,
    global_batch: GlobalBatch = None,
    device: DeviceNames = None,
    ranks: Ranks = None,
    strategies: StrategyNames = None,
    numerics: NumericsName = "reduced_precision",
    allow_accumulation_change: AccumulationChange = False,
    max_micro_batch: MaxMicroBatch = None,
    max_probes: MaxProbes = None,
    timeout: Timeout = None,
    planned_steps: PlannedSteps = PLANNED_STEPS,
    effort: Effort = "normal",
    study: StudyName = None,
    seed: Seed = 0,
    strict: Strict = False,
    out: Out = None,
    profile: Profile = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan that fits, and print the report.

    Exit codes: 0 found; 1 nothing fits; 2 usage; 3 your code raised; 4 the device or a worker
    failed; 5 timed out before any plan fitted, or undecided with --strict; 130 interrupted.
    """
    for path in out or ():
        check_out(path)
    from autofit.searching.options import SearchOptions

    options = SearchOptions(
        effort=effort,
        max_micro_batch=max_micro_batch,
        allow_accumulation_change=allow_accumulation_change,
        ranks=ranks,
        profile=profile,
    )
    with ended_like_interrupted(), interrupts_remembered():
        report = _searched(
            target,
            global_batch,
            timeout,
            quiet=quiet,
            vram_budget=read_budget(vram_budget),
            device=device,
            strategies=strategies or None,
            numerics=numerics,
            max_probes=max_probes,
            planned_steps=planned_steps,
            study=study,
            seed=seed,
            options=options,
        )
        if leads():
            show_report(report, out or (), as_json, verbose=verbose, quiet=quiet)
        from autofit.report.record import INTERRUPTED

        if report.record.search.stopped_because == INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is ending for it already
            raise Interrupted("interrupted: the report holds what was measured until then")
        if strict and not report.is_decided:
            raise typer.Exit(5)


def _searched(
    target: str,
    global_batch: int | None,
    timeout: float | None,
    *,
    quiet: bool,
    **arguments: Any,
) -> Report:
    """Load a workload and search it, with its progress shown; the report names the target."""
    start_server_ahead()
    from autofit.searching.progress import ProgressLine

    is_shown = leads() and not quiet
    with stdout_for_results_only(), ProgressLine() if is_shown else nullcontext() as progress:
        if progress is not None:
            progress.show_stage(f"loading {target}")
        began = time.monotonic()
        try:
            with ended_after(timeout):
                workload = load_target(target)  # before the slow imports: it may be mistyped
        except TimeoutError as over:
            if timeout is None or time.monotonic() - began < timeout:  # it is the user's own
                raise
            words = f"the timeout of {timeout:g} s was over before {target} was loaded"
            raise SearchTimedOut(f"{words}: give a longer one") from over
        from autofit.searching.options import SearchArguments
        from autofit.searching.search import search_as_asked

        if global_batch is not None:
            workload = replace(workload, global_batch=global_batch)
        asked = SearchArguments(
            progress=progress or False, timeout=timeout, began=began, **arguments
        )
        report = search_as_asked(asked, workload)
    facts = {**report.record.workload, "target": target}
    return replace(report, record=replace(report.record, workload=facts))


def probe(
    target: Target,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    setting: SettingsGiven = None,
    plan_from: PlanFrom = None,
    vram_budget: Budget = None,
    device: DeviceName = None,
    ranks: Ranks = None,
    as_json: AsJson = False,
) -> None:
    """Run one plan and print its memory and speed.

    Exit codes: 0 it ran; 1 it does not fit; 2 usage, or the device does not support the plan; 3
    your code raised; 4 the device or the worker failed.
    """
    with stdout_for_results_only():
        start_server_ahead()
        workload = load_target(target)
        from autofit.checks.probe import probe as run

        asked = given_plan(workload, micro_batch, global_batch, setting, plan_from)
        trial = run(
            workload,
            plan=asked,
            vram_budget=read_budget(vram_budget),
            device=device,
            ranks=ranks,
        )
    if leads():
        plan = asked or workload.plan()
        plan = plan if isinstance(plan, Plan) else plan.record.plan_to_rerun
        shown = replace(trial, plan=plan.on(trial.plan.ranks))  # without default settings
        facts = {"plan": trial.plan, "samples_per_second": trial.samples_per_second}
        written = to_json({**facts, **to_json(trial.measurement)})
        print_result(json.dumps(written, indent=1) if as_json else str(shown))
    raise typer.Exit(exit_code(trial.measurement.outcome))


def soak(
    target: Target,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    setting: SettingsGiven = None,
    plan_from: PlanFrom = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="optimizer steps to time", parser=whole(8))
    ] = 200,
    vram_budget: Budget = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Train a plan for longer, and check that its memory and speed hold.

    With --plan-from the recommended plan is compared with its trial in the report; another plan is
    probed first.

    Exit codes: 0 it holds; 1 it does not; 2 usage; 3 your code raised; 4 the device or the worker
    failed.
    """
    with stdout_for_results_only():
        start_server_ahead()
        workload = load_target(target)
        from autofit.checks.soak import soak as run

        asked = given_plan(workload, micro_batch, global_batch, setting, plan_from)
        result = run(
            workload,
            plan=asked or workload.plan(),
            steps=steps,
            vram_budget=read_budget(vram_budget),
            device=device,
        )
    if leads():
        print_result(json.dumps(result.to_dict(), indent=1) if as_json else str(result))
    ran = result.measurement.outcome
    raise typer.Exit(exit_code(ran) if ran is not Outcome.OK else 0 if result.passed else 1)


def report(
    path: Annotated[Path, typer.Argument(metavar="REPORT", help="the JSON file of a search")],
    later: Annotated[
        Path | None,
        typer.Argument(metavar="LATER", help="a later report, to show what changed"),
    ] = None,
    out: Out = None,
    export: Annotated[
        str | None,
        typer.Option(help="pytorch: print a training script for the plan; --out FILE writes it"),
    ] = None,
    epoch_samples: EpochSamples = None,
    price_per_hour: PricePerHour = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Show a saved report, convert it, or compare two.

    Needs neither a GPU nor torch.
    """
    if export is not None:
        if later is not None or as_json or verbose:
            raise InvalidArgument("--export: takes one report and no option except --out")
        export_report(path, export, out or ())
        return
    for file in out or ():
        check_out(file)
    loaded = load(path).with_costs(epoch_samples=epoch_samples, price_per_hour=price_per_hour)
    if later is not None:
        if as_json:
            raise InvalidArgument("--json: not available for a comparison of two reports")
        show_changes(loaded, load(later), out or ())
        return
    show_report(loaded, out or (), as_json, verbose=verbose, loaded_from=path)


def doctor(device: DeviceName = None, as_json: AsJson = False) -> None:
    """Check whether a search can run on this machine.

    Exit codes: 0 it can; 2 usage; 4 it cannot.
    """
    with stdout_for_results_only():
        from autofit.checks.doctor import diagnose

        diagnosis = diagnose(device)
    print_result(json.dumps(diagnosis.to_dict(), indent=1) if as_json else str(diagnosis))
    if not diagnosis.can_search:
        raise typer.Exit(4)


_EXAMPLES: Mapping[Callable[..., None], Sequence[str]] = {
    search: (
        "search train.py:make --vram-budget 24GiB --out report.json",
        "search train.py:make --global-batch 256 --numerics exact -q",
    ),
    probe: (
        "probe train.py:make --micro-batch 8 --set precision.dtype=bfloat16",
        "probe train.py:make --plan-from report.json",
    ),
    soak: (
        "soak train.py:make --plan-from report.json --steps 1000",
        "soak train.py:make --micro-batch 8 --device cuda:1",
    ),
    predict: (
        "predict train.py:make --gpu L4 --micro-batch 8",
        "predict train.py:make --gpu all",
    ),
    check: (
        "check train.py:make --gpu L4 --micro-batch 8",
        "check train.py:make --gpu L4 --json --baseline earlier.json",
    ),
    report: (
        "report report.json -v",
        "report report.json --out report.html",
        "report earlier.json later.json",
    ),
    doctor: ("doctor --device cuda:1",),
}
"""The commands, with what their help shows as examples."""

for command, examples in _EXAMPLES.items():
    lines = "\n".join(f"  autofit {each}" for each in examples)
    app.command(epilog=f"\b\nExamples:\n{lines}")(command)


def main(run: Callable[[], Any] = app) -> None:
    """Entry point of the `autofit` command."""
    with lossy_standard_streams(), exit_codes():
        run()
