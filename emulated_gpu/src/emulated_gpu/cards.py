"""Emulated cards: what a process on one is told of its GPU, and those that are known by name.

The memory of a known card is the least total capacity found in public out-of-memory messages; where
none was found, the nominal size less the share that its generation loses. Drivers and error
correction change it by a percent and more: where that matters, give bytes. Compute capability and
multiprocessors are from NVIDIA's data sheets and CUDA programming guide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from emulated_gpu.errors import InvalidArgument
from emulated_gpu.sizes import GIB, MIB, parse_size, size_text

MAX_CARDS = 8
CONTEXT_BYTES = 620 * MIB
"""Of a process that has multiplied matrices, as measured on an H200 (torch 2.11, driver 580)."""
_MEASURED_CONTEXT_BYTES = {"H100": 758 * MIB}
"""Measured likewise: 752 to 764 MiB, the most with cuDNN."""
CUBLAS_BYTES = 66 * MIB
"""Of these, what arrives with the first cuBLAS handle (`sources/driver/cublas.cpp`)."""


@dataclass(frozen=True)
class Card:
    """One emulated GPU.

    Attributes:
        name: as the driver gives it.
        total_bytes: its memory.
        capability: (major, minor) compute capability.
        multiprocessors: their number.
        context_bytes: what a process holds outside the allocator once it has multiplied matrices.
        held_by_others_bytes: what processes outside the emulated machine hold on it.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    context_bytes: int = CONTEXT_BYTES
    held_by_others_bytes: int = 0

    def __post_init__(self) -> None:
        if any(mark in self.name for mark in ",;="):
            raise InvalidArgument(f'the name of a card holds no ",", ";" or "=", got {self.name!r}')
        if self.total_bytes <= self.context_bytes:
            raise InvalidArgument(
                f"{self.name} has {size_text(self.total_bytes)}, which is less than its context: "
                f"give more than {size_text(self.context_bytes)}"
            )
        if self.held_by_others_bytes < 0:
            raise InvalidArgument(f"others hold 0 bytes or more, got {self.held_by_others_bytes}")

    @property
    def setting(self) -> str:
        """The card as `sources/driver/settings.cpp` reads it."""
        major, minor = self.capability
        return (
            f"name={self.name},total={self.total_bytes},"
            f"context={max(0, self.context_bytes - CUBLAS_BYTES)},capability={major}.{minor},"
            f"multiprocessors={self.multiprocessors},others={self.held_by_others_bytes}"
        )


