"""Emulated cards: what a process on one is told of its GPU, and those that are known by name.

`gpus.csv` is the table of the repository's autofit, by a link: a build takes its contents along.
The memory of a known card is the least total capacity found in public out-of-memory messages; where
none was found, the nominal size less the share that its generation loses. Drivers and error
correction change it by a percent and more: where that matters, give bytes. Compute capability and
multiprocessors are from NVIDIA's data sheets and CUDA programming guide. The context of an H100
was measured: 752 to 764 MiB, the most with cuDNN.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from emulated_gpu.errors import InvalidArgument
from emulated_gpu.sizes import GIB, MIB, parse_size, size_text

MAX_CARDS = 8
CONTEXT_BYTES = 620 * MIB
"""Of a process that has multiplied matrices, as measured on an H200 (torch 2.11, driver 580)."""
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
    return [row["name"] for row in _ROWS]


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


def _of_row(row: dict[str, str]) -> Card:
    major, _, minor = row["capability"].partition(".")
    return Card(
        f"NVIDIA {row['name']}",
        int(float(row["memory_gib"]) * GIB),
        (int(major), int(minor)),
        int(row["multiprocessors"]),
        int(row["context_mib"]) * MIB if row["context_mib"] else CONTEXT_BYTES,
    )


_LINES = files("emulated_gpu").joinpath("gpus.csv").read_text(encoding="utf-8").splitlines()
_ROWS = list(csv.DictReader(line for line in _LINES if not line.startswith("#")))
_BY_KEY = {_key(row["name"]): _of_row(row) for row in _ROWS}
_BY_KEY |= {key: _BY_KEY[_key(row["name"])] for row in _ROWS for key in row["also_called"].split()}
