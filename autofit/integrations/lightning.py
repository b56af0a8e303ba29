"""Search a LightningModule, and have a Lightning Trainer run the plan.

    report = autofit.integrations.lightning.search(module, datamodule, vram_budget="24GiB")
    trainer = Trainer(max_epochs=3, **autofit.integrations.lightning.arguments(report))
    trainer.fit(module, datamodule)

What is searched is the module's `training_step` over the longest samples of its training loader,
the optimizer of its `configure_optimizers`, and its `validation_step` over the longest samples of
the DataModule's validation loader, where there are both. `arguments` are precision,
accumulate_grad_batches and a callback, which applies to the module what a Trainer has no argument
for, and sets the DataModule's `batch_size`. For `lightning` and `pytorch_lightning` alike. One
device.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from autofit.errors import InvalidArgument
from autofit.integrations.applied import Division, divide, library, on_model
from autofit.integrations.loader_batches import MAX_EXAMINED, LoaderBatch
from autofit.integrations.workloads import longest_of, own_autocast, search_workload
from autofit.report.report import Report
from autofit.searching.events import OnEvent
from autofit.strategy import Strategy
from autofit.training.samples import CollateFn
from autofit.training.workload import Workload
from autofit.units import kind_of

if TYPE_CHECKING:
    from autofit.checks.predict import GpuTable
    from autofit.checks.verdict import Verdict
    from autofit.prediction.predict import Prediction
    from autofit.searching.options import SearchOptions

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_MIXED = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
# Where Lightning's own hooks are, which do nothing.
_HOOKS = ("lightning.pytorch.core.", "pytorch_lightning.core.")
_SHARDING = ("FSDP", "DeepSpeed", "ModelParallel")
"""In the names of Lightning's strategies."""


def workload(
    module: Any,
    data: Any = None,
    *,
    trainer: Any = None,
    sample_batch: Any = None,
    examine: int = MAX_EXAMINED,
    **more: Any,
) -> Workload:
    """Return a LightningModule's training as a workload, for `autofit.predict` and the like.

    Args:
        module: a live LightningModule with one optimizer, which Lightning steps.
        data: a DataModule, or a training DataLoader, whose longest samples are taken; its
            micro-batches are those of the baseline. A copy of a DataModule is set up, as a Trainer
            does it; the DataModule itself is left for the Trainer to set up.
        trainer: a Lightning Trainer whose accumulation, clipping and precision are the training's;
            None: one micro-batch a step, in the module's own precision, not clipped.
        sample_batch: in place of data.
        examine: samples to look at for the longest ones, for some seconds at most; of images and
            the like, which have no length, a few.
        more: further fields of the `Workload`, such as optimizer, where `configure_optimizers`
            needs a Trainer, or global_batch; `eval_step=None, eval_batch=None` leaves the module's
            validation out.

    Raises:
        InvalidArgument: the module or the Trainer trains in a way that cannot be searched, or there
            is no data.
    """
    if not getattr(module, "automatic_optimization", True):
        raise InvalidArgument(
            f"{kind_of(module)} steps its own optimizers "
            "(automatic_optimization=False): write that as training_step=(training, "
            "batch) -> loss for autofit.search"
        )
    data = _set_up(data, trainer)
    taken = _longest_samples(data, examine) if sample_batch is None else LoaderBatch(sample_batch)
    taken = _transferred(taken, module)
    schedule = None if trainer is None else Schedule.of(trainer, data)
    loss = ModuleLoss(precision=_own_precision(trainer), schedule=schedule)
    given: dict[str, Any] = {
        "collate_fn": taken.collate_fn,
        "loss_fn": loss,
        "global_batch": taken.samples * getattr(trainer, "accumulate_grad_batches", 1),
        **_clipping(trainer),
    }
    if "optimizer" not in more:
        with attached(module, schedule):
            given["optimizer"] = _optimizer(module)
    if _validates(module, data, trainer) and not {"eval_step", "eval_batch"} & more.keys():
        found = longest_of(data.val_dataloader(), examine)
        if found is not None:
            evaluated = _transferred(found, module)
            is_alike = evaluated.collate_fn == taken.collate_fn
            batch = evaluated.given if is_alike else {_WHOLE: evaluated.batch}
            given.update(eval_step=loss.evaluate, eval_batch=batch)
    return Workload(module, taken.given, **given | more)


