"""A workload: what the user trains, as given, with nothing run yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from autofit.errors import InvalidArgument, users_code
from autofit.plan import Plan, Settings, check_count
from autofit.training.batch import (
    Batch,
    BatchMaker,
    Samples,
    batch_size,
    check_batched_dimension,
    check_target,
    resize,
    tensors_of,
)
from autofit.training.evaluation import EvalStep, check_evaluation
from autofit.training.lengths import Lengths
from autofit.training.loader import Loader, check_loader
from autofit.training.loss import Recipe
from autofit.training.optimizers import (
    FactoryWrapper,
    OptimizerChoice,
    Optimizers,
    Place,
    build_optimizer,
    check_optimizer,
)
from autofit.units import kind_of

if TYPE_CHECKING:
    from autofit.training.training import Training


@dataclass(frozen=True)
class Workload:
    """Model, sample batch, loss, optimizer and global batch.

    Attributes:
        model: the module, or a function of no arguments that builds one.
        sample_batch: any pytree of tensors, as long as the longest the training will see; a
            function n -> batch of n samples; or `Lengths`, where lengths vary.
        loss_fn, criterion, loss_weight, before_step, clip_grad_norm, training_step: see `Recipe`.
        optimizer: parameters -> Optimizer; or a live Optimizer, rebuilt with its groups and state
            for each probe; or, with training_step, a mapping of either. A function in a mapping
            gets the parameters of the submodule that its key names.
        global_batch: samples per optimizer step to keep; None: free.
        loader: a function of batch_size, num_workers, pin_memory and prefetch_factor (or as many
            of them as it takes) that makes a `DataLoader`, or a live one. A search measures what it
            delivers against what its answer consumes.
        eval_step: (model, batch) -> anything, which is dropped: a step of your evaluation. A probe
            runs it after its training steps, in eval mode and without gradients. A plan beside
            which it has no room does not fit.
        eval_batch: the batch of an evaluation, or how many samples of the sample batch it has.

    Raises:
        InvalidArgument: arguments that contradict each other or cannot mean anything.
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    sample_batch: Batch | BatchMaker | Lengths
    _: KW_ONLY
    criterion: Callable[[Any, Any], torch.Tensor] | None = None
    loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor] | None = None
    loss_weight: Callable[[Batch], float] | None = None
    optimizer: OptimizerChoice = torch.optim.AdamW
    clip_grad_norm: float | None = None
    before_step: Callable[[torch.nn.Module, Any], None] | None = None
    training_step: Callable[[Training, Batch], torch.Tensor] | None = None
    global_batch: int | None = None
    loader: Loader | None = None
    eval_step: EvalStep | None = None
    eval_batch: Batch | int | None = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise InvalidArgument(
                f"model must be an nn.Module or a function that builds one, got {self.model!r}"
            )
        if isinstance(self.model, torch.nn.Module):
            _on_one_device(self.model)
        if self.global_batch is not None:
            object.__setattr__(self, "global_batch", check_count("global_batch", self.global_batch))
        if not self.makes_batches:
            for _, batch in self._mix:
                check_batched_dimension(batch)
                if self.criterion is not None:
                    check_target(batch)
        if self.global_batch is not None:
            Plan.split(self.global_batch, self.sample_batch_size)  # refuses a zero too many
        if self.loader is not None:
            check_loader(self.loader)
        check_evaluation(self.eval_step, self.eval_batch)
        if self.eval_batch is not None and not tensors_of(self.eval_batch):
            object.__setattr__(self, "eval_batch", check_count("eval_batch", self.eval_batch))
        check_optimizer(
            self.optimizer, self.model, has_training_step=self.training_step is not None
        )
        self.recipe  # noqa: B018 - a contradiction between its parts shows here, not in a worker

    @property
    def makes_batches(self) -> bool:
        """Whether the sample batch is a function n -> batch."""
        return callable(self.sample_batch) and not isinstance(self.sample_batch, torch.Tensor)

    @property
    def longest_batch(self) -> Batch | BatchMaker:
        """The sample batch; of several lengths, the longest."""
        given = self.sample_batch
        return given.longest if isinstance(given, Lengths) else given

    @property
    def _mix(self) -> list[tuple[float, Batch]]:
        given = self.sample_batch
        return given.mix if isinstance(given, Lengths) else [(1.0, given)]

    def mix(self, samples: int) -> list[tuple[float, Batch]]:
        """Return a batch of that many samples of each length, with its share of the steps.

        The longest is the last; where lengths do not vary, it is the only one.
        """
        if self.makes_batches:
            return [(1.0, self.batch(samples))]
        return [(share, resize(batch, samples)) for share, batch in self._mix]

    @property
    def recipe(self) -> Recipe:
        """The functions of the training loop."""
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})

    @property
    def sample_batch_size(self) -> int:
        """n; for a function n -> batch it is 2, the least that every module trains on.

        BatchNorm refuses to normalize over one value a channel.
        """
        return 2 if self.makes_batches else batch_size(self.longest_batch)

    @cached_property
    def samples(self) -> Samples:
        """Which of the batch's tensors hold samples; a function makes two small batches for it."""
        return Samples.made_by(self.batch) if self.makes_batches else Samples.of(self.longest_batch)

    def batch(self, samples: int) -> Batch:
        """A batch of that many samples.

        Raises:
            InvalidArgument: the user's function returned another number of samples.
        """
        if not self.makes_batches:
            return resize(self.longest_batch, samples)
        with users_code():
            made = self.longest_batch(samples)
        if batch_size(made) != samples:
            raise InvalidArgument(
                f"the sample batch function was asked for {samples} samples but returned "
                f"{batch_size(made)} (dimension 0 of its first tensor)"
            )
        return made

    @property
    def eval_samples(self) -> int | None:
        """Samples of an evaluation batch; None: there is no evaluation."""
        given = self.eval_batch
        return given if given is None or isinstance(given, int) else batch_size(given)

    def evaluation_batch(self, samples: int) -> Batch:
        """Return a batch of that many samples for `eval_step`; raises as `batch` does."""
        if isinstance(self.eval_batch, int):
            return self.batch(samples)
        return resize(self.eval_batch, samples)

    def plan(
        self,
        micro_batch: int | None = None,
        accumulation_steps: int | None = None,
        global_batch: int | None = None,
        settings: Settings | None = None,
        world_size: int = 1,
    ) -> Plan:
        """Return a plan of these counts and settings; what is left out is the workload's own.

        Args:
            micro_batch: samples; None: as many as the sample batch has.
            accumulation_steps: None: as many as the global batch asks for, else one.
            global_batch: None: the workload's, unless accumulation steps say how many samples.
            settings: those that are not at their first value.
            world_size: ranks that train together, and share the global batch.

        Returns:
            The baseline, where nothing is said.

        Raises:
            InvalidArgument: the counts make no plan, as a micro-batch that is larger than the
                global batch, or that an even split of it makes smaller.
        """
        size = micro_batch or self.sample_batch_size
        if accumulation_steps is not None:
            return Plan(
                size,
                accumulation_steps=accumulation_steps,
                global_batch=global_batch,
                settings=settings or {},
                world_size=world_size,
            )
        samples = global_batch or self.global_batch
        if samples is None:
            return Plan(size, settings=settings or {}, world_size=world_size)
        if micro_batch is not None and micro_batch > samples:
            raise InvalidArgument(
                f"a micro-batch of {micro_batch} is larger than the global batch of "
                f"{samples}: use a smaller micro_batch or a larger global_batch"
            )
        size = min(size, -(-samples // world_size))
        plan = Plan.split(samples, size, settings, world_size=world_size)
        if micro_batch is not None and plan.micro_batch != micro_batch:
            steps = plan.accumulation_steps
            raise InvalidArgument(
                f"a global batch of {samples} cannot be split evenly into micro-batches of "
                f"{micro_batch}: {steps} micro-batches have {plan.micro_batch} samples. "
                f"Use micro_batch={plan.micro_batch}, or "
                f"global_batch={steps * world_size * micro_batch}"
            )
        return plan

    def build_model(self) -> torch.nn.Module:
        """Return the live module, or the one that the function builds.

        Raises:
            InvalidArgument: the function returned something else, a lazy module's parameters have
                no shape yet, or the model is wrapped for several devices.
        """
        if isinstance(self.model, torch.nn.Module):
            return _with_shapes(self.model)
        if not callable(self.model):  # as its own __reduce__ had it, in a worker
            raise InvalidArgument(
                f"the model arrived in the worker process as {kind_of(self.model)}: its pickle "
                "makes another object (__reduce__, copyreg). Pass a function that builds the model"
            )
        with users_code():
            built = self.model()
        if not isinstance(built, torch.nn.Module):
            raise InvalidArgument(
                f"the model function must return an nn.Module, got {kind_of(built)}"
            )
        return _with_shapes(_on_one_device(built))

    def build_optimizer(
        self,
        model: torch.nn.Module,
        place: Place | None = None,
        wrappers: Sequence[FactoryWrapper] = (),
    ) -> Optimizers:
        """Build the optimizer as `autofit.training.optimizers.build_optimizer` does."""
        return build_optimizer(self.optimizer, model, place, wrappers)


def workload_of(model: Any, sample_batch: Any, **given: Any) -> Workload:
    """Return the Workload that stands for the model, or one of what was given.

    Raises:
        InvalidArgument: there is no sample batch, or a Workload with arguments of its own beside.
    """
    if not isinstance(model, Workload):
        if sample_batch is None:
            raise InvalidArgument("give a sample batch after the model, or a Workload alone")
        return Workload(model, sample_batch, **given)
    defaults = {name: field.default for name, field in Workload.__dataclass_fields__.items()}
    extra = [name for name, value in given.items() if value is not defaults[name]]
    if sample_batch is not None or extra:
        names = ", ".join(["sample_batch"] * (sample_batch is not None) + extra)
        raise InvalidArgument(
            f"the Workload describes the training: pass {names} to the Workload instead"
        )
    return model


_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def _on_one_device(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model; wrappers are known by name, since importing FSDP takes a second."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        wrapper = next((kind for kind in _PARALLEL if kind in kinds), None)
        if wrapper is not None:
            raise InvalidArgument(
                f"{name or 'the model'} is already wrapped in {wrapper}: pass the plain "
                "model, before it is wrapped"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise InvalidArgument(
                f"{name} is a DTensor, so the model is already distributed: pass the plain "
                "model, before it is sharded"
            )
    return model


def _with_shapes(model: torch.nn.Module) -> torch.nn.Module:
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in named if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise InvalidArgument(
            f"the model's {', '.join(lazy[:3])} {'have' if len(lazy) > 1 else 'has'} "
            "no shape yet, as in lazy modules before their first forward: run one "
            "batch through the model first (inside the function, if a function builds "
            "it)"
        )
    return model


def check_arguments(workload: object, plan: object) -> None:
    """Refuse arguments of a type that `probe`, `predict` and `check` do not take.

    Raises:
        InvalidArgument: one is.
    """
    if not isinstance(workload, Workload):
        raise InvalidArgument(
            f"workload must be an autofit.Workload, got {kind_of(workload)}: make one with "
            "autofit.Workload(model, sample_batch), or call the function that returns one"
        )
    if plan is not None and not isinstance(plan, Plan):
        raise InvalidArgument(
            f"plan must be an autofit.Plan such as Plan(8), a report, or None for the "
            f"baseline, got {plan!r}"
        )


# The attribute in which `Module.compile` leaves the compiled call; it does not pickle.
COMPILED_CALL = "_compiled_call_impl"


def compiled_part(model: torch.nn.Module) -> str | None:
    """Return the first part of a model that is compiled, in words; None: there is none."""
    for name, module in model.named_modules():
        is_script = isinstance(module, torch.jit.ScriptModule)
        is_wrapped = type(module).__name__ == "OptimizedModule"
        if is_script or is_wrapped or vars(module).get(COMPILED_CALL) is not None:
            compiler = "torch.jit" if is_script else "torch.compile"
            return f"{name or 'the model'} is already compiled, by {compiler}"
    return None


def compiled_in_place(model: torch.nn.Module) -> bool:
    """Return whether a call of the model is compiled that a pickled copy does not have."""
    return any(vars(module).get(COMPILED_CALL) is not None for module in model.modules())
