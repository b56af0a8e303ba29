"""`autofit` as a call of its entry point in this process."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.main import get_command

from autofit.cli.main import app, main

TEMPORARY = tempfile.gettempdir()
COMMAND = get_command(app)  # else each call builds it anew


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_here(*arguments: str, cwd: Path = Path()) -> Ran:
    """Run a command; the path and the modules that its target came from go as they came."""
    path, modules, out, err = list(sys.path), set(sys.modules), StringIO(), StringIO()
    with (
        patch.object(sys, "argv", ["autofit", *arguments]),
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main(COMMAND)
    for name in set(sys.modules) - modules:
        if not (file := getattr(sys.modules[name], "__file__", None)) or file.startswith(TEMPORARY):
            del sys.modules[name]
    sys.path[:] = path
    return Ran(int(end.value.code or 0), out.getvalue(), err.getvalue())