def predict(
    module: Any,
    data: Any = None,
    *,
    trainer: Any = None,
    sample_batch: Any = None,
    examine: int = MAX_EXAMINED,
    **more: Any,
) -> Prediction | GpuTable:
    """Predict the memory of a LightningModule's training: `autofit.predict` of its `workload`.

    Args:
        module: see `workload`.
        data: see `workload`.
        trainer: see `workload`.
        sample_batch: see `workload`.
        examine: see `workload`.
        more: further arguments of `autofit.predict` (gpu, plan, ranks, strategies).

    Raises:
        InvalidArgument: see `workload`, and what `autofit.predict` raises.
    """
    from autofit.checks.predict import predict as run

    given = {"trainer": trainer, "sample_batch": sample_batch, "examine": examine}
    predicted: Prediction | GpuTable = run(workload(module, data, **given), **more)
    return predicted


def check(
    module: Any,
    data: Any = None,
    *,
    trainer: Any = None,
    sample_batch: Any = None,
    examine: int = MAX_EXAMINED,
    **more: Any,
) -> Verdict:
    """Check whether a LightningModule's training fits: `autofit.check` of its `workload`.

    Args:
        module: see `workload`.
        data: see `workload`.
        trainer: see `workload`.
        sample_batch: see `workload`.
        examine: see `workload`.
        more: further arguments of `autofit.check` (vram_budget, gpu, device, plan, ...).

    Raises:
        InvalidArgument: see `workload`, and what `autofit.check` raises.
    """
    from autofit.checks.check import check as run

    given = {"trainer": trainer, "sample_batch": sample_batch, "examine": examine}
    return run(workload(module, data, **given), **more)


def search(
    module: Any,
    data: Any = None,
    *,
    trainer: Any = None,
    sample_batch: Any = None,
    examine: int = MAX_EXAMINED,
    optimizer: Any = None,
    global_batch: int | None = None,
    numerics: Any = "reduced_precision",
    strategies: Iterable[str | Strategy] | None = None,
    progress: OnEvent | bool | None = None,
    options: SearchOptions | None = None,
    **more: Any,
) -> Report:
    """Find the fastest way to train a LightningModule.

    Args:
        module: see `workload`.
        data: see `workload`.
        trainer: see `workload`.
        sample_batch: see `workload`.
        examine: see `workload`.
        optimizer: parameters -> Optimizer; None: that of `configure_optimizers`.
        global_batch: samples per optimizer step; None: those of `data` times the accumulation.
        numerics: as for `autofit.search`. If the Trainer has mixed precision, every plan keeps it,
            and no other is tried.
        strategies: as for `autofit.search`.
        progress: as for `autofit.search`.
        options: as for `autofit.search`; a loader makes micro-batches of one size, so `even_split`
            is always on.
        more: further arguments of `autofit.search` (vram_budget, timeout, study, ...).

    Raises:
        InvalidArgument: see `workload`, and what `autofit.search` raises.
    """
    own = _own_precision(trainer)
    given = {"optimizer": optimizer, "global_batch": global_batch}
    trained = workload(
        module,
        data,
        trainer=trainer,
        sample_batch=sample_batch,
        examine=examine,
        **{name: value for name, value in given.items() if value is not None},
    )
    known: dict[str, Any] = {}
    if trainer is not None:
        known["device"] = str(trainer.strategy.root_device)
        loss: Any = trained.loss_fn
        if (steps := loss.schedule.optimizer_steps) is not None:
            known["planned_steps"] = steps
    return search_workload(
        trained,
        precision=own,
        strategies=strategies,
        numerics=numerics,
        asked_by=f"precision={trainer.precision!r} of the Trainer" if own else "",
        notes=(),
        trainer="lightning",
        progress=progress,
        options=options,
        **known | more,
    )


def arguments(
    report: Report,
    *,
    callbacks: Sequence[Any] = (),
    strategies: Iterable[str | Strategy] | None = None,
) -> dict[str, Any]:
    """Return arguments of a Lightning Trainer that run a report's best plan.

    Args:
        report: of `search`, or of a search of the same module.
        callbacks: further ones, of your own.
        strategies: as for `Report.apply`.

    Returns:
        precision (where the plan has one), accumulate_grad_batches and callbacks. The DataLoader
        must make micro-batches of `report.plan.micro_batch` samples; of a DataModule the
        attribute `batch_size` is set while the Trainer fits, where it has one.

    Raises:
        InvalidArgument: Lightning is not installed, or cannot run the plan.
    """
    division = divide(report, lambda term, value: term == "autocast", strategies)
    found: dict[str, Any] = {
        "accumulate_grad_batches": division.plan.accumulation_steps,
        "callbacks": [*callbacks, _callback(division)],
    }
    if "autocast" in division.arguments:
        found.update(precision=_MIXED[str(division.arguments["autocast"])])
    return found


