"""A workload: what the user trains, as given, with nothing run yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from autofit.errors import InvalidArgument, release_exception, users_code
from autofit.plan import Plan, Settings, check_count
from autofit.training.batch import (
    Batch,
    BatchMaker,
    batch_size,
    describe,
    named_tensors,
    resize,
    shape_of,
    shape_words,
    tensors_of,
)
from autofit.training.contradictions import check_rows
from autofit.training.lengths import Lengths
from autofit.training.loss import Recipe, TrainingStep
from autofit.training.optimizers import (
    DEFAULT_OPTIMIZER,
    FactoryWrapper,
    OptimizerChoice,
    Optimizers,
    Place,
    build_optimizer,
    check_optimizer,
    optimizer_name,
)
from autofit.training.samples import (
    Collated,
    CollateFn,
    Made,
    Rows,
    Samples,
    TakenSamples,
    is_maker,
    is_sample_sequence,
    made_by,
    samples_in_turn,
    taken_from,
)
from autofit.units import kind_of, shortened

if TYPE_CHECKING:
    from autofit.training.evaluation import EvalStep
    from autofit.training.loader import Loader

# Micro-batch of a baseline that nobody chose.
_OWN_SIZE = 2


@dataclass(frozen=True)
class Workload:
    """Model, sample batch, loss, optimizer and global batch.

    Attributes:
        model: the module, or a function of no arguments that builds one.
        sample_batch: any pytree of tensors, as long as the longest the training will see; a
            function n -> batch of n samples, which is believed about n; with `collate_fn`, a list
            of samples, or a data set, of which the first are taken; or `Lengths` of these.
        collate_fn: list of samples -> a batch of them, as a `DataLoader` takes it. Every
            micro-batch is made by it of whole samples, and `Training.step` takes a list of them.
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
        eval_batch: the batch of an evaluation (with collate_fn, a list of its samples), or how
            many samples of the sample batch it has.

    Raises:
        InvalidArgument: arguments that contradict each other or cannot mean anything.
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    sample_batch: Batch | BatchMaker | Lengths
    _: KW_ONLY
    collate_fn: CollateFn | None = None
    criterion: Callable[[Any, Any], torch.Tensor] | None = None
    loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor] | None = None
    loss_weight: Callable[[Batch], float] | None = None
    optimizer: OptimizerChoice = DEFAULT_OPTIMIZER
    clip_grad_norm: float | None = None
    before_step: Callable[[torch.nn.Module, Any], None] | None = None
    training_step: TrainingStep | None = None
    global_batch: int | None = None
    loader: Loader | None = None
    eval_step: EvalStep | None = None
    eval_batch: Batch | int | None = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise InvalidArgument(
                f"model must be an nn.Module or a function that builds one, got {self.model!r}"
            )
        for part, what in ((self.model, "the model"), (self.criterion, "criterion")):
            if isinstance(part, torch.nn.Module):
                _checked(part, what)
        if self.global_batch is not None:
            object.__setattr__(self, "global_batch", check_count("global_batch", self.global_batch))
        self._check_samples()
        if self.global_batch is not None:
            Plan.split(self.global_batch, self.sample_batch_size)  # refuses a zero too many
        if self.loader is not None:
            from autofit.training.loader import check_loader  # most have none

            check_loader(self.loader)
        if self.eval_step is not None or self.eval_batch is not None:
            from autofit.training.evaluation import check_evaluation  # where one is given

            check_evaluation(self.eval_step, self.eval_batch)
        if self._eval_samples_given:
            object.__setattr__(self, "eval_batch", taken_from(self.eval_batch, None))
        elif self.eval_batch is not None and not tensors_of(self.eval_batch):
            object.__setattr__(self, "eval_batch", check_count("eval_batch", self.eval_batch))
        check_optimizer(
            self.optimizer, self.model, has_training_step=self.training_step is not None
        )
        self.recipe  # noqa: B018 - a contradiction between its parts shows here, not in a worker

    def _check_samples(self) -> None:
        """Take the samples that collate_fn is to make batches of, or refuse contradictory rows."""
        given = self.sample_batch
        if self.collate_fn is None and isinstance(given, Lengths):
            object.__setattr__(self, "collate_fn", given.collate_fn)
        if self.collate_fn is not None:
            self._take_samples(self.collate_fn)
        elif not self.makes_batches:
            if isinstance(given, Dataset | DataLoader):
                raise InvalidArgument(
                    f"the sample batch is {kind_of(given)}, which is no batch: pass one, such "
                    "as next(iter(loader)), or the data set's samples and their collate_fn="
                )
            if isinstance(given, Lengths):
                given.check_alike()
            for batch in given.batches if isinstance(given, Lengths) else [given]:
                check_rows(batch, has_criterion=self.criterion is not None)

    def _take_samples(self, collate_fn: CollateFn) -> None:
        if not callable(collate_fn):
            raise InvalidArgument(f"collate_fn must be a function, got {collate_fn!r}")
        given = self.sample_batch
        taken: Any
        if isinstance(given, Lengths):
            taken = replace(given, collate_fn=collate_fn)
        else:
            taken = taken_from(given, self.global_batch)
        object.__setattr__(self, "sample_batch", taken)

    @property
    def makes_batches(self) -> bool:
        """Whether the sample batch is a function n -> batch."""
        return self.collate_fn is None and is_maker(self.sample_batch)

    @property
    def longest_batch(self) -> Batch | BatchMaker:
        """The sample batch, or samples; of several lengths, the longest."""
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
        return [(share, self._batch_of(given, samples)) for share, given in self._mix]

    def mix_of_steps(self, sizes: Sequence[int]) -> list[tuple[float, Any]]:
        """Return such a step of each length, in micro-batches of those sizes; see `step_of`."""
        return [(share, self._step_of(given, sizes)) for share, given in self._mix]

    def step_of(self, *sizes: int) -> Any:
        """Return what `Training.step` takes to run micro-batches of those sizes.

        Batches of samples and of functions are made already, as processes of a loader make them;
        but a training_step gets what it would in the training.

        Raises:
            Exception: what the user's functions raised.
        """
        return self._step_of(self.longest_batch, sizes)

    def samples_of(self, *sizes: int) -> Any:
        """Return as many samples in the form in which they are divided: a list, or a batch."""
        return self._samples_of(self.longest_batch, sizes)

    def _samples_of(self, given: Any, sizes: Sequence[int]) -> Any:
        if self.collate_fn is not None:
            return samples_in_turn(given, sizes)
        return made_by(given, sum(sizes)) if self.makes_batches else resize(given, *sizes)

    def _step_of(self, given: Any, sizes: Sequence[int]) -> Any:
        if self.training_step is None and self.makes_batches:
            return Made().step_of(given, sizes)
        chosen = self._samples_of(given, sizes)
        if self.training_step is None and self.collate_fn is not None:
            return Collated(self.collate_fn).step_of(chosen, sizes)
        return chosen

    def _batch_of(self, given: Any, samples: int) -> Batch:
        chosen = self._samples_of(given, [samples])
        return chosen if self.collate_fn is None else Collated(self.collate_fn).batch(chosen)

    def sample_shapes(self) -> dict[str, str]:
        """Describe the batch that stands for the workload's; see `described_size`.

        Rows of several lengths are as long as any of theirs: where inputs are long, targets need
        not be.
        """
        batches = [batch for _, batch in self.mix(self.described_size)]
        if self.collate_fn is not None:
            return describe(batches[-1])
        each = [dict(named_tensors(batch)) for batch in batches]
        return {
            name: shape_words(tensor, *(shape_of(other[name]) for other in each))
            for name, tensor in each[-1].items()
        }

    def whole_mix(self, samples: int) -> Iterator[tuple[float, Batch]]:
        """Yield batches of that many samples which hold all that were given, with their shares.

        Collated ones differ in padding and size, each by the samples in it. A function, or rows,
        which are padded already, make one for each length. The last are those of the longest.
        """
        for share, given in self._mix:
            if self.collate_fn is None:
                yield share, self._batch_of(given, samples)
                continue
            sizes = [samples] * -(-len(given) // samples)
            chosen = samples_in_turn(given, sizes)
            for batch in Collated(self.collate_fn).micro_batches(chosen, sizes):
                yield share / len(sizes), batch.whole()

    def largest_batch(self, samples: int) -> dict[str, str] | None:
        """Describe each tensor where it is largest in batches of that many of the given samples.

        None: they are the rows of the sample batch, whose shapes tell.
        """
        if self.collate_fn is None and not self.makes_batches:
            return None
        largest: dict[str, tuple[int, str]] = {}
        for _, batch in self.whole_mix(samples):
            for name, tensor in named_tensors(batch):
                here = math.prod(shape_of(tensor)), shape_words(tensor)
                largest[name] = max(largest.get(name, here), here)
        return {name: shape for name, (_, shape) in largest.items()}

    @property
    def recipe(self) -> Recipe:
        """The functions of the training loop."""
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})

    @property
    def sample_batch_size(self) -> int:
        """n: the micro-batch of the baseline, where the global batch is not smaller.

        A function, or a data set, has no size of its own: it is the global batch, and without one
        2, the least that every module trains on (BatchNorm refuses to normalize over one value a
        channel).
        """
        if not self.chose_size:
            return self.global_batch or _OWN_SIZE
        given: Any = self.longest_batch
        return batch_size(given) if self.collate_fn is None else len(given)

    @property
    def chose_size(self) -> bool:
        """Whether the sample batch has a size, which its user chose."""
        return not self.makes_batches and not isinstance(self.longest_batch, TakenSamples)

    @property
    def described_size(self) -> int:
        """The samples of the batch whose shapes stand for the workload's: few, of a function."""
        return self.sample_batch_size if self.chose_size else _OWN_SIZE

    @cached_property
    def samples(self) -> Samples:
        """How a training step's batch becomes micro-batches; a function makes two for it."""
        given: Any = self.longest_batch
        if self.collate_fn is not None:
            return Collated.of(self.collate_fn, given[0])
        if not self.makes_batches:
            return Rows.of(given)
        try:
            return Rows.made_by(self.batch) or Made()
        except Exception as error:  # it may make no batches as small as that
            release_exception(error)
            return Made()

    def batch(self, samples: int) -> Batch:
        """A batch of that many samples.

        Raises:
            InvalidArgument: the user's function returned no batch.
            Exception: what it raised.
        """
        return self._batch_of(self.longest_batch, samples)

    @property
    def _eval_samples_given(self) -> bool:
        return self.collate_fn is not None and is_sample_sequence(self.eval_batch)

    @property
    def eval_samples(self) -> int | None:
        """Samples of an evaluation batch; None: there is no evaluation."""
        given = self.eval_batch
        if given is None or isinstance(given, int):
            return given
        return len(given) if self._eval_samples_given else batch_size(given)

    def evaluation_batch(self, samples: int) -> Batch:
        """Return a batch of that many samples for `eval_step`; raises as `batch` does."""
        if isinstance(self.eval_batch, int):
            return self.batch(samples)
        if self._eval_samples_given:
            return self._batch_of(self.eval_batch, samples)
        return resize(self.eval_batch, samples)

    def with_eval_samples(self, samples: int) -> Workload:
        """Return the workload with evaluations of so many samples."""
        own: Any = self.eval_batch
        given: Any = samples
        if self._eval_samples_given:
            given = samples_in_turn(own, [samples])
        elif not isinstance(own, int):
            given = self.evaluation_batch(samples)
        return replace(self, eval_batch=given)

    def plan(
        self,
        micro_batch: int | None = None,
        accumulation_steps: int | None = None,
        global_batch: int | None = None,
        settings: Settings | None = None,
        ranks: int = 1,
    ) -> Plan:
        """Return a plan of these counts and settings; what is left out is the workload's own.

        Args:
            micro_batch: samples; None: as many as the sample batch has.
            accumulation_steps: None: as many as the global batch asks for, else one.
            global_batch: None: the workload's, unless accumulation steps say how many samples.
            settings: those that are not at their first value.
            ranks: how many train together, and share the global batch.

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
                ranks=ranks,
            )
        samples = global_batch or self.global_batch
        if samples is None:
            return Plan(size, settings=settings or {}, ranks=ranks)
        if micro_batch is not None and micro_batch > samples:
            raise InvalidArgument(
                f"a micro-batch of {micro_batch} is larger than the global batch of "
                f"{samples}: use a smaller micro_batch or a larger global_batch"
            )
        size = min(size, -(-samples // ranks))
        plan = Plan.split(samples, size, settings, ranks=ranks)
        if micro_batch is not None and plan.micro_batch != micro_batch:
            steps = plan.accumulation_steps
            raise InvalidArgument(
                f"a global batch of {samples} cannot be split evenly into micro-batches of "
                f"{micro_batch}: {steps} micro-batches have {plan.micro_batch} samples. "
                f"Use micro_batch={plan.micro_batch}, or "
                f"global_batch={steps * ranks * micro_batch}"
            )
        return plan

    def build_model(self) -> torch.nn.Module:
        """Return the live module, or the one that the function builds.

        Raises:
            InvalidArgument: the function returned something else, a lazy module's parameters have
                no shape yet, or the model is wrapped for several devices.
        """
        if isinstance(self.model, torch.nn.Module):
            return _checked(self.model)
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
        return _checked(built)

    @property
    def assumes_optimizer(self) -> bool:
        """Whether the optimizer is the default, which stands in for one that was not given."""
        return self.optimizer is DEFAULT_OPTIMIZER

    @property
    def optimizer_name(self) -> str:
        """The class or function of the optimizer; of several, each after its key."""
        return optimizer_name(self.optimizer)

    def build_optimizer(
        self,
        model: torch.nn.Module,
        place: Place | None = None,
        wrappers: Sequence[FactoryWrapper] = (),
    ) -> Optimizers:
        """Build the optimizer as `autofit.training.optimizers.build_optimizer` does."""
        return build_optimizer(self.optimizer, model, place, wrappers)


def first_size(samples: int, max_micro_batch: int | None, *, is_chosen: bool) -> int:
    """Return the micro-batch of a baseline: no larger than allowed, unless the user chose it."""
    return samples if is_chosen or max_micro_batch is None else min(samples, max_micro_batch)


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


def _checked(model: torch.nn.Module, what: str = "the model") -> torch.nn.Module:
    """Return a module that can be trained: the check of every model, live or built.

    Wrappers are known by name, since importing FSDP takes a second.
    """
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        wrapper = next((kind for kind in _PARALLEL if kind in kinds), None)
        if wrapper is not None:
            raise InvalidArgument(
                f"{repr(name) if name else what} is already wrapped in {wrapper}: pass the plain "
                "model, before it is wrapped"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise InvalidArgument(
                f"{name!r} is a DTensor, so the model is already distributed: pass the plain "
                "model, before it is sharded"
            )
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in named if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise InvalidArgument(
            f"{what}'s {', '.join(lazy[:3])} {'have' if len(lazy) > 1 else 'has'} "
            "no shape yet, as in lazy modules before their first forward: run one "
            "batch through the model first (inside the function, if a function builds "
            "it)"
        )
    return model


def check_has_values(module: torch.nn.Module, what: str = "the model") -> None:
    """Refuse a module with tensors on the meta device, which a prediction alone can use.

    Raises:
        InvalidArgument: it has; the message names them.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty:
        raise InvalidArgument(
            f"{what}'s {shortened(empty, 3)} {'are' if len(empty) > 1 else 'is'} on the "
            "meta device, without values to train with: build the module outside "
            'torch.device("meta"), pass a function that does so, or call .to_empty(device="cpu") '
            "and load its values first"
        )


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
            return f"{repr(name) if name else 'the model'} is already compiled, by {compiler}"
    return None


def compiled_in_place(model: torch.nn.Module) -> bool:
    """Return whether a call of the model is compiled that a pickled copy does not have."""
    return any(vars(module).get(COMPILED_CALL) is not None for module in model.modules())
