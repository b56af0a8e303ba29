"""The result of a search: its trials, the answer, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofit.measurement import Trial, oom_probes_of, probes_of
from autofit.plan import Plan
from autofit.planning.search_spec import SearchSpec
from autofit.report.record import Skipped, Undecided

# `stopped_because` of a search that Ctrl-C ended.
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        spec: the specification of the search.
        trials: every trial of the study, in order.
        best: a trial of the plan that measured fastest, or that won a tie. It ran and fits; its
            kind is confirmation, unless the search was cut short before that.
        recommended: a trial of the plan to train with: the best, or the baseline where that was not
            told from it.
        baseline: the first trial.
        skipped: settings that were left out, with the reasons.
        stopped_because: why no further plan was searched.
        comparison_ended: whether the final comparison came to its own end.
        undecided_because: why the best plan was not told from the baseline; None: it was.
        with_more_time: the plan that a longer timeout would have tried next; None: there was time
            enough, or something else ended the search.
        may_probe: whether the prober may be used any more: not after Ctrl-C, nor where the machine
            became ill or no worker could be started.
        notes: for the reader, on what was left out after the search.
    """

    spec: SearchSpec
    trials: tuple[Trial, ...]
    best: Trial
    recommended: Trial
    baseline: Trial
    skipped: tuple[Skipped, ...]
    stopped_because: str
    comparison_ended: bool = True
    undecided_because: Undecided | None = None
    with_more_time: Plan | None = None
    may_probe: bool = True
    notes: Sequence[str] = ()

    @property
    def is_decided(self) -> bool:
        """Whether the best plan was told from the baseline."""
        return self.undecided_because is None

    def key_of(self, trial: Trial) -> str:
        """Return what a report calls the trial's plan, of the best and the baseline."""
        return "best" if trial.plan == self.best.plan else "baseline"

    @property
    def probes(self) -> int:
        """Number of plans that were run, baseline and confirmations included."""
        return len(probes_of(self.trials))

    @property
    def oom_probes(self) -> int:
        """Number of probes that ran out of memory."""
        return oom_probes_of(self.trials)
