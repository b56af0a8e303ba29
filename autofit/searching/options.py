"""The arguments of a search beside what is trained: what tunes it, and its limits."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from optuna.samplers import BaseSampler

from autofit.errors import InvalidArgument, SearchTimedOut
from autofit.measurement import Trial, TrialKind, fastest_of, oom_probes_of, probes_of
from autofit.plan import PLANNED_STEPS, check_count
from autofit.planning.search_spec import Effort
from autofit.registry import Unnamed
from autofit.report.report import check_writable
from autofit.searching.events import OnEvent, Progress
from autofit.strategy import Numerics, Strategy

_LARGEST_TIMEOUT_S = 1e9  # about as long as a system call waits
# Probes in fresh workers that time is left for: two plans twice, and their gradients.
COMPARISON_PROBES = 5

# Probes that the final comparison takes at least: the incumbent and the baseline.
COMPARED = 2

# The largest share of the timeout that is left for the final comparison.
MAX_COMPARISON_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How a search chooses plans, and where it runs its probes.

    Attributes:
        effort: "quick", "normal" or "thorough": how small a gain is still worth a probe.
        sampler: an Optuna sampler in place of autofit's own.
        max_micro_batch: the largest micro-batch to try, in samples; at least the baseline's.
        even_split: try only micro-batches of one size, as trainers need whose loader makes them.
        allow_accumulation_change: change the accumulation steps even where that changes gradients.
        executor: any `concurrent.futures.Executor`, in whose processes plans run: those of a Dask
            cluster, of MPI, or of this machine. docs/distributed.md says what it must do. None:
            plans run on this machine.
        workers: how many plans run at the executor at once: as many as it has machines
            that are alike.
        ranks: workers that train one model together, each on a GPU of its own or all on the CPU; if
            None, as many as torchrun started, or one.
        profile: a .json or .json.gz file, to which a trace of the best plan's steps is written in
            torch's own format.

    Raises:
        InvalidArgument: a value is of another kind; the message names it.
    """

    effort: Effort | str = "normal"
    sampler: BaseSampler | None = None
    max_micro_batch: int | None = None
    even_split: bool = False
    allow_accumulation_change: bool = False
    executor: Executor | None = None
    workers: int = 1
    ranks: int | None = None
    profile: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.effort not in list(Effort):  # a list asks for no hash, and it may be anything
            names = ", ".join(each.value for each in Effort)
            raise InvalidArgument(f"effort must be one of {names}, got {self.effort!r}")
        if self.sampler is not None and not isinstance(self.sampler, BaseSampler):
            raise InvalidArgument(f"sampler must be an Optuna sampler object, got {self.sampler!r}")
        for name in ("max_micro_batch", "workers", "ranks"):
            if (count := getattr(self, name)) is not None:
                check_count(name, count)
        for name in ("even_split", "allow_accumulation_change"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidArgument(f"{name} must be True or False, got {value!r}")
        executor: Any = self.executor
        if executor is None and self.workers > 1:
            raise InvalidArgument(
                f"workers={self.workers} is how many plans an executor runs at once: give "
                "executor= too, or several devices"
            )
        takes_jobs = callable(getattr(executor, "submit", None)) and not isinstance(executor, type)
        if executor is not None and not takes_jobs:
            raise InvalidArgument(
                f"executor must be a concurrent.futures.Executor, got {executor!r}"
            )
        if self.profile is not None:
            _check_profile(self.profile)


def _check_profile(profile: Any) -> None:
    """Refuse a file for the trace before the search rather than after it."""
    is_path = isinstance(profile, (str, os.PathLike)) and bool(os.fspath(profile))
    if not is_path or not os.fspath(profile).endswith((".json", ".json.gz")):
        raise InvalidArgument(
            f"profile must be a .json or .json.gz file for a trace, got {profile!r}"
        )
    if "\0" in os.fspath(profile):
        raise InvalidArgument(f"profile={os.fspath(profile)!r}: a file name cannot contain a NUL")
    check_writable(Path(profile), f"profile={os.fspath(profile)!r}")


def check_timeout(timeout: Any) -> None:
    """Check `timeout=`.

    Raises:
        InvalidArgument: it is neither None nor a number of seconds.
    """
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and 0 < timeout < _LARGEST_TIMEOUT_S):
        raise InvalidArgument(
            f"timeout must be above zero seconds and below {_LARGEST_TIMEOUT_S:g}, got {timeout!r}"
        )


