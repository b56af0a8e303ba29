"""How long a worker may take before it counts as hung."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.probing.prober import ProbeRequest


@dataclass(frozen=True)
class Deadlines:
    """Bounds on what the parent waits for, in seconds.

    Attributes:
        start_s: for a worker to import torch and open the device.
        unknown_s: for what nobody can say the length of: the survey, a first probe.
        shortest_s: the least for any probe.
        patience: a probe may take this many times what it is expected to take.
    """

    start_s: float = 120.0
    unknown_s: float = 900.0
    shortest_s: float = 60.0
    patience: float = 20.0

    def of(self, request: ProbeRequest) -> float:
        """Seconds after which this probe counts as hung."""
        if request.expected_seconds is None:
            return self.unknown_s
        return max(self.shortest_s, self.patience * request.expected_seconds)
