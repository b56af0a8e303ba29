"""`autofit.search`: find the fastest plan and return a report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from autofit.devices.cpu import load_of_others
from autofit.errors import InvalidArgument, NoFeasiblePlan, SearchTimedOut, hides_own_frames
from autofit.interrupts import interrupts_remembered
from autofit.measurement import Trial
from autofit.memory.blocks import LARGE_SEGMENT_BYTES
from autofit.notebook import is_watched
from autofit.planning.search_spec import Effort, SearchSpec
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.survey import Survey, check_weights_fit
from autofit.probing.together import owned_by_rank_0, ranks_meant
from autofit.registry import Unnamed, load_strategies, numerics_level, numerics_of
from autofit.report.record import Record
from autofit.report.report import Report
from autofit.searching import events
from autofit.searching.engine import run_search
from autofit.searching.events import Event, OnEvent
from autofit.searching.findings import SHARE_FOR_LOADER, look_for_findings
from autofit.searching.limits import Allowance, check_search_arguments
from autofit.searching.options import SearchOptions
from autofit.searching.places import Places, open_runner
from autofit.searching.predicted_lines import predicted_lines
from autofit.searching.result import (
    INTERRUPTED,
    SearchResult,
    difference_of,
    memory_of,
    record_of,
    with_measured_need,
)
from autofit.searching.runner import Runner
from autofit.searching.storage import check_opens
from autofit.searching.study import Store
from autofit.searching.wording import logged
from autofit.space import Space
from autofit.strategy import Numerics, Strategy
from autofit.training.workload import Workload, workload_of
from autofit.units import counted

_OF_RANKS = "Where memory goes and what bounds a step was not measured: there are several ranks"


@hides_own_frames
def search(
    model: torch.nn.Module | Callable[[], torch.nn.Module] | Workload,
    sample_batch: Any = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    global_batch: int | None = None,
    vram_budget: str | float | None = None,
    device: str | Sequence[str] | None = None,
    numerics: Numerics | str = "reduced_precision",
    strategies: Iterable[str | Strategy] | None = None,
    planned_steps: int | None = None,
    max_probes: int | None = None,
    timeout: float | None = None,
    study: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: OnEvent | bool | None = None,
    options: SearchOptions | None = None,
) -> Report:
    """Find, by running it, the fastest way to train a model within a VRAM budget.

    Under torchrun every rank makes the same call and gets the same report (docs/distributed.md).

    The model, the optimizer, random states and global flags are the same afterwards as before,
    also when this raises.

    Args:
        model: the module; a function of no arguments that builds one; or a `Workload`, alone,
            which also takes what this signature leaves out: loss_weight, clip_grad_norm,
            before_step, training_step, loader, eval_step and eval_batch.
        sample_batch: any pytree of tensors, as long as the longest the training will see; a
            function n -> batch of n samples; or `autofit.Lengths`, where lengths vary.
        criterion: (output, target) -> scalar tensor; the batch is then (input, target).
        loss_fn: (model, batch) -> scalar tensor, the mean over samples.
        optimizer: parameters -> Optimizer; or a live Optimizer.
        global_batch: samples per optimizer step to keep; None: free, with one micro-batch a step.
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
            many steps, and count with it. None: they are left out, unless `strategies` names them.
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
        options: a `SearchOptions`: how plans are chosen, and where they run.

    Returns:
        The report. After Ctrl-C, a timeout, or damage to the study it holds what had been measured
        by then.

    Raises:
        InvalidArgument: an argument, the sample batch or the budget is invalid.
        NoFeasiblePlan: nothing fits the budget.
        StudyError: the study belongs to another search, is in use, or cannot be written.
        DeviceUnavailable: the device is not there.
        WorkerFailed: the worker ended or hung before the first probe, or with every plan.
        SearchTimedOut: the timeout was reached before a plan that fits had been measured.
        Exception: what the user's own code raised, as it was raised.
    """
    allowance = Allowance(max_probes, timeout)
    check_search_arguments(
        max_probes=max_probes,
        timeout=timeout,
        planned_steps=planned_steps,
        study=study,
        progress=progress,
    )
    options = SearchOptions() if options is None else options
    if not isinstance(options, SearchOptions):
        raise InvalidArgument(f"options must be autofit.SearchOptions(...), got {options!r}")
    level, size = numerics_level(numerics), ranks_meant(options.ranks)
    chosen = load_strategies(strategies, numerics=level, world_size=size)
    workload = workload_of(
        model,
        sample_batch,
        criterion=criterion,
        loss_fn=loss_fn,
        optimizer=optimizer,
        global_batch=global_batch,
    )
    Space(  # refuses what leaves no baseline, before anything is started
        {},
        workload.sample_batch_size,
        global_batch=workload.global_batch,
        max_micro_batch=options.max_micro_batch,
        even_split=options.even_split,
        world_size=size,
    )
    places = Places.asked(device, options, ranks=size)
    course = _Course(
        workload,
        chosen,
        _named(strategies),
        level,
        vram_budget,
        planned_steps,
        study,
        seed,
        progress,
        options,
        None if options.profile is None else os.path.abspath(options.profile),
        places,
        allowance,
    )
    record = owned_by_rank_0(course.run, ranks=options.ranks)
    return Report(record, strategies=chosen, workload=workload)


@dataclass
class _Course:
    """The course of a search: inspect the workload, specify, explore, describe.

    Attributes (those without a word here are arguments of `search`):
        strategies: that may be used.
        named: the names of those that the caller named.
        level: how far a plan may change the arithmetic.
        profile: the file of `options`, wherever the process is by then.
        trials: of the study so far.
        on_event: is told of each event.
        record: of the report; None until the search itself has ended.
    """

    workload: Workload
    strategies: tuple[Strategy, ...]
    named: set[str]
    level: Numerics
    vram_budget: str | float | None
    planned_steps: int | None
    study: str | os.PathLike[str] | None
    seed: int
    progress: OnEvent | bool | None
    options: SearchOptions
    profile: str | None
    places: Places
    allowance: Allowance
    trials: Sequence[Trial] = ()
    on_event: OnEvent = field(default_factory=lambda: logged(None))
    record: Record | None = None

    @property
    def ends_at(self) -> float:
        """When the timeout is over, by `time.monotonic`."""
        timeout_s = self.allowance.timeout_s
        return math.inf if timeout_s is None else self.allowance.began + timeout_s

    def open_prober(self, place: int, ranks: int, **given: Any) -> Prober:
        """Open a prober of the workload at a place, which ends with the timeout."""
        target = Target(
            self.places.devices[place],
            self.vram_budget,
            self.seed,
            self.places.threads,
            ranks,
        )
        chosen, executor = self.strategies, self.places.executor
        return open_prober(
            self.workload, chosen, target, ends_at=self.ends_at, executor=executor, **given
        )

    def run(self, ranks: int) -> Record:
        """Search, with several ranks or with one device, and return the record of it.

        Raises:
            SearchTimedOut: the timeout was over before anything that fits had been measured.
            Exception: as of `search`.
        """
        sessions: Sequence[float] = ()
        with interrupts_remembered(), showing(self.progress) as self.on_event:
            if self.study is not None:
                check_opens(self.study)
            try:
                with self.open_prober(0, ranks, on_stage=self._on_stage) as prober:
                    survey = self._inspect(prober)
                    identity = self._identity(survey)
                    on_others = partial(self.open_prober, ranks=ranks)
                    with (
                        open_runner(prober, self.places, on_others, self._on_stage) as runner,
                        Store.open(self.study, identity, began=self.allowance.began) as store,
                    ):
                        survey = replace(survey, vram_budget_bytes=prober.vram_budget_bytes)
                        survey, spec = self._specify(prober, survey, store, identity)
                        result = self._explore(prober, runner, spec, store)
                        sessions = store.session_seconds
                    self._describe(prober, survey, result, sessions, is_alone=ranks == 1)
                    self._on_stage("ending the worker")
            except SearchTimedOut:
                raise self.allowance.too_short() from None
            except KeyboardInterrupt:
                if self.record is None:
                    raise
                self.record = _interrupted(self.record)
            assert self.record is not None  # or something was raised
            self._on_stage("writing the report")
            seconds = sum(sessions[:-1]) + self.allowance.elapsed_s
            return replace(self.record, search=replace(self.record.search, seconds=seconds))

    def _inspect(self, prober: Prober) -> Survey:
        """Return what a worker says of the workload and the device."""
        survey = prober.survey().without_opt_in(self.named)
        if self.planned_steps is None:
            survey = survey.without_costly(self.named)
        if self.options.allow_accumulation_change:
            survey = survey.with_accumulation_free()
        check_weights_fit(survey)
        if survey.world_size > 1:
            survey = replace(survey, notes=(*survey.notes, _OF_RANKS))
        if survey.busy is not None:
            self.on_event(events.MachineBusy(survey.busy, self.allowance.progress()))
        return survey

    def _identity(self, survey: Survey) -> dict[str, str]:
        """Return the identity of a study; without a budget "free", since free memory changes."""
        costly = [name for name, dimension in survey.dimensions.items() if dimension.is_costly]
        is_free = self.vram_budget is None
        return {
            "workload": survey.fingerprint,
            "allow_accumulation_change": str(self.options.allow_accumulation_change),
            "even_split": str(self.options.even_split),
            "strategies": ",".join(strategy.name for strategy in self.strategies),
            "numerics": self.level.name.lower(),
            "vram_budget": "free" if is_free else str(survey.vram_budget_bytes),
            "max_micro_batch": str(self.options.max_micro_batch),
            **({"ranks": str(survey.world_size)} if survey.world_size > 1 else {}),
            **({"costly settings": ",".join(costly)} if costly else {}),
        }

    def _specify(
        self, prober: Prober, survey: Survey, store: Store, identity: Mapping[str, str]
    ) -> tuple[Survey, SearchSpec]:
        """Return the survey with notes of prediction, and the study's specification or one."""
        spec = store.spec
        self.trials = store.trials
        if spec is not None:
            self._on_stage(f"resuming {store.name}, with {counted(len(self.trials), 'trial')}")
        else:
            space = survey.space(self.options.max_micro_batch, even=self.options.even_split)
            apart = partial(
                open_prober, self.workload, self.strategies, Target("cpu"), ends_at=self.ends_at
            )
            lines, times, notes = predicted_lines(
                prober, survey, space, apart if survey.world_size > 1 else None
            )
            survey = replace(survey, notes=(*survey.notes, *notes))
            own = {strategy.name: strategy for strategy in self.strategies}
            spec = SearchSpec(
                space,
                survey.vram_budget_bytes,
                self.seed,
                identity,
                lines,
                times,
                numerics={
                    name: int(numerics_of(own[name.partition(".")[0]], name))
                    for name in space.dimensions
                },
                segment_bytes=LARGE_SEGMENT_BYTES,
            )
        steps, samples = self.planned_steps, spec.space.baseline.samples_per_step
        planned_samples = None if steps is None else steps * samples
        effort = Effort(self.options.effort)
        return survey, replace(spec, effort=effort, planned_samples=planned_samples)

    def _explore(
        self, prober: Prober, runner: Runner, spec: SearchSpec, store: Store
    ) -> SearchResult:
        """Search; an error that nothing fits says what the smallest plan was measured to need."""
        allowance, has_loader = self.allowance, self.workload.loader is not None

        def on_event(event: Event) -> None:
            self.trials = store.trials
            self.on_event(event)

        try:
            return run_search(
                runner,
                spec,
                store=store,
                sampler=self.options.sampler,
                max_probes=allowance.max_probes,
                timeout_s=allowance.timeout_s,
                on_event=on_event,
                began=allowance.began,
                kept_s=SHARE_FOR_LOADER * (allowance.timeout_s or 0.0) if has_loader else 0.0,
            )
        except NoFeasiblePlan as error:
            if allowance.probes_left(store.trials) == 0:
                raise
            raise with_measured_need(error, prober, spec) from None

    def _describe(
        self,
        prober: Prober,
        survey: Survey,
        result: SearchResult,
        sessions: Sequence[float],
        *,
        is_alone: bool,
    ) -> None:
        """Keep the record of a result, and then what is found beside the answer."""
        self.trials = result.trials
        if survey.busy is None and survey.environment.gpu is None:
            survey = replace(survey, busy=load_of_others(own=os.cpu_count() or 1))
        difference: Mapping[str, Any] | None = None
        memory: Mapping[str, Any] = {}
        try:
            if result.may_probe:
                self._on_stage("comparing the answer's gradients with the baseline's")
            difference = difference_of(prober, result)
            memory = memory_of(prober, result) if is_alone else {}
        except KeyboardInterrupt:
            result = replace(result, stopped_because=INTERRUPTED, may_probe=False)
        workload, strategies = self.workload, tuple(prober.strategies)
        record = record_of(survey, result, strategies, workload, difference, memory, sessions)
        self.record = record
        if result.may_probe and is_alone:
            findings: dict[str, Any] = {}
            try:
                look_for_findings(
                    prober,
                    result.spec,
                    record,
                    loader=workload.loader,
                    trace=self.profile,
                    on_stage=self._on_stage,
                    facts=findings,
                )
            except KeyboardInterrupt:
                record = _interrupted(record)
            self.record = replace(record, findings=findings)

    def _on_stage(self, stage: str) -> None:
        progress = self.allowance.progress(self.trials)
        self.on_event(events.StageStarted(stage, progress))


def _interrupted(record: Record) -> Record:
    return replace(record, search=replace(record.search, stopped_because=INTERRUPTED))


@contextmanager
def showing(progress: OnEvent | bool | None) -> Iterator[OnEvent]:
    """Yield the function to call with events; what shows them is imported on demand."""
    if callable(progress) or not (is_watched() if progress is None else progress):
        yield logged(progress if callable(progress) else None, slowly=progress is None)
        return
    from autofit.cli.progress import ProgressLine

    with ProgressLine() as line:
        yield logged(line)


def _named(strategies: Iterable[str | Strategy] | None) -> set[str]:
    """Return the names of the strategies that the caller asked for."""
    if isinstance(strategies, Unnamed):
        return set()
    given = [strategies] if isinstance(strategies, str) else strategies or ()
    return {each if isinstance(each, str) else each.name for each in given}
