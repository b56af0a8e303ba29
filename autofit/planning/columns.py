"""The variants of a space as columns of arrays, and what is known of each beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autofit.plan import Settings, VariantKey, variant_key
from autofit.planning.curves import LineFamily
from autofit.planning.feasibility import MicroBatches
from autofit.planning.least_squares import Array
from autofit.planning.line_prior import MEMORY_PRIOR, PREDICTED_TIME_PRIOR, TIME_PRIOR, Hints
from autofit.planning.search_spec import MemoryLine, SearchSpec


@dataclass(frozen=True)
class Columns:
    """The variants that a posterior's arrays have a column for, and what is known of each before.

    Attributes:
        variants: the settings of each.
        index: the column of each.
        largest_micro_batches: (variants), the largest micro-batch of each one's plans.
        trial_costs_s: (variants), the extra seconds of a probe of each.
        values: (settings, variants), the place of each one's value among those of the setting.
        memory, time: the prior of bytes and of seconds over micro-batch.
    """

    variants: list[Settings]
    index: Mapping[VariantKey, int]
    largest_micro_batches: MicroBatches
    trial_costs_s: Array
    values: NDArray[np.intp]
    memory: LineFamily
    time: LineFamily

    def among(self, few: NDArray[np.intp]) -> Columns:
        """Return these columns alone."""
        variants = [self.variants[column] for column in few]
        return Columns(
            variants,
            {variant_key(settings): column for column, settings in enumerate(variants)},
            self.largest_micro_batches[few],
            self.trial_costs_s[few],
            self.values[:, few],
            self.memory.among(few),
            self.time.among(few),
        )


class Given:
    """What follows from the specification alone, whatever was probed: found once for a search.

    Attributes:
        index: the place of each variant among all.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec
        self._variants: list[Settings] = list(spec.space.variants())
        self.index: dict[VariantKey, int] = {
            variant_key(settings): index for index, settings in enumerate(self._variants)
        }

    @cached_property
    def columns(self) -> Columns:
        """One for every variant."""
        space, variants = self._spec.space, self._variants
        largest = [space.largest_micro_batch_of(settings) for settings in variants]
        costs_s = [space.trial_cost_s(settings) for settings in variants]
        values = [
            [dimension.values.index(settings[name]) for settings in variants]
            for name, dimension in space.dimensions.items()
        ]
        return Columns(
            variants,
            self.index,
            np.array(largest),
            np.array(costs_s),
            np.array(values, dtype=np.intp).reshape(-1, len(variants)),
            self._memory_family(),
            self._time_family(),
        )

    @cached_property
    def predicted_lines(self) -> Mapping[int, MemoryLine]:
        """Predicted memory lines by the place of the variant."""
        return self._by_index(self._spec.predicted_lines)

    def _memory_family(self) -> LineFamily:
        return LineFamily(
            self._variants,
            self._spec.space.dimensions,
            MEMORY_PRIOR,
            slope_hints=self.hints("bytes_per_sample"),
            intercept_hints=self.hints("fixed_bytes"),
            lines=self.predicted_lines,
        )

    def _time_family(self) -> LineFamily:
        lines = self._by_index(self._spec.predicted_times)
        return LineFamily(
            self._variants,
            self._spec.space.dimensions,
            PREDICTED_TIME_PRIOR if lines else TIME_PRIOR,
            slope_hints=self.hints("seconds_per_sample"),
            lines=lines,
        )

    def hints(self, field: str) -> Hints:
        """Return that field of the hints of all values."""
        return {
            (name, value): factor
            for name, dimension in self._spec.space.dimensions.items()
            for value, hint in dimension.hints.items()
            if (factor := getattr(hint, field)) is not None and factor > 0
        }

    def _by_index(self, lines: Mapping[VariantKey, MemoryLine]) -> Mapping[int, MemoryLine]:
        """Return predicted lines by variant index; empty without the plain variant's.

        Lines with a coefficient that has no logarithm are left out.
        """
        found = {
            index: line
            for key, index in self.index.items()
            if (line := lines.get(key)) is not None and min(line) > 0
        }
        return found if 0 in found else {}
