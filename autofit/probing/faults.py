"""Classification of the exceptions of a training: out of memory, a limit, a dead device, or a bug.

Exception types and error codes come first and text second, along the whole chain of causes and
contexts and through exception groups. Text counts only in plain RuntimeErrors and in the classes of
torch and Triton. Everything unknown is the user's own error, so a bug is never taken for a lack of
memory. A `Fault` is plain data, so that the exception, and the tensors that its frames hold, can be
released. Imports no torch.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from autofit.devices.base import MemoryReading
from autofit.errors import MESSAGE_BYTES, chain_of, text_of
from autofit.measurement import Measurement, Outcome
from autofit.probing.fault_table import GRAVITY, USER_ROW, Row, row_of
from autofit.torch_private import gone_in
from autofit.units import format_bytes, parse_bytes

_REQUESTED = re.compile(r"Tried to allocate ([\d.]*[1-9][\d.]* (?:[KMG]i)?B)")
_WITH_KNOWN_TEXT = frozenset({"torch", "triton"})


@dataclass(frozen=True)
class Fault:
    """An exception as plain data.

    Attributes:
        outcome: what it means for the probe.
        kind: the row of the catalogue that decided, such as "caching allocator".
        type_names: qualified names of the deciding exception's classes, the exception's own first.
        message: its text, cut to 4 kB.
        otherwise: the outcome where device memory was not short; None: the same. Some
            messages (cuBLAS, cuDNN, graph capture) mean a lack of memory only where it was.
        kills_context: the worker must be replaced, whatever a health check says.
        is_consequence: see `Row.is_consequence`.
    """

    outcome: Outcome
    kind: str
    type_names: tuple[str, ...]
    message: str
    otherwise: Outcome | None = None
    kills_context: bool = False
    is_consequence: bool = False

    @property
    def detail(self) -> str:
        """One line for a report: the kind, then the type and first line of the exception."""
        line = f"{self.type_names[0]}: {_first_line(self.message)}".rstrip(": ")
        return f"{self.kind} ({line})"

    def outcome_where(self, *, memory_was_short: bool) -> Outcome:
        """Return the outcome, given whether device memory was short at the time."""
        return self.outcome if memory_was_short else self.otherwise or self.outcome

    @property
    def requested_bytes(self) -> int | None:
        """Size of the allocation that failed; None where the message does not contain it."""
        found = _REQUESTED.search(self.message)
        return parse_bytes(found[1]) if found else None


def fault_of(exception: BaseException) -> Fault:
    """Return an exception as plain data; the gravest exception of its chain decides."""
    links = list(chain_of(exception))
    rows = [_row_of(link) for link in links]
    # Ctrl-C and sys.exit are not the plan's, even amid a fault
    if not isinstance(exception, (Exception, BaseExceptionGroup)):
        rows = [USER_ROW] * len(links)
    decisive = min(range(len(links)), key=lambda place: GRAVITY.index(rows[place].outcome))
    link, row = links[decisive], rows[decisive]
    return Fault(
        outcome=row.outcome,
        kind=row.name,
        type_names=_type_names(link),
        message=_cut(gone_in(link) or text_of(link)),
        otherwise=row.otherwise,
        kills_context=any(row.kills_context for row in rows),
        is_consequence=row.is_consequence,
    )


def _row_of(link: BaseException) -> Row:
    if isinstance(link, OSError) and link.errno == errno.ENOMEM:
        return row_of(("MemoryError",), None, None)
    if gone_in(link) is not None:
        return row_of(("autofit.errors.Unsupported",), None, None)
    cls = type(link)
    has_known_text = str(cls.__module__).partition(".")[0] in _WITH_KNOWN_TEXT
    text = text_of(link) if cls is RuntimeError or has_known_text else None
    return row_of(_type_names(link), _error_code(link), text)


def _type_names(link: BaseException) -> tuple[str, ...]:
    classes = type(link).__mro__[:-1]
    return tuple(
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        for cls in classes
    )


def _error_code(link: BaseException) -> int | None:
    """Return the error code of torch's own exceptions: a user's class may reuse the name."""
    if "torch.AcceleratorError" not in _type_names(link):
        return None
    code = getattr(link, "error_code", None)
    return code if isinstance(code, int) else None


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 300 else line[:299] + "…"


def _cut(text: str) -> str:
    return text.encode(errors="replace")[:MESSAGE_BYTES].decode(errors="ignore")


# Whether the readings of the device's memory bear an outcome out.
#
# An out-of-memory error that live tensors and the request do not add up to may be bad luck of the
# allocator (a block whose release on another stream is pending, a fragmented cache), so the probe
# is repeated once; where other processes hold memory that the budget allows, the plan's size is not
# to blame. A run that held more than the device had left has spilled to host memory and does not
# fit. One that went over the budget by the libraries it loaded is repeated, with the allocator's
# cap lowered by their size. Errors of libraries mean a lack of memory only where memory was short.

# From this share of what the process can have, memory counts as short.
SHORT = 0.9
CONTENDED_BYTES = 64 * 2**20
# Other processes' use has moved if it changed by more than both this much and this share.
CONTENDED_SHARE = 0.01


def memory_was_short(
    before: MemoryReading, after: MemoryReading, *, vram_budget_bytes: int, available_bytes: int
) -> bool:
    """Return whether a probe came near the end of memory.

    Args:
        before: at its start.
        after: at its end, with the peaks since its start.
        vram_budget_bytes: what the process was allowed.
        available_bytes: the device's memory less what other processes hold.
    """
    held = after.peak_held_bytes
    flushed = after.allocator_retries > before.allocator_retries
    return flushed or held >= SHORT * min(vram_budget_bytes, available_bytes)


def is_explained(fault: Fault, after: MemoryReading, *, vram_budget_bytes: int) -> bool:
    """Return whether live bytes and the failed request together exceed the budget."""
    if fault.requested_bytes is None:
        return False
    needed = after.peak_allocated_bytes + fault.requested_bytes + after.non_torch_bytes
    return needed > vram_budget_bytes


def spilled(held_bytes: int, available_bytes: int) -> str | None:
    """Return in words that the process held more than the device had left.

    None if it did not.
    """
    if held_bytes <= available_bytes:
        return None
    return (
        f"held {format_bytes(held_bytes)}, but other processes left "
        f"{format_bytes(available_bytes)} of the device: the rest spilled to host memory"
    )


def only_libraries_went_over(
    measurement: Measurement, before: MemoryReading, vram_budget_bytes: int
) -> bool:
    """Return whether a probe stayed within the allocator's cap, and loaded libraries besides.

    The cap leaves room for the non-torch bytes at the moment it is set. Kernels and handles are
    loaded when they are first used, so the cap of a process's first probe is too loose.
    """
    if measurement.outcome is not Outcome.OVER_BUDGET or measurement.peak_reserved_bytes is None:
        return False
    return measurement.peak_reserved_bytes + before.non_torch_bytes <= vram_budget_bytes


def has_moved(foreign_before: int | None, foreign_after: int | None, *, total_bytes: int) -> bool:
    """Return whether other processes' use changed during a probe; False if it is unknown."""
    if foreign_before is None or foreign_after is None:
        return False
    least = max(CONTENDED_BYTES, CONTENDED_SHARE * total_bytes)
    return abs(foreign_after - foreign_before) > least
