"""The record of a search: the plain data behind a report, and its JSON form.

Readers ignore unknown keys, so an earlier version can read a report of a later one as long as
`schema` is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property, partial
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, get_args

from autofit.codec import (
    Amount,
    Count,
    DescribedTensor,
    DeviceName,
    Number,
    from_json,
    to_json,
    without_controls,
)
from autofit.dimension import DimensionForm, check_are_words, dimensions_of, forms_of, payloads_of
from autofit.errors import InvalidArgument
from autofit.measurement import (
    Trial,
    TrialKind,
    by_plan,
    check_ran,
    compared_log_speed,
    probes_of,
)
from autofit.plan import Dimension, Plan, ResolvedPlan, Scalar, Settings
from autofit.registry import resolve, strategies_of
from autofit.rounds import Estimate, Rounds
from autofit.space import Space
from autofit.strategy import Strategy

SCHEMA = 1

# `stopped_because` of a search that Ctrl-C ended.
INTERRUPTED = "interrupted"

_Function: TypeAlias = Literal[
    "collate_fn", "loss_fn", "criterion", "loss_weight", "before_step", "training_step"
]
FUNCTIONS: tuple[str, ...] = get_args(_Function)
"""Arguments that are functions: a report names those that were given, and holds no code."""


class Undecided(StrEnum):
    """Why a search did not tell its best plan from the baseline."""

    NOISE = "noise"
    """The final comparison ended: the plans are too near, or their speeds too unsteady."""
    TIMEOUT = "timeout"
    """The time was over before."""
    MAX_PROBES = "max_probes"
    """The probes were used up before."""
    INTERRUPTED = "interrupted"
    """Ctrl-C or SIGTERM came before."""
    FAILED = "failed"
    """The machine, the workers or the study failed before; `stopped_because` says how."""


@dataclass(frozen=True)
class SearchSummary:
    """How a search went, and why it ended.

    Attributes:
        probes: number of plans that were run, baseline and confirmations included.
        oom_probes: number of probes that ran out of memory.
        seconds: duration of the search, the start of the worker included, over all its sessions.
        stopped_because: the reason why no further plan was tried.
        seed: of the search.
        effort: "quick", "normal" or "thorough".
        sessions: how often it was begun: once, and again each time that it was resumed.
        comparison_ended: whether the final comparison came to its own end.
        undecided_because: why the best plan was not told from the baseline; None: it was.
        busy: what others did on the device, such as "load 5.1 on 2 cores"; None: not much.
        planned_samples: that the training will take; None: not told.
        epoch_samples: samples of an epoch; None: not known.
        price_per_hour: of the device, in any currency; None: not told.
    """

    probes: Amount
    oom_probes: Amount
    seconds: Number
    stopped_because: str
    seed: Amount
    effort: str = "normal"
    sessions: Count = 1
    comparison_ended: bool = True
    undecided_because: Undecided | None = None
    busy: str | None = None
    planned_samples: Count | None = None
    epoch_samples: Count | None = None
    price_per_hour: Number | None = None


@dataclass(frozen=True)
class Skipped:
    """Variants that were not run.

    Attributes:
        settings: the settings that these variants share.
        why: the reason; for a value that was never run, its predicted speed.
    """

    settings: Settings
    why: str

    def covers(self, plan: Plan) -> bool:
        """Return whether a plan is one of these variants."""
        return self.settings.items() <= plan.settings.items()


def lines_of(described: object) -> list[str]:
    """Return what `describe` of a plug-in returned as lines, a whole text too."""
    if isinstance(described, str):
        return described.splitlines()
    return [str(line) for line in described] if isinstance(described, Iterable) else []


def terms_of(strategy: Strategy, settings: Settings) -> Mapping[str, Scalar]:
    """Return the settings in standard terms; {} if the strategy offers none."""
    in_terms = getattr(strategy, "in_standard_terms", None)
    return in_terms(settings) if in_terms else {}


@dataclass(frozen=True)
class Record:
    """All data of a report. A search makes it, and adds what it finds beside the answer.

    Attributes:
        vram_budget_bytes: the budget.
        search: how the search went.
        dimensions: setting -> its values, with payloads.
        trials: all of them, in order.
        best_number: number of the trial of the plan that measured fastest, or that won a tie.
        baseline_number: number of the trial that it is compared with.
        environment: device and versions; the keys of `autofit.devices.base.Environment`.
        workload: fingerprint, number of parameters, loss, optimizer, sample shapes and more.
        skipped: variants that were not run, with reasons.
        paste: trial number -> lines of code that train in the same way.
        notes: remarks for the reader.
        difference: relative differences of loss and gradients between the best plan and the
            baseline on the same samples; None: not compared.
        memory: where the memory of the plans "best" and "baseline" goes over an optimizer step:
            "bytes" by kind at moments of it, "peak", the moment of most, "phases" with their first
            moments, "modules" at the peak, and "how" it was looked at; or "why_not". {}: unknown.
        calibration: constants of the device for later predictions.
        findings: what was found beside the answer: the largest evaluation, the loader, and what
            bounds a step.
        was_read: whether all this comes from a file, which may be anybody's: its code is not shown.
        recommended_number: number of the trial to train with; None: that of the best.
        with_more_time: the plan that a longer timeout would have tried next; None: there was time
            enough, or something else ended the search. Not written.
        may_probe: whether the search may use its prober any more: not after Ctrl-C, nor where the
            machine failed or no worker could be started. Not written.
        version: of autofit at the time of the search.
        created: UTC, ISO 8601.

    Raises:
        InvalidArgument: one of those three trials is not among the trials, or two of these have one
            number.
    """

    vram_budget_bytes: int
    search: SearchSummary
    dimensions: Mapping[str, Dimension]
    trials: tuple[Trial, ...]
    best_number: int
    baseline_number: int
    environment: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    paste: Mapping[int, list[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    difference: Mapping[str, Any] | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    findings: Mapping[str, Any] = field(default_factory=dict)
    was_read: bool = False
    recommended_number: int | None = None
    with_more_time: Plan | None = None
    may_probe: bool = True
    version: str = field(default_factory=partial(version, "torch-autofit"))
    created: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}")

    def __post_init__(self) -> None:
        if self.recommended_number is None:
            object.__setattr__(self, "recommended_number", self.best_number)
        numbers = {trial.number for trial in self.trials}
        if len(numbers) < len(self.trials):
            raise InvalidArgument("two trials have the same number")
        named = {self.best_number, self.baseline_number, self.recommended_number}
        if missing := sorted(number for number in named - numbers if number is not None):
            raise InvalidArgument(
                f"trial {missing[0]} is the best one, the baseline or the recommended one, but not "
                "among the trials"
            )

    def trial(self, number: int) -> Trial:
        """Return the trial of that number."""
        return next(trial for trial in self.trials if trial.number == number)

    @property
    def functions_given(self) -> tuple[str, ...]:
        """Names of the functions that were passed to the search, such as "criterion"."""
        return tuple(self.workload.get("given", ()))

    @property
    def default_settings(self) -> Settings:
        """Every setting at its first value."""
        return {name: dimension.values[0] for name, dimension in self.dimensions.items()}

    @property
    def best(self) -> Trial:
        """The trial of the plan that measured fastest, or that won a tie."""
        return self.trial(self.best_number)

    @property
    def recommended(self) -> Trial:
        """The trial to train with: the best, or the baseline where that was not told from it."""
        assert self.recommended_number is not None  # __post_init__ sets it
        return self.trial(self.recommended_number)

    @property
    def baseline(self) -> Trial:
        """The trial with every setting at its default, at the sample batch's own size."""
        return self.trial(self.baseline_number)

    @property
    def is_decided(self) -> bool:
        """Whether the best plan was told from the baseline."""
        return self.search.undecided_because is None

    def key_of(self, trial: Trial) -> str:
        """Return what `memory` and `findings` call the trial's plan: "best" or "baseline"."""
        return "best" if trial.plan == self.best.plan else "baseline"

    @property
    def plan_to_rerun(self) -> Plan:
        """The recommended plan without the settings at their default.

        A workload, device or installation that lacks one of those settings can still run it.
        """
        return self.recommended.plan.without(self.default_settings)

    def resolve_plan(
        self,
        strategies: Iterable[str | Strategy] | None = None,
        remembered: Sequence[Strategy] = (),
    ) -> ResolvedPlan:
        """Resolve the recommended plan; only the strategies that change something are needed.

        Args:
            strategies, remembered: see `autofit.registry.strategies_of`.

        Raises:
            InvalidArgument: a strategy that the plan needs is not installed, or cannot read a
                payload of it.
        """
        whole = self.recommended.plan
        plan = whole if whole.ranks > 1 else self.plan_to_rerun
        needed = strategies_of(plan, strategies, remembered)
        return resolve(whole, Space(self.dimensions, 1), needed, self.payloads(whole.settings))

    @property
    def baseline_beside_best(self) -> Trial:
        """The baseline's fastest turn in the final comparison; else its first trial."""
        turns = self.turns(self.baseline.plan)
        return turns[-1] if turns else self.baseline

    @property
    def is_confirmed(self) -> bool:
        """Whether the best plan won the final comparison, which came to its own end."""
        return self.search.comparison_ended and self.best.kind is TrialKind.CONFIRMATION

    @property
    def factor(self) -> float | None:
        """The best plan's speed over the baseline's, by the final comparison.

        None if it is not decided or confirmed, or the baseline was not compared with it.
        """
        best, baseline = self.best.plan, self.baseline.plan
        was_compared = self.is_confirmed and {best, baseline} <= set(self._rounds.plans)
        if not (was_compared and self.is_decided):
            return None
        return math.exp(self.ahead(best, baseline).log) if best != baseline else 1.0

    def ahead(self, plan: Plan, other: Plan) -> Estimate:
        """Return the log by which a plan is faster than another, both of which ran and fit."""
        return self._rounds.ahead(plan, other)

    def turns(self, plan: Plan) -> list[Trial]:
        """Return the plan's fitting trials of the final comparison, the slowest first."""
        its = [t for t in self.trials if t.plan == plan and t.kind is TrialKind.CONFIRMATION]
        ran = [trial for trial in its if trial.ok and trial.samples_per_second]
        return sorted(ran, key=lambda trial: trial.samples_per_second or 0.0)

    @cached_property
    def compared_speeds(self) -> dict[Plan, float]:
        """Samples/s by which plans of the final comparison compare, of those that had a turn.

        The best plan has those of its fastest turn, and the others so many times as many as `ahead`
        says. They order plans and tell what one saves; what is shown is measured, see `speed_of`.
        """
        plans = [plan for plan in self._rounds.plans if self.turns(plan)]
        if not plans:
            return {}
        anchor = self.best.plan if self.best.plan in plans else plans[0]
        speed = self.turns(anchor)[-1].samples_per_second or 0.0
        return {
            plan: speed if plan == anchor else speed / math.exp(self.ahead(anchor, plan).log)
            for plan in plans
        }

    def speed_of(self, trial: Trial) -> float | None:
        """Return the plan's samples/s as a probe measured them.

        Of its fastest turn in the final comparison, which work of others slowed down least; the
        trial's own where it had none, or where that did not come to its end.
        """
        turns = self.turns(trial.plan) if self.is_confirmed else []
        return (turns[-1] if turns else trial).samples_per_second

    def speed_range(self, trial: Trial) -> tuple[float | None, float | None]:
        """Return the 95% interval of the speed that `speed_of` returns; None: nothing was timed.

        By all of the plan's turns; of a plan that had none, by the steps of the trial.
        """
        speed = self.speed_of(trial)
        low, high = trial.samples_per_second_low, trial.samples_per_second_high
        if not (speed and low and high):
            return low, high
        if self.is_confirmed and self.turns(trial.plan):
            told = self._rounds.speed(trial.plan)
            return speed * math.exp(told.low - told.log), speed * math.exp(told.high - told.log)
        return low, high

    @cached_property
    def _rounds(self) -> Rounds:
        return Rounds(probes_of(self.trials))

    def searched_speed(self, plan: Plan) -> float | None:
        """Return the plan's median samples/s in the search alone.

        None if it did not fit there.
        """
        its = [
            t
            for t in probes_of(self.trials)
            if t.plan == plan and t.kind is not TrialKind.CONFIRMATION
        ]
        ran = [trial for trial in its if trial.ok and trial.samples_per_second]
        return math.exp(compared_log_speed(ran)) if ran else None

    @property
    def assumes_optimizer(self) -> bool:
        """Whether the default optimizer stood in for one that was not given."""
        return bool(self.workload.get("assumes_optimizer"))

    @property
    def lacks_loss(self) -> bool:
        """Whether the search was given no loss, so that something stood in for it."""
        return bool(self.workload.get("lacks_loss"))

    @property
    def frontier(self) -> tuple[Trial, ...]:
        """Pareto frontier of speed and held bytes, the fastest trial first."""
        return frontier(self.trials, self.speed_of, is_compared=self.is_confirmed)

    @property
    def finalists(self) -> list[Plan]:
        """The plans of the final comparison that fit, the fastest first, by `compared_speeds`."""
        return sorted(self.compared_speeds, key=lambda plan: -self.compared_speeds[plan])

    def payloads(self, settings: Settings) -> dict[str, Any]:
        """Return the payloads of these values, by setting."""
        return payloads_of(self.dimensions, settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a report file."""
        compared = {"best": self.best, "baseline": self.baseline_beside_best}
        written: dict[str, Any] = to_json(
            {
                "schema": SCHEMA,
                "autofit": self.version,
                "created": self.created,
                "environment": self.environment,
                "workload": self.workload,
                "vram_budget_bytes": self.vram_budget_bytes,
                "search": self.search,
                "dimensions": forms_of(self.dimensions),
                "calibration": self.calibration,
                "recommended": self._row(self.recommended),
                "best": self._row(self.best),
                "baseline": self._row(self.baseline),
                "frontier": [self._row(trial) for trial in self.frontier],
                "trials": [self._row(trial) for trial in self.trials],
                "skipped": self.skipped,
                "notes": self.notes,
                "difference": self.difference,
                "memory": self.memory,
                "findings": self.findings,
                "rates": {name: rates_of(self, trial) for name, trial in compared.items()},
            }
        )
        return written

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Return the record that `to_dict` wrote.

        Raises:
            InvalidArgument: the data are not a report, or one of another schema.
        """
        if "schema" not in data:
            raise InvalidArgument(
                'this is not an autofit report (it has no "schema"): pass a .json file that '
                "--out or report.save wrote"
            )
        if data["schema"] != SCHEMA:
            raise InvalidArgument(
                f"this is a report of schema {data.get('schema')!r}; this version reads {SCHEMA}"
            )
        try:
            record = _record_in(without_controls(data))
            check_ran(record.best)
            check_ran(record.recommended)
            return record
        except InvalidArgument as error:
            raise InvalidArgument(f"this is not a complete autofit report: {error}") from error

    def _row(self, trial: Trial) -> dict[str, Any]:
        return {**trial.row(), "paste": self.paste.get(trial.number, [])}


class _Environment(TypedDict):
    device: DeviceName
    torch: str
    gpu: NotRequired[str | None]
    total_bytes: NotRequired[Amount]


class _Tokens(TypedDict):
    counted: str
    per_sample: Count
    padding_share: Number | None


SamplesName = Literal["rows", "collate_fn", "function"]
"""What the samples of a training are; see `autofit.training.samples`."""


class _Workload(TypedDict):
    fingerprint: str
    parameters: Amount
    global_batch: Count | None
    loss: str | None
    sample_shapes: dict[str, DescribedTensor]
    may_change_accumulation: NotRequired[bool]
    allow_accumulation_change: NotRequired[bool]
    lacks_loss: NotRequired[bool]
    optimizer: NotRequired[str]
    assumes_optimizer: NotRequired[bool]
    samples: NotRequired[SamplesName]
    described_size: NotRequired[Count]
    micro_batch_shapes: NotRequired[dict[str, DescribedTensor]]
    batched: NotRequired[list[str]]
    tokens: NotRequired[_Tokens]
    given: NotRequired[list[_Function]]
    clip_grad_norm: NotRequired[Number | None]
    target: NotRequired[str]
    trainer: NotRequired[Literal["transformers", "lightning"]]


class _Numbered(TypedDict):
    number: Amount


class _Pasted(_Numbered):
    paste: list[str]


class _Phase(TypedDict):
    name: str
    first: Amount


_Module = TypedDict(
    "_Module", {"name": str, "class": str, "count": Count, "bytes": dict[str, Amount]}
)


class _MemoryUse(TypedDict, total=False):
    why_not: str
    how: str
    phases: list[_Phase]
    bytes: dict[str, list[Amount]]
    peak: Amount
    modules: list[_Module]


class _Difference(TypedDict):
    loss: Number
    gradient: Number


class _Calibration(TypedDict):
    non_torch_bytes: NotRequired[Amount]


class _Delivered(TypedDict):
    num_workers: Amount
    samples_per_second: Number


class _Evaluation(TypedDict, total=False):
    failed: str
    samples: Count
    held_bytes: Amount
    largest_samples: Count
    largest_held_bytes: Amount
    is_bound: bool


class _Loader(TypedDict):
    failed: NotRequired[str]
    own_workers: Amount
    consumed_samples_per_second: Number
    delivered: list[_Delivered]
    num_workers: Amount | None
    bottleneck: Literal["device", "loader"] | None
    keeps_workers: bool
    warnings: list[str]


class _Bounds(TypedDict, total=False):
    failed: str
    trace: str
    best: dict[str, Number] | None
    baseline: dict[str, Number] | None


class _Flops(TypedDict):
    per_sample: Number
    peak_per_second: Number | None


class _Findings(TypedDict, total=False):
    evaluation: _Evaluation
    loader: _Loader
    bounds: _Bounds
    flops: _Flops


@dataclass(frozen=True, kw_only=True)
class _File:
    """What a report file must hold; its objects may hold more, which is kept."""

    autofit: str
    created: str
    environment: _Environment
    workload: _Workload
    vram_budget_bytes: Count
    search: SearchSummary
    dimensions: dict[str, DimensionForm]
    best: _Numbered
    baseline: _Numbered
    trials: list[_Pasted]
    skipped: tuple[Skipped, ...]
    recommended: _Numbered | None = None
    notes: tuple[str, ...] = ()
    difference: _Difference | None = None
    memory: dict[str, _MemoryUse] = field(default_factory=dict)
    calibration: _Calibration = field(default_factory=_Calibration)
    findings: _Findings = field(default_factory=_Findings)


def _record_in(data: Mapping[str, Any]) -> Record:
    """Return the record in a file.

    Raises:
        InvalidArgument: the file lacks something, or holds what means nothing.
    """
    file = from_json(data, _File, "the report")
    # A trial stands flat in a file: its measurement's keys among its own
    nested = [{**row, "measurement": row} for row in data["trials"]]
    trials = tuple(
        from_json(row, Trial, f"trial {at} of the report") for at, row in enumerate(nested)
    )
    check_are_words(file.dimensions, (trial.plan.settings for trial in trials))
    for use in file.memory.values():
        _check_memory_use(use)
    return Record(
        version=file.autofit,
        created=file.created,
        environment=data["environment"],
        workload=data["workload"],
        vram_budget_bytes=file.vram_budget_bytes,
        search=file.search,
        dimensions=dimensions_of(file.dimensions),
        trials=trials,
        best_number=file.best["number"],
        baseline_number=file.baseline["number"],
        skipped=file.skipped,
        paste={row["number"]: row["paste"] for row in file.trials},
        notes=file.notes,
        difference=data.get("difference"),
        memory=data.get("memory", {}),
        calibration=data.get("calibration", {}),
        findings=data.get("findings", {}),
        was_read=True,
        recommended_number=file.recommended and file.recommended["number"],
    )


def _check_memory_use(use: Mapping[str, Any]) -> None:
    """Check that a memory use is complete, or says why there is none.

    Raises:
        InvalidArgument: it is neither.
    """
    if "why_not" in use:
        return
    missing = {"how", "phases", "bytes", "peak", "modules"} - set(use)
    moments = {len(held) for held in use.get("bytes", {}).values()}
    if missing or len(moments) != 1 or use["peak"] >= min(moments) or not use["modules"]:
        raise InvalidArgument("the memory over a step is not complete")


def one_a_plan(trials: Iterable[Trial], *, is_compared: bool = True) -> list[Trial]:
    """Return a trial of each plan that fits: its fastest turn in the final comparison, if any.

    Of a plan that was not in it, the last; a vetoed proposal only repeats an earlier result. A
    comparison that did not come to its end is none (`is_compared`): the median of all is taken.
    """
    ran = (t for t in trials if t.kind is not TrialKind.VETOED and t.ok and t.samples_per_second)
    of = by_plan(ran)
    turns = {plan: [t for t in its if t.kind is TrialKind.CONFIRMATION] for plan, its in of.items()}
    speed = attrgetter("samples_per_second")
    if not is_compared:
        return [sorted(its, key=speed)[len(its) // 2] for its in of.values()]
    return [max(turns[plan], key=speed) if turns[plan] else its[-1] for plan, its in of.items()]


def frontier(
    trials: Iterable[Trial],
    speed_of: Callable[[Trial], float | None] = attrgetter("samples_per_second"),
    *,
    is_compared: bool = True,
) -> tuple[Trial, ...]:
    """Return the Pareto frontier of speed and held bytes of `one_a_plan`, the fastest first."""
    found = one_a_plan(trials, is_compared=is_compared)
    by_speed = sorted(found, key=lambda trial: -(speed_of(trial) or 0.0))
    kept: list[Trial] = []
    for trial in by_speed:
        held = trial.measurement.held_bytes
        if held is None or any((other.measurement.held_bytes or 0) <= held for other in kept):
            continue
        kept.append(trial)
    return tuple(kept)


def rates_of(record: Record, trial: Trial) -> dict[str, float]:
    """Return what is known of a trial's speed, by the names of a report file.

    MFU, model FLOPs utilization, is the model FLOPs of a second over the peak of the GPU (PaLM,
    Chowdhery et al. 2022, appendix B): the dense rate in 16 bits of its data sheet, whatever the
    precision of the plan, so that plans compare.
    """
    speed, search = record.speed_of(trial), record.search
    tokens, flops = record.workload.get("tokens"), record.findings.get("flops")
    if not speed:
        return {}
    known: dict[str, float] = {}
    if tokens:
        known["tokens_per_second"] = speed * tokens["per_sample"]
    if flops:
        known["model_flops_per_second"] = speed * flops["per_sample"]
        if flops["peak_per_second"]:
            known["mfu"] = known["model_flops_per_second"] / flops["peak_per_second"]
    spans = {"epoch": search.epoch_samples, "training": search.planned_samples}
    for name, samples in spans.items():
        if samples:
            known[f"{name}_seconds"] = samples / speed
            if search.price_per_hour is not None:
                known[f"{name}_cost"] = samples / speed / 3600 * search.price_per_hour
    return known
