"""Which lines of the CUDA code run under the tests on an emulated GPU, in killed workers, too.

Tools that measure coverage write when a process ends, and workers are ended by a signal. Here a
process notes each line in a file when it first comes there.

    emulated-gpu run -- python -m benchmarks.emulated_coverage -- \
        -n 1 -m "cuda or emulated"

What follows `--` are arguments of pytest. Lines are those that Python's compiler has code for.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[1]
FILES = ("autofit/devices/cuda.py", "autofit/devices/nvml.py", "autofit/probing/*.py")
_HOOK = """
import os, sys, threading

FILES, NOTES = {files!r}, {notes!r}
seen = set()

def note(frame, event, argument):
    place = frame.f_code.co_filename, frame.f_lineno
    if event == "line" and place not in seen:
        seen.add(place)
        file = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, "{{}}:{{}}\\n".format(*place).encode())
        os.close(file)
    return note

def begin(frame, event, argument):
    return note if frame.f_code.co_filename in FILES else None

threading.settrace(begin)
sys.settrace(begin)
"""


def lines_of(path: Path) -> set[int]:
    """Return the lines of a file that there is code for."""

    def codes(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from codes(constant)

    whole = compile(path.read_text(), str(path), "exec")
    return {
        line for code in codes(whole) for _, _, line in code.co_lines() if line
    } - docstrings_of(path)


def docstrings_of(path: Path) -> set[int]:
    """Return the lines where a bare string begins: they have code at the top of a module alone."""
    return {
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def ranges(lines: Sequence[int]) -> str:
    """Return sorted numbers as "3, 5-7"."""
    parts: list[list[int]] = []
    for line in lines:
        if parts and line == parts[-1][-1] + 1:
            parts[-1][1:] = [line]
        else:
            parts.append([line])
    return ", ".join("-".join(map(str, part)) for part in parts)


def table(files: Sequence[Path], ran: set[tuple[str, int]]) -> Iterator[str]:
    """Yield the lines of each file, how many ran, and which did not."""
    yield "| file | lines | ran | not |"
    yield "|---|---:|---:|---|"
    for file in files:
        lines = lines_of(file)
        missing = sorted(line for line in lines if (str(file), line) not in ran)
        share = 1 - len(missing) / len(lines) if lines else 1.0
        yield f"| {file.relative_to(ROOT)} | {len(lines)} | {share:.1%} | {ranges(missing)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arguments", nargs="*", help="of pytest, after --")
    given = parser.parse_args().arguments
    files = sorted(path for pattern in FILES for path in ROOT.glob(pattern))
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        notes.touch()
        hook = _HOOK.format(files={str(path) for path in files}, notes=str(notes))
        Path(folder, "sitecustomize.py").write_text(hook)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *given], env=os.environ | {"PYTHONPATH": path}
        )
        places = (line.rpartition(":") for line in notes.read_text().splitlines())
        reached = {(name, int(number)) for name, _, number in places}
    print("\n".join(table(files, reached)))
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
