"""`autofit.predict`: the memory that a plan needs on one GPU, or on several, without a GPU.

Of several the answer is a table: for each GPU and each main variant the bytes that the plan needs,
and the largest micro-batch that fits, from dry runs that serve as many GPUs as they hold for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from autofit.checks.tuned import AskedPlan
from autofit.codec import to_json
from autofit.devices.gpus import NCCL_BYTES, NCCL_UNKNOWN, Gpu, answers_alike, find_gpu, known_gpus
from autofit.errors import InvalidArgument, PredictionUnavailable, Unsupported, hides_own_frames
from autofit.plan import Dimension, Plan, Settings, VariantKey, settings_of, unlike
from autofit.prediction import predict as one_gpu
from autofit.prediction.dry_run import Offered, offered
from autofit.prediction.dry_run_worker import in_worker
from autofit.prediction.needs import (
    MOST,
    Need,
    SharedRuns,
    guess_from,
    largest_that_fits,
)
from autofit.prediction.predict import Prediction, plan_of_ranks
from autofit.registry import load_strategies, resolve, strategies_of
from autofit.report.report import Report
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.training.loss import STOOD_IN
from autofit.training.workload import Workload
from autofit.units import counted, format_bytes


@overload
def predict(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    gpu: str | int | Gpu | None = None,
    world_size: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
) -> Prediction: ...


@overload
def predict(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    gpu: list[Any] | tuple[Any, ...],
    world_size: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    progress: Callable[[str], object] | None = None,
) -> GpuTable: ...


@hides_own_frames
def predict(
    workload: Workload,
    *,
    plan: Plan | Report | None = None,
    gpu: str | int | Gpu | list[Any] | tuple[Any, ...] | None = None,
    world_size: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Prediction | GpuTable:
    """Predict the memory of a plan on a GPU, without a GPU.

    A worker process runs the training on torch's meta device, where nothing is computed, and
    replays its allocations through a simulation of the CUDA caching allocator.

    With several GPUs the result is a table: on each one, what the plan and its variants need,
    whether they fit, and the largest micro-batch that does.

    Args:
        workload: what is trained.
        plan: a plan, or a report, whose best plan is predicted with what its search measured;
            None: the baseline. In a table other micro-batches keep its global batch, or where it
            has none its accumulation steps.
        gpu: a name such as "L4" or "A100-80GB", a size such as "24GiB", or bytes; None: the
            report's, else H200. Several: a list of these, or ["all"] for all that are known.
        world_size: how many GPUs train together, each with its share of the global batch; None:
            the plan's number, else one. The GPU that needs most is predicted, without NCCL.
        strategies: names or Strategy objects that may have settings in the plan; None: those whose
            settings the plan has, and in a table all that are installed.
        progress: called with a line about each GPU of a table.

    Raises:
        InvalidArgument: an argument is not valid, there is no such GPU, setting or value, the
            workload cannot be sent to the worker, or the report is of another workload.
        PredictionUnavailable: the training needs values; the message names the line.
        WorkerFailed: the worker died, twice.
        Exception: raised by the user's own code.
    """
    asked = AskedPlan.read(workload, plan)
    if isinstance(gpu, (list, tuple)):
        predicted: Prediction | GpuTable = predict_gpus(
            workload,
            gpus=gpu,
            plan=asked.plan,
            payloads=asked.payloads,
            world_size=world_size,
            strategies=strategies,
            progress=progress,
        )
    else:
        predicted = one_gpu.predict(
            workload,
            plan=asked.plan,
            gpu=asked.gpu if gpu is None else gpu,
            strategies=strategies,
            payloads=asked.payloads,
            calibration=asked.calibration_for(gpu),
            world_size=world_size,
        )
    asked.check_same_model(predicted.parameters, workload)
    return predicted


@dataclass(frozen=True)
class Fit:
    """A variant on a GPU, as predicted. Every None means unknown, but for `largest`.

    Attributes:
        plan: the plan that was asked for, with the variant's settings.
        required_bytes: the smallest VRAM budget under which it runs, non-torch bytes included.
        margin_bytes: how far off that may be.
        fits: whether it fits the GPU's memory with its margin; None also where it depends on the
            bytes that NCCL takes.
        largest: the plan with the largest micro-batch that fits; None: not even one sample does.
        largest_required_bytes: what that plan needs, without margin.
        detail: why it could not be predicted.
    """

    plan: Plan
    required_bytes: int | None = None
    margin_bytes: int | None = None
    fits: bool | None = None
    largest: Plan | None = None
    largest_required_bytes: int | None = None
    detail: str | None = None


@dataclass(frozen=True)
class GpuRow:
    """A GPU with the variants of a plan.

    Attributes:
        gpu: its name.
        total_bytes: its memory.
        fits: the variants, the default one first; none where the GPU lacks a setting of the plan.
        detail: why there are no variants.
    """

    gpu: str
    total_bytes: int
    fits: tuple[Fit, ...]
    detail: str | None = None


@dataclass(frozen=True)
class GpuTable:
    """What a plan needs on several GPUs.

    Attributes:
        plan: the plan that was asked for.
        gpus: a row for each GPU, by memory.
        notes: what a reader should know besides.
        parameters: elements of the model's parameters; None: of several ranks.
    """

    plan: Plan
    gpus: tuple[GpuRow, ...]
    notes: tuple[str, ...] = ()
    parameters: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        written: dict[str, Any] = to_json(self)
        return written

    def __str__(self) -> str:
        head = ("GPU", "memory", "settings", "needs", "fits", "largest")
        rows = [head, *(cells for row in self.gpus for cells in _text_rows(row))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if name in ("memory", "needs") else cell.ljust(width)
                for name, cell, width in zip(head, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        legend = (
            "needs: required bytes with their margin; largest: micro-batch x accumulation steps"
        )
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"{self.plan}, predicted", "", *lines, "", legend, *notes])


def _text_rows(row: GpuRow) -> Iterator[tuple[str, ...]]:
    name, memory = row.gpu, format_bytes(row.total_bytes)
    if row.detail is not None:
        yield name, memory, row.detail, "", "", ""
    for fit in row.fits:
        changed = unlike(fit.plan.settings, row.fits[0].plan.settings)
        settings = ", ".join(f"{name}={value}" for name, value in changed.items()) or "default"
        if fit.required_bytes is None or fit.margin_bytes is None:
            yield name, memory, f"{settings}: {fit.detail}", "", "", ""
            continue
        largest = fit.largest
        yield (
            name,
            memory,
            settings,
            format_bytes(fit.required_bytes + fit.margin_bytes),
            {True: "yes", False: "no", None: "?"}[fit.fits],
            f"{largest.micro_batch} x {largest.accumulation_steps}" if largest else "none",
        )


MOST_VARIANTS = 16


def predict_gpus(
    workload: Workload,
    *,
    gpus: Sequence[str | int | Gpu],
    plan: Plan | None = None,
    payloads: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    progress: Callable[[str], object] | None = None,
) -> GpuTable:
    """Predict for several GPUs what a plan needs there, and the largest micro-batch that fits.

    Settings that the plan has keep their values. The others take all values, except where these are
    costly to try, change nothing for each sample or parts of the model alone, or can only be found
    by measuring (for the last, pass a report's plan and payloads).

    Args:
        workload, plan, strategies, progress, world_size: as for `autofit.checks.predict.predict`.
        gpus: names, sizes or bytes; ["all"]: those that are known.
        payloads: by setting, as in a report's dimensions.

    Raises:
        InvalidArgument: an argument is not valid, or there is no such GPU.
        PredictionUnavailable: no variant can be predicted; the message names the line.
        Unsupported: no variant can run with these settings.
        Exception: raised by the user's own code.
    """
    chosen = _find(gpus)
    varied = load_strategies(strategies)
    asked = plan or workload.plan()
    if world_size is not None:
        asked = plan_of_ranks(workload, plan, world_size)
    given = asked, chosen, varied, payloads or {}
    return in_worker(_predict_gpus, workload, *given, progress=progress or (lambda line: None))


def _predict_gpus(
    workload: Workload,
    asked: Plan,
    gpus: Sequence[Gpu],
    varied: Sequence[Strategy],
    payloads: Mapping[str, Any],
    progress: Callable[[str], object],
) -> GpuTable:
    """Predict for the GPUs, in the worker."""
    table = _Predictor(workload, asked, varied, payloads)
    found: list[GpuRow] = []
    for gpu in sorted(gpus, key=lambda gpu: -gpu.total_bytes):
        # The largest first: what the others need lies between its micro-batches.
        progress(f"{gpu.name} ({len(found) + 1} of {len(gpus)})")
        found.append(table.row(gpu))
    if all(fit.required_bytes is None for row in found for fit in row.fits):
        raise table.failure or PredictionUnavailable(f"no GPU was predicted: {found[0].detail}")
    made = table.runs.made
    if any(run.has_stand_in_loss for run in made):
        table.note(STOOD_IN)
    parameters = made[-1].parameters if made else None
    return GpuTable(table.asked, tuple(reversed(found)), tuple(table.notes), parameters)


def _find(gpus: Sequence[str | int | Gpu]) -> list[Gpu]:
    if not gpus:
        raise InvalidArgument('gpu is empty: name some, or pass ["all"] for all known ones')
    if list(gpus) == ["all"]:
        return known_gpus()
    return list({gpu.name: gpu for gpu in map(find_gpu, gpus)}.values())


class _Predictor:
    """Predicts the variants of a plan on one GPU after the other.

    Attributes:
        asked: the plan.
        notes: what a reader should know besides, each once.
        failure: why the first variant that could not be predicted could not.
        runs: the dry runs.
    """

    def __init__(
        self,
        workload: Workload,
        asked: Plan,
        varied: Sequence[Strategy],
        payloads: Mapping[str, Any],
    ) -> None:
        self.asked = asked
        self.notes: dict[str, None] = {}
        self.failure: PredictionUnavailable | Unsupported | None = None
        self._workload, self._payloads = workload, payloads
        self._varied = {strategy.name for strategy in varied}
        self._strategies = strategies_of(asked, varied, varied)
        self.runs = SharedRuns(workload)
        self._offered: dict[str, list[Offered]] = {}
        self._looks: dict[VariantKey, dict[int, int]] = {}
        if asked.world_size > 1:
            self.note(
                f"NCCL: {NCCL_UNKNOWN}; ? means that {format_bytes(NCCL_BYTES)} more would not fit"
            )
        self.note(
            "no global batch is set, so a larger micro-batch means more samples in an optimizer "
            "step"
            if asked.global_batch is None
            else "assumes that accumulation does not change the gradients; a search checks that"
        )

    def row(self, gpu: Gpu) -> GpuRow:
        """Predict all variants on a GPU."""
        row = GpuRow(gpu.name, gpu.total_bytes, ())
        try:
            space = self._space(gpu)
        except (InvalidArgument, PredictionUnavailable) as error:
            return replace(row, detail=str(error))
        plain = space.default_settings
        variants = sorted(space.variants(), key=lambda settings: len(unlike(settings, plain)))
        if (left_out := len(variants) - MOST_VARIANTS) > 0:
            self.note(f"{counted(left_out, 'variant')} with the most settings left out")
        return replace(
            row, fits=tuple(self._fit(each, gpu, space) for each in variants[:MOST_VARIANTS])
        )

    def note(self, text: str) -> None:
        """Note what a reader should know besides."""
        self.notes[text] = None

    def _space(self, gpu: Gpu) -> Space:
        """Return the variants on a GPU.

        Raises:
            InvalidArgument: the GPU lacks a setting or a value of the plan.
            PredictionUnavailable: the meaning of one can only be found by running the model.
        """
        dimensions: dict[str, Dimension] = {}
        for strategy in self._strategies:
            dimensions |= self._dimensions(strategy, gpu)
        asked = self.asked
        samples = asked.samples_per_step if asked.accumulation_steps > 1 else asked.global_batch
        return Space(
            dimensions, self._workload.sample_batch_size, samples, world_size=asked.world_size
        )

    def _dimensions(self, strategy: Strategy, gpu: Gpu) -> Mapping[str, Dimension]:
        own = settings_of(strategy.name, self.asked.settings)
        if settings_of(strategy.name, self._payloads):
            return {setting: Dimension([value]) for setting, value in own.items()}
        found = self._offer(strategy, gpu)
        found.check(own)
        return {
            setting: self._narrowed(setting, dimension, strategy)
            for setting, dimension in found.dimensions.items()
        }

    def _offer(self, strategy: Strategy, gpu: Gpu) -> Offered:
        known = self._offered.setdefault(strategy.name, [])
        alike = [each for each in known if answers_alike(gpu, each.answers)]
        if alike:
            return alike[0]
        try:
            found = offered(strategy, self._workload, gpu, self.asked.world_size)
        except PredictionUnavailable as error:
            if settings_of(strategy.name, self.asked.settings):
                raise
            found = Offered({}, (f"{strategy.name} was left out: {error}",))
        known.append(found)
        for note in found.notes:
            self.note(note)
        return found

    def _narrowed(self, setting: str, dimension: Dimension, strategy: Strategy) -> Dimension:
        """Return a dimension with the values to predict: that of the plan, or all."""
        values = list(dimension.values)
        if setting in self.asked.settings:
            values = [self.asked.settings[setting]]
        elif strategy.name not in self._varied:
            values = values[:1]
        elif len(values) > 1 and (why := _minor(dimension)):
            self.note(f"{setting} was left at {values[0]}: {why}; set it in the plan to predict it")
            values = values[:1]
        payloads = {value: load for value, load in dimension.payloads.items() if value in values}
        split = {value: each for value, each in dimension.accumulation.items() if value in values}
        return Dimension(values, payloads=payloads, when=dimension.when, accumulation=split)

    def _fit(self, settings: Settings, gpu: Gpu, space: Space) -> Fit:
        shown = {
            setting: value
            for setting, value in settings.items()
            if len(space.dimensions[setting].values) > 1 or setting in self.asked.settings
        }
        plan = replace(self.asked, settings=shown)
        try:
            need = self._need(plan, gpu, space)
        except (PredictionUnavailable, Unsupported) as error:
            self.failure = self.failure or error
            return Fit(plan, detail=str(error))
        fit = Fit(plan, need.required_bytes, need.margin_bytes, need.fits(gpu.total_bytes))
        largest = self._largest(plan, gpu, space, need)
        if largest is None:
            return fit
        return replace(
            fit,
            largest=largest,
            largest_required_bytes=self._need(largest, gpu, space).required_bytes,
        )

    def _largest(self, plan: Plan, gpu: Gpu, space: Space, need: Need) -> Plan | None:
        """Return the plan with the largest micro-batch that fits, given what this one needs."""
        looks = self._looks.setdefault(plan.variant, {})

        def high_bytes(micro_batch: int) -> int:
            sized = _of_size(plan, micro_batch)
            try:
                needed = self._need(sized, gpu, space)
                looks[sized.micro_batch] = needed.high_bytes + needed.unknown_bytes
            except PredictionUnavailable:
                return sys.maxsize
            return looks[sized.micro_batch]

        most = -(-plan.global_batch // plan.world_size) if plan.global_batch else MOST
        start = plan.micro_batch
        if len(looks) > 1:  # of another GPU, which needs almost the same
            start = min(max(guess_from(looks, gpu.total_bytes), 1), most)
        found = largest_that_fits(
            high_bytes,
            gpu.total_bytes,
            start=start,
            known={plan.micro_batch: need.high_bytes + need.unknown_bytes},
            most=most,
        )
        return None if found is None else _of_size(plan, found)

    def _need(self, plan: Plan, gpu: Gpu, space: Space) -> Need:
        return self.runs.need(resolve(plan, space, self._strategies, self._payloads), gpu)


def _minor(dimension: Dimension) -> str | None:
    """Return why the values of a dimension make no main variants; None: they do."""
    if dimension.is_costly:
        return "other values are costly to try"
    if set(dimension.payloads) == set(dimension.values[1:]):
        return "other values change parts of the model alone"
    hints = [dimension.hints.get(value) for value in dimension.values[1:]]
    per_sample = [(hint.bytes_per_sample, hint.seconds_per_sample) for hint in hints if hint]
    if len(per_sample) == len(hints) and set(per_sample) == {(1.0, 1.0)}:
        return "other values change nothing for each sample"
    return None


def _of_size(plan: Plan, micro_batch: int) -> Plan:
    """Return the plan with micro-batches of at most that size."""
    if plan.global_batch is not None:
        ranks = plan.world_size
        return Plan.split(plan.global_batch, micro_batch, plan.settings, world_size=ranks)
    return replace(plan, micro_batch=micro_batch)
