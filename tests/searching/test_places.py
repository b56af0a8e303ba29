"""Searches whose plans run on several devices, or in the processes of an executor."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from autofit.devices.request import device_names
from autofit.errors import InvalidArgument, SearchTimedOut, WorkerFailed
from autofit.probing.requests import Reply
from autofit.probing.wire import message_of_reply

LIMITS: dict[str, Any] = {"vram_budget": "64MiB", "strategies": ["checkpointing"], "seed": 0}


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Fall short of the processor, so that devices do not slow one another down."""
    time.sleep(0.02)
    output: torch.Tensor = model(batch)
    return output.square().mean()


def searched(**given: Any) -> autofit.Report:
    return autofit.search(build, torch.randn(4, 32), loss_fn=loss, **(LIMITS | given))


def numbers(report: autofit.Report) -> list[int]:
    return [trial.number for trial in report.trials]


@pytest.mark.slow
def test_two_devices_run_plans_of_one_search(tmp_path: Path) -> None:
    """Both run some, the plans of a moment differ, and every number is used once."""
    study = tmp_path / "study.log"
    report = searched(device=["cpu", "cpu"], max_probes=8, study=study)
    assert report.best.ok
    assert report.best in report.trials
    assert numbers(report) == sorted(set(numbers(report)))
    searched_plans = [t.plan for t in report.trials if t.kind is autofit.TrialKind.SEARCH]
    assert len(report.trials) <= 8
    assert len(set(searched_plans)) >= len(searched_plans) - 2  # repeats tell noise
    again = searched(device="cpu", max_probes=8, study=study)
    assert [t.plan for t in again.trials] == [t.plan for t in report.trials]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": ["cuda:0", "cuda:0"]}, "cuda:0 twice"),
        ({"device": ["cuda", "cuda:1"]}, "numbered"),
        ({"device": "cpu,cuda:0"}, "numbered"),
        ({"device": []}, "device is empty"),
        ({"device": ["cpu", "tpu"]}, "tpu"),
        (
            {
                "device": ["cuda:0", "cuda:1"],
                "options": autofit.SearchOptions(executor=ThreadPoolExecutor()),
            },
            "names 2 devices",
        ),
    ],
)
def test_devices_that_cannot_be_meant_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        searched(**given)


def test_names_divided_by_commas_are_several() -> None:
    assert device_names("cuda:0,cuda:1") == ["cuda:0", "cuda:1"]
    assert device_names(torch.device("cpu")) == ["cpu"]
    assert device_names(None) == [None]


class _Losing(Executor):
    """An executor that loses the process of its n-th calls, as a cluster loses a machine."""

    def __init__(self, inner: Executor, lost: set[int]) -> None:
        self.inner, self.lost, self.calls = inner, lost, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls in self.lost:
            return self.inner.submit(_lost)
        return self.inner.submit(fn, *args, **kwargs)


class MachineGone(Exception):
    """What a cluster's executor raises of its own."""


def _lost() -> None:
    raise MachineGone("the machine was switched off")


@pytest.mark.slow
def test_a_probe_whose_machine_went_away_is_given_to_another() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        executor = _Losing(pool, {6, 9})
        options = autofit.SearchOptions(executor=executor)
        report = searched(device="cpu", max_probes=5, options=options)
    assert executor.calls > 9
    assert all(trial.ok for trial in report.trials)
    assert numbers(report) == list(range(len(report.trials)))


class _Answering(Executor):
    """An executor that runs nothing: it raises, or gives an answer of its own, or none."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self.answer, Exception):
            raise self.answer
        if isinstance(self.answer, BaseException):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("an answer", "str.*distributed"),
        ({"reply": "x"}, "dict.*distributed"),
        (pickle.dumps(7), r"x80.*distributed"),
        (message_of_reply(Reply("no device")), "no device.*distributed"),
        (b"bytes", "bytes.*distributed"),
        (KeyError("full"), "full"),
        (KeyboardInterrupt("there"), "lost twice.*KeyboardInterrupt"),
        (SystemExit(0), "lost twice.*SystemExit"),
    ],
)
def test_an_executor_that_runs_nothing_is_named(answer: Any, words: str) -> None:
    with pytest.raises(WorkerFailed, match=words):
        searched(device="cpu", options=autofit.SearchOptions(executor=_Answering(answer)))


@pytest.mark.slow
def test_an_executor_that_never_answers_is_ended_by_the_timeout() -> None:
    with pytest.raises(SearchTimedOut):
        searched(device="cpu", timeout=1, options=autofit.SearchOptions(executor=_Answering()))


@pytest.mark.slow
def test_ctrl_c_while_two_plans_run_returns_what_was_measured() -> None:
    def interrupt_soon(event: Any) -> None:
        if event.progress.probes >= 3 and not timer.ident:
            timer.start()

    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    report = searched(device=["cpu", "cpu"], max_probes=12, progress=interrupt_soon)
    assert len(report.trials) >= 3
    assert "interrupted" in report.record.search.stopped_because.lower()
