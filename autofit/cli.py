"""The command line. Progress goes to standard error, the result to standard output.

Exit codes: 0 done, fits; 1 nothing fits, does not fit; 2 usage; 3 the workload's own code failed;
4 the device or the worker failed; 5 could not be told.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from autofit.errors import AutofitError, InvalidRequest
from autofit.measurement import Trial
from autofit.plan import Plan, Scalar
from autofit.units import format_bytes, format_rate, format_seconds

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Finds, by running it, the fastest way to train a PyTorch model within a VRAM budget.",
)

Target = Annotated[
    str, typer.Argument(help="path/to/file.py:name or package.module:name, a Workload")
]
Budget = Annotated[
    str | None, typer.Option(help="24GiB, bytes, or a fraction of the device such as 0.5")
]
DeviceName = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu; default: cuda if any")]
StrategyNames = Annotated[
    list[str] | None, typer.Option("--strategies", help="use only these (may be repeated)")
]
Seed = Annotated[int, typer.Option(help="of everything random")]
Isolation = Annotated[str, typer.Option(help="process or inprocess")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
MicroBatch = Annotated[int | None, typer.Option(help="samples in one forward and backward")]
AccumulationSteps = Annotated[int, typer.Option(help="micro-batches in one optimizer step")]
GlobalBatch = Annotated[int | None, typer.Option(help="samples in one optimizer step")]
SettingsGiven = Annotated[
    list[str] | None, typer.Option("--set", help="a setting, such as precision.dtype=bfloat16")
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="take the plan of this report")]


@app.command()
def search(
    target: Target,
    vram_budget: Budget = None,
    global_batch: GlobalBatch = None,
    device: DeviceName = None,
    strategies: StrategyNames = None,
    numerics: Annotated[
        str, typer.Option(help="exact, rounding or reduced_precision: how far plans may go")
    ] = "reduced_precision",
    allow_resplit: Annotated[
        bool, typer.Option(help="change the accumulation even where that changes the gradients")
    ] = False,
    max_micro_batch: Annotated[int | None, typer.Option(help="the largest to try")] = None,
    max_probes: Annotated[int | None, typer.Option(help="the most plans to run")] = None,
    timeout: Annotated[float | None, typer.Option(help="seconds until it stops")] = None,
    study: Annotated[
        str | None, typer.Option(help="a file or Optuna storage URL to stop and resume with")
    ] = None,
    seed: Seed = 0,
    isolation: Isolation = "process",
    out: Annotated[
        list[Path] | None, typer.Option(help="write the report: .json, .txt or .csv")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan that fits, and print the report."""
    from dataclasses import replace

    from autofit.progress import ProgressLine
    from autofit.searching.public import search as run
    from autofit.target import load_target

    for path in out or ():
        _check_suffix(path)
    workload = load_target(target)
    if global_batch is not None:
        workload = replace(workload, global_batch=global_batch)
    if allow_resplit:
        workload = replace(workload, allow_resplit=True)
    with ProgressLine() as progress:
        report = run(
            workload,
            vram_budget=_budget(vram_budget),
            device=device,
            strategies=strategies,
            numerics=numerics,
            max_micro_batch=max_micro_batch,
            max_probes=max_probes,
            timeout=timeout,
            study=study,
            seed=seed,
            isolation=isolation,
            progress=progress,
        )
    for path in out or ():
        report.save(path)
    _print(json.dumps(report.to_dict(), indent=1) if as_json else str(report))


@app.command()
def probe(
    target: Target,
    micro_batch: MicroBatch = None,
    accumulation_steps: AccumulationSteps = 1,
    global_batch: GlobalBatch = None,
    setting: SettingsGiven = None,
    plan_file: PlanFile = None,
    vram_budget: Budget = None,
    device: DeviceName = None,
    strategies: StrategyNames = None,
    seed: Seed = 0,
    isolation: Isolation = "process",
    as_json: AsJson = False,
) -> None:
    """Run one plan, and say what it needs and how fast it is."""
    from autofit.searching.public import probe as run
    from autofit.target import load_target

    plan = read_plan(micro_batch, accumulation_steps, global_batch, setting or [], plan_file)
    trial = run(
        load_target(target),
        plan=plan,
        vram_budget=_budget(vram_budget),
        device=device,
        strategies=strategies,
        seed=seed,
        isolation=isolation,
    )
    _print(json.dumps(_trial_to_dict(trial), indent=1) if as_json else _trial_line(trial))
    if not trial.ok:
        raise typer.Exit(1 if trial.measurement.outcome.about_memory else 4)


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="a report that a search wrote")],
    as_json: AsJson = False,
) -> None:
    """Show a saved report; needs no GPU and no torch."""
    from autofit.report.report import load

    loaded = load(path)
    _print(json.dumps(loaded.to_dict(), indent=1) if as_json else str(loaded))


