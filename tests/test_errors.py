"""Whose fault an exception is: noted where it is known, and asked for with one function."""

from __future__ import annotations

import pytest

from autofit.errors import InvalidRequest, is_users, mark_users, users_code


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


def test_our_own_errors_stay_ours() -> None:
    error = InvalidRequest("no such thing")
    mark_users(error)
    assert not is_users(error)


def test_what_users_code_raises_is_marked_on_its_way() -> None:
    with pytest.raises(LookupError, match="gone") as caught, users_code():
        raise LookupError("gone")
    assert is_users(caught.value)
    with pytest.raises(InvalidRequest) as refused, users_code():
        raise InvalidRequest("no such thing")
    assert not is_users(refused.value)
