"""`autofit.predict`: the memory that a plan needs on a GPU, without a GPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autofit.codec import Amount, from_json, to_json
from autofit.devices.gpu_catalogue import ASSUMED, FITS, NCCL_UNKNOWN, Gpu, find_gpu
from autofit.errors import InvalidArgument, hides_own_frames
from autofit.memory.allocator import expandable_segments, ignored_options
from autofit.memory.replay import replay
from autofit.notebook import shown
from autofit.plan import Dimension, Plan, ResolvedPlan, check_count, settings_of
from autofit.prediction.breakdown import KINDS
from autofit.prediction.cuda.roofline import Cost
from autofit.prediction.dry_run import meta_dimensions
from autofit.prediction.dry_run_worker import Progress, in_worker
from autofit.prediction.needs import (
    MAX_MICRO_BATCH,
    SharedRuns,
    largest_that_fits,
    need_of,
)
from autofit.registry import load_strategies, resolve, strategies_of
from autofit.space import Space
from autofit.strategy import Phase, Strategy
from autofit.training.loss import STOOD_IN
from autofit.training.workload import Workload, check_arguments
from autofit.units import format_bytes, memory_words


@hides_own_frames
def predict(
    workload: Workload,
    *,
    plan: Plan | None = None,
    gpu: str | int | Gpu | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    payloads: Mapping[str, Any] | None = None,
    calibration: Mapping[str, Any] | None = None,
    ranks: int | None = None,
) -> Prediction:
    """Predict the memory of a plan on a GPU, without a GPU.

    The training runs on torch's meta device, where nothing is computed, and its allocations are
    replayed through a simulation of the CUDA caching allocator. It runs in a worker process, which
    later predictions use again; this process is left as it is. What a search measured on that GPU
    makes it more accurate: the `calibration` of its report.

    Args:
        workload: model, sample batch, loss and optimizer.
        plan: None: the baseline, with every setting plain.
        gpu: a name such as "L4" or "A100-80GB", a size such as "24GiB", or bytes; None: H200.
        strategies: names or Strategy objects that may have settings in the plan; None: the
            installed strategies whose settings the plan has.
        payloads: by setting, as in a report's dimensions; None: as the strategies say.
        calibration: measured constants of the GPU, its driver and torch, from `Report.calibration`;
            an empty one has no effect.
        ranks: how many GPUs train together, each with its share of the global batch; None:
            as many as the plan says, else one. The prediction is that of the GPU which needs most,
            without what NCCL holds.

    Raises:
        InvalidArgument: an argument is not valid, there is no such GPU, setting or value, or the
            workload cannot be sent to the worker.
        PredictionUnavailable: the training needs values; the message names the line.
        WorkerFailed: the worker died, twice.
        Exception: raised by the user's own code.
    """
    request = _request(workload, plan, strategies, payloads, ranks)
    answer = in_worker(_predict, workload, calibrated(find_gpu(gpu), calibration), *request)
    return replace(answer, _workload=workload, _gpu_assumed=gpu is None)


def predict_each(
    workload: Workload,
    gpus: Sequence[Gpu],
    *,
    plan: Plan | None = None,
    strategies: Iterable[str | Strategy] | None = None,
    payloads: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    progress: Progress,
) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Predict a plan on each GPU, and the largest micro-batch there, from dry runs they share.

    Args:
        workload, plan, strategies, payloads, ranks: as for `predict`.
        gpus: those of one name count once.
        progress: called with a line about each GPU.

    Returns:
        The predictions by name, and by name why the plan cannot run on a GPU.

    Raises:
        InvalidArgument: an argument is not valid, or the plan can run on none of them.
        Exception: as of `predict`.
    """
    request = _request(workload, plan, strategies, payloads, ranks)
    answers, refusals = in_worker(_predict_each, workload, gpus, *request, progress=progress)
    predictions = {}
    for name, (prediction, largest) in answers.items():
        predictions[name] = replace(prediction, _workload=workload)
        vars(predictions[name])["largest_micro_batch"] = largest  # as if it had been asked for
    return predictions, refusals


def calibrated(gpu: Gpu, calibration: Mapping[str, Any] | None) -> Gpu:
    """Return the GPU with what a search has measured of it; None or empty: nothing.

    Raises:
        InvalidArgument: it is no calibration.
    """
    if not calibration:
        return gpu
    learned = from_json(calibration, Calibration, "the calibration").non_torch_bytes
    return replace(gpu, context_bytes=learned, context_margin_bytes=0)


