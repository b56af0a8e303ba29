"""What tunes a search, beside what is trained and where."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from optuna.samplers import BaseSampler

from autofit.errors import InvalidArgument
from autofit.plan import PLANNED_STEPS, check_count
from autofit.planning.search_spec import Effort
from autofit.registry import Unnamed
from autofit.report.report import check_writable
from autofit.searching.events import OnEvent
from autofit.searching.limits import Allowance, check_study, check_timeout
from autofit.strategy import Numerics, Strategy


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
            names = ", ".join(repr(each.value) for each in Effort)
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
        raise InvalidArgument(f"profile={os.fspath(profile)!r}: the name of a file has no NUL")
    check_writable(Path(profile), f"profile={os.fspath(profile)!r}")


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
