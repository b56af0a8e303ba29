"""Errors of users and of ours, what they hold, and interrupts."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import TracebackType

import pytest
import torch

from autofit.errors import (
    InvalidArgument,
    in_one_line,
    is_users,
    mark_users,
    release_exception,
    traceback_text,
    users_code,
    with_type,
)
from autofit.interrupts import (
    ended_like_interrupted,
    interrupts_deferred,
    interrupts_remembered,
)
from autofit.probing.faults import fault_of
from autofit.probing.requests import Reply
from autofit.probing.wire import message_of_reply, reply_of


class Guarded(Exception):
    """An exception of a user's that lets nobody write to it."""

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{name} cannot be set")


@pytest.mark.parametrize("error", [ValueError("bad"), Guarded("bad"), SystemExit(2)])
def test_what_is_marked_is_the_users(error: BaseException) -> None:
    assert not is_users(error)
    mark_users(error)
    assert is_users(error)
    assert str(error) in ("bad", "2")


def test_what_users_code_raises_is_marked_on_its_way() -> None:
    with pytest.raises(LookupError, match="gone") as caught, users_code():
        raise LookupError("gone")
    assert is_users(caught.value)
    with pytest.raises(InvalidArgument) as refused, users_code():
        raise InvalidArgument("no such thing")
    assert not is_users(refused.value)


class Unspeakable(Exception):
    """An exception of a user's whose text ends the process that asks for it."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_the_text_of_an_exception_is_cut() -> None:
    for text in ("x" * 2 * 10**6, "x\n" * 10**6):
        error = raised(RuntimeError(text))
        shown = traceback_text(error)
        assert len(shown) < 10**5
        assert "test_errors.py" in shown  # the place where it was raised
        sent = message_of_reply(Reply(exception=error))
        assert len(sent) < 2 * 10**5
        assert str(reply_of(sent).exception).startswith("builtins.RuntimeError: x")
        assert len(fault_of(error).message) < 10**4
        assert with_type(error).startswith("RuntimeError: x")
        assert max(len(with_type(error)), len(in_one_line(error))) < 10**4


def test_a_text_that_interrupts_is_described() -> None:
    error = raised(Unspeakable())
    assert "Unspeakable" in fault_of(error).message
    message = message_of_reply(Reply(exception=error))
    assert type(reply_of(message).exception) is Unspeakable
    assert "test_errors.py" in traceback_text(error)


# -- After `release_exception`, nothing that a caught exception held is alive


class Step:
    """A step that fails with a tensor in its frame, and remembers that tensor weakly."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[torch.Tensor]] = []

    def fails(self) -> None:
        activation = torch.ones(8)
        self.held.append(weakref.ref(activation))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def fails_while_cleaning_up(self) -> None:
        output = torch.ones(8)
        self.held.append(weakref.ref(output))
        try:
            self.fails()
        except RuntimeError as error:
            raise ValueError("step failed") from error

    def fails_in_a_group(self) -> None:
        errors: list[Exception] = []
        for attempt in (self.fails, self.fails_while_cleaning_up):
            try:
                attempt()
            except (RuntimeError, ValueError) as error:
                errors.append(error)
        raise ExceptionGroup("both", errors)

    def fails_in_backward(self) -> None:
        weight = torch.ones(8, requires_grad=True)
        activation = weight.exp()
        self.held += [weakref.ref(weight), weakref.ref(activation)]
        hooked = activation.clone()
        torch.autograd.graph.register_multi_grad_hook([hooked], lambda _: self.fails())
        torch.autograd.backward(hooked.sum())

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.held)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """So that what is freed was freed by `release_exception`, not by a lucky collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    "way", ["fails", "fails_while_cleaning_up", "fails_in_a_group", "fails_in_backward"]
)
def test_frees_the_tensors_of_every_frame(way: str) -> None:
    step = Step()
    kept: list[BaseException] = []
    try:
        getattr(step, way)()
    except Exception as error:
        kept.append(error)
    assert step.alive() > 0
    release_exception(kept[0])
    assert step.alive() == 0


@pytest.mark.usefixtures("no_garbage_collection")
def test_frees_the_tensors_of_frames_that_others_hold() -> None:
    """As a debugger does, or a logger that keeps the traceback."""
    step, tracebacks = Step(), list[TracebackType | None]()
    try:
        step.fails_while_cleaning_up()
    except ValueError as error:
        tracebacks.append(error.__traceback__)
        release_exception(error)
    assert step.alive() == 0


# -- Ctrl-C waits for the end of what must be finished, and is then answered


def interrupted_twice(done: list[str]) -> None:
    with interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        done.append("after the first")
        signal.raise_signal(signal.SIGINT)
        done.append("after the second")


def test_is_answered_once_the_body_is_done() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(done)
    assert done == ["after the first", "after the second"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_is_left_alone() -> None:
    came: list[int] = []

    def own(number: int, _: object) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with interrupts_remembered() as interrupts:
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT]


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["default", "ignored"])
def sigterm(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGTERM counts as Ctrl-C, which itself may be ignored, as a shell's "&" leaves it."""
    before = signal.signal(signal.SIGINT, request.param)
    try:
        with ended_like_interrupted():
            yield
        assert signal.getsignal(signal.SIGINT) is request.param
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("sigterm")
def test_sigterm_waits_too() -> None:
    done: list[str] = []

    def finish() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        finish()
    assert done == ["the rest"]


def test_ctrl_c_while_the_command_line_is_imported_ends_it_without_a_traceback() -> None:
    program = """
import runpy, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["doctor"]
runpy.run_module("autofit", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