def _request(
    workload: Workload,
    plan: Plan | None,
    strategies: Iterable[str | Strategy] | None,
    payloads: Mapping[str, Any] | None,
    ranks: int | None,
) -> tuple[Plan, Sequence[Strategy], Mapping[str, Any]]:
    """Return the plan, its strategies and payloads, as `_predict` takes them."""
    check_arguments(workload, plan)
    if (ignored := ignored_options()) is not None:
        warnings.warn(ignored, stacklevel=3)
    chosen = plan_of_ranks(workload, plan, ranks)
    used = strategies_of(chosen) if strategies is None else load_strategies(strategies)
    return chosen, used, payloads or {}


def plan_of_ranks(workload: Workload, plan: Plan | None, ranks: int | None) -> Plan:
    """Return the plan for so many ranks; None: the baseline, and as many as the plan says.

    Raises:
        InvalidArgument: the plan says another number, or its samples cannot be shared by so many.
    """
    if plan is None:
        return workload.plan(ranks=1 if ranks is None else check_count("ranks", ranks))
    if ranks is None or check_count("ranks", ranks) == plan.ranks:
        return plan
    if plan.ranks > 1:
        raise InvalidArgument(
            f"ranks={ranks}, but the plan is of {plan.ranks} ranks: leave one out"
        )
    return plan.on(ranks)


