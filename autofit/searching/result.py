"""What a search found, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.measurement import Trial
from autofit.report.record import Skipped
from autofit.searching.facts import SearchFacts
from autofit.searching.tally import oom_probes_of, probes_of

INTERRUPTED = "interrupted"
"""Why a search stopped that Ctrl-C ended."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        facts: what it searched.
        trials: every trial of the study, in order.
        best: the plan to train with; confirmed, unless the search was cut short before that (its
            role says so). It was run, and it fits.
        baseline: the first trial.
        skipped: variants that were left out, and why.
        stopped_because: why no further plan was searched.
    """

    facts: SearchFacts
    trials: tuple[Trial, ...]
    best: Trial
    baseline: Trial
    skipped: tuple[Skipped, ...]
    stopped_because: str

    @property
    def probes(self) -> int:
        """Plans that were run, baseline and confirmations counted."""
        return len(probes_of(self.trials))

    @property
    def oom_probes(self) -> int:
        """Probes that ran out of memory."""
        return oom_probes_of(self.trials)
