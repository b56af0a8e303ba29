"""Search a live `transformers.Trainer`, and write the plan back into its arguments.

    report = autofit.integrations.transformers.search(trainer, vram_budget="24GiB")
    print(autofit.integrations.transformers.apply(report, trainer))
    trainer.train()

`predict(trainer, gpu="L4")` and `check(trainer)` tell the memory of the Trainer as it is.

What is searched is what the Trainer would run: its model, its collator over its longest samples,
its `compute_loss`, the optimizer that it creates, its clipping, and
per_device_train_batch_size x gradient_accumulation_steps samples in an optimizer step; where it has
an eval_dataset, also its `prediction_step` over the longest of that. One device.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from autofit.errors import InvalidArgument
from autofit.integrations.applied import (
    Applied,
    Division,
    accelerate_compiles,
    divide,
    library,
    on_model,
)
from autofit.integrations.loader_batches import MAX_EXAMINED, LoaderBatch, longest_samples
from autofit.integrations.workloads import longest_of, own_autocast, search_workload
from autofit.plan import Scalar
from autofit.report.report import Report
from autofit.searching.events import OnEvent
from autofit.strategy import Strategy
from autofit.training.batch import batch_size, tensors_of
from autofit.training.evaluation import modes_kept
from autofit.training.samples import CollateFn
from autofit.training.workload import Workload

if TYPE_CHECKING:
    from autofit.checks.predict import GpuTable
    from autofit.checks.verdict import Verdict
    from autofit.prediction.predict import Prediction
    from autofit.searching.options import SearchOptions


def workload(
    trainer: Any,
    *,
    sample_batch: Any = None,
    examine: int = MAX_EXAMINED,
    as_configured: bool = True,
    **more: Any,
) -> Workload:
    """Return a Trainer's training as a workload, for `autofit.predict`, `check` and the like.

    Its precision, accumulation, optimizer and clipping count, and LoRA: frozen parameters have
    neither gradients nor optimizer state. The batch is that of its longest samples, which is the
    most that any order or packing of them makes.

    Args:
        trainer: a live `transformers.Trainer`, of any subclass; it is not changed.
        sample_batch: a batch as its collator makes them, as long as the longest; None: the
            collator is given the longest of `examine` samples of the training data.
        examine: samples to look at for the longest ones, for some seconds at most; of images and
            the like, which have no length, a few.
        as_configured: with the activation checkpointing that the arguments ask for. False: without,
            as for a search or the plan of a report, which checkpoint as the plan says.
        more: further fields of the `Workload`; `eval_step=None, eval_batch=None` leaves the
            Trainer's evaluation out.

    Raises:
        InvalidArgument: the Trainer uses more than one device, or has no training data.

    Warns:
        UserWarning: the arguments ask for compilation, which is left out.
    """
    _check_one_device(trainer)
    args = trainer.args
    if sample_batch is None:
        taken = _longest_samples(trainer, examine)
    else:
        taken = LoaderBatch(sample_batch)
    loss = TrainerLoss(trainer)
    given: dict[str, Any] = {
        "collate_fn": taken.collate_fn,
        "loss_fn": loss,
        "loss_weight": loss.items if loss.counts_items(taken.batch) else None,
        "optimizer": _optimizer(trainer),
        "clip_grad_norm": args.max_grad_norm or None,
        "global_batch": samples_per_step(args),
    }
    if trainer.eval_dataset is not None and not {"eval_step", "eval_batch"} & more.keys():
        evaluated = _longest_evaluation(trainer, examine)
        # The Trainer has one collator for both; without samples a batch is cut as rows
        given.update(eval_step=loss.evaluate, eval_batch=evaluated and evaluated.given)
    model = trainer.model
    if as_configured and args.torch_compile:
        warnings.warn("torch_compile=True of TrainingArguments was ignored", stacklevel=2)
    if as_configured and _checkpoints(args):
        model = _checkpointed(model, args)
    return Workload(model, taken.given, **given | more)


def predict(
    trainer: Any, *, sample_batch: Any = None, examine: int = MAX_EXAMINED, **more: Any
) -> Prediction | GpuTable:
    """Predict the memory of this Trainer as it is: `autofit.predict` of its `workload`.

    Args:
        trainer: see `workload`.
        sample_batch: see `workload`.
        examine: see `workload`.
        more: further arguments of `autofit.predict` (gpu, plan, ranks, strategies). A report
            as plan replaces the Trainer's own checkpointing, as `apply` does.

    Raises:
        InvalidArgument: see `workload`, and what `autofit.predict` raises.
    """
    from autofit.checks.predict import predict as run

    given = _workload_for(trainer, sample_batch, examine, more.get("plan"))
    predicted: Prediction | GpuTable = run(given, **more)
    return predicted


def check(
    trainer: Any, *, sample_batch: Any = None, examine: int = MAX_EXAMINED, **more: Any
) -> Verdict:
    """Check whether this Trainer fits as it is: `autofit.check` of its `workload`.

    Args:
        trainer: see `workload`.
        sample_batch: see `workload`.
        examine: see `workload`.
        more: further arguments of `autofit.check` (vram_budget, gpu, device, plan, ...); a report
            as for `predict`.

    Raises:
        InvalidArgument: see `workload`, and what `autofit.check` raises.
    """
    from autofit.checks.check import check as run

    return run(_workload_for(trainer, sample_batch, examine, more.get("plan")), **more)


def _workload_for(trainer: Any, sample_batch: Any, examine: int, plan: Any) -> Workload:
    """Return the workload under the Trainer's arguments, or under the plan of a given report."""
    as_configured = not isinstance(plan, Report)
    return workload(
        trainer, sample_batch=sample_batch, examine=examine, as_configured=as_configured
    )


