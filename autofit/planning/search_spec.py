"""The immutable spec of a search: written once when its study is made, never changed after.

Everything a planner may know beside the trials stands here, as plain data, so that the next plan
is a pure function of what the study holds: a killed search goes on where it was, and a "level 2"
means the same modules tomorrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.plan import Dimension, Settings, VariantKey, variant_key
from autofit.space import Space

MemoryLine = tuple[float, float]
"""Bytes that stay whatever the micro-batch, and bytes for each sample of it."""


@dataclass(frozen=True)
class SearchSpec:
    """What a planner knows before anything was run.

    Attributes:
        space: every plan the search may choose.
        vram_budget_bytes: the most a plan may hold.
        seed: of every random choice of the planner.
        identity: what the study belongs to, by part (say, "workload": its fingerprint); a search
            whose parts differ is refused the study.
        predicted_lines: memory lines of variants, computed without running them; they are
            corrected by what is measured, so a wrong one costs probes and never the answer.
    """

    space: Space
    vram_budget_bytes: int
    seed: int = 0
    identity: Mapping[str, str] = field(default_factory=dict)
    predicted_lines: Mapping[VariantKey, MemoryLine] = field(default_factory=dict)

    def predicted_line(self, settings: Settings) -> MemoryLine | None:
        """The predicted memory line of a variant; None where there is none."""
        return self.predicted_lines.get(variant_key(settings))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        space = self.space
        return {
            "dimensions": [[name, d.to_dict()] for name, d in space.dimensions.items()],
            "sample_batch_size": space.sample_batch_size,
            "global_batch": space.global_batch,
            "may_resplit": space.may_resplit,
            "max_micro_batch": space.max_micro_batch,
            "vram_budget_bytes": self.vram_budget_bytes,
            "seed": self.seed,
            "identity": dict(self.identity),
            "predicted_lines": [
                [dict(variant), list(line)] for variant, line in self.predicted_lines.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchSpec:
        """The spec that `to_dict` wrote; keys it does not know are ignored."""
        space = Space(
            {name: Dimension.from_dict(dimension) for name, dimension in data["dimensions"]},
            sample_batch_size=data["sample_batch_size"],
            global_batch=data["global_batch"],
            may_resplit=data["may_resplit"],
            max_micro_batch=data["max_micro_batch"],
        )
        lines = {
            variant_key(settings): (line[0], line[1]) for settings, line in data["predicted_lines"]
        }
        return cls(
            space,
            data["vram_budget_bytes"],
            seed=data["seed"],
            identity=data["identity"],
            predicted_lines=lines,
        )
