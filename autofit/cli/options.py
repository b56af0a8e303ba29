"""The options shared by commands, and the parsing of their text.

TARGET is `path/to/file.py:name` or `package.module:name`, and names a Workload.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autofit.devices.request import check_budget, device_names
from autofit.errors import InvalidArgument, users_code
from autofit.plan import Plan, Scalar
from autofit.report.place import in_shell_words
from autofit.report.report import Report, check_writable, load
from autofit.units import kind_of

if TYPE_CHECKING:
    from autofit.training.workload import Workload


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="a Workload, or a function that returns one: path/to/file.py:name or "
        "package.module:name",
    ),
]


# Each option is checked when it is read: before torch is imported, which takes seconds.


def refused_by_name(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a callback whose errors name the option, as those of the command line itself do."""

    def callback(value: Any) -> Any:
        try:
            return check(value)
        except InvalidArgument as error:
            raise typer.BadParameter(in_shell_words(str(error))) from error

    return callback


def whole(least: int, most: int | None = None) -> Callable[[str | int], int]:
    """Return what reads a whole number of at least, and at most, this many."""
    allowed = f"from {least} to {most}" if most is not None else f"of at least {least}"

    def parse(text: str | int) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise typer.BadParameter(f"must be a whole number {allowed}, got {str(text)!r}")
        return number

    return parse


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"must be a number, got {str(text)!r}") from None


def _choices(*names: str) -> Callable[[], list[str]]:
    """Return the values of an option for the completion of a shell."""
    return lambda: list(names)


def read_budget(text: str | None) -> str | float | None:
    """Return "24" as bytes and "0.5" as a fraction; the device reads other texts."""
    if text is None or not re.fullmatch(r"-?\d*\.?\d+|-?\d+\.", text):
        return text
    return float(text) if "." in text else int(text)


@refused_by_name
def _check_budget(text: str | None) -> str | None:
    check_budget(read_budget(text))
    return text


def checked(check: str) -> Callable[[Any], Any]:
    """Return a callback that checks a value by "module:function", which it imports when called."""

    def callback(value: Any) -> Any:
        if value is not None:
            resolve_name(check)(value)
        return value

    return refused_by_name(callback)


@refused_by_name
def _check_devices(names: str | None) -> str | None:
    if names != "all":  # how many there are is asked of torch, later
        device_names(names)
    return names


def by_commas(texts: list[str] | None) -> list[str]:
    """Return what an option that takes a list names, by commas or by being repeated.

    Nothing is an empty list: typer 0.15 asks for the length of what a callback returns.
    """
    return [part for text in texts or () for part in text.split(",")]


@refused_by_name
def _check_strategies(texts: list[str] | None) -> list[str]:
    from autofit.registry import check_installed

    names = by_commas(texts)
    for name in names:
        check_installed(name)
    return names


@refused_by_name
def _check_effort(level: str) -> str:
    from autofit.searching.options import SearchOptions

    SearchOptions(effort=level)
    return level


@refused_by_name
def _check_settings(texts: list[str] | None) -> list[str]:
    # A comma parts two settings where another "strategy.name=" follows, else it is of the value.
    settings = [part for text in texts or () for part in re.split(r",(?=\w+\.\w+=)", text)]
    by_name: dict[str, str] = {}
    for text in settings:
        name, _ = _read_setting(text)
        if name in by_name:
            raise InvalidArgument(f"{name} is given twice, as {by_name[name]} and as {text}")
        by_name[name] = text
    _check_strategies([name.partition(".")[0] for name in by_name])
    return settings


def paths(texts: list[Path] | None) -> list[Path]:
    """Return the files of `--out`: several by commas, and by being repeated."""
    return list(map(Path, by_commas(list(map(str, texts or ())))))


