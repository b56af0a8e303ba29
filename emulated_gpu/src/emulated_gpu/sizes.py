"""Sizes of memory as text: "24GiB", "24GB", "512M"."""

from __future__ import annotations

import re

from emulated_gpu.errors import InvalidArgument

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_BINARY = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?b|)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of "24GiB" (2^30), "24GB" (10^9), "24G" (2^30, as docker has it) or "1024".

    Raises:
        InvalidArgument: the text is not a size, or not above zero.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidArgument(
            f"cannot read {text!r} as a size: write it like 24GiB, 512MiB or 80GB"
        )
    number, prefix, form = match.groups()
    scale = (_DECIMAL if form.lower() == "b" else _BINARY)[prefix.lower()]
    size = int(float(number) * scale)
    if size <= 0:
        raise InvalidArgument(f"a size must be above zero, got {text!r}")
    return size


def size_text(size: int) -> str:
    """Return bytes as text: 25769803776 -> "24 GiB"."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} bytes"
