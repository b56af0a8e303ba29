"""A plan on many GPUs: what it needs and what fits there, as a table, CSV and JSON.

Imports no torch.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autofit.codec import to_json
from autofit.plan import Plan, Settings, unlike
from autofit.report.report import write
from autofit.units import format_bytes

MEDIAN_ERROR, ERROR_90TH = 0.21, 0.46
"""Of ratios of estimated times, in the median and for one plan in ten.

Those of the worse of two recorded grids, after one scale for each
(`benchmarks/results/roofline-2026-11-22.md`).
"""

FORMS = (".json", ".txt", ".csv")
"""What `Cards.save` writes."""


@dataclass(frozen=True)
class Fit:
    """A variant on a GPU, as predicted. Every None means unknown, but for `largest`.

    Attributes:
        plan: the plan that was asked for, with the variant's settings.
        required_bytes: the smallest VRAM budget under which it runs, non-torch bytes included.
        margin_bytes: how far off that may be.
        fits: whether it fits with its margin; None also where the bytes that NCCL takes decide.
        largest: the plan with the largest micro-batch that fits; None: not even one sample does.
        largest_required_bytes: what that plan needs, without margin.
        relative_time: estimated time of a sample with that plan, where the plan that was asked for
            takes 1 with plain settings on this GPU. For its error: `Cards.time_error`.
        detail: why it could not be predicted.
    """

    plan: Plan
    required_bytes: int | None = None
    margin_bytes: int | None = None
    fits: bool | None = None
    largest: Plan | None = None
    largest_required_bytes: int | None = None
    relative_time: float | None = None
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
            "relative_time": self.relative_time,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class Card:
    """A GPU with the variants of a plan.

    Attributes:
        gpu: its name.
        total_bytes: its memory.
        vram_budget_bytes: what the training may take of it.
        fits: the variants, the plain one first; none where the GPU lacks a setting of the plan.
        chosen: the one of them that prediction alone would choose, at its largest micro-batch: the
            least estimated time; None where nothing fits, or the GPU's speed is unknown.
        detail: why there are no variants.
    """

    gpu: str
    total_bytes: int
    vram_budget_bytes: int
    fits: tuple[Fit, ...]
    chosen: Fit | None = None
    detail: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "gpu": self.gpu,
            "total_bytes": self.total_bytes,
            "vram_budget_bytes": self.vram_budget_bytes,
            "variants": [fit.to_dict() for fit in self.fits],
            "chosen": self.fits.index(self.chosen) if self.chosen else None,
            "detail": self.detail,
        }


_Row = dict[str, Any]


@dataclass(frozen=True)
class Cards:
    """What a plan needs on many GPUs.

    Attributes:
        plan: the plan that was asked for.
        cards: the GPUs, by memory.
        notes: what a reader should know besides.
        parameters: elements of the model's parameters; None: of several ranks.
    """

    plan: Plan
    cards: tuple[Card, ...]
    notes: tuple[str, ...] = ()
    parameters: int | None = None

    time_error = MEDIAN_ERROR, ERROR_90TH
    """Error of ratios of `relative_time`: in the median, and for one plan in ten."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        median, ninetieth = self.time_error
        return {
            "plan": to_json(self.plan),
            "time_error": {"median": median, "90th": ninetieth},
            "cards": [card.to_dict() for card in self.cards],
            "notes": list(self.notes),
        }

    def to_csv(self) -> str:
        """Return a row for each variant on each GPU."""
        rows = [row for card in self.cards for row in _csv_rows(card)]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table; the suffix (.json, .txt or .csv) chooses the form.

        Raises:
            InvalidArgument: another suffix, or the file cannot be written.
        """
        text = {".json": json.dumps(self.to_dict(), indent=1), ".csv": self.to_csv().rstrip("\n")}
        forms = {form: partial("{}\n".format, text.get(form, str(self))) for form in FORMS}
        write(Path(path), forms, "a table of cards")

    def __str__(self) -> str:
        head = ("GPU", "memory", "settings", "needs", "fits", "largest", "time")
        rows = [head, *(row for card in self.cards for row in _text_rows(card))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if name in ("memory", "needs", "time") else cell.ljust(width)
                for name, cell, width in zip(head, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.plan}, predicted", "", *lines, "", *self._legend()])

    def _legend(self) -> list[str]:
        median, ninetieth = self.time_error
        return [
            "needs: required bytes with their margin; largest: micro-batch x accumulation steps.",
            f"time: of a sample at the largest micro-batch, estimated: {self.plan} with plain "
            "settings on that GPU is 1.00.",
            f"Such ratios were {median:.0%} off in the median and {ninetieth:.0%} for one plan in "
            "ten, so * marks a first choice, not a",
            "result: `autofit search` on the GPU measures.",
            *(f"- {note}" for note in self.notes),
        ]


def _csv_rows(card: Card) -> Iterator[_Row]:
    for fit in card.fits or (None,):
        largest = fit.largest if fit else None
        yield {
            "gpu": card.gpu,
            "total_bytes": card.total_bytes,
            "vram_budget_bytes": card.vram_budget_bytes,
            "settings": _shown(fit.plan.settings) if fit else None,
            "required_bytes": fit.required_bytes if fit else None,
            "margin_bytes": fit.margin_bytes if fit else None,
            "fits": fit.fits if fit else None,
            "largest_micro_batch": largest.micro_batch if largest else None,
            "largest_accumulation_steps": largest.accumulation_steps if largest else None,
            "largest_required_bytes": fit.largest_required_bytes if fit else None,
            "relative_time": fit.relative_time if fit else None,
            "chosen": fit is not None and fit is card.chosen,
            "detail": fit.detail if fit else card.detail,
        }


def _text_rows(card: Card) -> Iterator[tuple[str, ...]]:
    name, memory = card.gpu, format_bytes(card.total_bytes)
    if card.detail is not None:
        yield name, memory, card.detail, "", "", "", ""
    for fit in card.fits:
        settings = _shown(unlike(fit.plan.settings, card.fits[0].plan.settings)) or "plain"
        if fit.required_bytes is None or fit.margin_bytes is None:
            yield name, memory, f"{settings}: {fit.detail}", "", "", "", ""
            continue
        largest, time = fit.largest, fit.relative_time
        yield (
            name,
            memory,
            settings,
            format_bytes(fit.required_bytes + fit.margin_bytes),
            {True: "yes", False: "no", None: "?"}[fit.fits],
            f"{largest.micro_batch} x {largest.accumulation_steps}" if largest else "none",
            f"{_ratio(time)}{' *' if fit is card.chosen else '  '}" if time else "",
        )


def _ratio(time: float) -> str:
    """Format a ratio of times: 0.62, 0.0041; its error leaves no third digit."""
    return f"{time:.{max(2, 1 - math.floor(math.log10(time)))}f}"


def _shown(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