def search(
    trainer: Any,
    *,
    sample_batch: Any = None,
    examine: int = MAX_EXAMINED,
    numerics: Any = "reduced_precision",
    strategies: Iterable[str | Strategy] | None = None,
    progress: OnEvent | bool | None = None,
    options: SearchOptions | None = None,
    **more: Any,
) -> Report:
    """Find the fastest way to run this Trainer, with its own samples per optimizer step.

    Args:
        trainer: a live `transformers.Trainer`; its model, arguments and data stay as they are.
        sample_batch: see `workload`.
        examine: see `workload`.
        numerics: as for `autofit.search`. If the arguments ask for bf16 or fp16, every plan keeps
            it, and no other precision is tried.
        strategies: as for `autofit.search`.
        progress: as for `autofit.search`.
        options: as for `autofit.search`; a Trainer's loader makes micro-batches of one size, so
            `even_split` is always on.
        more: further arguments of `autofit.search` (vram_budget, timeout, study, ...).

    Raises:
        InvalidArgument: see `workload`, and what `autofit.search` raises.
    """
    own = own_precision(trainer.args)
    asks = {dtype: f"{name}=True in TrainingArguments" for name, dtype in AMP.items()}
    trained = workload(
        trainer,
        sample_batch=sample_batch,
        examine=examine,
        as_configured=False,
    )
    with modes_kept(trainer.model):
        trainer.model.train()  # as it trains; a loaded one is in evaluation mode
        report = search_workload(
            trained,
            precision=own,
            strategies=strategies,
            numerics=numerics,
            asked_by=asks[own] if own else "",
            notes=_notes(trainer.args),
            trainer="transformers",
            progress=progress,
            options=options,
            **{"device": str(trainer.args.device), **_planned_steps(trainer)} | more,
        )
    data = trainer.train_dataset
    return report.with_costs(epoch_samples=len(data) or None if hasattr(data, "__len__") else None)