@dataclass(frozen=True)
class Prediction:
    """The memory that a plan needs.

    Attributes:
        plan: with every setting of its strategies.
        gpu: the GPU.
        peak_allocated_bytes: most bytes in live tensors.
        peak_reserved_bytes: most bytes held by the caching allocator if memory is not short; of
            several ranks, within `required_bytes`.
        required_bytes: the smallest VRAM budget under which the plan runs, non-torch bytes
            included. It may be less than what is held where memory is not short: the cache is
            emptied while a training warms up.
        breakdown: bytes by kind at the moment of peak allocated: weights, gradients,
            optimizer_state, activations and temporaries, which add up to it; and non_torch.
            Gradients are 0 where the peak lies before the first of them is made: at the end of a
            forward without accumulation, for an update drops them.
        interval: (low, high) around required_bytes; `fits` uses the high end.
        unknown_bytes: the room that a fit leaves for what is not counted: 2 GiB for NCCL where the
            plan is one of several ranks, else 0.
        has_stand_in_loss: whether the mean of the model's outputs stood in for a loss, because the
            workload has none: a real one takes more.
        parameters: elements of the model's parameters, trained or not; None of several ranks.
        evaluation_bytes: what an evaluation beside the training holds, non-torch bytes included;
            `required_bytes` is no less. None: the workload has no eval_step.
        micro_batch_cost: the operations of a micro-batch by a roofline, good for ratios between
            plans of one training alone; None where the rates of the GPU are unknown.
        notes: what was assumed or left out: of a GPU that only has a size, options of the
            allocator, compiled functions.
    """

    plan: Plan
    gpu: Gpu
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    required_bytes: int
    breakdown: Mapping[str, int]
    interval: tuple[int, int]
    micro_batch_cost: Cost | None = field(repr=False)
    _resolved: ResolvedPlan = field(repr=False, compare=False)
    unknown_bytes: int = 0
    has_stand_in_loss: bool = False
    parameters: int | None = None
    evaluation_bytes: int | None = None
    notes: tuple[str, ...] = ()
    _workload: Workload | None = field(default=None, repr=False, compare=False)
    _gpu_assumed: bool = field(default=False, repr=False, compare=False)

    def fits(self, vram_budget: str | float | None = None) -> bool | None:
        """Return whether the plan fits into a VRAM budget, with the margin of the interval.

        None: what NCCL takes decides, which is unknown.

        Args:
            vram_budget: "24GiB", bytes, or a fraction of what is usable of the GPU's memory; None:
                all of that.

        Raises:
            InvalidArgument: it is no budget, or more than the GPU has.
        """
        if self.interval[1] > self.gpu.budget_bytes(vram_budget):
            return False
        return True if self.excess_bytes(vram_budget) <= 0 else None

    def excess_bytes(self, vram_budget: str | float | None = None) -> int:
        """Return the bytes that are missing from a VRAM budget, for a constraint of Optuna.

        At most zero where the plan fits; then as much is left. What is unknown counts as needed.
        Argument and errors are those of `fits`.
        """
        return self.interval[1] + self.unknown_bytes - self.gpu.budget_bytes(vram_budget)

    @cached_property
    def largest_micro_batch(self) -> int | None:
        """The largest micro-batch that fits into the GPU's usable memory; see the method below."""
        return self.largest_micro_batch_within(self.gpu.usable_bytes)

    def largest_micro_batch_within(self, vram_budget_bytes: int) -> int | None:
        """Return the largest micro-batch that fits; None: one sample does not.

        Settings stay, and so does the plan's global batch, by accumulation; where it has none, its
        accumulation steps stay. Further plans are predicted, the returned one among
        them; a plan that cannot be predicted counts as one that does not fit (a model may look at
        the values of its batch, which are not kept for a very large one).
        """
        assert self._workload is not None  # `predict` puts it there
        request = replace(self, _workload=None), vram_budget_bytes
        return in_worker(_largest_micro_batch, self._workload, *request)

    def __str__(self) -> str:
        lines = [f"  {label:<20}{text}" for label, text in self._rows().items()]
        return "\n".join([self._title, *lines, *self._notes])

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return shown([self._title, *self._notes], list(self._rows().items()))

    @property
    def optimizer(self) -> str:
        """The class of the optimizer, or the function that makes it; AdamW if none was given."""
        assert self._workload is not None  # `predict` puts it there
        return self._workload.optimizer_name

    @property
    def assumes_optimizer(self) -> bool:
        """Whether the optimizer is the default, AdamW."""
        assert self._workload is not None  # as above
        return self._workload.assumes_optimizer

    @property
    def _title(self) -> str:
        return f"{self.plan} on {self.gpu.name}{ASSUMED * self._gpu_assumed}"

    @property
    def _notes(self) -> list[str]:
        return [f"note: {note}" for note in self.notes]

    def _rows(self) -> dict[str, str]:
        low, high = (format_bytes(size) for size in self.interval)
        rows = {
            "required": f"{format_bytes(self.required_bytes)} ({low} to {high})",
            "VRAM budget": f"{format_bytes(self.gpu.usable_bytes)}, all that is usable",
            "fits": FITS[self.fits()],
            "peak reserved": format_bytes(self.peak_reserved_bytes),
            "peak allocated": f"{format_bytes(self.peak_allocated_bytes)}, of which at that moment",
            **{f"  {memory_words(kind)}": format_bytes(self.breakdown[kind]) for kind in KINDS},
            "non-torch": format_bytes(self.breakdown["non_torch"]),
        }
        rows["  optimizer state"] += (
            f" ({self.optimizer}{', the default' * self.assumes_optimizer})"
        )
        if self.unknown_bytes:
            rows["NCCL"] = NCCL_UNKNOWN
        if self.evaluation_bytes is not None:
            rows["evaluation"] = f"{format_bytes(self.evaluation_bytes)}, part of required"
        if not self.breakdown["gradients"]:
            rows["  gradients"] += " (they do not exist yet at the peak)"
        if self.has_stand_in_loss:
            rows["no loss"] = STOOD_IN
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "plan": to_json(self.plan),
            "gpu": self.gpu.name,
            "optimizer": self.optimizer,
            "assumes_optimizer": self.assumes_optimizer,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "required_bytes": self.required_bytes,
            "required_bytes_low": self.interval[0],
            "required_bytes_high": self.interval[1],
            "breakdown": dict(self.breakdown),
            "unknown_bytes": self.unknown_bytes,
            "evaluation_bytes": self.evaluation_bytes,
            "has_stand_in_loss": self.has_stand_in_loss,
            "fits": self.fits(),
            "gpu_assumed": self._gpu_assumed,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Calibration:
    """Measured constants of a GPU, its driver and torch, as a report holds them.

    Adding the error of one plan's predicted peak to the predictions of other plans makes them no
    better (benchmarks/results/prediction-ablation), so only the context is kept.

    Attributes:
        non_torch_bytes: bytes that a process holds outside the allocator.
    """

    non_torch_bytes: Amount


def predict_resolved(
    workload: Workload, resolved: ResolvedPlan, gpu: Gpu, runs: SharedRuns | None = None
) -> Prediction:
    """Predict a plan that is resolved already, like `predict`.

    Args:
        workload: what is trained.
        resolved: the plan.
        gpu: the GPU.
        runs: dry runs of the workload to use and to add to; None: none.

    Raises:
        PredictionUnavailable: the training needs values; the message names the line.
        Exception: raised by the user's own code.
    """
    run = (runs or SharedRuns(workload)).run(resolved, gpu)
    recording, expandable = run.recording_on(gpu), expandable_segments()
    breakdown = run.labels.at_peak(recording)
    ample = replay(recording, expandable_segments=expandable)
    need = need_of(recording, gpu, resolved.plan.ranks, run.evaluation_on(gpu))
    plain = (
        f"not compiled in the prediction, and may need less where it is: {line}"
        for line in run.uncompiled
    )
    reserved = ample.peak_reserved_bytes
    if resolved.plan.ranks > 1:
        reserved = min(reserved, need.required_bytes - gpu.context_bytes)
    return Prediction(
        plan=resolved.plan,
        gpu=gpu,
        peak_allocated_bytes=ample.peak_allocated_bytes,
        peak_reserved_bytes=reserved,
        required_bytes=need.required_bytes,
        breakdown={**breakdown, "non_torch": gpu.context_bytes},
        interval=(need.required_bytes - need.margin_bytes, need.high_bytes),
        micro_batch_cost=run.micro_batch_cost_on(gpu),
        _resolved=resolved,
        unknown_bytes=need.unknown_bytes,
        has_stand_in_loss=run.has_stand_in_loss,
        parameters=run.parameters,
        evaluation_bytes=need.evaluation_bytes,
        notes=tuple(note for note in (gpu.assumed, ignored_options(), *plain) if note is not None),
    )


