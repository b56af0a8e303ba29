"""What a search finds beside its answer: the largest evaluation, the loader, bounds of a step.

Each is looked at after the final comparison, and none is worth an answer: what fails or hangs is
told in words, and what the time did not suffice for is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from autofit.errors import SearchTimedOut, release_exception
from autofit.measurement import Trial
from autofit.planning.search_spec import SearchSpec
from autofit.probing.evaluation import largest_evaluation
from autofit.probing.messages import OnStage
from autofit.probing.prober import Prober
from autofit.probing.profile import StepProfile, profile_plan
from autofit.registry import resolve
from autofit.report.record import Record
from autofit.training.loader import Loader

SHARE_FOR_LOADER = 0.15
"""Of the timeout, kept back for measuring a loader."""


def look_for_findings(
    prober: Prober,
    spec: SearchSpec,
    record: Record,
    *,
    loader: Loader | None,
    trace: str | None,
    on_stage: OnStage,
    facts: dict[str, Any],
) -> None:
    """Find what there is beside the answer; what was not looked at is missing.

    Args:
        prober: of the search.
        spec: of the search.
        record: of its report, without findings.
        loader: the workload's.
        trace: file for a trace of the best plan; None: none.
        on_stage: called with the name of each stage that begins.
        facts: filled with the findings as JSON data, by name.
    """
    found = _Findings(prober, spec, record, on_stage, facts)
    if record.best.measurement.evaluation_peak_bytes is not None:
        found.look_at_evaluation()
    if loader is not None:
        found.look_at_loader(loader)
    found.look_at_step(trace)


class _Findings:
    def __init__(
        self,
        prober: Prober,
        spec: SearchSpec,
        record: Record,
        on_stage: OnStage,
        facts: dict[str, Any],
    ) -> None:
        self._prober, self._spec, self._record = prober, spec, record
        self._on_stage, self.facts = on_stage, facts

    def look_at_evaluation(self) -> None:
        """Find the largest evaluation that has room beside the best plan."""
        budget = self._spec.vram_budget_bytes
        resolved = self._resolved(self._record.best)
        with self._failure("evaluation") as facts:
            self._on_stage("looking for the largest evaluation batch")
            function = partial(largest_evaluation, resolved=resolved, vram_budget_bytes=budget)
            facts |= asdict(self._prober.run(function, budget))

    def look_at_loader(self, loader: Loader) -> None:
        """Measure the workload's loader against the best plan."""
        from autofit.searching.loader import measure_loader  # most searches have none

        best = self._record.best
        with self._failure("loader") as facts:
            measure_loader(
                self._prober,
                loader,
                best.plan,
                self._record.speed_of(best) or 0.0,
                self._on_stage,
                facts,
            )

    def look_at_step(self, trace: str | None) -> None:
        """Find what bounds a step of the best plan and of the baseline."""
        best, baseline = self._record.best, self._record.baseline_beside_best
        with self._failure("bounds") as facts:
            self._on_stage("measuring what bounds a step")
            facts["best"] = self._shares(best, trace)
            if trace is not None:
                facts["trace"] = trace
            if best.plan == baseline.plan:
                facts["baseline"] = facts["best"]
            elif baseline.ok:
                facts["baseline"] = self._shares(baseline, None)

    def _shares(self, trial: Trial, trace: str | None) -> Mapping[str, float] | None:
        function: Callable[[Any], StepProfile | None]
        function = partial(profile_plan, resolved=self._resolved(trial), trace=trace)
        profiled = self._prober.run(function, self._spec.vram_budget_bytes)
        step_time_s = trial.measurement.step_time_s
        return None if profiled is None or step_time_s is None else profiled.shares(step_time_s)

    def _resolved(self, trial: Trial) -> Any:
        return resolve(trial.plan, self._spec.space, self._prober.strategies)

    @contextmanager
    def _failure(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the facts of that name; what fails inside becomes their last words."""
        facts: dict[str, Any] = {}
        self.facts[name] = facts
        try:
            yield facts
        except SearchTimedOut:
            facts["failed"] = "the time of the search was over"
        except (Exception, SystemExit) as error:
            facts["failed"] = f"{type(error).__name__}: {error}".strip()
            release_exception(error)  # in this process its frames hold a loader's processes