Budget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="24GiB, 24G, bytes or a fraction such as 0.5",
        show_default="what is free, less a margin",
        callback=_check_budget,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="cuda, cuda:1 or cpu",
        show_default="cuda, if there is one",
        callback=checked("autofit.devices.request:check_device_name"),
    ),
]
DeviceNames = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="cuda, cuda:1 or cpu; several by commas, or all",
        show_default="cuda, if there is one",
        callback=_check_devices,
    ),
]
StrategyNames = Annotated[
    list[str] | None,
    typer.Option(
        "--strategies",
        metavar="NAMES",
        help="use these only, separated by commas",
        show_default="all that are installed",
        callback=_check_strategies,
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", help="random seed", parser=whole(0, 2**32 - 1))]
Strict = Annotated[bool, typer.Option("--strict", help="exit with code 5 if nothing is decided")]
NumericsName = Annotated[
    str,
    typer.Option(
        "--numerics",
        metavar="LEVEL",
        help="how far results may change: exact (not at all), rounding, reduced_precision",
        callback=checked("autofit.registry:numerics_level"),
        autocompletion=_choices("exact", "rounding", "reduced_precision"),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="print no progress, only the result and errors")
]
MicroBatch = Annotated[
    int | None,
    typer.Option(metavar="N", help="samples in one forward and backward", parser=whole(1)),
]
GlobalBatch = Annotated[
    int | None, typer.Option(metavar="N", help="samples in one optimizer step", parser=whole(1))
]
Ranks = Annotated[
    int | None,
    typer.Option(metavar="N", help="GPUs that train one model together", parser=whole(1)),
]
SettingsGiven = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTINGS",
        help="such as precision.dtype=bfloat16; other settings keep their defaults",
        callback=_check_settings,
    ),
]
AccumulationChange = Annotated[
    bool,
    typer.Option(
        "--allow-accumulation-change",
        help="accumulate even where that changes the gradients",
    ),
]
MaxMicroBatch = Annotated[
    int | None,
    typer.Option(metavar="N", help="largest micro-batch to try, in samples", parser=whole(1)),
]
MaxProbes = Annotated[
    int | None, typer.Option(metavar="N", help="stop after this many probes", parser=whole(1))
]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="stop after this time",
        parser=_number,
        callback=checked("autofit.searching.options:check_timeout"),
    ),
]
PlannedSteps = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(0),
        help="optimizer steps you will train: settings that are slow to try, such as compile, "
        "are tried only if they pay off over these steps; 0: never",
    ),
]
Effort = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        help="quick, normal or thorough",
        callback=_check_effort,
        autocompletion=_choices("quick", "normal", "thorough"),
    ),
]
StudyName = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="keep the search in this file or Optuna storage URL, and resume it from there",
        callback=checked("autofit.searching.options:check_study"),
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="write a profiler trace of the recommended plan: .json or .json.gz",
    ),
]
EpochSamples = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="samples of an epoch, to show the time it takes", parser=whole(1)
    ),
]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        metavar="PRICE",
        help="price of the device, to show what an epoch or the training costs",
        parser=_number,
        callback=checked("autofit.report.report:check_price"),
    ),
]
EvalBatch = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="samples of an evaluation, instead of the workload's own",
        parser=whole(1),
    ),
]
PlanFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="REPORT",
        help="the recommended plan of this report",
        callback=checked("autofit.report.report:load"),
    ),
]


def given_plan(
    workload: Workload,
    micro_batch: int | None,
    global_batch: int | None,
    settings: Sequence[str] | None,
    plan_from: Path | None,
    ranks: int | None = None,
) -> Plan | Report | None:
    """Return `plan=` for `probe`, `predict` and `check`; None: no option was given.

    Counts that were not given are the workload's own.

    Raises:
        InvalidArgument: the options contradict each other, or the counts do not make a plan.
    """
    has_any = bool(settings) or micro_batch is not None or global_batch is not None
    if plan_from is not None:
        if has_any:
            raise InvalidArgument(
                "--plan-from: sets the whole plan: drop --micro-batch, --global-batch and --set"
            )
        return load(plan_from)
    if not has_any:
        return None
    read = dict(map(_read_setting, settings or ()))
    return workload.plan(micro_batch, None, global_batch, read, ranks or 1)


def with_eval_batch(workload: Workload, samples: int | None) -> Workload:
    """Return the workload with evaluations of this many samples; None: its own.

    Raises:
        InvalidArgument: it has no evaluation.
    """
    if samples is None:
        return workload
    if workload.eval_samples is None:
        raise InvalidArgument("--eval-batch: the workload has no eval_step= and eval_batch=")
    return workload.with_eval_samples(samples)


REPORT_FORMS = (".json", ".html", ".md", ".txt", ".csv", ".svg")
Out = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILES",
        help="also write the report: .json, .html, .md, .txt, .csv or .svg; several by commas",
        callback=paths,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show every trial and all notes")]