@dataclass(frozen=True)
class Schedule:
    """How long a Trainer trains, which a module may ask it for.

    Attributes:
        max_epochs, max_steps, accumulate_grad_batches: of the Trainer.
        micro_batches: of an epoch; infinite: not known.
    """

    max_epochs: int | None
    max_steps: int
    accumulate_grad_batches: int
    micro_batches: float

    @classmethod
    def of(cls, trainer: Any, data: Any) -> Schedule:
        """Return that of a Trainer on the data of a DataModule, or of a loader."""
        loader: Any = None if data is None else _train_loader(data)
        try:
            micro_batches: float = len(loader)
        except TypeError:  # it streams
            micro_batches = math.inf
        limit = trainer.limit_train_batches  # a number of batches, or a share of them
        if isinstance(limit, int):
            micro_batches = min(micro_batches, limit)
        elif limit is not None and math.isfinite(micro_batches):
            micro_batches = int(limit * micro_batches)
        return cls(
            trainer.max_epochs, trainer.max_steps, trainer.accumulate_grad_batches, micro_batches
        )

    @property
    def optimizer_steps(self) -> int | None:
        """How many `Trainer.fit` takes, or None if not known."""
        steps = [] if self.max_steps == -1 else [self.max_steps]
        epochs = -1 if self.max_epochs is None else self.max_epochs
        if epochs >= 0 and math.isfinite(self.micro_batches):
            of_epoch = math.ceil(self.micro_batches / self.accumulate_grad_batches)
            steps.append(of_epoch * max(epochs, 1))
        return max(1, min(steps)) if steps else None


@contextmanager
def attached(module: Any, schedule: Schedule | None) -> Iterator[None]:
    """Attach a module to a Trainer of that schedule; None: to none.

    It has trained no step, runs no callback and logs nothing.
    """
    if schedule is None or _is_attached(module):
        yield
        return
    if module not in _TRAINERS:
        _TRAINERS[module] = _bare_trainer(module, schedule)
    module.trainer = _TRAINERS[module]
    try:
        with warnings.catch_warnings():  # of each `self.log`
            warnings.filterwarnings("ignore", r".*Trainer\(barebones=True\)")
            yield
    finally:
        module.trainer = None


_TRAINERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By module. A Trainer refers to the module weakly, by its optimizers' parameters alone."""


def _is_attached(module: Any) -> bool:
    try:
        return module.trainer is not None
    except RuntimeError:  # there is no Trainer
        return False


def _bare_trainer(module: Any, schedule: Schedule) -> Any:
    """Return a Trainer that only answers questions, with the optimizers of the module."""
    base: Any = library(*_packages()).Trainer

    class Answering(base):  # type: ignore[misc]  # a class of a library that is optional
        num_training_batches = schedule.micro_batches
        train_dataloader = ()  # else it would be set up to count its batches

    with _quiet():
        trainer = Answering(
            accelerator="cpu",
            devices=1,
            barebones=True,
            max_epochs=schedule.max_epochs,
            max_steps=schedule.max_steps,
            accumulate_grad_batches=schedule.accumulate_grad_batches,
        )
    module.trainer = trainer
    with suppress(Exception):  # the search may be given another optimizer because it fails
        trainer.strategy.connect(module)
        trainer.strategy.setup_optimizers(trainer)
    trainer.strategy.connect(None)  # else the module would outlive its probe
    module.trainer = None
    return trainer


