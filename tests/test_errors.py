"""Errors of users and of ours, and what they hold."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

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
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


@pytest.mark.parametrize("text", ["x" * 2 * 10**6, "x\n" * 10**6])
def test_the_text_of_an_exception_is_cut(text: str) -> None:
    error = raised(RuntimeError(text))
    assert len(traceback_text(error)) < 10**5
    assert "test_errors.py" in traceback_text(error)  # the place where it was raised
    sent = message_of_reply(Reply(exception=error))
    assert len(sent) < 2 * 10**5
    assert str(reply_of(sent).exception).startswith("builtins.RuntimeError: x")
    assert with_type(error).startswith("RuntimeError: x")
    assert max(map(len, (fault_of(error).message, with_type(error), in_one_line(error)))) < 10**4


def test_a_text_that_interrupts_is_described() -> None:
    error = raised(Unspeakable())
    assert "Unspeakable" in fault_of(error).message
    assert type(reply_of(message_of_reply(Reply(exception=error))).exception) is Unspeakable
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
    step, kept = Step(), list[BaseException]()
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
    step = Step()
    with pytest.raises(ValueError, match="step failed") as caught:
        step.fails_while_cleaning_up()
    release_exception(caught.value)
    assert step.alive() == 0