@app.command()
def strategies() -> None:
    """List the installed strategies and how far each may change the arithmetic."""
    from autofit.registry import load_strategies

    for strategy in load_strategies():
        summary = (type(strategy).__doc__ or "").strip().partition("\n")[0]
        _print(f"{strategy.name:<16}{strategy.numerics.name.lower():<20}{summary}")


@app.command()
def doctor(device: DeviceName = None) -> None:
    """Say what autofit finds here: versions, device, memory, strategies."""
    import importlib.metadata

    from autofit.devices.open import open_device
    from autofit.registry import installed_names

    opened = open_device(device)
    for name, value in vars(opened.environment).items():
        shown = format_bytes(value) if name == "total_bytes" else value
        _print(f"{name:<16}{'-' if shown is None else shown}")
    _print(f"{'free':<16}{format_bytes(opened.free_bytes)}")
    _print(f"{'capabilities':<16}{opened.capabilities}")
    _print(f"{'strategies':<16}{', '.join(installed_names())}")
    for package in ("torch-autofit", "optuna", "cloudpickle"):
        _print(f"{package:<16}{importlib.metadata.version(package)}")


def read_plan(
    micro_batch: int | None,
    accumulation_steps: int,
    global_batch: int | None,
    settings: list[str],
    plan_file: Path | None,
) -> Plan | None:
    """The plan that the options describe; None where they say nothing.

    Raises:
        InvalidRequest: they contradict each other, or a setting cannot be read.
    """
    if plan_file is not None:
        if micro_batch is not None or settings or global_batch is not None:
            raise InvalidRequest("--plan says all of the plan: leave the other plan options out")
        from autofit.report.report import load

        return load(plan_file).best.plan
    if micro_batch is None:
        if settings or global_batch is not None or accumulation_steps != 1:
            raise InvalidRequest("a plan needs --micro-batch")
        return None
    chosen = dict(_read_setting(text) for text in settings)
    if global_batch is not None:
        return Plan.split(global_batch, micro_batch, chosen)
    return Plan(micro_batch, accumulation_steps=accumulation_steps, settings=chosen)


def _read_setting(text: str) -> tuple[str, Scalar]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidRequest(f"--set takes strategy.name=value, got {text!r}")
    try:
        read = json.loads(value)
    except ValueError:
        read = value
    return name, read if isinstance(read, (bool, int, float, str)) else value


def _budget(text: str | None) -> str | float | None:
    """A bare number is a fraction up to 1, and bytes above; the rest is read later."""
    try:
        number = float(text) if text is not None else None
    except ValueError:
        return text
    return number if number is None or (number <= 1 and "." in str(text)) else int(number)


def _check_suffix(path: Path) -> None:
    if path.suffix not in (".json", ".txt", ".csv"):
        raise InvalidRequest(f"--out {path}: a report is written as .json, .txt or .csv")


def _trial_to_dict(trial: Trial) -> dict[str, Any]:
    return {
        "plan": trial.plan.to_dict(),
        "samples_per_second": trial.samples_per_second,
        **trial.measurement.to_dict(),
    }


def _trial_line(trial: Trial) -> str:
    measured = trial.measurement
    if not trial.ok:
        return f"{trial.plan}: {measured.outcome.value}: {measured.detail or 'no detail'}"
    return (
        f"{trial.plan}: {format_rate(trial.samples_per_second)}, "
        f"{format_seconds(measured.step_time_s)} an optimizer step, "
        f"held {format_bytes(measured.held_bytes)} "
        f"(peak allocated {format_bytes(measured.peak_allocated_bytes)}, "
        f"peak reserved {format_bytes(measured.peak_reserved_bytes)}, "
        f"non-torch {format_bytes(measured.non_torch_bytes)})"
    )


def _print(text: str) -> None:
    typer.echo(text.rstrip("\n"))


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Errors as messages and exit codes; a traceback only for the user's own code and for bugs."""
    try:
        yield
    except AutofitError as error:
        typer.echo(f"autofit: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("autofit: interrupted before anything was measured", err=True)
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        sys.exit(3 if _came_from_the_workload(error) else 4)


def _came_from_the_workload(error: Exception) -> bool:
    """Whether the user's code raised it: in the worker, or here while it was imported."""
    if type(error.__cause__).__name__ == "WorkerTraceback":
        return True
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(__file__).parent not in Path(innermost).parents


def main(run: Callable[[], Any] = app) -> None:
    """Entry point of the `autofit` command."""
    with _exit_codes():
        run()


if __name__ == "__main__":
    main()
