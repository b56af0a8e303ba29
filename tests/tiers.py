"""The tiers of tests: `unit` starts no interpreter, `process` does, others are marked by hand.

A test belongs to `process` if its code, or that of a fixture or helper of the tests that it names,
names something that starts one. A unit test that starts one all the same fails. To import another
library's trainer takes as long as a process, so tests that do belong to `process` too.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import CodeType, FunctionType
from typing import Any

import pytest

import autofit
from autofit.checks.doctor import diagnose
from autofit.cli.main import app, main
from autofit.prediction.predict import predict
from autofit.probing.probe import probe_if
from autofit.probing.prober import open_prober
from autofit.probing.rank_channel import RankChannel
from autofit.probing.worker_channel import WorkerChannel, WorkerProcess

OTHERS = ("slow", "cuda", "emulated", "browser")
PUBLIC = {
    "search",
    "find_batch_size",
    "checkpoint_to_budget",
    "probe",
    "soak",
    "predict",
    "check",
}
"""Functions of autofit, and of its integrations, that run the user's training in a worker."""
IMPORT_TRAINERS = {
    "test_accelerate.py",
    "test_hugging_face.py",
    "test_lightning.py",
    "test_pairs.py",
    "test_quantised.py",
    "test_transformers.py",
}
"""Files that import another library's trainer or layers before their first test."""
STARTERS: tuple[Any, ...] = (
    *(getattr(autofit, name) for name in PUBLIC),
    predict,
    probe_if,
    app,
    diagnose,
    main,
    open_prober,
    multiprocessing,
    subprocess,
    ProcessPoolExecutor,
    RankChannel,
    WorkerChannel,
    WorkerProcess,
)


def tier_of(item: pytest.Item) -> str | None:
    """Return "unit" or "process"; None: markers say what it is."""
    if any(item.get_closest_marker(name) for name in OTHERS) or not isinstance(
        item, pytest.Function
    ):
        return None
    if item.path.name in IMPORT_TRAINERS:
        return "process"
    fixtures = [each[-1].func for each in item._fixtureinfo.name2fixturedefs.values()]
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    functions = (item.function, *fixtures, *filter(inspect.isfunction, given))
    return "process" if any(map(_starts_one, functions)) else "unit"


@functools.cache
def _starts_one(function: Callable[..., Any]) -> bool:
    """Whether a function names a starter, or a function of the tests that does."""
    todo, seen = [function], set()
    while todo:
        its = inspect.unwrap(todo.pop())
        if not isinstance(its, FunctionType) or its in seen:
            continue
        seen.add(its)
        names = set(_names(its.__code__))
        for value in (its.__globals__[name] for name in names & its.__globals__.keys()):
            if any(value is each for each in STARTERS):
                return True
            if isinstance(value, dict):
                todo += filter(inspect.isfunction, value.values())
            if value is pytest and "importorskip" in names:
                return True
            if inspect.ismodule(value) and value.__name__.startswith("autofit") and names & PUBLIC:
                return True
            if str(getattr(value, "__module__", "")).split(".")[0] == "tests":
                todo += vars(value).values() if isinstance(value, type) else [value]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)


class _Watch:
    """Raises where a process of Python starts while a unit test runs."""

    def __init__(self) -> None:
        self.watching = False
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching and event == "subprocess.Popen" and arguments[0] == sys.executable:
            raise AssertionError("a unit test starts a process: name what does in tests/tiers.py")


@functools.cache
def watch() -> _Watch:
    """Return the only one: a hook stays for as long as the process."""
    return _Watch()