def check_study(study: Any) -> None:
    """Check `study=`.

    Raises:
        InvalidArgument: it is neither None, nor a path or URL.
    """
    if study is not None and not (isinstance(study, (str, os.PathLike)) and os.fspath(study)):
        raise InvalidArgument(f"study must be a file path or an Optuna storage URL, got {study!r}")


@dataclass(frozen=True)
class SearchArguments:
    """How `autofit.search` was asked to search a workload; `began` when it was called.

    Attributes:
        vram_budget: "24GiB", bytes, or a fraction of the device; None: what is free, less a margin.
            On a CPU it bounds the training's tensors, not the memory of the process.
        device: "cuda", "cuda:1", "cpu"; None: cuda where there is one. Several that are alike run
            plans at the same time: ["cuda:0", "cuda:1"], "cuda:0,cuda:1", "all" (every GPU), or
            ["cpu", "cpu"], which share the cores.
        numerics: "exact", "rounding" or "reduced_precision", or such a `Numerics`: how far a plan
            may change the arithmetic.
        strategies: names or Strategy objects; None: all that `numerics` allows.
        planned_steps: optimizer steps that the training will take. Settings whose trials take long,
            such as a compilation, are tried where they are expected to save more than that over so
            many steps, and count with it. 0: they are left out. None: as if it had no end.
        max_probes: the most probes: runs of a plan that are timed, baseline and confirmations
            counted. The look at the workload before the first probe (its memory, settings and split
            gradients) and the profile of a step after the last one are not counted.
        timeout: seconds from the call until the search ends, with what was measured by then. A
            probe that runs is ended.
        study: a file path or an Optuna storage URL: the search can be stopped and resumed.
        seed: of everything random; a study that is resumed keeps that of its planner.
        progress: True shows it on standard error, False does not; None: where that is a terminal
            or a notebook, and elsewhere, as in a log, a line every half minute. A function is
            called with each event of `autofit.searching.events`. All events go to the logger
            "autofit" too.
        options: how plans are chosen, and where they run.

    Raises:
        InvalidArgument: one is invalid; the message names it and its value.
    """

    vram_budget: str | float | None = None
    device: str | Sequence[str] | None = None
    numerics: Numerics | str = "reduced_precision"
    strategies: Iterable[str | Strategy] | None = None
    planned_steps: int | None = PLANNED_STEPS
    max_probes: int | None = None
    timeout: float | None = None
    study: str | os.PathLike[str] | None = None
    seed: int = 0
    progress: OnEvent | bool | None = None
    options: SearchOptions = field(default_factory=SearchOptions)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.max_probes is not None:
            check_count("max_probes", self.max_probes)
        if self.planned_steps is not None:
            check_count("planned_steps", self.planned_steps, least=0)
        if not isinstance(self.strategies, str | Sequence) and isinstance(
            self.strategies, Iterable
        ):
            object.__setattr__(self, "strategies", tuple(self.strategies))  # it is read again
        check_timeout(self.timeout)
        check_study(self.study)
        progress = self.progress
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise InvalidArgument(
                "progress must be True or a function that is called with each event, got "
                f"{progress!r}"
            )
        if not isinstance(self.options, SearchOptions):
            raise InvalidArgument(
                f"options must be autofit.SearchOptions(...), got {self.options!r}"
            )

    @cached_property
    def allowance(self) -> Allowance:
        """The limits in probes and time."""
        return Allowance(self.max_probes, self.timeout, began=self.began)

    @property
    def named(self) -> set[str]:
        """The names of the strategies that the caller asked for."""
        if isinstance(self.strategies, Unnamed):
            return set()
        given = self.strategies
        given = [given] if isinstance(given, str) else given or ()
        return {each if isinstance(each, str) else each.name for each in given}

    @cached_property
    def profile(self) -> str | None:
        """The file for the trace, wherever the process is by then."""
        profile = self.options.profile
        return None if profile is None else os.path.abspath(profile)


# How many probes and how much time are left.


