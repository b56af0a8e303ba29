"""The specification of a search: written when its study is made, never changed after.

With the trials it is all that a planner knows, as plain data. The next plan is therefore a pure
function of the study: a killed search goes on where it was, and "level 2" means the same modules
tomorrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any, TypeAlias

from autofit.codec import Amount, Count, Number, from_json, to_json
from autofit.dimension import DimensionForm, dimensions_of, forms_of
from autofit.plan import Settings, VariantKey, variant_key
from autofit.planning.constants import (
    QUICK,
    QUICK_TIMED_S,
    THOROUGH,
    TIMED_S,
    USUAL_PROBES,
    USUAL_PROBES_OF_SIZES,
    USUAL_PROBES_WITH_LINES,
)
from autofit.space import Space

# Fixed bytes, and bytes per sample of the micro-batch.
MemoryLine: TypeAlias = tuple[Number, Number]
# Fixed seconds of a micro-batch, and seconds per sample of it.
TimeLine: TypeAlias = tuple[Number, Number]


class Effort(StrEnum):
    """How long a search looks for small gains."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"

    @property
    def least_value_factor(self) -> float:
        """By how much the least acquisition value of a probe is multiplied."""
        return {Effort.QUICK: QUICK, Effort.NORMAL: 1.0, Effort.THOROUGH: THOROUGH}[self]

    @property
    def most_timed_seconds(self) -> float:
        """No further step of a probe is timed once they add up to this many seconds."""
        return QUICK_TIMED_S if self is Effort.QUICK else TIMED_S

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
        planned_samples: what the training will take, so that the start of costly variants counts;
            None: unknown. Like the effort, not part of what a study belongs to.
        segment_bytes: the pieces in which the device's allocator takes memory, so that what a plan
            holds does not grow evenly; 0: any number of bytes.
    """

    space: Space
    vram_budget_bytes: Count
    seed: Amount = 0
    identity: Mapping[str, str] = field(default_factory=dict)
    predicted_lines: Mapping[VariantKey, MemoryLine] = field(default_factory=dict)
    predicted_times: Mapping[VariantKey, TimeLine] = field(default_factory=dict)
    effort: Effort = Effort.NORMAL
    numerics: Mapping[str, Amount] = field(default_factory=dict)
    planned_samples: Count | None = None
    segment_bytes: Amount = 0

    @property
    def usual_probes(self) -> tuple[int, int] | None:
        """The fewest and the most probes that such a search usually takes in all.

        None: unknown, as for an effort that is not normal.
        """
        if self.effort is not Effort.NORMAL:
            return None
        if len(list(islice(self.space.variants(), 2))) == 1:
            return USUAL_PROBES_OF_SIZES
        return USUAL_PROBES_WITH_LINES if self.predicted_lines else USUAL_PROBES

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; mappings whose keys are not text stand apart."""
        space = replace(self.space, dimensions={})
        lines, times = (
            [(dict(variant), line) for variant, line in predicted.items()]
            for predicted in (self.predicted_lines, self.predicted_times)
        )
        apart = _Apart(forms_of(self.space.dimensions), lines, times)
        rest = replace(self, space=space, predicted_lines={}, predicted_times={})
        return {**to_json(rest), **to_json(apart)}

    @classmethod
    def from_json(cls, data: Any) -> SearchSpec:
        """Return the specification that `to_json` wrote; unknown keys are ignored.

        Raises:
            InvalidArgument: the data are not such a specification.
        """
        apart = from_json(data, _Apart, "the specification")
        rest = from_json(data, cls, "the specification")
        lines, times = (
            {variant_key(settings): line for settings, line in pairs}
            for pairs in (apart.memory_lines, apart.time_lines)
        )
        space = replace(rest.space, dimensions=dimensions_of(apart.dimensions))
        return replace(rest, space=space, predicted_lines=lines, predicted_times=times)


@dataclass(frozen=True)
class _Apart:
    dimensions: Mapping[str, DimensionForm]
    memory_lines: Sequence[tuple[Settings, MemoryLine]]
    time_lines: Sequence[tuple[Settings, TimeLine]]
