"""Who is compared. Imports no torch: whoever prints what ran needs none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Peer:
    """One tool, or one person.

    Attributes:
        tool: a function of `benchmarks.versus.peers`.
        kind: "finder" of a batch size, "tuner" of more than that, "by hand", or "autofit".
        packages: whose versions are recorded.
        options: of the function.
    """

    tool: str
    kind: str
    packages: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def _by_hand(precision: str, *levers: str, halved: bool = False) -> Peer:
    told = {"precision": precision, "levers": levers, "halved": halved}
    return Peer("by_hand", "by hand", options=told)


def _finders(name: str, tool: str, package: str, **options: str) -> dict[str, Peer]:
    return {
        f"{name}, {precision}": Peer(
            tool, "finder", (package,), {"precision": precision, **options}
        )
        for precision in PRECISIONS
    }


OURS, EXPERT = "autofit", "the expert"
PEERS: Mapping[str, Peer] = {
    **_finders("accelerate find_executable_batch_size", "accelerate", "accelerate"),
    **_finders("Lightning scale_batch_size, power", "lightning", "lightning", mode="power"),
    **_finders("Lightning scale_batch_size, binsearch", "lightning", "lightning", mode="binsearch"),
    EXPERT: _by_hand("bfloat16", "channels_last", "compiled"),
    OURS: Peer("autofit_search", "autofit", ("torch-autofit",)),
    "Optuna TPE": Peer("optuna_search", "tuner", ("optuna",)),
    "autovram tune": Peer("autovram", "tuner", ("autovram",)),
    "float32": _by_hand("float32"),
    "bfloat16": _by_hand("bfloat16"),
    "bfloat16, half the size": _by_hand("bfloat16", halved=True),
    "bfloat16, fused": _by_hand("bfloat16", "fused"),
    "bfloat16, fused, channels_last": _by_hand("bfloat16", "fused", "channels_last"),
    "all of it, compiled": _by_hand("bfloat16", "fused", "channels_last", "compiled"),
}
"""In the order in which they run: Optuna's search lasts as long as autofit's did."""
COMPARED = tuple(PEERS)[: tuple(PEERS).index("autovram tune") + 1]
"""Without the steps of a person on the way to all levers, which `benchmarks.by_hand` has."""
