"""Bytes, seconds, rates and counts as text and back: the only place that formats or parses them.

GiB means 2**30 bytes throughout; decimal units (GB = 10**9) are read, never written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from autofit.errors import InvalidArgument

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
# What torch's CUDA allocator takes for requests from 1 to 10 MiB
LARGE_SEGMENT_BYTES = 20 * MIB

MAX_BYTES = 2**60  # no device has as much
_BINARY = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(
    r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<prefix>[kmgt]?)(?P<form>i?b|)\s*", re.IGNORECASE
)


def parse_bytes(text: str) -> int:
    """Read a size such as "24GiB", "512 MiB", "80GB" or "1000000" as bytes.

    "24G" is 24 GiB, as SLURM and docker mean it; "24GB" is decimal.

    Raises:
        InvalidArgument: the text is not a size, or not above zero.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidArgument(
            f"cannot read {text!r} as a size; use a form such as 24GiB, 512MiB or 80GB"
        )
    prefix = match["prefix"].lower()
    table = _DECIMAL if match["form"].lower() == "b" else _BINARY
    read = float(match["number"]) * (table[prefix] if prefix else 1)
    if read >= MAX_BYTES:
        raise InvalidArgument(f"no device has as much memory as {text[:40]!r}")
    size = int(read)
    if size <= 0:
        raise InvalidArgument(f"a size must be positive, got {text!r}")
    return size


def check_size(size: int, written: object) -> int:
    """Return the size in bytes if it is plausible as device memory.

    Args:
        size: in bytes.
        written: the size as the user wrote it, for the message.

    Raises:
        InvalidArgument: it is below 1 MiB, or larger than any device.
    """
    if size >= MAX_BYTES:
        raise InvalidArgument(f"no device has as much memory as {str(written)[:40]} bytes")
    if size >= MIB:
        return size
    is_bare = re.fullmatch(r"[1-9]\d{0,2}", str(written).strip())
    meant = f"did you mean '{written}GiB'?" if is_bare else "write at least 1MiB, such as '24GiB'"
    raise InvalidArgument(f"{written!r} is {size} bytes: {meant}")


def format_bytes(size: float | None) -> str:
    """Format a size in bytes: 1610612736 -> "1.50 GiB"; None (unknown) -> "?"."""
    if size is None:
        return "?"
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= unit * (1 - 1 / 2048):  # else the unit below would show 1024
            return f"{size / unit:.{_decimals(size / unit)}f} {name}"
    return f"{size:.0f} B"


def round_up_shown(size: float) -> int:
    """Round a size in bytes up to one that `format_bytes` shows exactly."""
    unit = next((unit for unit in (TIB, GIB, MIB, KIB) if size >= unit), 1)
    grain = unit / 10 ** _decimals(size / unit) if unit > 1 else 1
    return math.ceil(math.ceil(size / grain) * grain)


def format_seconds(seconds: float | None, spread: float = 0.0) -> str:
    """Format a duration: 0.0123 -> "12.3 ms"; 95 -> "1 min 35 s"; None -> "?".

    Args:
        seconds: the duration.
        spread: how far it is uncertain to either side, in seconds; see `rounded`.
    """
    if seconds is None:
        return "?"
    if seconds >= 59.95:  # else it would show 60.0 s
        minutes, rest = divmod(round(seconds), 60)
        return (
            f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
        )
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale * 0.9995:  # else the unit below would show 1000
            return f"{rounded(seconds / scale, spread / scale)} {name}"
    return f"{seconds:.1g} s"


def format_clock(seconds: float) -> str:
    """Format like a clock, rounded down: 97.3 -> "1:37"; 3725 -> "1:02:05"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_rate(samples_per_second: float | None, spread: float = 0.0) -> str:
    """Format a rate: 1234.5 -> "1234 samples/s"; 0.52 -> "0.52 samples/s"; None -> "?".

    Args:
        samples_per_second: the rate.
        spread: how far it is uncertain to either side, in samples/s; see `rounded`.
    """
    if samples_per_second is None:
        return "?"
    return f"{rounded(samples_per_second, spread)} samples/s"


def format_flops(flops_per_second: float, spread: float = 0.0) -> str:
    """Format floating-point operations a second: 4.01e14 -> "401 TFLOP/s".

    Args:
        flops_per_second: the rate.
        spread: how far it is uncertain to either side; see `rounded`.
    """
    scale, name = next(
        (each for each in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if flops_per_second >= each[0]),
        (1.0, ""),
    )
    return f"{rounded(flops_per_second / scale, spread / scale)} {name}FLOP/s"


def rounded(value: float, spread: float = 0.0, decimals: int | None = None) -> str:
    """Format a number with no digit beyond the first one that its spread leaves uncertain.

    (168.34, 4.9) -> "168"; (1234.5, 60) -> "1230"; (2.113, 0.2) -> "2.1".

    Args:
        value: the number.
        spread: how far it is uncertain to either side, in the same unit; 0: unknown.
        decimals: the most to show; None: those of three significant digits.
    """
    shown = _decimals(value) if decimals is None else decimals
    if spread > 0:
        shown = min(shown, -math.floor(math.log10(spread)))
    return f"{round(value, shown):.{max(shown, 0)}f}"


def memory_words(kind: str) -> str:
    """Return the name of a kind of memory: "optimizer_state" -> "optimizer state"."""
    return "non-torch" if kind == "non_torch" else kind.replace("_", " ")


def quoted(names: Iterable[str], most: int = 3) -> str:
    """Return the first names in quotes, and how many more: "'0', 'head' and 2 more".

    In quotes, since modules of an `nn.Sequential` are named by numbers.
    """
    return shortened([repr(name) if name else "the model itself" for name in names], most)


def shortened(words: Sequence[str], most: int) -> str:
    """Return the first words, and how many more: "a, b and 2 more"."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def counted(count: int, noun: str) -> str:
    """Format a count of things: "1 probe", "2 probes", "2 micro-batches"."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"


def kind_of(value: object) -> str:
    """Return the type of a value with its article: "an int", "a Tensor"; "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _decimals(value: float) -> int:
    """Return the number of decimals that shows two or three significant digits."""
    magnitude = abs(value)
    if 0 < magnitude < 0.1:
        return 1 - math.floor(math.log10(magnitude))
    return 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2
