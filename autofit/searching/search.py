"""`autofit.search`: find the fastest plan and return a report."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from autofit.devices.base import load_of_others
from autofit.errors import SearchTimedOut, hides_own_frames
from autofit.interrupts import interrupts_remembered
from autofit.measurement import TrialKind
from autofit.plan import PLANNED_STEPS, NoFeasiblePlan, ResolvedPlan
from autofit.planning.search_spec import Effort, SearchSpec
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest, Reply
from autofit.probing.survey import Recomputation, Survey, check_weights_fit
from autofit.probing.torchrun import owned_by_rank_0, ranks_meant
from autofit.registry import load_strategies, numerics_level, numerics_of
from autofit.report.record import INTERRUPTED, Record
from autofit.report.report import Report
from autofit.searching import events
from autofit.searching.engine import run_search
from autofit.searching.events import OnEvent, logged
from autofit.searching.faithful import judged
from autofit.searching.findings import (
    SHARE_FOR_LOADER,
    described,
    largest_micro_batch,
    look_for_findings,
    memory_of,
)
from autofit.searching.options import SearchArguments, SearchOptions
from autofit.searching.runner import Places, open_runner
from autofit.searching.storage import check_opens
from autofit.searching.study import COSTLY, Store
from autofit.space import Space
from autofit.strategy import Numerics, Strategy
from autofit.training.workload import Workload, first_size, workload_of
from autofit.units import LARGE_SEGMENT_BYTES, counted

if TYPE_CHECKING:
    from autofit.searching.predicted_lines import Predicted

# Of what is left of the timeout after the baseline, for what strategies look at before any of their
# settings is tried: probes need the rest.
SHARE_FOR_LOOKS = 1 / 3

# Of the budget, by what the baseline holds: a plan of less needs no recomputation, whatever its
# other settings.
SHARE_THAT_FITS = 0.8

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
    planned_steps: int | None = PLANNED_STEPS,
    max_probes: int | None = None,
    timeout: float | None = None,
    study: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: OnEvent | bool | None = None,
    options: SearchOptions | None = None,
) -> Report:
    """Find, by running it, the fastest way to train a model within a VRAM budget.

    Model, optimizer, random states and global flags stay as they are, also when this raises. Under
    torchrun every rank makes the same call and gets the same report. Longer explanations of the
    arguments: `autofit.searching.options.SearchArguments`.

    Args:
        model: the module; a function of no arguments that builds one; or a `Workload`, alone.
        sample_batch: any pytree of tensors, as long as the longest the training will see; a
            function n -> batch of n samples; or `autofit.Lengths`, where lengths vary.
        criterion: (output, target) -> scalar tensor; the batch is then (input, target).
        loss_fn: (model, batch) -> scalar tensor, the mean over samples.
        optimizer: parameters -> Optimizer; or a live Optimizer.
        global_batch: samples per optimizer step to keep; None: free, with one micro-batch a step.
        vram_budget: "24GiB", bytes, or a fraction of the device; None: what is free, less a margin.
        device: "cuda", "cuda:1", "cpu", "all" (every GPU) or a list; None: cuda where there is one.
        numerics: "exact", "rounding" or "reduced_precision": what may change in the arithmetic.
        strategies: names or Strategy objects; None: all that `numerics` allows.
        planned_steps: optimizer steps of the training: what costs more to try than it is expected
            to save over them, such as a compilation, is not tried. 0: nothing costly is.
        max_probes: the most timed runs of plans.
        timeout: seconds until the search ends, with what was measured by then.
        study: a file path or an Optuna storage URL, to resume the search from.
        seed: of everything random.
        progress: True or False; or a function of `autofit.searching.events`; None: as is watched.
        options: a `SearchOptions`: how plans are chosen, and where they run.

    Raises:
        InvalidArgument: an argument or the study is invalid.
        NoFeasiblePlan: nothing fits the budget.
        DeviceUnavailable, WorkerFailed: there is no device, or no worker runs a plan on it.
        SearchTimedOut: the timeout was reached before a plan that fits had been measured.
        Exception: what the user's own code raised, as it was raised.
    """
    asked = SearchArguments(
        vram_budget, device, numerics, strategies, planned_steps, max_probes, timeout, study, seed,
        progress, SearchOptions() if options is None else options,
    )  # fmt: skip
    given = {"criterion": criterion, "loss_fn": loss_fn, "optimizer": optimizer}
    return search_as_asked(
        asked, workload_of(model, sample_batch, **given, global_batch=global_batch)
    )


def search_as_asked(asked: SearchArguments, workload: Workload) -> Report:
    """Search with these arguments; for the errors see `search`."""
    options, level = asked.options, numerics_level(asked.numerics)
    size = ranks_meant(options.ranks)
    chosen = load_strategies(asked.strategies, numerics=level, ranks=size)
    Space(  # refuses what leaves no baseline, before anything is started
        {},
        first_size(
            workload.sample_batch_size, options.max_micro_batch, is_chosen=workload.chose_size
        ),
        global_batch=workload.global_batch,
        max_micro_batch=options.max_micro_batch,
        even_split=options.even_split,
        ranks=size,
    )
    places = Places.asked(asked.device, options, ranks=size)
    run = _SearchRun(workload, asked, chosen, level, places)
    record = owned_by_rank_0(run.search, ranks=options.ranks, ends_at=run.ends_at)
    return Report(record, strategies=chosen, workload=workload)


@dataclass
class _SearchRun:
    """One run of `search`: inspect the workload, specify, explore, describe.

    Attributes:
        workload: that is searched.
        asked: the arguments of the search.
        strategies: that may be used.
        level: how far a plan may change the arithmetic.
        places: where plans run.
        store: the open study; None before it is opened.
        on_event: is told of each event.
        record: of the report; None until the search itself has ended.
    """

    workload: Workload
    asked: SearchArguments
    strategies: tuple[Strategy, ...]
    level: Numerics
    places: Places
    store: Store | None = None
    on_event: OnEvent = field(default_factory=lambda: logged(None))
    record: Record | None = None

    @property
    def ends_at(self) -> float:
        """When the timeout is over, by `time.monotonic`."""
        timeout_s = self.asked.allowance.timeout_s
        return math.inf if timeout_s is None else self.asked.allowance.began + timeout_s

    def open_prober(self, place: int, ranks: int, **given: Any) -> Prober:
        """Open a prober of the workload at a place, which ends with the timeout."""
        target = Target(
            self.places.devices[place],
            self.asked.vram_budget,
            self.asked.seed,
            self.places.threads,
            ranks,
        )
        chosen, executor = self.strategies, self.places.executor
        return open_prober(
            self.workload, chosen, target, ends_at=self.ends_at, executor=executor, **given
        )

    def search(self, ranks: int) -> Record:
        """Search, with several ranks or with one device, and return the record of it.

        Raises:
            SearchTimedOut: the timeout was over before anything that fits had been measured.
            Exception: as of `search`.
        """
        with interrupts_remembered(), showing(self.asked.progress) as self.on_event:
            if self.asked.study is not None:
                check_opens(self.asked.study)
            try:
                with self.open_prober(0, ranks, on_stage=self._on_stage) as prober:
                    survey, spec, record = self._searched(prober, ranks)
                    self._describe(prober, survey, spec, record, is_alone=ranks == 1)
                    self._on_stage("ending the worker")
            except SearchTimedOut:
                raise self.asked.allowance.too_short() from None
            except KeyboardInterrupt:
                if self.record is None:
                    raise
                self.record = _interrupted(self.record)
            assert self.record is not None  # or something was raised
            assert self.store is not None  # as above
            self._on_stage("writing the report")
            seconds = sum(self.store.session_seconds)
            return replace(self.record, search=replace(self.record.search, seconds=seconds))

    def _searched(self, prober: Prober, ranks: int) -> tuple[Survey, SearchSpec, Record]:
        """Return the survey, what was searched, and the record of the search by itself.

        Raises:
            NoFeasiblePlan: nothing fits; it says what the smallest plan was measured to need.
            Exception: as of `search`.
        """
        survey, baseline = self._inspect(prober, is_alone=ranks == 1)
        identity, limits = self._identity(survey), self.asked.allowance
        on_others = partial(self.open_prober, ranks=ranks)
        for_loader = 0.0 if self.workload.loader is None else SHARE_FOR_LOADER
        with (
            open_runner(prober, self._places, on_others, self._on_stage) as runner,
            Store.open(
                self.asked.study, identity, limits.began, self.asked.planned_steps
            ) as self.store,
        ):
            if prober.vram_budget_bytes != survey.vram_budget_bytes:
                baseline = None  # it ran within another budget
            survey = replace(survey, vram_budget_bytes=prober.vram_budget_bytes)
            survey, spec = self._specify(prober, survey, self.store, identity)
            try:
                record = run_search(
                    runner,
                    spec,
                    store=self.store,
                    sampler=self.asked.options.sampler,
                    max_probes=limits.max_probes,
                    timeout_s=limits.timeout_s,
                    on_event=self.on_event,
                    began=limits.began,
                    after_s=for_loader * (limits.timeout_s or 0.0),
                    baseline=baseline,
                )
            except NoFeasiblePlan as error:
                if limits.probes_left(self.store.trials) == 0:
                    raise
                from autofit.searching.infeasible import with_measured_need  # few searches end so

                raise with_measured_need(error, prober, spec) from None
            return survey, spec, record

    @property
    def _places(self) -> Places:
        """Where plans run: on no further devices where no time is left for another plan."""
        is_over = self.asked.allowance.seconds_left == 0
        return replace(self.places, devices=self.places.devices[:1]) if is_over else self.places

    def _inspect(self, prober: Prober, *, is_alone: bool) -> tuple[Survey, Reply | None]:
        """Return what a worker says of the workload and the device, and the baseline's probe.

        The baseline runs first, so that there is an answer whatever the strategies' looks take. Of
        several ranks it needs one of them, and a study that is resumed has its own.
        """
        first, baseline = None, None
        if is_alone and not self._resumes:
            first = prober.first_survey()
            check_weights_fit(first)
            baseline = self._run_baseline(prober, first)
        needed = None if first is None or baseline is None else self._needed(first, baseline)
        try:
            survey = prober.survey(looks_end_at=self._looks_end_at, recomputation=needed)
        except SearchTimedOut:
            if first is None or baseline is None or not baseline.measurement.ok:
                raise
            survey = first
        if first is not None:  # before this search computed there
            survey = replace(survey, busy=first.busy)
        survey = self._as_asked(survey)
        has_no_room = baseline is not None and baseline.measurement.outcome.about_memory
        if has_no_room and not survey.may_change_accumulation and survey.is_split_by_function:
            survey = survey.split_by_function()
        return survey, baseline

    def _needed(self, first: Survey, baseline: Reply) -> Recomputation | None:
        """Return what decides whether recomputation is needed; None: it may be.

        Bytes grow at most as the micro-batch does, and other settings may hold more of them, such
        as casts of the weights.
        """
        held, options = baseline.measurement.held_bytes, self.asked.options
        if not baseline.measurement.ok or not held:
            return None
        kept, free = (
            replace(first, may_change_accumulation=may).space(
                options.max_micro_batch, even=options.even_split
            )
            for may in (options.allow_accumulation_change, True)
        )
        each = held / free.baseline.micro_batch
        names = [s.name for s in self.strategies if getattr(s, "recomputes", False)]
        return Recomputation(
            [name for name in names if name not in self.asked.named],
            int(SHARE_THAT_FITS * first.vram_budget_bytes / each),
            free.largest_micro_batch,
            kept.largest_micro_batch,
        )

    @property
    def _resumes(self) -> bool:
        study = self.asked.study
        return study is not None and os.path.exists(study)

    @property
    def _looks_end_at(self) -> float:
        left_s = self.asked.allowance.seconds_left
        return math.inf if left_s is None else time.monotonic() + SHARE_FOR_LOOKS * left_s

    def _run_baseline(self, prober: Prober, first: Survey) -> Reply:
        """Run the baseline before it is known which settings it leaves at their first values."""
        options = self.asked.options
        plan = first.space(options.max_micro_batch, even=options.even_split).baseline
        told = self.asked.allowance.progress()
        self.on_event(events.ProbeStarted(plan, TrialKind.BASELINE, None, told))
        effort = Effort(options.effort)
        request = ProbeRequest(ResolvedPlan(plan), most_timed_seconds=effort.most_timed_seconds)
        return prober.probe(request)

    def _as_asked(self, survey: Survey) -> Survey:
        """Return the survey of what the arguments allow, and tell of a busy machine."""
        survey = survey.without_opt_in(self.asked.named)
        if self.asked.planned_steps == 0:
            survey = survey.without_costly()
        if self.asked.options.allow_accumulation_change:
            survey = survey.with_accumulation_free()
        check_weights_fit(survey)
        if survey.ranks > 1:
            survey = replace(survey, notes=(*survey.notes, _OF_RANKS))
        if survey.busy is not None:
            self.on_event(events.MachineBusy(survey.busy, self.asked.allowance.progress()))
        return survey

    def _identity(self, survey: Survey) -> dict[str, str]:
        """Return the identity of a study; without a budget "free", since free memory changes."""
        costly = [name for name, dimension in survey.dimensions.items() if dimension.is_costly]
        is_free = self.asked.vram_budget is None
        return {
            "workload": survey.fingerprint,
            "allow_accumulation_change": str(self.asked.options.allow_accumulation_change),
            "even_split": str(self.asked.options.even_split),
            "strategies": ",".join(strategy.name for strategy in self.strategies),
            "numerics": self.level.name.lower(),
            "vram_budget": "free" if is_free else str(survey.vram_budget_bytes),
            "max_micro_batch": str(self.asked.options.max_micro_batch),
            **({"ranks": str(survey.ranks)} if survey.ranks > 1 else {}),
            **({COSTLY: ",".join(costly)} if costly else {}),
        }

    def _specify(
        self, prober: Prober, survey: Survey, store: Store, identity: Mapping[str, str]
    ) -> tuple[Survey, SearchSpec]:
        """Return the survey with notes of prediction, and the study's specification or one."""
        spec = store.spec
        if spec is not None:
            self._on_stage(f"resuming {store.name}, with {counted(len(store.trials), 'trial')}")
            if spec.space.may_change_accumulation and not survey.may_change_accumulation:
                survey = survey.split_by_function()
        else:
            space = survey.space(
                self.asked.options.max_micro_batch, even=self.asked.options.even_split
            )
            space.check_can_be_planned()
            lines, times, notes = self._predicted(prober, survey, space)
            survey = replace(survey, notes=(*survey.notes, *notes, *space.notes()))
            own = {strategy.name: strategy for strategy in self.strategies}
            spec = SearchSpec(
                space,
                survey.vram_budget_bytes,
                self.asked.seed,
                identity,
                lines,
                times,
                numerics={
                    name: int(numerics_of(own[name.partition(".")[0]], name))
                    for name in space.dimensions
                },
                segment_bytes=LARGE_SEGMENT_BYTES,
            )
        steps, samples = self.asked.planned_steps, spec.space.baseline.samples_per_step
        planned_samples = steps * samples if steps else None
        effort = Effort(self.asked.options.effort)
        return survey, replace(spec, effort=effort, planned_samples=planned_samples)

    def _predicted(self, prober: Prober, survey: Survey, space: Space) -> Predicted:
        """Return lines of memory and of time, and notes; there are none on a CPU."""
        if survey.environment.gpu is None:
            return {}, {}, ()
        from autofit.searching.predicted_lines import most_seconds, predicted_lines

        apart = partial(
            open_prober, self.workload, self.strategies, Target("cpu"), ends_at=self.ends_at
        )
        return predicted_lines(
            prober,
            survey,
            space,
            apart if survey.ranks > 1 else None,
            most_seconds(self.asked.allowance.seconds_left),
        )

    def _describe(
        self,
        prober: Prober,
        survey: Survey,
        spec: SearchSpec,
        record: Record,
        *,
        is_alone: bool,
    ) -> None:
        """Keep the record as the report shows it, and then what is found beside the answer."""
        if survey.environment.gpu is None:
            now = load_of_others(load_of_search=os.cpu_count() or 1)
            survey = replace(survey, busy=_busy_words(survey.busy, now))
        largest = None
        try:
            largest = largest_micro_batch(prober, survey, record)
            if record.may_probe and record.recommended.plan != record.baseline.plan:
                self._on_stage("comparing the answer's gradients with the baseline's")
                record = judged(prober, spec, record)
            if is_alone:
                record = replace(record, memory=memory_of(prober, spec, record))
        except KeyboardInterrupt:
            record = _interrupted(record)
        strategies = tuple(prober.strategies)
        record = described(record, spec, survey, strategies, self.workload, largest)
        self.record = record
        if record.may_probe and is_alone:
            findings: dict[str, Any] = {}
            try:
                look_for_findings(
                    prober,
                    spec,
                    record,
                    loader=self.workload.loader,
                    trace=self.asked.profile,
                    on_stage=self._on_stage,
                    facts=findings,
                )
            except KeyboardInterrupt:
                record = _interrupted(record)
            self.record = replace(record, findings=findings)

    def _on_stage(self, stage: str) -> None:
        trials = () if self.store is None else self.store.trials
        self.on_event(events.StageStarted(stage, self.asked.allowance.progress(trials)))


def _interrupted(record: Record) -> Record:
    ended = replace(record.search, stopped_because=INTERRUPTED)
    return replace(record, search=ended, may_probe=False)


@contextmanager
def showing(progress: OnEvent | bool | None) -> Iterator[OnEvent]:
    """Yield the function to call with events; what shows them is imported on demand."""
    slowly = progress is None
    if progress is None:
        from autofit.notebook import is_watched

        progress = is_watched()
    if callable(progress) or not progress:
        yield logged(progress if callable(progress) else None, slowly=slowly)
        return
    from autofit.searching.progress import ProgressLine

    with ProgressLine() as line:
        yield logged(line)


def _busy_words(at_start: str | None, at_end: str | None) -> str | None:
    """Return what others did on the machine, and when, where that changed; None: not much."""
    if at_start is None or at_start == at_end:
        return at_end
    return f"{at_start} at the start, {at_end or 'idle'} at the end"