_TABLE = [  # name, GiB, compute capability, multiprocessors
    ("P100-16GB", 15.9, (6, 0), 56),
    ("V100-16GB", 15.77, (7, 0), 80),
    ("V100-32GB", 31.73, (7, 0), 80),
    ("T4", 14.56, (7, 5), 40),
    ("RTX 2060", 5.79, (7, 5), 30),
    ("RTX 2070", 7.79, (7, 5), 36),
    ("RTX 2080", 7.79, (7, 5), 46),
    ("RTX 2080 Ti", 10.75, (7, 5), 68),
    ("A100-40GB", 39.39, (8, 0), 108),
    ("A100-80GB", 79.15, (8, 0), 108),
    ("A30", 23.5, (8, 0), 56),
    ("A2", 14.5, (8, 6), 10),
    ("A10", 22.0, (8, 6), 72),
    ("A10G", 22.0, (8, 6), 80),
    ("A40", 44.35, (8, 6), 84),
    ("A6000", 47.4, (8, 6), 84),
    ("A5000", 23.5, (8, 6), 64),
    ("A4000", 15.6, (8, 6), 48),
    ("RTX 3060", 11.75, (8, 6), 28),
    ("RTX 3060 Ti", 7.79, (8, 6), 38),
    ("RTX 3070", 7.79, (8, 6), 46),
    ("RTX 3070 Ti", 7.79, (8, 6), 48),
    ("RTX 3080", 9.75, (8, 6), 68),
    ("RTX 3080 Ti", 11.75, (8, 6), 80),
    ("RTX 3090", 23.5, (8, 6), 82),
    ("L4", 22.03, (8, 9), 58),
    ("L40", 44.4, (8, 9), 142),
    ("L40S", 44.4, (8, 9), 142),
    ("RTX 6000 Ada", 44.4, (8, 9), 142),
    ("RTX 4060", 7.6, (8, 9), 24),
    ("RTX 4060 Ti", 15.6, (8, 9), 34),
    ("RTX 4070", 11.7, (8, 9), 46),
    ("RTX 4070 Ti", 11.7, (8, 9), 60),
    ("RTX 4080", 15.6, (8, 9), 76),
    ("RTX 4090", 23.5, (8, 9), 128),
    ("H100-PCIe", 79.1, (9, 0), 114),
    ("H100", 79.1, (9, 0), 132),
    ("H100-NVL", 93.0, (9, 0), 132),
    ("GH200", 94.5, (9, 0), 132),
    ("H200", 139.8, (9, 0), 132),
    ("B200", 178.4, (10, 0), 148),
    ("RTX 5070", 11.7, (12, 0), 48),
    ("RTX 5080", 15.5, (12, 0), 84),
    ("RTX 5090", 31.4, (12, 0), 170),
    ("RTX PRO 6000", 94.0, (12, 0), 188),
]
_ALIASES = {  # names in drivers that differ from the table's
    "p100": "P100-16GB",
    "p100pcie16gb": "P100-16GB",
    "v100": "V100-16GB",
    "v100pcie16gb": "V100-16GB",
    "v100pcie32gb": "V100-32GB",
    "a100": "A100-40GB",
    "a100pcie40gb": "A100-40GB",
    "a10080gbpcie": "A100-80GB",
    "h100sxm": "H100",
    "h10080gb": "H100",
    "gh200480gb": "GH200",
    "h200nvl": "H200",
    "rtxa4000": "A4000",
    "rtxa5000": "A5000",
    "rtxa6000": "A6000",
    "rtx6000adageneration": "RTX 6000 Ada",
}
_FORM_FACTORS = re.compile(r"sxm\d|hbm\de?")
DEFAULT = "H200"
"""The card of which recorded trainings tell most."""


def find_card(
    gpu: str | None = None, *, memory: str | int | None = None, held_by_others_bytes: int = 0
) -> Card:
    """Return the card of that name.

    Args:
        gpu: a name such as "L4", "RTX 4090" or "A100-80GB", in any case and with or without
            "NVIDIA"; None: the H200, or with `memory` a card like it.
        memory: another memory than that card has, as "24GiB" or bytes.
        held_by_others_bytes: what other users of the GPU hold.

    Raises:
        InvalidArgument: no such card is known, or the memory is less than a context takes.
    """
    found = _BY_KEY.get(_key(DEFAULT if gpu is None else gpu))
    if found is None:
        raise InvalidArgument(
            f'unknown GPU {gpu!r}: give its memory alone, such as "24GiB", or one of '
            f"{', '.join(card_names())}"
        )
    total_bytes = parse_size(memory) if isinstance(memory, str) else memory
    if total_bytes is not None:
        name = found.name if gpu else f"NVIDIA GPU of {size_text(total_bytes)}"
        found = replace(found, name=name, total_bytes=total_bytes)
    return replace(found, held_by_others_bytes=held_by_others_bytes)


def card_names() -> list[str]:
    """Return the names of the known cards."""
    return [name for name, *_ in _TABLE]


def cards_setting(cards: Sequence[Card]) -> str:
    """Return the cards of a machine as `sources/driver/settings.cpp` reads them.

    Raises:
        InvalidArgument: there are more than a machine can have.
    """
    if len(cards) > MAX_CARDS:
        raise InvalidArgument(f"a machine has at most {MAX_CARDS} cards, got {len(cards)}")
    return ";".join(card.setting for card in cards)


def _key(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    letters = letters.removeprefix("nvidia").removeprefix("tesla").removeprefix("geforce")
    return _FORM_FACTORS.sub("", letters)


_BY_KEY = {
    _key(name): Card(
        f"NVIDIA {name}",
        int(gib * GIB),
        capability,
        multiprocessors,
        _MEASURED_CONTEXT_BYTES.get(name, CONTEXT_BYTES),
    )
    for name, gib, capability, multiprocessors in _TABLE
}
_BY_KEY |= {alias: _BY_KEY[_key(name)] for alias, name in _ALIASES.items()}
