"""Whose fault an exception is: noted where it is known, and asked for with one function."""

from __future__ import annotations

import pytest

from autofit.errors import (
    InvalidArgument,
    in_one_line,
    is_users,
    mark_users,
    traceback_text,
    users_code,
    with_type,
)
from autofit.probing.faults import fault_of
from autofit.probing.messages import Reply, message_of_reply, reply_of


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
        assert len(sent["reply"]) < 2 * 10**5
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
