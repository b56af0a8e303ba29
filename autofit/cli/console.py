"""The commands as processes: standard output, errors and exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
import typer.core

from autofit.cli.options import check_out
from autofit.codec import for_terminal
from autofit.errors import (
    AutofitError,
    InvalidArgument,
    Unsupported,
    WorkerTraceback,
    is_users,
    traceback_text,
    tried_when,
)
from autofit.measurement import Outcome
from autofit.report.details import changes
from autofit.report.place import Place, in_shell_words
from autofit.report.report import Report, load, write
from autofit.report.text import WIDTH, in_markdown, in_text, laid_out
from autofit.streams import LossyStream, complain
from autofit.world import world_of_environment

_OF_THE_WORKLOAD = (Outcome.LEAK, Outcome.NONFINITE, Outcome.USER_ERROR)
"""Outcomes that another device or worker would not change."""


def show_report(
    report: Report,
    paths: Iterable[Path],
    as_json: bool,
    *,
    verbose: bool = False,
    quiet: bool = False,
    loaded_from: Path | None = None,
) -> None:
    """Write the report, then print it: a full disk must cost neither the answer nor other files.

    Args:
        report: of a search.
        paths: of the files to write.
        as_json: print JSON; else text, whose commands name a file that holds the report.
        verbose: everything.
        quiet: do not name the files on standard error.
        loaded_from: the file that holds the report; None: the first of `paths` that does, or else
            one in the folder for temporary files, so that no search is lost.

    Raises:
        InvalidArgument: some of the files could not be written.
    """
    held_by, lost = loaded_from, []
    report = _shown_at(report, held_by)
    for path in sorted(paths, key=lambda path: path.suffix != ".json"):
        try:
            report.save(path)
        except InvalidArgument as error:
            lost.append(str(error))
        else:
            if not quiet:
                say_written(path)
            held_by = held_by or (path if path.suffix == ".json" else None)
        report = _shown_at(report, held_by)
    kept = _kept(report) if held_by is None and not as_json else None
    if kept is not None and not quiet:
        say(f"wrote {kept}, a temporary file: pass --out to keep the report")
    report = _shown_at(report, held_by or kept)
    try:
        shown = json.dumps(report.to_dict(), indent=1) if as_json else None
        print_result(shown or report.to_text(verbose=verbose, **style()))
    except AutofitError as error:
        lost.append(str(error))
        if held_by is None and (kept := kept or _kept(report)) is not None:
            lost.append(f"the report is in {kept}")
        raise AutofitError("; ".join(lost)) from error
    if lost:
        raise InvalidArgument("; ".join(lost))


def _kept(report: Report) -> Path | None:
    """Write a report that no file holds yet to one that only this user may read.

    None if none can.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix="autofit-", suffix=".json")
    except OSError:  # there is no folder for temporary files
        return None
    os.close(descriptor)
    try:
        return report.save(name)
    except InvalidArgument:
        os.unlink(name)
        return None


def _shown_at(report: Report, path: Path | None) -> Report:
    """Return the report with shell commands that read it from that file."""
    if path is None:
        return report
    return replace(report, place=Place(os.fspath(path), _program()))


def _program() -> str:
    """Return how autofit was called, as a command that a shell can run."""
    command = shutil.which("autofit")
    if command is not None and os.path.abspath(sys.argv[0]) == command:
        return "autofit"
    return f"{shlex.quote(sys.executable)} -m autofit"


def export_report(report: Path, stack: str, paths: Sequence[Path]) -> None:
    """Print a script that trains by a report, or write it to the file that is given.

    Raises:
        InvalidArgument: there is no such stack, or several files or one that cannot be written.
    """
    if len(paths) > 1:
        raise InvalidArgument("--out: --export writes one file")
    for path in paths:
        check_out(path, (path.suffix,))
    text = _shown_at(load(report), report).export(stack, *paths)
    for path in paths:
        say_written(path)
    if not paths:
        print_result(text.rstrip("\n"))


def show_changes(before: Report, after: Report, paths: Iterable[Path]) -> None:
    """Write and print what changed from one report to the other.

    Raises:
        InvalidArgument: a file has another suffix than .md, or cannot be written.
    """
    section = changes(before.record, after.record)
    for path in paths:
        write(path, {".md": lambda: "\n".join(in_markdown(section)) + "\n"}, "a comparison")
        say_written(path)
    print_result(laid_out(in_text(section), **{"width": WIDTH, **style()}))


def leads() -> bool:
    """Return whether this process shows results: alone, or the first of torchrun's ranks."""
    try:
        return world_of_environment().rank == 0
    except InvalidArgument:  # commands that use no ranks need no place among them
        return True


def start_server_ahead() -> None:
    """Have the server of workers import torch while this process loads what they train."""
    if leads():
        from autofit.probing.fork_server import start_server  # reports need none

        start_server()


def style() -> dict[str, Any]:
    """Return width and color of text on standard output; a file gets no color, nor NO_COLOR."""
    if not LossyStream(sys.stdout).isatty():
        return {}
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return {"width": min(shutil.get_terminal_size().columns, 100), "color": not is_plain}


