"""The page of arguments, made from the code: `python tests/arguments_page.py` writes it.

Of a function it is the signature and the docstring's Args, of a command what its `--help` says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

import autofit
from autofit.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "arguments.md"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "autofit.search": autofit.search,
    "autofit.probe": autofit.probe,
    "autofit.predict": autofit.predict,
    "autofit.check": autofit.check,
    "autofit.cards": autofit.cards,
    "report.apply": autofit.Report.apply,
    "report.soak": autofit.Report.soak,
    "report.save": autofit.Report.save,
    "report.export": autofit.Report.export,
    "report.to_text": autofit.Report.to_text,
}
_HEAD = """# Arguments

All arguments and options with their defaults, written from the code by
`python tests/arguments_page.py`. A size in bytes is a number or a text such as
"24GiB" (1 GiB is 2^30 bytes). What `autofit.Workload` takes has the names that it has in
`autofit.search`.

## In Python
"""
_ENTRY = re.compile(r" {4}([\w, ]+): (.*)")


def written() -> str:
    """Return the page."""
    parts = [_HEAD]
    for name, function in FUNCTIONS.items():
        parts += [f"### {name}\n", _summary(function), *_function(function), ""]
    parts.append(
        "## On the command line\n\nThe codes that a command exits with: [Outcomes](outcomes.md).\n"
    )
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    for name, command in commands.items():
        parts += [f"### autofit {name}\n", _summary(command.callback), *_command(command), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def said_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return what the docstring's Args say of each argument."""
    said: dict[str, str] = {}
    names: list[str] = []
    text = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[2]
    for line in text.partition("\n\n")[0].splitlines():
        if entry := _ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            said |= dict.fromkeys(names, entry[2])
        else:
            said |= {name: f"{said[name]} {line.strip()}" for name in names}
    return said


def _summary(function: Callable[..., Any]) -> str:
    return f"{inspect.cleandoc(function.__doc__ or '').splitlines()[0]}\n"


def _function(function: Callable[..., Any]) -> Iterator[str]:
    said = said_of(function)
    yield from _head("argument")
    for name, parameter in inspect.signature(function).parameters.items():
        if name != "self":
            yield _row(name, _default(parameter.default), said[name])


def _command(command: Any) -> Iterator[str]:
    if command.params:
        yield from _head("option")
    for parameter in command.params:
        metavar = (parameter.metavar or parameter.name.upper()).strip("[]")
        is_option = parameter.param_type_name == "option"
        name = ", ".join(parameter.opts) if is_option else metavar
        shown = "-" if parameter.default in (None, False) else f"`{parameter.default}`"
        yield _row(name, "required" if parameter.required else shown, parameter.help or "")


def _head(what: str) -> Iterator[str]:
    yield f"| {what} | default | what it is |"
    yield "|---|---|---|"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    return f"`{value.__name__ if isinstance(value, type) else repr(value)}`"


def _row(name: str, default: str, words: str) -> str:
    return f"| `{name}` | {default} | {words.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