# In the worker.


def _predict_each(
    workload: Workload,
    gpus: Sequence[Gpu],
    plan: Plan,
    strategies: Sequence[Strategy],
    payloads: Mapping[str, Any],
    progress: Progress,
) -> tuple[dict[str, tuple[Prediction, int | None]], dict[str, str]]:
    """Predict for each GPU in turn, and then the largest micro-batches, the largest GPU's first.

    What smaller ones hold lies between its dry runs.
    """
    runs, predictions = SharedRuns(workload), dict[str, Prediction]()
    refusals: dict[str, InvalidArgument] = {}
    for gpu in gpus:
        progress(f"{gpu.name} ({len(predictions) + len(refusals) + 1} of {len(gpus)})")
        try:
            predictions[gpu.name] = _predict(workload, gpu, plan, strategies, payloads, runs)
        except InvalidArgument as error:  # it lacks a type, say
            refusals[gpu.name] = error
    if not predictions:
        raise next(iter(refusals.values()))
    largest = {
        name: _largest_micro_batch(workload, each, each.gpu.usable_bytes, runs)
        for name, each in sorted(predictions.items(), key=lambda item: -item[1].gpu.total_bytes)
    }
    answers = {name: (each, largest[name]) for name, each in predictions.items()}
    return answers, {name: str(error) for name, error in refusals.items()}


def _predict(
    workload: Workload,
    gpu: Gpu,
    plan: Plan,
    strategies: Sequence[Strategy],
    payloads: Mapping[str, Any],
    runs: SharedRuns | None = None,
) -> Prediction:
    """Predict a plan with the dimensions that its strategies offer on the meta device.

    Strategies whose payloads are given are not asked: they may have found them by measuring.

    Raises:
        InvalidArgument: a setting or a value that the GPU does not have.
        PredictionUnavailable: the payload of a setting can only be found by running the model.
    """
    dimensions: dict[str, Dimension] = {}
    for strategy in strategies:
        settings = settings_of(strategy.name, plan.settings)
        if settings_of(strategy.name, payloads):
            dimensions |= {name: Dimension([value]) for name, value in settings.items()}
        elif settings or (plan.ranks > 1 and strategy.phase is Phase.PARALLEL):
            dimensions |= meta_dimensions(strategy, settings, workload, gpu, plan.ranks)
    space = Space(dimensions, workload.sample_batch_size)
    resolved = resolve(plan, space, strategies, payloads)
    return predict_resolved(workload, resolved, gpu, runs)


def _largest_micro_batch(
    workload: Workload,
    prediction: Prediction,
    vram_budget_bytes: int,
    runs: SharedRuns | None = None,
) -> int | None:
    runs = runs or SharedRuns(workload)
    if (prediction.evaluation_bytes or 0) > vram_budget_bytes:
        return None  # whatever the micro-batch
    plan = prediction.plan
    space = Space({}, 1, plan.global_batch, ranks=plan.ranks)

    def at(micro_batch: int) -> Plan:
        if micro_batch == plan.micro_batch:
            return plan
        if plan.global_batch is None:
            return replace(plan, micro_batch=micro_batch)
        return space.plan(micro_batch, plan.settings)

    def needed(micro_batch: int) -> int:
        if micro_batch == plan.micro_batch:
            return prediction.interval[1] + prediction.unknown_bytes
        with suppress(Exception):  # the plan itself was predicted: another size cannot be trained
            need = runs.need(replace(prediction._resolved, plan=at(micro_batch)), prediction.gpu)
            return need.high_bytes + need.unknown_bytes
        return sys.maxsize

    maximum = MAX_MICRO_BATCH if plan.global_batch is None else space.largest_micro_batch
    largest = largest_that_fits(needed, vram_budget_bytes, start=plan.micro_batch, maximum=maximum)
    return None if largest is None else at(largest).micro_batch