@dataclass(frozen=True)
class ModuleLoss:
    """(module, batch) -> the loss of a LightningModule's `training_step`.

    Attributes:
        precision: the type of autocast that the Trainer has; None: none.
        schedule: of the Trainer; None: there is no Trainer, and the step may not ask for one.
    """

    precision: str | None = None
    schedule: Schedule | None = None

    def __call__(self, module: Any, batch: Any) -> torch.Tensor:
        output = self._run(module, "training_step", batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise InvalidArgument(
                f"training_step of {kind_of(module)} returned {kind_of(output)}, not a loss"
            )
        return loss

    def evaluate(self, module: Any, batch: Any) -> None:
        """Run the module's `validation_step`."""
        if isinstance(batch, dict) and batch.keys() == {_WHOLE}:
            batch = batch[_WHOLE]
        self._run(module, "validation_step", batch)

    def _run(self, module: Any, name: str, batch: Any) -> Any:
        """Return what a step of the module returns for a batch on its device."""
        batch, step = module.on_after_batch_transfer(batch, 0), getattr(module, name)
        asks_for_index = len(inspect.signature(step).parameters) > 1
        with own_autocast(module, self.precision), attached(module, self.schedule):
            try:
                return step(batch, *(0,) * asks_for_index)
            except RuntimeError as error:
                raise _asks_for_trainer(error, f"{name} of {kind_of(module)}") from error


def _set_up(data: Any, trainer: Any) -> Any:
    """Return a copy of a DataModule, set up as `Trainer.fit` does; anything else as it is.

    A DataModule keeps its data in attributes of its own.
    """
    if not hasattr(data, "train_dataloader"):
        return data
    data = copy.copy(data)
    data.trainer = trainer
    data.prepare_data()
    data.setup(stage="fit")
    return data


_WHOLE = "autofit_batch"
"""Key of an evaluation batch that another `collate_fn` made than makes those of the training."""


@dataclass(frozen=True)
class TransferredCollate:
    """A `collate_fn`, and the hook of a module that sees its batches before they move to a device.

    Attributes:
        collate_fn: list of samples -> batch.
        module: a LightningModule.
    """

    collate_fn: CollateFn
    module: Any

    def __call__(self, samples: list[Any]) -> Any:
        return self.module.on_before_batch_transfer(self.collate_fn(samples), 0)


def _transferred(taken: LoaderBatch, module: Any) -> LoaderBatch:
    """Return samples, or a batch, as the module's `on_before_batch_transfer` leaves them."""
    if not _defines(module, "on_before_batch_transfer"):
        return taken
    if taken.collate_fn is None:
        return LoaderBatch(module.on_before_batch_transfer(taken.given, 0))
    return replace(taken, collate_fn=TransferredCollate(taken.collate_fn, module))


def _longest_samples(data: Any, examine: int) -> LoaderBatch:
    """Return the longest samples of the training loader, as many as its micro-batches have.

    Raises:
        InvalidArgument: it makes no batches.
    """
    taken = longest_of(_train_loader(data), examine)
    if taken is None:
        raise InvalidArgument("train_dataloader() returned no loader: pass sample_batch=")
    return taken


def _train_loader(data: Any) -> Any:
    if data is None:
        raise InvalidArgument("pass a DataModule or a DataLoader as data, or sample_batch=")
    return data.train_dataloader() if hasattr(data, "train_dataloader") else data


def _validates(module: Any, data: Any, trainer: Any) -> bool:
    """Return whether a Trainer would run the module's validation on data of the DataModule."""
    asked = getattr(trainer, "limit_val_batches", None) != 0
    return asked and _defines(module, "validation_step") and _defines(data, "val_dataloader")


def _defines(of: Any, hook: str) -> bool:
    """Return whether an object has a hook that is not the empty one of Lightning."""
    home = getattr(getattr(type(of), hook, None), "__module__", None)
    return home is not None and not home.startswith(_HOOKS)


def _own_precision(trainer: Any) -> str | None:
    """Return the type of a Trainer's autocast.

    Raises:
        InvalidArgument: its precision is of another kind, or it has several devices.
    """
    if trainer is None:
        return None
    if trainer.world_size > 1:
        raise InvalidArgument(
            f"this Trainer uses {trainer.world_size} devices, but autofit searches for "
            "one: pass devices=1"
        )
    strategy = type(trainer.strategy).__name__
    if any(name in strategy for name in _SHARDING):
        raise InvalidArgument(
            f"this Trainer has {kind_of(trainer.strategy)}, which shards the model, but autofit "
            "searches for one device: pass a Trainer without strategy="
        )
    kept = {mixed: dtype for dtype, mixed in _MIXED.items()} | {"32-true": None}
    if trainer.precision not in kept:
        raise InvalidArgument(
            f"this Trainer has precision={trainer.precision!r}, but autofit only "
            f"supports {', '.join(kept)}: for another precision convert the module's "
            "weights, and pass no trainer"
        )
    return kept[trainer.precision]


def _clipping(trainer: Any) -> dict[str, Any]:
    value = getattr(trainer, "gradient_clip_val", None)
    if not value:
        return {}
    if str(trainer.gradient_clip_algorithm or "norm").endswith("norm"):
        return {"clip_grad_norm": float(value)}
    return {"before_step": partial(_clip_values, most=float(value))}  # it travels to a worker


def _clip_values(module: torch.nn.Module, optimizer: Any, *, most: float) -> None:
    torch.nn.utils.clip_grad_value_(module.parameters(), most)


def _optimizer(module: Any) -> Any:
    """Return the one optimizer of `configure_optimizers`."""
    try:
        made = module.configure_optimizers()
    except RuntimeError as error:
        what = f"configure_optimizers of {kind_of(module)}"
        raise _asks_for_trainer(error, what, ", or optimizer=parameters -> Optimizer") from error
    if isinstance(made, Mapping):
        made = made["optimizer"]
    while isinstance(made, (tuple, list)) and made:  # [optimizers], [schedulers]
        if len(made) > 1 and isinstance(made[1], (torch.optim.Optimizer, Mapping)):
            break
        made = made[0]
        made = made.get("optimizer") if isinstance(made, Mapping) else made
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidArgument(
            f"configure_optimizers of {kind_of(module)} returned {kind_of(made)}, but "
            "a search needs one optimizer: pass optimizer=parameters -> Optimizer, or "
            "use autofit.search with training_step= for several"
        )
    return made


def _asks_for_trainer(error: RuntimeError, what: str, advice: str = "") -> Exception:
    """Return the error to raise for one in a module's code: explained, if it needs a Trainer."""
    if "not attached to a `Trainer`" not in str(error):
        return error
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)
    ]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return InvalidArgument(
        f"{what} asks for its Trainer{where}, and none was given: pass trainer=, the Trainer that "
        f"you would train with{advice}"
    )