@dataclass(frozen=True)
class Allowance:
    """The limits of one run of a search.

    Attributes:
        max_probes: the most probes, those of earlier runs included; None: unlimited.
        timeout_s: seconds from `began`; None: unlimited.
        clock: tells the time in seconds.
        began: when the run began, by the clock.
        after_s: seconds of `timeout_s` for what comes after the search.
    """

    max_probes: int | None
    timeout_s: float | None
    clock: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)
    after_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self.clock() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the timeout, less `after_s`, or None if unlimited."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - self.after_s - self.elapsed_s)

    def probes_left(self, trials: Sequence[Trial]) -> int | None:
        """Return the probes left after those trials, or None if unlimited."""
        if self.max_probes is None:
            return None
        return max(0, self.max_probes - len(probes_of(trials)))

    def time_is_short(self, trials: Sequence[Trial], least_s: float) -> bool:
        """Return whether one more probe of mean duration would leave less than `least_s`."""
        left = self.seconds_left
        return left is not None and left <= _mean_seconds(trials) + least_s

    def comparison_s(self, trials: Sequence[Trial], start_s: float) -> float:
        """Return the seconds that the final comparison needs; 0 if nothing fits yet.

        Args:
            trials: so far.
            start_s: seconds that a fresh worker takes to start.
        """
        if self.timeout_s is None or not any(trial.ok for trial in trials):
            return 0.0
        in_full = [_seconds_in_full(trial) for trial in trials if trial.ok]
        probes_s = COMPARISON_PROBES * (start_s + statistics.fmean(in_full))
        return min(probes_s, MAX_COMPARISON_SHARE * self.timeout_s)

    def spent(self, trials: Sequence[Trial], start_s: float = 0.0) -> str | None:
        """Return why no further plan may be tried; None: it may.

        The final comparison needs probes, and `comparison_s`.
        """
        if not trials:
            return None
        left = self.probes_left(trials)
        # The comparison needs two probes, fewer if max_probes < 4, one when there was one before
        has_compared = any(trial.kind is TrialKind.CONFIRMATION for trial in trials)
        needed = 1 if has_compared else min(COMPARED, max(0, (self.max_probes or 0) - 2))
        if left is not None and left <= needed:
            return self._probes_are_over
        if self.time_is_short(trials, self.comparison_s(trials, start_s)):
            return self.time_is_over
        return None

    def comparison_limit(self, trials: Sequence[Trial]) -> str:
        """Return what ended a final comparison that did not come to its own end."""
        if self.probes_left(trials) == 0:
            return self._probes_are_over
        return self.time_is_over

    def progress(
        self, trials: Sequence[Trial] = (), usual_probes: tuple[int, int] | None = None
    ) -> Progress:
        """Return the state of the search after those trials, for its events."""
        return Progress(
            len(probes_of(trials)),
            oom_probes_of(trials),
            fastest_of(trials),
            self.elapsed_s,
            self.seconds_left,
            self.probes_left(trials),
            usual_probes,
        )

    @property
    def _probes_are_over(self) -> str:
        return f"max_probes={self.max_probes} was reached"

    @property
    def time_is_over(self) -> str:
        """The reason of a search that its timeout ended."""
        return f"the timeout of {self.timeout_s:.10g} s was reached"

    def too_short(self) -> SearchTimedOut:
        """Return the error of a search that its timeout ended before any plan could be returned."""
        return SearchTimedOut(
            f"the timeout of {self.timeout_s:.10g} s was reached before a plan that fits was "
            "measured: give a longer one"
        )


def _mean_seconds(trials: Sequence[Trial]) -> float:
    """Return the mean duration of the probes that ran; those that hung say nothing about others."""
    lengths = [t.measurement.seconds for t in probes_of(trials) if t.ok and t.measurement.seconds]
    return statistics.fmean(lengths) if lengths else 0.0


def _seconds_in_full(trial: Trial) -> float:
    """Return how long a probe would have taken had its steps run all their micro-batches."""
    measured, in_all = trial.measurement, trial.plan.accumulation_steps
    left_out = 1 - (measured.micro_batches_run or in_all) / in_all
    return (measured.seconds or 0.0) + left_out * sum(measured.step_times_s)
