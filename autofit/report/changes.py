"""Two reports compared: what changed in plan, speed and bytes, and whether they may be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autofit.codec import to_json
from autofit.measurement import ACT
from autofit.report.details import Section, figures
from autofit.report.record import Record
from autofit.report.summary import describe, ratio_words, speed_words
from autofit.report.text import WIDTH, in_markdown, in_text, laid_out, plain
from autofit.units import format_bytes, format_seconds

_SAME = {"device": "device", "gpu": "GPU", "torch": "torch", "driver": "driver"}
"""Key of the environment -> its name."""


@dataclass(frozen=True)
class Changes:
    """What changed from one report to another.

    Attributes:
        before, after: records of the two.
    """

    before: Record
    after: Record

    @property
    def speed_factor(self) -> float | None:
        """The best plan's samples/s of the later report over the earlier one's; None: unknown."""
        before, after = (record.speed_of(record.best) for record in (self.before, self.after))
        return after / before if before and after else None

    @property
    def held_bytes_more(self) -> int | None:
        """Bytes that the later best plan holds more; negative: less; None: unknown."""
        before, after = (r.best.measurement.held_bytes for r in (self.before, self.after))
        return None if before is None or after is None else after - before

    def headline(self) -> str:
        """Return a sentence about plan, speed and memory."""
        plans = [describe(record.best.plan, record) for record in (self.before, self.after)]
        plan = "The same plan" if plans[0] == plans[1] else f"{plans[0]} became {plans[1]}"
        factor, more = self.speed_factor, self.held_bytes_more
        ranges = [record.speed_range(record.best) for record in (self.before, self.after)]
        speed = f"{ratio_words(factor, *ranges)} the speed" if factor else "speed unknown"
        memory = "memory unknown" if more is None else "the same memory"
        if more:
            memory = f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'} memory"
        return f"{plan}: {speed}, {memory}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (what, before, after) of each figure that changed, and of speed and memory."""
        before, after = _figures(self.before), _figures(self.after)
        return [
            (label, figure, after[label])
            for label, figure in before.items()
            if figure != after[label] or label in ("throughput", "memory")
        ]

    def cautions(self) -> Iterator[str]:
        """Yield why the two may not be compared like for like."""
        before, after = self.before, self.after
        if before.workload["fingerprint"] != after.workload["fingerprint"]:
            yield "The workloads differ in model, batch, loss or optimizer"
        for (name, was), is_now in zip(_alike(before).items(), _alike(after).values(), strict=True):
            if was != is_now:
                yield f"The {name} changed from {was} to {is_now}"
        for name, record in (("earlier", before), ("later", after)):
            if not record.is_confirmed:
                yield f"The {name} report's best plan is not confirmed"
            elif not record.search.is_decided:
                yield f"The {name} report does not decide which plan is the fastest"

    def to_text(self, *, width: int = WIDTH, color: bool = False) -> str:
        """Return the changes as text of at most `width` columns."""
        return laid_out([self.headline(), "", *in_text(self._section())], width, color=color)

    def to_markdown(self) -> str:
        """Return the changes as GitHub's Markdown."""
        return "\n".join([f"### {plain(self.headline())}\n", *in_markdown(self._section())]) + "\n"

    def _section(self) -> Section:
        cautions = [f"{ACT}{line}" for line in self.cautions()]
        return Section("", cautions, [("", "before", "after"), *self.rows()])

    def to_dict(self) -> dict[str, Any]:
        """Return the changes as JSON has them."""
        return {
            "before": to_json(self.before.best.plan),
            "after": to_json(self.after.best.plan),
            "speed_factor": self.speed_factor,
            "held_bytes_more": self.held_bytes_more,
            "changes": [
                {"what": what, "before": was, "after": is_now} for what, was, is_now in self.rows()
            ],
            "cautions": list(self.cautions()),
        }


def _alike(record: Record) -> dict[str, Any]:
    """Return, by name, what must be alike or speeds are hard to compare."""
    return {
        **{name: record.environment.get(key) for key, name in _SAME.items()},
        "global batch": record.best.plan.samples_per_step,
        "VRAM budget": format_bytes(record.vram_budget_bytes),
    }


def _figures(record: Record) -> dict[str, str]:
    best, baseline, search = figures(record), record.baseline_beside_best, record.search
    return {
        "throughput": speed_words(record.best, record),
        "memory": format_bytes(record.best.measurement.held_bytes),
        **{label: figure for label, figure, _ in best},
        "throughput of the baseline": speed_words(baseline, record),
        "memory of the baseline": format_bytes(baseline.measurement.held_bytes),
        "VRAM budget": format_bytes(record.vram_budget_bytes),
        "probes": f"{search.probes}, {search.oom_probes} out of memory",
        "search": format_seconds(search.seconds),
    }