def _checkpointed(model: torch.nn.Module, args: Any) -> torch.nn.Module:
    """Return a copy of the model, with its very tensors, that checkpoints as `train` would."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied: Any = copy.deepcopy(model, tensors)
    options = getattr(args, "activation_checkpointing_kwargs", args.gradient_checkpointing_kwargs)
    # The first since transformers 5, the second until then
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(copied, name) for name in names if hasattr(copied, name))
    taken = inspect.signature(enable).parameters  # such as every_n_layers; others are for torch
    own = {name: value for name, value in (options or {}).items() if name in taken}
    others = {name: value for name, value in (options or {}).items() if name not in taken}
    enable(others or None, **own)
    return copied  # type: ignore[no-any-return]  # of a library without types here


def apply(
    report: Report, trainer: Any, *, strategies: Iterable[str | Strategy] | None = None
) -> Applied:
    """Write a report's best plan into a Trainer; what its arguments lack, `train` applies.

    Args:
        report: of `search`, or of a search of the same training.
        trainer: its arguments are changed. Settings that `TrainingArguments` do not know are
            applied to the model and the optimizer while `trainer.train()` runs.
        strategies: as for `Report.apply`.

    Returns:
        What was set, to be printed; `undo` takes it back.

    Raises:
        InvalidArgument: the Trainer uses more than one device, or cannot run the plan.

    Warns:
        UserWarning: the last step of an epoch would not have the gradients of its samples' mean.
    """
    _check_one_device(trainer)
    args = trainer.args
    compiles = accelerate_compiles(report, strategies, is_mixed=own_precision(args) is not None)
    division = divide(
        report,
        lambda term, value: compiles if term == "compilation" else _expresses(trainer, term, value),
        strategies,
        weighs_losses=True,  # by the items of a step, as `TrainerLoss` does
    )
    changed = {name: v for name, v in _arguments(division, args).items() if v != _held(args, name)}
    before = {name: getattr(args, name) for name in changed}
    lines = [f"{name}={value!r} (was {_held(args, name)!r})" for name, value in changed.items()]
    callback = _callback(division)
    with ExitStack() as stack:
        stack.callback(_write, trainer, before)
        _write(trainer, changed)
        if division.rest.strategies:
            trainer.add_callback(callback)
            stack.callback(trainer.remove_callback, callback)
            stack.callback(callback.undo)
            stack.enter_context(_after_train(trainer, callback.undo))
        undo = stack.pop_all()
    if words := _last_misweighed(trainer, division):
        warnings.warn(words, stacklevel=2)
    said = (*lines, *division.lines("TrainingArguments"))
    return Applied(said or ("nothing to change: TrainingArguments already match the plan",), undo)


def _last_misweighed(trainer: Any, division: Division) -> str | None:
    """Say how an epoch's last step weighs a short micro-batch; None: as it should, or unknown.

    A Trainer divides by the micro-batches that a step has, or by the items that their losses are
    means over.
    """
    args, plan = trainer.args, division.plan
    counts_items = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    samples = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else 0
    steps, left = divmod(samples, plan.samples_per_step)
    if counts_items or args.dataloader_drop_last or 0 < args.max_steps <= steps:
        return None
    whole, short = divmod(left, plan.micro_batch)
    if not whole or not short:
        return None
    return division.misweighed(plan.accumulation_steps, short)


def _check_one_device(trainer: Any) -> None:
    args = trainer.args
    if args.world_size > 1 or args.n_gpu > 1:
        raise InvalidArgument(
            f"this Trainer uses {max(args.world_size, args.n_gpu)} devices, but "
            "autofit searches for one: start one process with CUDA_VISIBLE_DEVICES=0"
        )
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        raise InvalidArgument(
            "this Trainer uses DeepSpeed or FSDP, which shard the model, but autofit "
            "searches for one device: remove deepspeed= and fsdp= from its arguments"
        )


def _longest_samples(trainer: Any, examine: int) -> LoaderBatch:
    """Return the Trainer's longest samples, as many as its micro-batches have, and its collator."""
    if trainer.train_dataset is None:
        raise InvalidArgument(
            "this Trainer has no train_dataset to take the longest samples from: pass "
            "one to the Trainer, or pass sample_batch="
        )
    known = len(trainer.accelerator._dataloaders)
    loader = copy.copy(trainer).get_train_dataloader()  # it may keep what it finds out
    del trainer.accelerator._dataloaders[known:]  # what asking for a loader adds
    taken = longest_samples(loader, examine, trainer.args.train_batch_size)
    if taken.collate_fn is None:
        return taken
    return replace(taken, collate_fn=CountedCollate(taken.collate_fn))


