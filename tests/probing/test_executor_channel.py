"""A channel to an executor that loses answers, or whose owner no longer wants them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from autofit.errors import WorkerFailed
from autofit.probing import executor_channel
from autofit.probing.executor_channel import MOST_COPIES, ExecutorChannel
from autofit.probing.requests import Call, Deadline, NoReply, Reply, ignore_stage
from autofit.probing.wire import message_of_reply
from autofit.training.workload import Workload


def _called(session: Any) -> int:
    return 7


CALL = Call(_called, vram_budget_bytes=2**20)


class _Losing(Executor):
    """An executor that never answers its first requests, and answers the others with 7."""

    def __init__(self, lost: float) -> None:
        self.lost, self.submitted = lost, list[Future[Any]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if len(self.submitted) >= self.lost:
            future.set_result(message_of_reply(Reply(7)))
        self.submitted.append(future)
        return future


def _channel(executor: Executor) -> ExecutorChannel:
    model = torch.nn.Linear(2, 2)
    return ExecutorChannel(executor, Workload(model, torch.ones(4, 2), loss_fn=lambda m, b: m(b)))


def test_a_request_whose_answer_is_lost_is_submitted_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(executor_channel, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(executor_channel, "_SLACK_S", 0.0)
    executor = _Losing(2)
    deadline = Deadline.after(0.1, ends_at=time.monotonic() + 60)
    assert _channel(executor).call(CALL, deadline, ignore_stage).value == 7
    assert [future.cancelled() for future in executor.submitted] == [True, True, False]


def test_an_executor_that_never_answers_is_asked_a_few_times(monkeypatch: Any) -> None:
    monkeypatch.setattr(executor_channel, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(executor_channel, "_SLACK_S", 0.0)
    executor = _Losing(math.inf)
    with pytest.raises(WorkerFailed, match="executor"):
        _channel(executor).call(CALL, Deadline.after(0.01), ignore_stage)
    assert len(executor.submitted) == MOST_COPIES
    assert all(future.cancelled() for future in executor.submitted)


def test_a_late_answer_counts_where_the_request_was_submitted_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(executor_channel, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(executor_channel, "_SLACK_S", 0.0)
    executor = _Losing(math.inf)
    deadline = Deadline.after(1.0, ends_at=time.monotonic() + 60)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(_channel(executor).call, CALL, deadline, ignore_stage)
        while len(executor.submitted) < 2:
            time.sleep(0.01)
        executor.submitted[0].set_result(message_of_reply(Reply(5)))
        assert asked.result().value == 5


def test_a_request_that_another_thread_drops_is_not_submitted_again() -> None:
    executor = _Losing(math.inf)
    channel = _channel(executor)
    deadline = Deadline.after(60, ends_at=time.monotonic() + 5)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(channel.call, CALL, deadline, ignore_stage)
        while not executor.submitted:
            time.sleep(0.01)
        channel.drop()
        with pytest.raises(NoReply):
            asked.result()
    assert len(executor.submitted) == 1
