"""The specification of a search: written when its study is made, never changed after.

With the trials it is all that a planner knows, as plain data. The next plan is therefore a pure
function of the study: a killed search goes on where it was, and "level 2" means the same modules
tomorrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from autofit.plan import SETTINGS, Dimension, VariantKey, variant_key
from autofit.shapes import (
    AMOUNT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Leaf,
    Maybe,
    Shape,
    Table,
    check_shape,
)
from autofit.space import Space

MemoryLine: TypeAlias = tuple[float, float]
"""Fixed bytes, and bytes per sample of the micro-batch."""
TimeLine: TypeAlias = tuple[float, float]
"""Fixed seconds of a micro-batch, and seconds per sample of it."""

_PAIRS = Leaf(
    "a list of pairs",
    lambda value: (
        isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    ),
)
_LINE = Leaf(
    "two numbers",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(NUMBER.fits, value)),
)
EFFORT = Leaf("an effort", lambda value: value in list(Effort))
_SPEC: Shape = {
    "dimensions": _PAIRS,
    "sample_batch_size": COUNT,
    "global_batch": Maybe(COUNT),
    "may_resplit": FLAG,
    "max_micro_batch": Maybe(COUNT),
    "even_split?": FLAG,
    "world_size?": COUNT,
    "vram_budget_bytes": COUNT,
    "segment_bytes?": AMOUNT,
    "seed": AMOUNT,
    "identity": Table(TEXT),
    "predicted_lines": _PAIRS,
    "predicted_times?": _PAIRS,
    "numerics?": Table(AMOUNT),
    "fixed?": SETTINGS,
    "train_samples?": Maybe(COUNT),
    "effort?": EFFORT,
}
_GEOMETRY = ("sample_batch_size", "global_batch", "may_resplit", "max_micro_batch")


class Effort(StrEnum):
    """How long a search looks for small gains."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"

    @property
    def least_worth_factor(self) -> float:
        """By how much the least worth of a probe is multiplied."""
        return {Effort.QUICK: 10.0, Effort.NORMAL: 1.0, Effort.THOROUGH: 0.25}[self]

    @property
    def most_timed_seconds(self) -> float:
        """No further step of a probe is timed once they add up to so many seconds."""
        return 1.0 if self is Effort.QUICK else 5.0

    def covers(self, other: Effort) -> bool:
        """Return whether a search of this effort leaves nothing for one of the other to do."""
        order = list(Effort)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class SearchSpec:
    """The specification of a search.

    Attributes:
        space: every plan the search may choose.
        vram_budget_bytes: the most a plan may hold.
        seed: of every random choice of the planner.
        identity: what the study belongs to, part by part (say, "workload": its fingerprint); a
            search with another identity may not use the study.
        predicted_lines: memory lines of variants, computed without running them. Measurements
            correct them, so a wrong line costs probes but not the answer.
        predicted_times: time lines of variants, likewise; good for ratios between variants alone.
        effort: how small the gains are that are still looked for. Not part of what a study
            belongs to: it may be resumed with another.
        numerics: setting -> how far it may change the arithmetic (`autofit.strategy.Numerics`, as
            a number); 0, exact, where it is missing. Of equally fast plans the most exact wins.
        train_samples: what the training will take, so that the start of costly variants counts;
            None: unknown. Like the effort, not part of what a study belongs to.
        segment_bytes: the pieces in which the device's allocator takes memory, so that what a plan
            holds lies up to one above its line; 0: any number of bytes.
    """

    space: Space
    vram_budget_bytes: int
    seed: int = 0
    identity: Mapping[str, str] = field(default_factory=dict)
    predicted_lines: Mapping[VariantKey, MemoryLine] = field(default_factory=dict)
    predicted_times: Mapping[VariantKey, TimeLine] = field(default_factory=dict)
    effort: Effort = Effort.NORMAL
    numerics: Mapping[str, int] = field(default_factory=dict)
    train_samples: int | None = None
    segment_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "dimensions": [[name, d.to_dict()] for name, d in self.space.dimensions.items()],
            **{name: getattr(self.space, name) for name in _GEOMETRY},
            "even_split": self.space.even_split,
            **({"world_size": self.space.world_size} if self.space.world_size > 1 else {}),
            "fixed": dict(self.space.fixed),
            "vram_budget_bytes": self.vram_budget_bytes,
            "segment_bytes": self.segment_bytes,
            "seed": self.seed,
            "identity": dict(self.identity),
            "predicted_lines": _written(self.predicted_lines),
            "predicted_times": _written(self.predicted_times),
            "effort": self.effort.value,
            "numerics": dict(self.numerics),
            "train_samples": self.train_samples,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchSpec:
        """Return the specification that `to_dict` wrote; unknown keys are ignored.

        Raises:
            InvalidRequest: the data are not such a specification.
        """
        check_shape(data, _SPEC, "the specification")
        space = Space(
            {name: Dimension.from_dict(dimension) for name, dimension in data["dimensions"]},
            **{name: data[name] for name in _GEOMETRY},
            even_split=data.get("even_split", False),
            fixed=data.get("fixed", {}),
            world_size=data.get("world_size", 1),
        )
        return cls(
            space,
            data["vram_budget_bytes"],
            seed=data["seed"],
            identity=data["identity"],
            predicted_lines=_read(data["predicted_lines"]),
            predicted_times=_read(data.get("predicted_times", ())),
            effort=Effort(data.get("effort", Effort.NORMAL)),
            numerics=data.get("numerics", {}),
            train_samples=data.get("train_samples"),
            segment_bytes=data.get("segment_bytes", 0),
        )


def _written(lines: Mapping[VariantKey, tuple[float, float]]) -> list[Any]:
    return [[dict(variant), list(line)] for variant, line in lines.items()]


def _read(written: Sequence[Any]) -> dict[VariantKey, tuple[float, float]]:
    for settings, line in written:
        check_shape(settings, SETTINGS, "a predicted line's variant")
        check_shape(line, _LINE, "a predicted line")
    return {variant_key(settings): (fixed, each) for settings, (fixed, each) in written}
