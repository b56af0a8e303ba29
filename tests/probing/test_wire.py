"""Requests and exceptions cross between processes and come out the same."""

from __future__ import annotations

import errno
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.errors import (
    InvalidArgument,
    WorkloadFailed,
    is_users,
    mark_users,
)
from autofit.measurement import Measurement, Outcome
from autofit.plan import NoFeasiblePlan, Plan, ResolvedPlan
from autofit.probing.requests import Call, ProbeRequest, Reply
from autofit.probing.wire import message_of_reply, message_of_request, reply_of, request_of
from autofit.registry import load_strategies


class Strict(Exception):
    """Wants more than its text, as many classes do, and so cannot be pickled as it is."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Holding(ValueError):
    """Holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.stream = io.StringIO() if text == "fine" else (n for n in range(3))


class Heavy(RuntimeError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.batch = torch.zeros(2**20)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _there_and_back(exception: BaseException, traceback: str | None = "where it was") -> Any:
    sent = message_of_reply(Reply(exception=exception, traceback=traceback))
    return reply_of(sent).exception


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("plain", 3),
        KeyError("missing"),
        OSError(errno.ENOENT, "no such file", "x.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
        torch.OutOfMemoryError("CUDA out of memory"),
        InvalidArgument("not that"),
        SystemExit(3),
    ],
    ids=lambda exception: type(exception).__name__,
)
def test_exceptions_keep_type_arguments_and_text(exception: BaseException) -> None:
    back = _there_and_back(exception)
    assert type(back) is type(exception)
    assert back.args == exception.args
    assert str(back) == str(exception)


def test_what_init_wants_does_not_matter() -> None:
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(Strict(3, "bad sample")))
    back = _there_and_back(Strict(3, "bad sample"))
    assert type(back) is Strict
    assert str(back) == "3: bad sample"
    assert back.code == 3
    refused = NoFeasiblePlan("none", plan=Plan(2), required_bytes=None, allowed_bytes=7)
    assert _there_and_back(refused).plan == Plan(2)


@pytest.mark.parametrize("exception", [Holding("not fine"), Heavy("with a batch")])
def test_what_cannot_travel_stays_behind_and_the_type_does_not(exception: BaseException) -> None:
    assert len(message_of_reply(Reply(exception=exception))) < 2**20
    back = _there_and_back(exception)
    assert type(back) is type(exception)
    assert str(back) == str(exception)


def test_the_workers_traceback_is_the_cause_but_not_of_our_own_errors() -> None:
    assert "where it was" in str(_there_and_back(ValueError("x")).__cause__)
    assert _there_and_back(ValueError("x"), None).__cause__ is None
    assert _there_and_back(InvalidArgument("x")).__cause__ is None


def test_that_an_exception_is_the_users_travels() -> None:
    theirs = ValueError("x")
    mark_users(theirs)
    assert is_users(_there_and_back(theirs))
    assert not is_users(_there_and_back(ValueError("x")))


class OfAFile(Exception):
    """Reads a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return of_file, (self.args[0],)


def of_file(path: Path) -> OfAFile:
    path.read_text()
    return OfAFile(path)


def test_an_unreadable_exception_is_described_in_words(tmp_path: Path) -> None:
    path = tmp_path / "needed"
    path.touch()
    message = message_of_reply(Reply(exception=OfAFile(path)))
    assert type(reply_of(message).exception) is OfAFile
    path.unlink()
    back = reply_of(message).exception
    assert isinstance(back, WorkloadFailed)
    assert f"OfAFile: {path}" in str(back)
    assert type(_there_and_back(Mute())) is Mute


def test_a_class_that_comes_home_is_left_as_it_was() -> None:
    """cloudpickle fills a class that it reads by value, also one that was here first."""

    class Mine(ValueError):
        limit = 3

        def hello(self) -> str:
            return f"hello {self}"

    before = {name: id(value) for name, value in vars(Mine).items()}
    back = _there_and_back(Mine("from afar"))
    assert type(back) is Mine
    assert back.hello() == "hello from afar"
    assert {name: id(value) for name, value in vars(Mine).items()} == before


@pytest.mark.parametrize("detail", ["its file is gone", None])
def test_a_user_error_without_an_exception_is_the_workloads(detail: str | None) -> None:
    error = Reply(Measurement(Outcome.USER_ERROR, detail)).user_exception
    assert isinstance(error, WorkloadFailed)
    assert (detail or "workload") in str(error)


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.USER_ERROR}))
def test_every_other_outcome_is_not_an_error_of_the_users_code(outcome: Outcome) -> None:
    assert Reply(Measurement(outcome), KeyError("x")).user_exception is None


@pytest.mark.parametrize(
    "request_",
    [
        ProbeRequest(ResolvedPlan(Plan(4))),
        ProbeRequest(
            ResolvedPlan(Plan.split(10, 4, {"a.x": 1}), {"a.x": ["layer.0", "layer.1"]}),
            vram_budget_bytes=2**30,
            incumbent_samples_per_second=12.5,
            full_accumulation=True,
            steps=40,
        ),
    ],
)
def test_requests_arrive_as_they_were(request_: ProbeRequest) -> None:
    assert request_of(message_of_request(request_, ()), ()) == request_


@pytest.mark.parametrize("make", [ProbeRequest, lambda resolved: Call(partial(print, resolved), 1)])
def test_strategies_are_those_of_the_receiver(make: Any) -> None:
    (sent,), (received,) = load_strategies(["precision"]), load_strategies(["precision"])
    data = message_of_request(make(ResolvedPlan(Plan(4), strategies=[sent])), [sent])
    arrived: Any = request_of(data, [received])
    resolved = arrived.resolved if make is ProbeRequest else arrived.function.args[0]
    assert resolved.strategies == [received]
    assert resolved.strategies[0] is received is not sent


def test_a_storage_arrives() -> None:
    held = torch.arange(5.0)
    error = LookupError("this storage", held.untyped_storage())
    arrived = _there_and_back(error)
    assert type(arrived) is LookupError
    assert torch.equal(torch.empty(0).set_(arrived.args[1]), held)


@pytest.mark.cuda
def test_tensors_on_a_gpu_arrive_on_the_host() -> None:
    held = torch.ones(3, device="cuda", requires_grad=True)
    error = LookupError("this batch", {"batch": held, "weight": torch.nn.Parameter(held.detach())})
    vars(error)["storage"] = held.untyped_storage()
    arrived = _there_and_back(error)
    assert type(arrived) is LookupError
    assert arrived.args[1]["batch"].tolist() == [1.0, 1.0, 1.0]
    parts = (*arrived.args[1].values(), vars(arrived)["storage"])
    assert {part.device.type for part in parts} == {"cpu"}