def _longest_evaluation(trainer: Any, examine: int) -> LoaderBatch | None:
    """Return the longest samples of an evaluation, of the longer data set where several."""
    given = trainer.eval_dataset
    data_sets = given.values() if isinstance(given, Mapping) else [given]
    known = len(trainer.accelerator._dataloaders)
    loaders = [copy.copy(trainer).get_eval_dataloader(each) for each in data_sets]
    del trainer.accelerator._dataloaders[known:]
    return longest_of(loaders, examine, trainer.args.eval_batch_size)


def _optimizer(trainer: Any) -> Any:
    """Return the optimizer that the Trainer has, or would create for its model."""
    if trainer.optimizer is not None:
        return getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    other = copy.copy(trainer)  # `create_optimizer` keeps what it makes
    other.create_optimizer()
    return other.optimizer


def _notes(args: Any) -> Iterator[str]:
    if _checkpoints(args):
        yield (
            "gradient_checkpointing=True of TrainingArguments was ignored: "
            "the search looks for placements itself, and applying a plan turns it off"
        )
    if args.torch_compile:
        yield (
            "torch_compile=True of TrainingArguments was ignored in the baseline; "
            "applying a plan sets it to what the plan has, if compilation was searched"
        )


def _planned_steps(trainer: Any) -> dict[str, int]:
    """Return the optimizer steps that `train` takes, as an argument.

    {} if its data has no length.
    """
    args, data = trainer.args, trainer.train_dataset
    if args.max_steps > 0:
        return {"planned_steps": args.max_steps}
    if not hasattr(data, "__len__"):
        return {}
    rounded = math.floor if args.dataloader_drop_last else math.ceil
    micro_batches = rounded(len(data) / args.train_batch_size)
    of_epoch = max(1, math.ceil(micro_batches / args.gradient_accumulation_steps))
    return {"planned_steps": max(1, math.ceil(args.num_train_epochs * of_epoch))}


def _checkpoints(args: Any) -> bool:
    # The first since transformers 5, the second until then
    return bool(getattr(args, "activation_checkpointing", args.gradient_checkpointing))


def _expresses(trainer: Any, term: str, value: Scalar) -> bool:
    """Whether the arguments of this Trainer have a place for it."""
    if term == "optimizer_implementation":
        is_torch = str(_held(trainer.args, "optim")) in ("adamw_torch", "adamw_torch_fused")
        return is_torch and value == "fused" and trainer.optimizer is None
    return term == "autocast"  # tf32= counts only where TrainingArguments are made


def _arguments(division: Division, args: Any) -> dict[str, Any]:
    """Return the names and values of arguments that run the plan."""
    plan, terms = division.plan, division.arguments
    wanted: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "auto_find_batch_size": False,  # it would change the global batch without a word
        "gradient_checkpointing": False,
    }
    if hasattr(args, "activation_checkpointing"):  # its name since transformers 5
        wanted["activation_checkpointing"] = False
    if "autocast" in terms:
        wanted |= {name: dtype == terms["autocast"] for name, dtype in AMP.items()}
    if "optimizer_implementation" in terms:
        wanted["optim"] = type(args.optim)("adamw_torch_fused")
    if "compilation" in division.searched:
        compiles = "compilation" in terms
        mode = terms.get("compilation", "default")
        wanted |= {
            "torch_compile": compiles,
            "torch_compile_backend": "inductor" if compiles else None,
            "torch_compile_mode": None if mode == "default" else mode,
        }
    return wanted


