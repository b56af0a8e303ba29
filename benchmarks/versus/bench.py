"""Processes of the comparison: a tool searches, the judge trains by its answer."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TURNS = 5
"""Turns of each process of a pair. More would not tell more: a process stays faster or slower than
its like for as long as it lives, so a pair counts once."""

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Bench:
    """Where one task's processes run, and how long they may take.

    Attributes:
        task: fields of a `benchmarks.versus.task.Task`.
        folder: theirs.
        steps, timed_steps: that the judge trains to see an answer live, and to time a turn of it.
        limit_s: a tool that takes longer is ended, with the processes that it started.
    """

    task: dict[str, Any]
    folder: Path
    steps: int = 200
    timed_steps: int = 20
    limit_s: float = 900.0

    def found(self, name: str) -> tuple[dict[str, Any], int]:
        """Let a tool search; return what it found, and how often it ran out of memory."""
        own = self.folder / name.replace("/", " ")
        own.mkdir()
        log, variables = own / "log.jsonl", {"VERSUS_LOG": str(own / "log.jsonl")}
        try:
            with self._running("run_peer", name, self._file(self.task), own, **variables) as ran:
                ran.communicate(timeout=self.limit_s)
            told = json.loads((own / "found.json").read_text())
        except (OSError, subprocess.TimeoutExpired) as error:
            told = {"error": f"{type(error).__name__}: {str(error)[:100]}"}
        return told, len(log.read_text().splitlines()) if log.exists() else 0

    def verdict(self, answer: Answer) -> dict[str, Any]:
        """Train by an answer under the budget; return whether it lives, and what it held."""
        files = self._file(self.task), self._file(answer)
        with self._running("judge", "survive", *files, self.steps) as process:
            told, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the judge failed:\n{self._errors()}")
        found: dict[str, Any] = json.loads(told.splitlines()[-1])
        return found

    def pair(self, one: Answer, other: Answer, **variables: str) -> tuple[float, float]:
        """Return samples per second of two answers that train in turns, in two processes."""
        with ExitStack() as stack:
            first, second = (
                stack.enter_context(self.training(answer, **variables)) for answer in (one, other)
            )
            turns = [(first(), second()) for _ in range(TURNS)]
        ours, others = zip(*turns, strict=True)
        return statistics.median(ours), statistics.median(others)

    @contextmanager
    def training(self, answer: Answer, **variables: str) -> Iterator[Callable[[], float]]:
        """Let a process train by an answer in turns; each returns samples per second of one.

        It trains as the tool's user would: by `Report.apply`, or in a plain loop.
        """
        arguments = ("speed", self._file(self.task), self._file(answer), self.timed_steps)
        with self._running("judge", *arguments, **variables) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            asked, told = process.stdin, process.stdout

            def turn() -> float:
                asked.write("\n")
                asked.flush()
                if not (line := told.readline()):
                    raise RuntimeError(self._errors())
                return float(line)

            turn()  # builds and warms up first
            yield turn

    @contextmanager
    def _running(
        self, module: str, *arguments: object, **variables: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a module of this folder; at the end, end its process and those that it started."""
        with (
            (self.folder / "stderr.txt").open("a") as errors,
            subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.versus.{module}", *map(str, arguments)],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # so that all that it starts can be ended
            ) as process,
        ):
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _file(self, told: Mapping[str, Any]) -> Path:
        """Return a new file with something as JSON."""
        path = self.folder / f"given-{len(list(self.folder.glob('given-*')))}.json"
        path.write_text(json.dumps(told))
        return path

    def _errors(self) -> str:
        return (self.folder / "stderr.txt").read_text()[-500:]
