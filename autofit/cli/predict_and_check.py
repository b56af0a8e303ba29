"""The commands `predict` and `check`: required bytes, and where they fit."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autofit.checks.verdict import (
    Regression,
    Verdict,
    compare_with,
    junit_xml,
    junit_xml_of_error,
    markdown,
    read_fraction,
)
from autofit.cli.console import leads, print_result, say, say_written, stdout_for_results_only
from autofit.cli.fine_tune import (
    Batch,
    Dtype,
    LoraRank,
    ModelOrTarget,
    SampleLength,
    predict_in_each_precision,
    read_model,
    sets_precision,
    workload_of,
)
from autofit.cli.options import (
    AsJson,
    Budget,
    DeviceName,
    EvalBatch,
    GlobalBatch,
    MicroBatch,
    PlanFrom,
    Ranks,
    SettingsGiven,
    by_commas,
    checked,
    given_plan,
    read_budget,
    refused_by_name,
    with_eval_batch,
)
from autofit.errors import InvalidArgument, PredictionUnavailable, users_code
from autofit.memory.allocator import IGNORED
from autofit.report.report import check_is_file
from autofit.world import world_of_environment

if TYPE_CHECKING:
    from autofit.prediction.predict import Prediction


@refused_by_name
def _check_gpus(texts: list[str] | None) -> list[str]:
    from autofit.devices.gpu_catalogue import find_gpu

    names = by_commas(texts)
    for name in names if names != ["all"] else ():
        find_gpu(name)
    return names


GpuName = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="predict for a GPU, such as L4 or A100-80GB, or a memory size",
        callback=checked("autofit.devices.gpu_catalogue:find_gpu"),
    ),
]
MAX_REGRESSION = "5%"
_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
_EXIT_CODES = {True: 0, False: 1, None: 5}
"""By whether a plan fits."""


def predict(
    target: ModelOrTarget,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="name, such as L4 or A100-80GB, or memory size; several by commas, or all, for a "
            "table",
            show_default="H200",
            callback=_check_gpus,
        ),
    ] = None,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    setting: SettingsGiven = None,
    eval_batch: EvalBatch = None,
    plan_from: PlanFrom = None,
    ranks: Ranks = None,
    batch: Batch = None,
    sequence: SampleLength = None,
    lora_rank: LoraRank = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Predict whether a plan fits a GPU, without one.

    For several GPUs a table shows which of them the plan fits, and the largest micro-batch on each.

    Exit codes: 0 it fits (of several GPUs, one); 1 it does not; 2 usage; 3 your code raised; 5 it
    cannot be told.
    """
    with stdout_for_results_only():
        warnings.filterwarnings("ignore", f".*{re.escape(IGNORED)}")  # the result has it as a note
        model = read_model(target, dtype, batch=batch, sequence=sequence, lora_rank=lora_rank)
        precisions = None
        if model is not None and not (plan_from or eval_batch or sets_precision(setting)):
            asked = (dtype, micro_batch, global_batch, setting, ranks)
            with users_code():
                precisions = predict_in_each_precision(model, gpu or [None], *asked)
    if precisions is not None:
        as_text = json.dumps(precisions.to_dict(), indent=1) if as_json else str(precisions)
        print_result(as_text)
        raise typer.Exit(_EXIT_CODES[precisions.fits])
    with stdout_for_results_only():
        loaded, notes = workload_of(model, target, dtype, setting)
        workload = with_eval_batch(loaded, eval_batch)
        from autofit.checks.predict import predict as run

        plan = given_plan(workload, micro_batch, global_batch, setting, plan_from, ranks)
        is_table = gpu is not None and (len(gpu) > 1 or gpu == ["all"])
        with users_code():
            if is_table:
                table = run(
                    workload,
                    plan=plan,
                    gpu=gpu or (),
                    ranks=ranks,
                    progress=lambda line: say(f"predicting {line}"),
                )
            else:
                name = gpu[0] if gpu else None
                prediction = run(workload, plan=plan, gpu=name, ranks=ranks)
                prediction = replace(prediction, notes=(*notes, *prediction.notes))
                largest, told = _largest_of(prediction)
    if is_table:
        as_text = "\n".join([*notes, str(table)])
        as_data = table.to_dict() | {"notes": list(notes)}
        print_result(json.dumps(as_data, indent=1) if as_json else as_text)
        raise typer.Exit(_EXIT_CODES[table.fits])
    if as_json:
        more = {"largest_micro_batch": largest}
        print_result(json.dumps(prediction.to_dict() | more, indent=1))
    else:
        print_result(str(prediction))
        print_result(f"  {'largest micro-batch':<20}{told} on {prediction.gpu.name}")
    raise typer.Exit(_EXIT_CODES[prediction.fits()])


