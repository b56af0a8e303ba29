"""The options shared by commands, and the parsing of their text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autofit.devices.request import check_budget, check_device_name, device_names
from autofit.errors import InvalidArgument
from autofit.plan import Scalar

if TYPE_CHECKING:
    from autofit.plan import Plan
    from autofit.report.report import Report
    from autofit.training.workload import Workload

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help=(
            "path/to/file.py:name or package.module:name: a Workload, or a function "
            "that returns one"
        ),
    ),
]


# Each option is checked when it is read: before torch is imported, which takes seconds.


def read_budget(text: str | None) -> str | float | None:
    """Return "24" as bytes and "0.5" as a fraction; the device reads other texts."""
    if text is None or not re.fullmatch(r"-?\d*\.?\d+|-?\d+\.", text):
        return text
    return float(text) if "." in text else int(text)


def _check_budget(text: str | None) -> str | None:
    check_budget(read_budget(text))
    return text


def _check_device(name: str | None) -> str | None:
    check_device_name(name)
    return name


def _check_devices(names: str | None) -> str | None:
    if names != "all":  # how many there are is asked of torch, later
        device_names(names)
    return names


def _check_strategies(names: list[str] | None) -> list[str] | None:
    from autofit.registry import check_installed

    for name in names or ():
        check_installed(name)
    return names


def _check_settings(texts: list[str] | None) -> list[str] | None:
    _check_strategies([_read_setting(text)[0].partition(".")[0] for text in texts or ()])
    return texts


def _check_report(path: Path | None) -> Path | None:
    from autofit.report.report import load

    if path is not None:
        load(path)
    return path


def one_of(*choices: str) -> Callable[[str], str]:
    """Return the callback of an option that takes one of these."""

    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return check


Budget = Annotated[
    str | None,
    typer.Option(
        help=("24GiB, bytes, or a fraction of the device such as 0.5; default: all available"),
        callback=_check_budget,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(help="cuda, cuda:1 or cpu; default: cuda if there is one", callback=_check_device),
]
DeviceNames = Annotated[
    str | None,
    typer.Option(
        help=(
            "cuda, cuda:1 or cpu; cuda:0,cuda:1 or all to run plans on several at "
            "once; default: cuda if there is one"
        ),
        callback=_check_devices,
    ),
]
StrategyNames = Annotated[
    list[str] | None,
    typer.Option(
        "--strategies",
        help="use only these (may be repeated); default: all installed",
        callback=_check_strategies,
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="random seed")]
NumericsName = Annotated[
    str,
    typer.Option(
        "--numerics",
        help=("exact, rounding or reduced_precision: how far plans may change the arithmetic"),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
MicroBatch = Annotated[
    int | None,
    typer.Option(min=1, help="samples in one forward and backward; default: the workload's"),
]
AccumulationSteps = Annotated[
    int | None,
    typer.Option(min=1, help="micro-batches in one optimizer step; default: the workload's"),
]
GlobalBatch = Annotated[
    int | None, typer.Option(min=1, help="samples in one optimizer step; default: the workload's")
]
Ranks = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=(
            "ranks that train one model together, each on its own device; default: as "
            "many as torchrun started, or one"
        ),
    ),
]
SettingsGiven = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="a setting, as strategy.name=value (may be repeated); default: none",
        callback=_check_settings,
    ),
]
WorldSize = Annotated[
    int | None,
    typer.Option(min=1, help="GPUs that train together (ranks); default: the plan's, or one"),
]
ModeOfRanks = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        help=("how ranks share the model: ddp, ddp_view, zero1, fsdp2, fsdp2_keep; default: ddp"),
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="use the plan of this report", callback=_check_report),
]


@dataclass(frozen=True)
class PlanOptions:
    """The options that select a plan.

    Raises:
        InvalidArgument: the options contradict each other, or a setting cannot be read.
    """

    micro_batch: int | None = None
    accumulation_steps: int | None = None
    global_batch: int | None = None
    settings: Sequence[str] | None = None
    plan_file: Path | None = None
    world_size: int | None = None
    mode_of_ranks: str | None = None

    def __post_init__(self) -> None:
        if self.plan_file is not None and self._has_any:
            raise InvalidArgument("--plan sets the whole plan: leave the other plan options out")
        if self.mode_of_ranks is not None and (self.world_size or 1) == 1:
            raise InvalidArgument(
                f"--parallel {self.mode_of_ranks} needs --world-size of at least 2"
            )
        for text in self.settings or ():
            _read_setting(text)

    @property
    def _has_any(self) -> bool:
        counts = (self.micro_batch, self.accumulation_steps, self.global_batch)
        if self.mode_of_ranks is not None:
            return True
        return bool(self.settings) or any(count is not None for count in counts)

    @cached_property
    def report(self) -> Report | None:
        """The report of `--plan`; None: not given."""
        if self.plan_file is None:
            return None
        from autofit.report.report import load

        return load(self.plan_file)

    def plan_and_payloads(self, workload: Workload) -> dict[str, Any]:
        """Return `plan=` and `payloads=` for `probe`, `predict` and `check`.

        Counts that were not given are the workload's own; without any plan option both are None.
        The payloads of a report are given too: measured here, its values might mean something else.

        Raises:
            InvalidArgument: the counts do not make a plan, or the report cannot be read.
        """
        plan: Plan | None = None
        payloads: dict[str, Any] | None = None
        if self.report is not None:
            plan = self.report.record.best_plan_to_rerun
            payloads = self.report.record.payloads(self.report.best.plan.settings)
        elif self._has_any:
            counts = self.micro_batch, self.accumulation_steps, self.global_batch
            settings = dict(map(_read_setting, self.settings or ())) | self._settings_of_ranks()
            plan = workload.plan(*counts, settings, self.world_size or 1)
        return {"plan": plan, "payloads": payloads}

    def check_same_model(self, parameters: int | None, workload: Workload) -> None:
        """Refuse a workload that is not that of `--plan`, as `checks.same.check_same_model` does.

        Args:
            parameters: of the workload's model; None: not known.
            workload: that the command runs or predicts.

        Raises:
            InvalidArgument: they differ.
        """
        if self.report is None:
            return
        from autofit.checks.same import check_same_model

        check_same_model(self.report.record, parameters, workload)

    def _settings_of_ranks(self) -> dict[str, Scalar]:
        """Return `--parallel` as settings of the strategy for several ranks."""
        if self.mode_of_ranks is None:
            return {}
        from autofit.registry import names_of_ranks

        names = names_of_ranks()
        if len(names) != 1:
            raise InvalidArgument(
                f"--parallel is short for --set STRATEGY.mode={self.mode_of_ranks}, but "
                "the installed strategies for several ranks are "
                f"{', '.join(names) or 'none'}: use --set"
            )
        return {f"{names[0]}.mode": self.mode_of_ranks}


REPORT_FORMS = (".json", ".html", ".md", ".txt", ".csv")
Out = Annotated[
    list[Path] | None, typer.Option(help="write the report: .json, .html, .md, .txt or .csv")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show every trial and the reasons")]


def check_writable(path: Path, forms: Sequence[str] = REPORT_FORMS, what: str = "a report") -> None:
    """Refuse a path of `--out` before the work rather than after it."""
    if path.suffix not in forms:
        *others, last = forms
        raise InvalidArgument(f"--out {path}: {what} is written as {', '.join(others)} or {last}")
    from autofit.report.report import check_is_file

    check_is_file(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidArgument(f"--out {path}: the folder must exist and be writable")


def _read_setting(text: str) -> tuple[str, Scalar]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidArgument(f"--set takes strategy.name=value, got {text!r}")
    try:
        read = json.loads(value)
    except ValueError:
        read = value
    return name, read if isinstance(read, (bool, int, float, str)) else value
