"""The commands `predict`, `check` and `cards`: required bytes, and where they fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autofit.checks.verdict import ASSUMED
from autofit.cli.console import leads, print_result, say, stdout_for_results_only
from autofit.cli.options import (
    AccumulationSteps,
    AsJson,
    Budget,
    DeviceName,
    GlobalBatch,
    MicroBatch,
    ModeOfRanks,
    NumericsName,
    PlanFile,
    PlanOptions,
    SettingsGiven,
    StrategyNames,
    Target,
    WorldSize,
    check_writable,
    read_budget,
)
from autofit.cli.target import load_target
from autofit.errors import InvalidArgument, PredictionUnavailable, users_code
from autofit.units import format_bytes
from autofit.world import world_of_environment

if TYPE_CHECKING:
    from autofit.checks.regression import Regression
    from autofit.checks.verdict import Verdict
    from autofit.report.report import Report


def _check_gpu(name: str | None) -> str | None:
    from autofit.devices.gpus import find_gpu

    if name is not None:
        find_gpu(name)
    return name


def _check_gpus(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        _check_gpu(name)
    return names


def _check_earlier(path: Path | None) -> Path | None:
    from autofit.checks.regression import read_earlier

    if path is not None:
        read_earlier(path)
    return path


GpuName = Annotated[
    str | None,
    typer.Option("--gpu", help="GPU to predict for: L4, A100-80GB, or a size", callback=_check_gpu),
]
_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def predict(
    target: Target,
    gpu: GpuName = None,
    micro_batch: MicroBatch = None,
    accumulation_steps: AccumulationSteps = None,
    global_batch: GlobalBatch = None,
    setting: SettingsGiven = None,
    plan_file: PlanFile = None,
    world_size: WorldSize = None,
    mode_of_ranks: ModeOfRanks = None,
    strategies: StrategyNames = None,
    as_json: AsJson = False,
) -> None:
    """Predict the memory that a plan needs on a GPU, without one."""
    options = PlanOptions(
        micro_batch,
        accumulation_steps,
        global_batch,
        setting,
        plan_file,
        world_size,
        mode_of_ranks,
    )
    with stdout_for_results_only():
        workload = load_target(target)
        from autofit.prediction.predict import predict as run

        chosen = options.plan_and_payloads(workload)
        with users_code():
            prediction = run(
                workload,
                gpu=gpu,
                strategies=strategies,
                world_size=world_size,
                **chosen,
            )
            options.check_same_model(prediction.parameters, workload)
            try:
                largest = prediction.largest_micro_batch
                told = f"{largest or 'none'} on {prediction.gpu.name}"
            except PredictionUnavailable as error:  # of other sizes; the plan's own answer stands
                largest, told = None, str(error)
    if as_json:
        more = {"gpu_assumed": gpu is None, "largest_micro_batch": largest}
        print_result(json.dumps(prediction.to_dict() | more, indent=1))
        return
    name, _, rows = str(prediction).partition("\n")
    print_result(f"{name}{ASSUMED * (gpu is None)}\n{rows}")
    print_result(f"  {'largest micro-batch':<20}{told}")


def check(
    target: Target,
    vram_budget: Budget = None,
    gpu: GpuName = None,
    micro_batch: MicroBatch = None,
    accumulation_steps: AccumulationSteps = None,
    global_batch: GlobalBatch = None,
    setting: SettingsGiven = None,
    plan_file: PlanFile = None,
    world_size: WorldSize = None,
    mode_of_ranks: ModeOfRanks = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="use the plan, budget and GPU of this report")
    ] = None,
    device: DeviceName = None,
    strategies: StrategyNames = None,
    allow_stand_in_loss: Annotated[
        bool,
        typer.Option(
            "--allow-stand-in-loss",
            help="answer even if the workload has no loss; a real one takes more",
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            help="compare with an earlier report or the output of check --json",
            callback=_check_earlier,
        ),
    ] = None,
    max_regression: Annotated[
        str, typer.Option(help="allowed growth of memory over --against")
    ] = "5%",
    junit_xml: Annotated[Path | None, typer.Option(help="write a JUnit XML file")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help=f"append Markdown to this file; default: ${_SUMMARY_VARIABLE}"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a plan trains within a VRAM budget (exit code 0: yes, 1: no, 5: no answer)."""
    from autofit.checks.regression import compare_with, read_fraction

    if report_file is not None and plan_file is not None:
        raise InvalidArgument("--report already includes the plan of --plan: leave --plan out")
    here = world_of_environment().size
    ranks = world_size if world_size is not None or here == 1 else here
    plan_file = report_file or plan_file
    options = PlanOptions(
        micro_batch,
        accumulation_steps,
        global_batch,
        setting,
        plan_file,
        ranks,
        mode_of_ranks,
    )
    tuned = options.report if report_file is not None else None
    allowed = read_fraction(max_regression)
    with stdout_for_results_only(), _errors_shown(target, junit_xml if leads() else None):
        verdict = _verdict(
            target,
            options,
            tuned,
            vram_budget=read_budget(vram_budget),
            gpu=gpu,
            device=device,
            strategies=strategies,
            world_size=world_size,
            allow_stand_in_loss=allow_stand_in_loss,
        )
        has_figure = verdict.required_bytes is not None  # else the verdict gives the reason
        regression = compare_with(verdict, against, allowed) if against and has_figure else None
    if leads():
        _show(target, verdict, regression, as_json, junit_xml, summary)
    raise typer.Exit(_exit_code(verdict, regression))


