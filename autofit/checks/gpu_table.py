"""The table of `autofit.predict` for several GPUs: what a plan needs, and what fits.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autofit.codec import to_json
from autofit.plan import Plan, Settings, unlike
from autofit.units import format_bytes


@dataclass(frozen=True)
class Fit:
    """A variant on a GPU, as predicted. Every None means unknown, but for `largest`.

    Attributes:
        plan: the plan that was asked for, with the variant's settings.
        required_bytes: the smallest VRAM budget under which it runs, non-torch bytes included.
        margin_bytes: how far off that may be.
        fits: whether it fits the GPU's memory with its margin; None also where it depends on the
            bytes that NCCL takes.
        largest: the plan with the largest micro-batch that fits; None: not even one sample does.
        largest_required_bytes: what that plan needs, without margin.
        detail: why it could not be predicted.
    """

    plan: Plan
    required_bytes: int | None = None
    margin_bytes: int | None = None
    fits: bool | None = None
    largest: Plan | None = None
    largest_required_bytes: int | None = None
    detail: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "settings": dict(self.plan.settings),
            "required_bytes": self.required_bytes,
            "margin_bytes": self.margin_bytes,
            "fits": self.fits,
            "largest": to_json(self.largest) if self.largest else None,
            "largest_required_bytes": self.largest_required_bytes,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class GpuRow:
    """A GPU with the variants of a plan.

    Attributes:
        gpu: its name.
        total_bytes: its memory.
        fits: the variants, the default one first; none where the GPU lacks a setting of the plan.
        detail: why there are no variants.
    """

    gpu: str
    total_bytes: int
    fits: tuple[Fit, ...]
    detail: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "gpu": self.gpu,
            "total_bytes": self.total_bytes,
            "variants": [fit.to_dict() for fit in self.fits],
            "detail": self.detail,
        }


@dataclass(frozen=True)
class GpuTable:
    """What a plan needs on several GPUs.

    Attributes:
        plan: the plan that was asked for.
        gpus: a row for each GPU, by memory.
        notes: what a reader should know besides.
        parameters: elements of the model's parameters; None: of several ranks.
    """

    plan: Plan
    gpus: tuple[GpuRow, ...]
    notes: tuple[str, ...] = ()
    parameters: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "plan": to_json(self.plan),
            "gpus": [row.to_dict() for row in self.gpus],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        head = ("GPU", "memory", "settings", "needs", "fits", "largest")
        rows = [head, *(cells for row in self.gpus for cells in _text_rows(row))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if name in ("memory", "needs") else cell.ljust(width)
                for name, cell, width in zip(head, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        legend = (
            "needs: required bytes with their margin; largest: micro-batch x accumulation steps"
        )
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"{self.plan}, predicted", "", *lines, "", legend, *notes])


def _text_rows(row: GpuRow) -> Iterator[tuple[str, ...]]:
    name, memory = row.gpu, format_bytes(row.total_bytes)
    if row.detail is not None:
        yield name, memory, row.detail, "", "", ""
    for fit in row.fits:
        settings = _shown(unlike(fit.plan.settings, row.fits[0].plan.settings)) or "default"
        if fit.required_bytes is None or fit.margin_bytes is None:
            yield name, memory, f"{settings}: {fit.detail}", "", "", ""
            continue
        largest = fit.largest
        yield (
            name,
            memory,
            settings,
            format_bytes(fit.required_bytes + fit.margin_bytes),
            {True: "yes", False: "no", None: "?"}[fit.fits],
            f"{largest.micro_batch} x {largest.accumulation_steps}" if largest else "none",
        )


def _shown(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
