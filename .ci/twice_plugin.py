"""A plugin of pytest for `twice`: writes down which tests failed, and how things stood then."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from twice import HERE, NOTES, options_of_pytest


def _taken() -> Path | None:
    """Return the file for notes, and hide this plugin from the pytest that tests start."""
    notes = os.environ.pop(NOTES, None)
    if notes is None:
        return None
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in folders if each != HERE)
    options = os.environ["PYTEST_ADDOPTS"].replace(options_of_pytest(Path(notes)), "")
    os.environ["PYTEST_ADDOPTS"] = options.strip()
    return Path(notes)


_notes = _taken()


class Notes:
    """What failed and what passed, as the process hears it that starts the tests."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.failed: dict[str, str] = {}
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            circumstances = getattr(report, "circumstances", None) or _circumstances()
            self.failed[report.nodeid] = f"{circumstances}: {_error(report)}"
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = sorted(self.passed - self.failed.keys())
        self.file.write_text(json.dumps({"failed": self.failed, "passed": passed}))


def pytest_configure(config: pytest.Config) -> None:
    if _notes is not None:  # a worker of pytest-xdist is told no file, and only adds to its reports
        config.pluginmanager.register(Notes(_notes))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, pytest.TestReport]:
    """Add to a failure how things stood in the process that ran the test."""
    report = yield
    if report.failed:
        report.circumstances = _circumstances()
    return report  # type: ignore[no-any-return]


def _circumstances() -> str:
    seeds = [f"PYTHONHASHSEED={os.environ.get('PYTHONHASHSEED', 'random')}"]
    if "torch" in sys.modules:
        seeds.append(f"torch.initial_seed() {sys.modules['torch'].initial_seed()}")
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {', '.join(seeds)}"


def _error(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return (text.strip().splitlines() or ["no message"])[0][:200]