def cards(
    target: Target,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="L4, A100-80GB, or a size (may be repeated); default: all known GPUs",
            callback=_check_gpus,
        ),
    ] = None,
    vram_budget: Budget = None,
    micro_batch: MicroBatch = None,
    accumulation_steps: AccumulationSteps = None,
    global_batch: GlobalBatch = None,
    setting: SettingsGiven = None,
    plan_file: PlanFile = None,
    world_size: WorldSize = None,
    mode_of_ranks: ModeOfRanks = None,
    strategies: StrategyNames = None,
    numerics: NumericsName = "reduced_precision",
    out: Annotated[
        list[Path] | None, typer.Option(help="write the table: .json, .txt or .csv")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict which GPUs a plan fits, and the largest micro-batch on each (exit code 1: none)."""
    from autofit.checks.card_table import FORMS
    from autofit.registry import numerics_level

    for path in out or ():
        check_writable(path, FORMS, "a table of cards")
    numerics_level(numerics)
    options = PlanOptions(
        micro_batch,
        accumulation_steps,
        global_batch,
        setting,
        plan_file,
        world_size,
        mode_of_ranks,
    )
    with stdout_for_results_only():
        workload = load_target(target)
        from autofit.checks.cards import cards as run

        chosen = options.plan_and_payloads(workload)
        with users_code():
            table = run(
                workload,
                gpus=gpu,
                vram_budget=read_budget(vram_budget),
                strategies=strategies,
                numerics=numerics,
                progress=lambda line: say(f"predicting {line}"),
                world_size=world_size,
                **chosen,
            )
            options.check_same_model(table.parameters, workload)
    for path in out or ():
        table.save(path)
    print_result(json.dumps(table.to_dict(), indent=1) if as_json else str(table))
    if not any(fit.fits for card in table.cards for fit in card.fits):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    commands: list[Callable[..., Any]] = [predict, check, cards]
    for command in commands:
        app.command()(command)


def _verdict(
    target: str,
    options: PlanOptions,
    tuned: Report | None,
    *,
    strategies: Any,
    world_size: int | None,
    allow_stand_in_loss: bool,
    **how: Any,
) -> Verdict:
    workload = load_target(target)
    from autofit.checks.check import check as run

    if tuned is not None:
        if world_of_environment().size > 1:
            world_size = tuned.best.plan.world_size  # of one device it is refused, too
        how |= _as_tuned(tuned, **how)
    how |= options.plan_and_payloads(workload)
    how |= {"world_size": world_size, "allow_stand_in_loss": allow_stand_in_loss}
    with users_code():
        verdict = run(workload, strategies=strategies, **how)
        options.check_same_model(verdict.parameters, workload)
    return verdict


def _as_tuned(
    tuned: Report,
    *,
    vram_budget: str | float | None,
    gpu: str | None,
    device: str | None,
) -> dict[str, Any]:
    """Return the report's budget, GPU and calibration where no others were given.

    A plan tuned on the CPU is probed on the CPU: its budget does not include a GPU context.

    Raises:
        InvalidArgument: a budget of the CPU would be compared with a prediction for a GPU.
    """
    from autofit.checks.check import will_probe

    on_cpu = tuned.record.environment.get("device") == "cpu"
    if on_cpu and gpu is None and device is None:
        device = "cpu"
    probes = will_probe(gpu, device)
    if vram_budget is None and on_cpu and not (probes and device == "cpu"):
        raise InvalidArgument(
            f"the report was made on the CPU, and its budget of "
            f"{format_bytes(tuned.record.vram_budget_bytes)} leaves out what a GPU's context "
            "takes: give --vram-budget, or neither --gpu nor --device"
        )
    # Naming the report's GPU requests a prediction, so do not where a probe is possible.
    return {
        "vram_budget": tuned.record.vram_budget_bytes if vram_budget is None else vram_budget,
        "gpu": gpu if gpu or probes or on_cpu else _gpu_of(tuned),
        "device": device,
        "calibration": tuned.calibration if gpu in (None, _gpu_of(tuned)) else None,
    }


def _gpu_of(tuned: Report) -> str | int:
    """Return the name of the report's GPU, or its size where the name is unknown."""
    from autofit.devices.gpus import find_gpu

    try:
        return find_gpu(tuned.record.environment.get("gpu")).name
    except InvalidArgument:  # not in the table: its size is enough for a prediction
        total_bytes = tuned.record.environment.get("total_bytes")
        if total_bytes is None:
            raise InvalidArgument(
                "the report has neither a known GPU nor its memory: pass --gpu"
            ) from None
        return int(total_bytes)


def _show(
    target: str,
    verdict: Verdict,
    regression: Regression | None,
    as_json: bool,
    junit_path: Path | None,
    summary_path: Path | None,
) -> None:
    """Print the verdict, and write it in the forms that a CI job shows."""
    from autofit.checks.ci_formats import junit_xml, markdown

    if as_json:
        compared = {"regression": regression.to_dict() if regression else None}
        print_result(json.dumps(verdict.to_dict() | compared, indent=1))
    else:
        print_result(str(verdict) + (f"; {regression}" if regression else ""))
    page = summary_path or os.environ.get(_SUMMARY_VARIABLE)
    try:
        if junit_path is not None:
            _write(junit_path, junit_xml(target, verdict, regression))
        if page:
            _write(Path(page), markdown(target, verdict, regression), mode="a")
    except OSError as error:
        where = error.filename or " or ".join(str(path) for path in (junit_path, page) if path)
        raise InvalidArgument(f"cannot write {where}: {error.strerror}") from error


def _write(path: Path, text: str, mode: str = "w") -> None:
    """Write text that may hold the name of a file, which need not be Unicode."""
    from autofit.report.report import check_is_file

    check_is_file(path)
    with path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


@contextmanager
def _errors_shown(target: str, junit_path: Path | None) -> Iterator[None]:
    """Write an error that ends the check to its JUnit file too, where a CI job looks for it."""
    try:
        yield
    except BaseException as error:
        from autofit.checks.ci_formats import junit_xml_of_error

        if junit_path is not None:
            with suppress(OSError, InvalidArgument):  # the error itself matters more
                _write(junit_path, junit_xml_of_error(target, error))
        raise


def _exit_code(verdict: Verdict, regression: Regression | None) -> int:
    if verdict.fits is None:
        return 5
    return 0 if verdict.fits and (regression is None or regression.passed) else 1
