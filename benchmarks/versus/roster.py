"""Who is compared. Imports no torch, which an emulated card's environment may not have outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """One tool.

    Attributes:
        tool: a function of `benchmarks.versus.peers`.
        packages: whose versions are recorded.
        options: of the function.
        finder: a batch-size finder, which is run once at float32 and once in a precision chosen by
            hand; others choose their own.
        timed: its answer depends on measured times, which an emulated card has not.
        card_only: it refuses a CPU.
    """

    tool: str
    packages: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    finder: bool = True
    timed: bool = False
    card_only: bool = False


PEERS: Mapping[str, Peer] = {
    "accelerate find_executable_batch_size": Peer("accelerate", ("accelerate",)),
    "Lightning scale_batch_size, power": Peer("lightning", ("lightning",), {"mode": "power"}),
    "Lightning scale_batch_size, binsearch": Peer(
        "lightning", ("lightning",), {"mode": "binsearch"}
    ),
    "batch-finder": Peer("batch_finder", ("batch-finder",)),
    "batchtune find_max_batch_size": Peer("batchtune", ("batchtune",), card_only=True),
    "rule of Composer, halving": Peer("composer_rule"),
    "rule of Ultralytics AutoBatch": Peer("ultralytics_rule"),
    "autovram tune": Peer("autovram", ("autovram",), finder=False, timed=True),
    "autofit find_batch_size": Peer("autofit_batch_size", ("torch-autofit",), timed=True),
    "autofit": Peer("autofit_search", ("torch-autofit",), finder=False, timed=True),
    "autofit, 5,000 steps planned": Peer(
        "autofit_search", ("torch-autofit",), {"planned_steps": 5000}, finder=False, timed=True
    ),
    "autofit, exact arithmetic": Peer(
        "autofit_search", ("torch-autofit",), {"numerics": "exact"}, finder=False, timed=True
    ),
    "Optuna TPE": Peer(
        "optuna_search", ("optuna",), {"sampler": "TPESampler"}, finder=False, timed=True
    ),
    "Optuna GP": Peer(
        "optuna_search", ("optuna", "scipy"), {"sampler": "GPSampler"}, finder=False, timed=True
    ),
}
"""In the order in which they run: Optuna's searches last as long as autofit's did."""