def _is_users(path: str) -> bool:
    return not any(
        f"/{package.replace('.', '/')}/" in path for package in (*_PACKAGES, "autofit", "torch")
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what Lightning logs and warns of a Trainer that it makes."""
    names = ("lightning.pytorch.utilities.rank_zero", "pytorch_lightning.utilities.rank_zero")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _packages() -> list[str]:
    """Return the names of Lightning, that which is imported first."""
    return [*(name for name in _PACKAGES if name in sys.modules), *_PACKAGES]


def _callback(division: Division) -> Any:
    """Return a callback that applies what a Trainer has no argument for, while it fits."""
    base: Any = library(*_packages()).Callback

    class ApplyPlan(base):  # type: ignore[misc]  # a class of a library that is optional
        """Applies a plan to module, optimizer and DataModule while a Trainer fits."""

        def __init__(self) -> None:
            self._stack = ExitStack()

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            data, size = trainer.datamodule, division.plan.micro_batch
            if stage == "fit" and hasattr(data, "batch_size"):
                self._stack.callback(setattr, data, "batch_size", data.batch_size)
                data.batch_size = size

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (optimizer,) = trainer.optimizers
            applied = on_model(division.rest, pl_module, optimizer, "training_step")
            self._stack.enter_context(applied)

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            found, meant = division.samples_in(batch), division.plan.micro_batch
            if found is None:
                found = getattr(trainer.train_dataloader, "batch_size", None) or meant
            steps = division.plan.accumulation_steps
            if trainer.is_last_batch or found < meant:
                words = division.misweighed(batch_idx % steps + 1, found)
                if words and (batch_idx or trainer.is_last_batch):
                    warnings.warn(words, stacklevel=2)
            if batch_idx == 0 and found != meant:
                warnings.warn(
                    (
                        f"the training loader makes micro-batches of {found} samples, but the plan "
                        f"has {meant}, so an optimizer step has {steps * found} samples instead of "
                        f"{steps * meant}: give the DataLoader batch_size={meant}"
                    ),
                    stacklevel=2,
                )

        def _close(self, *given: Any, **named: Any) -> None:
            self._stack.close()

        on_train_end = on_exception = teardown = _close

    return ApplyPlan()