def exit_code(outcome: Outcome) -> int:
    """Return the exit code for a probe with this outcome."""
    if outcome is Outcome.OK:
        return 0
    if outcome.about_memory:
        return 1
    if outcome is Outcome.UNSUPPORTED:
        return Unsupported.exit_code
    return 3 if outcome in _OF_THE_WORKLOAD else 4


def print_result(text: str) -> None:
    """Print to standard output, which carries only results; a closed pipe is not an error.

    Raises:
        AutofitError: it cannot be written.
    """
    out = LossyStream(sys.stdout)
    print(for_terminal(text.rstrip("\n")), file=out, flush=True)
    if isinstance(out.error, OSError) and not isinstance(out.error, BrokenPipeError):
        raise AutofitError(f"cannot write the result to standard output: {out.error.strerror}")


def say(line: str) -> None:
    """Tell on standard error how far a command is."""
    _print_error(f"autofit: {line}")


def say_written(path: Path) -> None:
    """Tell on standard error that a file was written."""
    say(f"wrote {path}")


def _print_error(text: str) -> None:
    complain(for_terminal(text))


_INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a process ended by Ctrl-C; typer turns a KeyboardInterrupt into it."""


class Interrupted(AutofitError):
    """A signal ended the command after it printed what it had, so a calling script should end too.

    SIGTERM of a search counts as Ctrl-C.
    """

    exit_code = _INTERRUPTED


@contextmanager
def stdout_for_results_only() -> Iterator[None]:
    """Send what the user's own code prints to standard error, so that results can be piped."""
    with redirect_stdout(sys.stderr):
        yield


class Commands(typer.core.TyperGroup):
    """The commands; typer gives some errors of the user's code an exit code that means an answer.

    That is 1 for EOFError, a broken pipe and its own Abort, and any for its Exit.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command; a command line that is wrong ends as any other wrong argument does."""
        if options.get("standalone_mode") is False:  # for a caller that handles errors itself
            return super().main(*args, **options)
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer and click have it in different modules
                raise
            _print_error(f"autofit: {_usage_words(error)}")
            code = getattr(error, "exit_code", 2)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer's own base class
        try:
            return super().invoke(ctx)
        except Exception as error:
            if is_users(error) or isinstance(error, (EOFError, OSError)):
                sys.exit(_show_error(error))
            raise


_NAMED = re.compile(r"^[\w-]+ (?=must )")
"""The argument that a message begins with, where the option is named before it."""


def _usage_words(error: Any) -> str:
    """Return what is wrong with a command line: "--timeout: must be above zero seconds"."""
    option, message = getattr(error, "param", None), str(error.message)
    if option is not None and message:
        return f"{_name_of(option)}: {_NAMED.sub('', message)}"
    if hasattr(error, "possibilities"):
        alike = " or ".join(sorted(error.possibilities or ()))
        words = f"no such option {error.option_name}" + (f", do you mean {alike}?" if alike else "")
    else:
        words = f"missing {_name_of(option)}" if option is not None else message
    hint = f" (see {error.ctx.command_path} -h)" if error.ctx is not None else ""
    return f"{words[:1].lower()}{words[1:].removesuffix('.')}{hint}"


def _name_of(option: Any) -> str:
    """Return the longest form of an option, or the name of an argument."""
    is_argument = option.param_type_name == "argument"
    return str(option.metavar or option.name) if is_argument else max(option.opts, key=len)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors into messages and exit codes; show tracebacks of user code and bugs only."""
    try:
        yield
    except BaseException as error:  # Python would end with 1, which means that nothing fits
        if isinstance(error, Exception) or is_users(error):
            sys.exit(_show_error(error))
        code = error.code if isinstance(error, SystemExit) else None
        if code == _INTERRUPTED and leads():  # others cannot know
            _print_error("autofit: interrupted before any plan that fits was measured")
        raise


def _show_error(error: BaseException) -> int:
    """Print an error and return its exit code; of several ranks the first one prints."""
    if getattr(error, "said_by_rank_0", False):
        return 3 if is_users(error) else getattr(error, "exit_code", 4)
    if isinstance(error, AutofitError):
        _print_error(f"autofit: {in_shell_words(str(error))}")
        return error.exit_code
    _show_traceback(error)
    return 3 if is_users(error) else 4


def _show_traceback(error: BaseException) -> None:
    """Show a traceback: of the user's code alone, or of a fault of autofit's in full."""
    if not is_users(error):
        _print_error("".join(traceback.format_exception(error)).rstrip())
        return
    tried = tried_when(error) or "loading the workload"
    _print_error(f"autofit: your code raised {type(error).__name__} while {tried}:")
    if isinstance(error.__cause__, WorkerTraceback):
        _print_error(str(error.__cause__.args[0]).strip())
    else:
        _leave_out_callers(error)
        _print_error(traceback_text(error).strip())


def _leave_out_callers(error: BaseException) -> None:
    """Drop the frames above the command's own, which are the command line's."""
    part = error.__traceback__
    while part is not None and part.tb_next is not None:
        if Path(part.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            error.__traceback__ = part.tb_next
        part = part.tb_next