def _largest_of(prediction: Prediction) -> tuple[int | None, str]:
    """Return the largest micro-batch that fits the GPU, and how it is printed."""
    try:
        largest = prediction.largest_micro_batch
    except PredictionUnavailable as error:  # of other sizes; the plan's own answer stands
        return None, str(error)
    from autofit.checks.predict import largest_words

    return largest, largest_words(largest, prediction.plan)


def check(
    target: ModelOrTarget,
    vram_budget: Budget = None,
    gpu: GpuName = None,
    device: DeviceName = None,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    setting: SettingsGiven = None,
    eval_batch: EvalBatch = None,
    plan_from: PlanFrom = None,
    ranks: Ranks = None,
    batch: Batch = None,
    sequence: SampleLength = None,
    lora_rank: LoraRank = None,
    dtype: Dtype = None,
    allow_stand_in_loss: Annotated[
        bool, typer.Option("--allow-stand-in-loss", help="accept a workload without a loss")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="compare with an earlier report, or the output of check --json",
            callback=checked("autofit.checks.verdict:read_earlier"),
        ),
    ] = None,
    max_regression: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="allowed growth over --baseline",
            show_default=MAX_REGRESSION,
            callback=checked("autofit.checks.verdict:read_fraction"),
        ),
    ] = None,
    junit_xml: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a JUnit XML file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check in CI that a plan fits a VRAM budget.

    With --plan-from the budget and the GPU of the report are used unless others are given. On
    GitHub a table is added to the summary of the job.

    Exit codes: 0 it fits; 1 it does not, or needs more than --max-regression allows; 2 usage; 3
    your code raised; 4 the device or the worker failed; 5 it cannot be told.
    """
    here = world_of_environment().size
    if ranks is None and here > 1 and not plan_from:
        ranks = here
    allowed = read_fraction(MAX_REGRESSION if max_regression is None else max_regression)
    if max_regression is not None and baseline is None:
        raise InvalidArgument("--max-regression: needs --baseline, the file to compare with")
    with stdout_for_results_only(), _errors_shown(target, junit_xml if leads() else None):
        warnings.filterwarnings("ignore", f".*{re.escape(IGNORED)}")
        model = read_model(target, dtype, batch=batch, sequence=sequence, lora_rank=lora_rank)
        loaded, notes = workload_of(model, target, dtype, setting)
        workload = with_eval_batch(loaded, eval_batch)
        from autofit.checks.check import check as run

        plan = given_plan(workload, micro_batch, global_batch, setting, plan_from, ranks)
        with users_code():
            verdict = run(
                workload,
                plan=plan,
                vram_budget=read_budget(vram_budget),
                gpu=gpu,
                device=device,
                ranks=ranks,
                allow_stand_in_loss=allow_stand_in_loss,
            )
        verdict = replace(verdict, notes=(*notes, *verdict.notes))
        has_figure = verdict.required_bytes is not None  # else the verdict gives the reason
        regression = compare_with(verdict, baseline, allowed) if baseline and has_figure else None
    if leads():
        _show(target, verdict, regression, as_json, junit_xml)
    passed = verdict.fits and (regression is None or regression.passed)
    raise typer.Exit(_EXIT_CODES[passed if verdict.fits else verdict.fits])


def _show(
    target: str,
    verdict: Verdict,
    regression: Regression | None,
    as_json: bool,
    junit_path: Path | None,
) -> None:
    """Print the verdict, and write it in the forms that a CI job shows."""
    if as_json:
        compared = {"regression": regression.to_dict() if regression else None}
        print_result(json.dumps(verdict.to_dict() | compared, indent=1))
    else:
        parts = [str(part) for part in (verdict, regression) if part is not None]
        failed_growth = regression is not None and not regression.passed
        print_result("; ".join(reversed(parts) if failed_growth and verdict.fits else parts))
    page = os.environ.get(_SUMMARY_VARIABLE)
    try:
        if junit_path is not None:
            _write(junit_path, junit_xml(target, verdict, regression))
            say_written(junit_path)
        if page:
            _write(Path(page), markdown(target, verdict, regression), mode="a")
    except OSError as error:
        where = error.filename or " or ".join(str(path) for path in (junit_path, page) if path)
        raise InvalidArgument(f"cannot write {where}: {error.strerror}") from error


def _write(path: Path, text: str, mode: str = "w") -> None:
    """Write text that may hold the name of a file, which need not be Unicode."""
    check_is_file(path)
    with path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


@contextmanager
def _errors_shown(target: str, junit_path: Path | None) -> Iterator[None]:
    """Write an error that ends the check to its JUnit file too, where a CI job looks for it."""
    try:
        yield
    except BaseException as error:
        if junit_path is not None:
            with suppress(OSError, InvalidArgument):  # the error itself matters more
                _write(junit_path, junit_xml_of_error(target, error))
        raise