def check_out(path: Path, forms: Sequence[str] = REPORT_FORMS) -> None:
    """Refuse a path of `--out` before the work rather than after it."""
    if path.suffix not in forms:
        *others, last = forms
        allowed = f"{', '.join(others)} or {last}"
        raise InvalidArgument(f"--out: {path} must end in {allowed}")
    check_writable(path, "--out")


def _read_setting(text: str) -> tuple[str, Scalar]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidArgument(f"write strategy.name=value, got {text!r}")
    try:
        read = json.loads(value)
    except ValueError:
        read = value
    return name, read if isinstance(read, (bool, int, float, str)) else value


_ASKED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@users_code()
def load_target(target: str) -> Workload:
    """Return the workload that a target names.

    A file is imported as a script beside it would import it: its folder comes first on the path.

    Args:
        target: as above.

    Raises:
        InvalidArgument: the file, module or name does not exist, or it is not a workload.
        Exception: whatever the user's module raises when it is imported or called; it is marked as
            the user's.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InvalidArgument(
            f"{target!r} is not a target: use path/to/file.py:name or package.module:name (for "
            "predict and check also hf:ORG/MODEL, or a folder with a config.json)"
        )
    if place == "hf":
        raise InvalidArgument(f"{target}: only predict and check take a model by its config")
    gc.disable()  # importing torch leaves nothing to collect, and looking takes a tenth of it
    try:
        module = _import(place)
    finally:
        gc.freeze()  # nor is it passed over later, which takes another 0.2 s
        # The end of the interpreter collects no frozen objects: Triton, from 3.9 on, prints them.
        atexit.register(gc.unfreeze)
        gc.enable()
    try:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise InvalidArgument(f"{place} has no {name!r}; it has: {_offers(module)}") from None
    import torch  # late, as what follows: a mistyped target does not need it

    from autofit.training.workload import Workload

    is_model = isinstance(found, torch.nn.Module)  # callable, but not to make a workload
    made = _call(found, target) if callable(found) and not is_model else found
    if not isinstance(made, Workload):
        raise InvalidArgument(
            f"{target} must be a Workload or a function that returns one, got {kind_of(made)}: "
            "return autofit.Workload(model, sample_batch, criterion=...)"
        )
    return made


def _call(function: Callable[..., Any], target: str) -> Any:
    wanted = [p.name for p in _parameters(function) if p.default is p.empty and p.kind in _ASKED]
    if wanted:
        raise InvalidArgument(
            f"{target} takes arguments ({', '.join(wanted)}): name a function that "
            "takes none and returns a Workload"
        )
    return function()


def _parameters(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return ()


# What is imported after the target, which would be found in its place.
_NEEDED = {
    "cloudpickle", "msgspec", "numpy", "optuna", "pynvml", "rich", "sqlalchemy", "sympy", "torch",
    *sys.stdlib_module_names - {"test"},
}  # fmt: skip


def _import(place: str) -> ModuleType:
    if not place.endswith(".py"):
        if not all(part.isidentifier() for part in place.split(".")):
            raise InvalidArgument(f"{place!r} is neither a .py file nor the name of a module")
        with suppress(FileNotFoundError):  # it may have been removed
            sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and place.startswith(error.name):
                raise InvalidArgument(f"module {place!r} is not on the path") from None
            raise
    path = Path(os.path.realpath(place))
    if not os.path.isfile(path):  # unlike a Path's own, it takes any name
        raise InvalidArgument(f"file {place} does not exist")
    loaded = sys.modules.get(path.stem)
    is_other = loaded is not None and getattr(loaded, "__file__", None) != str(path)
    if is_other or path.stem in _NEEDED:
        raise InvalidArgument(
            f"{place} has the name of a module that is in use ({path.stem!r}): rename the file"
        )
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem) if "." not in path.stem else _import_file(path)


def _import_file(path: Path) -> ModuleType:
    """Import a file whose name contains a dot, which would otherwise mean a package."""
    name = path.stem.replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _offers(module: ModuleType) -> str:
    from autofit.training.workload import Workload

    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, Workload) or getattr(value, "__module__", None) == module.__name__)
    ]
    return ", ".join(names) or "nothing of its own"
