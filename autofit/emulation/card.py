"""Emulated cards: what a process on one is told of its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofit.devices.gpus import Gpu, find_gpu
from autofit.errors import InvalidRequest
from autofit.units import MIB

MAX_CARDS = 8
CUBLAS_BYTES = 66 * MIB
"""Of a context's bytes, those that arrive with the first cuBLAS handle (`sources/cublas.cpp`)."""


@dataclass(frozen=True)
class EmulatedCard:
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
    context_bytes: int
    held_by_others_bytes: int = 0

    def __post_init__(self) -> None:
        if any(mark in self.name for mark in ",;="):
            raise InvalidRequest(f'the name of a card holds no ",", ";" or "=", got {self.name!r}')
        if self.total_bytes <= self.context_bytes:
            raise InvalidRequest(
                f"{self.name} has {self.total_bytes} bytes, less than its context "
                f"({self.context_bytes})"
            )

    @property
    def setting(self) -> str:
        """The card as `sources/settings.cpp` reads it."""
        major, minor = self.capability
        return (
            f"name={self.name},total={self.total_bytes},"
            f"context={max(0, self.context_bytes - CUBLAS_BYTES)},capability={major}.{minor},"
            f"multiprocessors={self.multiprocessors},others={self.held_by_others_bytes}"
        )


def emulated_card(
    gpu: str | int | Gpu | None = None, *, held_by_others_bytes: int = 0
) -> EmulatedCard:
    """Return a card that is like the GPU of that name, or like the H200 with that much memory.

    Args:
        gpu: as in `autofit.predict`: a name such as "L4", a size such as "24GiB", or bytes.
        held_by_others_bytes: what other users of the GPU hold.

    Raises:
        InvalidRequest: no such GPU is known.
    """
    like = find_gpu(gpu)
    return EmulatedCard(
        f"NVIDIA {like.name}",
        like.total_bytes,
        like.capability,
        like.multiprocessors,
        like.context_bytes,
        held_by_others_bytes,
    )


def cards_setting(cards: Sequence[EmulatedCard]) -> str:
    """Return the cards of a machine as `sources/settings.cpp` reads them.

    Raises:
        InvalidRequest: there are more than a machine can have.
    """
    if len(cards) > MAX_CARDS:
        raise InvalidRequest(f"an emulated machine has at most {MAX_CARDS} cards, got {len(cards)}")
    return ";".join(card.setting for card in cards)
