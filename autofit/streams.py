"""Standard streams that may be closed, full or without a reader: who writes to them goes on.

An exit code and a file say the essential; text that nobody can take is dropped.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


class LossyStream(io.TextIOBase):
    """A text stream that drops what another one does not take.

    Args:
        stream: takes the text; None, as `sys.stderr` may be: nothing does.

    Attributes:
        error: the last for which text was dropped; None: there was none.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream: Any = stream._stream if isinstance(stream, LossyStream) else stream
        self.error: OSError | ValueError | None = None

    def write(self, text: str, /) -> int:
        """Write text as far as the stream takes it; return the length of the text.

        A character that its encoding lacks is written as an escape.
        """
        with self._errors_kept():
            if self._stream is not None:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    known = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
                    self._stream.write(known)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written, as far as the stream takes it."""
        with self._errors_kept():
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        try:
            return bool(self._stream.isatty())
        except (AttributeError, OSError, ValueError):  # there is none, or it is closed
            return False

    def fileno(self) -> int:
        """Return the stream's descriptor.

        Raises:
            UnsupportedOperation: there is no stream.
        """
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return int(self._stream.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute there
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # likewise
        """What the stream does with characters that its encoding lacks."""
        return getattr(self._stream, "errors", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _errors_kept(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self.error = error
            if isinstance(error, OSError):
                _empty(self._stream)


def _empty(stream: IO[str]) -> None:
    """Drop what a stream holds back: as Python ends, it would fail again and exit with 120."""
    try:
        descriptor = stream.fileno()
        kept = os.dup(descriptor)
    except (AttributeError, OSError, ValueError):  # there is no descriptor below it
        return
    is_inheritable = os.get_inheritable(descriptor)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), descriptor, is_inheritable)
        stream.flush()
    except (OSError, ValueError):
        pass  # what it holds back stays there
    finally:
        os.dup2(kept, descriptor, is_inheritable)
        os.close(kept)


def complain(text: str) -> None:
    """Write lines to standard error."""
    print(text, file=LossyStream(sys.stderr), flush=True)


@contextmanager
def lossy_standard_streams() -> Iterator[None]:
    """Have a program go on where a standard stream is closed or does not take what is written.

    A closed descriptor becomes the null device's: else the next file that is opened would get its
    number, and what libraries print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
                os.set_inheritable(descriptor, True)
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = sys.stdin or _null("r")
    sys.stdout = out = LossyStream(sys.stdout or _null("w"))
    sys.stderr = errors = LossyStream(sys.stderr or _null("w"))
    try:
        yield
    finally:
        out.flush()
        errors.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def _null(mode: str) -> IO[str]:
    return open(os.devnull, mode, encoding="utf-8")  # open as long as it runs