def _held(args: Any, name: str) -> Any:
    value = getattr(args, name)
    return getattr(value, "value", value)  # of an enumeration


def _write(trainer: Any, values: Mapping[str, Any]) -> None:
    """Set these arguments, with all that the Trainer has derived from them."""
    args = trainer.args
    for name, value in values.items():
        setattr(args, name, value)
    trainer._train_batch_size = args.train_batch_size
    if not values.keys() & (AMP.keys() | _COMPILATION):
        return
    accelerate = library("accelerate")
    args.mixed_precision = next((name for name in AMP if getattr(args, name)), "no")
    _take_off_autocast(trainer.model)
    if getattr(trainer.model_wrapped, "_orig_mod", None) is trainer.model:  # compiled before
        trainer.model_wrapped = trainer.model
    accelerate.state.AcceleratorState._reset_state()
    trainer.create_accelerator_and_postprocess()


def _take_off_autocast(model: torch.nn.Module) -> None:
    """Undo `Accelerator.prepare_model`, which would keep the autocast of the earlier precision.

    `Accelerator.unwrap_model(keep_fp32_wrapper=False)` would take decorators of the model's own
    forward off, too.
    """
    attributes = vars(model)
    if attributes.pop("_is_accelerate_prepared", False) and "_original_forward" in attributes:
        original = attributes.pop("_original_forward")
        attributes.pop("forward")
        if original != model.forward:
            attributes["forward"] = original


@contextmanager
def _after_train(trainer: Any, undo: Callable[[], None]) -> Iterator[None]:
    """Have `train` end with `undo`, also where it raises: a Trainer has no callback for that."""
    own, train = vars(trainer).get("train"), trainer.train

    @functools.wraps(train)
    def train_and_undo(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        finally:
            undo()

    trainer.train = train_and_undo
    try:
        yield
    finally:
        del trainer.train
        if own is not None:
            trainer.train = own


def _callback(division: Division) -> Any:
    """Return a callback that applies the rest of a plan while a Trainer trains."""
    base: Any = library("transformers").TrainerCallback

    class ApplyPlan(base):  # type: ignore[misc]  # a class of a library that is optional
        """Applies a plan's settings to model and optimizer from the start to the end of `train`."""

        def __init__(self) -> None:
            self._stack = ExitStack()

        def on_train_begin(
            self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **others: Any
        ) -> None:
            own = getattr(optimizer, "optimizer", optimizer)  # without accelerate's wrapper
            self._stack.enter_context(on_model(division.rest, model, own))

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.undo()

        def undo(self) -> None:
            self._stack.close()

    return ApplyPlan()


AMP = {"bf16": "bfloat16", "fp16": "float16"}
"""Argument of a Trainer -> the type of its autocast."""
_COMPILATION = frozenset({"torch_compile", "torch_compile_backend", "torch_compile_mode"})
_LEFT_BEHIND = (
    "model",
    "model_wrapped",
    "train_dataset",
    "eval_dataset",
    "optimizer",
    "lr_scheduler",
    "callback_handler",
    "accelerator",
    "gather_function",
    "_memory_tracker",
    "deepspeed",
    "train",
)
"""Attributes of a Trainer that its loss does without, and that are large or do not travel."""


_SAMPLES = "autofit_samples"
"""Key of a batch's number of samples, which its tensors need not tell: a collator may flatten them.
"""


@dataclass(frozen=True)
class CountedCollate:
    """A collator whose batches say how many samples they have.

    Attributes:
        collate_fn: list of samples -> a mapping of tensors.
    """

    collate_fn: CollateFn

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate_fn(samples) | {_SAMPLES: len(samples)}


def _split_off_samples(batch: Any) -> tuple[dict[str, Any], int]:
    """Return a batch as the model takes it, and its number of samples."""
    inputs = dict(batch)
    samples = inputs.pop(_SAMPLES, None)
    return inputs, batch_size(batch) if samples is None else samples


class TrainerLoss:
    """(model, batch) -> the loss of one micro-batch as a mean, by a Trainer's `compute_loss`.

    A Trainer adds up the losses of a step's micro-batches, each of them divided by the items (valid
    tokens, say) of the whole step, or else by the number of micro-batches. So this is the share
    that a micro-batch adds, times their number. It depends on that number where a `compute_loss` of
    the user's own leaves the division out: then the accumulation stays as it is.

    It travels to the worker without the Trainer's model, data, optimizer and callbacks. Where the
    Trainer's own arguments ask for bf16 or fp16, it is computed under that autocast.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._precision = own_precision(trainer.args)
        # named here so that a study knows a training with another loss
        kind = type(trainer)
        self._functions = (kind.compute_loss, kind.prediction_step, trainer.compute_loss_func)
        self._smoothing = trainer.args.label_smoothing_factor
        self._samples = samples_per_step(trainer.args)

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        model.train()  # as `Trainer.training_step` does
        inputs, samples = _split_off_samples(batch)
        micro_batches = self._samples / samples
        items = self._items_in(inputs)
        with own_autocast(model, self._precision), self._with_model(model):
            loss: torch.Tensor = self._trainer.compute_loss(
                model,
                inputs,
                num_items_in_batch=None if items is None else micro_batches * items,
            )
        return micro_batches * loss if self._is_share(items) else loss

    def evaluate(self, model: torch.nn.Module, batch: Any) -> None:
        """Run the Trainer's `prediction_step` on a batch that is on the model's device."""
        trainer = copy.copy(self._trainer)
        trainer.model = trainer.model_wrapped = model
        trainer._prepare_inputs = dict  # it would move them to the device of the arguments
        loss_only = trainer.compute_metrics is None or trainer.args.prediction_loss_only
        with own_autocast(model, self._precision):
            trainer.prediction_step(model, _split_off_samples(batch)[0], loss_only)

    def _is_share(self, items: Any) -> bool:
        """Whether the Trainer adds up these losses as they are, as its `training_step` decides."""
        trainer = self._trainer
        told: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
        if told is not None:
            return told
        counted = trainer.model_accepts_loss_kwargs and items is not None
        return counted or trainer.compute_loss_func is not None

    @contextmanager
    def _with_model(self, model: torch.nn.Module) -> Iterator[None]:
        """Give a copied Trainer its model back, for `compute_loss` only."""
        before = self._trainer.model
        if before is None:
            self._trainer.model = self._trainer.model_wrapped = model
        try:
            yield
        finally:
            if before is None:  # else a probe's model would outlive it
                self._trainer.model = self._trainer.model_wrapped = None

    def counts_items(self, batch: Any) -> bool:
        """Whether the Trainer averages its loss over the items of a step, such as valid tokens."""
        return self._items_in(_split_off_samples(batch)[0]) is not None

    def items(self, batch: Any) -> float:
        """What the loss of this batch is a mean over, as the Trainer counts it."""
        return float(self._items_in(_split_off_samples(batch)[0]))

    def _items_in(self, batch: Any) -> Any:
        device = next((tensor.device for tensor in tensors_of(batch)), torch.device("cpu"))
        return self._trainer._get_num_items_in_batch([batch], device)

    def __getstate__(self) -> dict[str, Any]:
        """Drop what the loss does not need; `__setstate__` makes a new Accelerator."""
        trainer = copy.copy(self._trainer)
        for name in _LEFT_BEHIND:
            vars(trainer).pop(name, None)
        return {**vars(self), "_trainer": trainer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        cpu = self._trainer.args.use_cpu
        self._trainer.accelerator = library("accelerate").Accelerator(cpu=cpu)
        self._trainer.model = self._trainer.model_wrapped = None


def samples_per_step(args: Any) -> int:
    """Return the samples of an optimizer step."""
    return int(args.train_batch_size * args.gradient_accumulation_steps)


def own_precision(args: Any) -> str | None:
    """Return the type of autocast that the arguments ask for."""
    return next((dtype for name, dtype in AMP.items() if getattr(args, name)), None)
