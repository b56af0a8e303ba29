"""The contract of a strategy: a plug-in that adds dimensions to the search space.

A strategy says which values its settings can take for a model on a device (`dimensions`), applies
chosen values to a training and takes them back exactly (`apply`), and says in code what a user
would write to get the same (`describe`). It is found by the entry-point group
`autofit.strategies`; the core knows none by name. `autofit.testing` has the suite that every
strategy must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from autofit.dimension import Dimension, Scalar
from autofit.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = [
    "ALONE",
    "Capabilities",
    "Comparison",
    "Context",
    "Dimension",
    "Numerics",
    "Phase",
    "Strategy",
    "TrainingView",
    "World",
]


PYTHON, NUMPY = "Python's random state", "numpy's random state"
"""Names in `Comparison.changes` and in the payloads of strategies."""


class Phase(IntEnum):
    """When a strategy is applied: MODEL first, COMPILE last; undone in the opposite order."""

    MODEL = 0
    PARALLEL = 1
    """Before the optimizer is made, for what replaces parameters (sharding)."""
    OPTIMIZER = 2
    STEP = 3
    COMPILE = 4


class Numerics(IntEnum):
    """How far a strategy may change the arithmetic."""

    EXACT = 0
    """Losses and gradients are the same."""
    ROUNDING = 1
    """The same up to the order of roundings."""
    REDUCED_PRECISION = 2
    """Fewer bits."""

    @classmethod
    def parse(cls, text: str) -> Numerics:
        """ "rounding" -> Numerics.ROUNDING; raises KeyError for another word."""
        return cls[text.upper()]


@dataclass(frozen=True)
class Capabilities:
    """What a device can do natively, as far as strategies care.

    Attributes:
        device_type: "cuda", "cpu" or "meta".
        bfloat16: bfloat16 arithmetic in hardware, not emulated.
        float16: float16 training is worth trying.
        tf32: matrix products in TF32.
        compute_capability: (major, minor) of an NVIDIA device, else None.
    """

    device_type: str
    bfloat16: bool = False
    float16: bool = False
    tf32: bool = False
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class World:
    """The processes that train one model together, a device each, and which of them this is.

    Attributes:
        rank: of this process among all, from 0.
        local_rank: of this process among those of its machine, from 0.
        size: how many ranks there are; 1: one device trains alone.

    Raises:
        InvalidArgument: the rank is not among the ranks.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InvalidArgument(
                f"rank must be between 0 and size - 1, got rank {self.rank} of {self.size}"
            )


ALONE = World()
"""One device trains alone."""


@dataclass(frozen=True)
class Comparison:
    """How far a second training step is from a first one over the same samples.

    Attributes:
        loss: |second - first| / |first|.
        gradient: norm of the difference of all gradients over the norm of the first's.
        tolerance: the most that roundings, or the noise of the device, explain of either.
        modules: names of the modules that cause a difference: those that normalize over the batch,
            else the owners of the parameters whose gradients differ most.
        normalizes_over_batch: `modules` are those that normalize over the batch; no weighting of
            losses makes a split batch equal to a whole one there.
        differences: names of the values that differ by more than the device's noise: "the loss",
            "the gradient of encoder.weight", "buffer norm.running_mean", "Python's random state".
        is_repeatable: False: the first step differs from itself, by what `differences` says.
        changes: what the first step changes and a recomputation has to find as it was: dotted names
            of buffers, "Python's random state", "numpy's random state".
        ran: names of the modules that ran in either step; a comparison says nothing of others.
    """

    loss: float
    gradient: float
    tolerance: float
    modules: tuple[str, ...] = ()
    normalizes_over_batch: bool = False
    differences: tuple[str, ...] = ()
    is_repeatable: bool = True
    changes: frozenset[str] = frozenset()
    ran: frozenset[str] = frozenset()

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        within = self.gradient <= self.tolerance and self.loss <= self.tolerance
        return within and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, for a report; it leaves out what only strategies need."""
        names = ("loss", "gradient", "tolerance", "normalizes_over_batch")
        return {name: getattr(self, name) for name in names} | {"modules": list(self.modules)}


class Context(Protocol):
    """A model on a device, in the worker, for which a strategy finds its dimensions."""

    @property
    def model(self) -> torch.nn.Module:
        """A copy of the user's model, on the device; it may be run, and is thrown away."""

    @property
    def device(self) -> torch.device:
        """Where the plans will run."""

    @property
    def capabilities(self) -> Capabilities:
        """What that device can do natively."""

    @property
    def clock(self) -> Callable[[], float] | None:
        """The seconds that the work so far would take, where it is computed: on the meta device.

        By a roofline, good for ratios alone. None: time can be measured, or is unknown.
        """

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step: the global batch to keep, else the sample batch's own."""

    @property
    def world(self) -> World:
        """The ranks that the plans will run on together."""

    @property
    def unused_parameters(self) -> Mapping[str, frozenset[int]]:
        """Names of parameters that require gradients -> the ranks on which they get none.

        As a few samples show that the ranks share; every rank gets the same answer. Empty where
        this process trains with no other one, on the meta device, and where a `training_step` hides
        the gradients.
        """

    def with_training(self, run: Callable[[TrainingView, Any], Any], micro_batch: int) -> Any:
        """Return `run(training, batch)` of a plain training of a fresh copy of the model.

        `batch` has `micro_batch` samples and lies on the device; the training is undone after.

        Raises:
            Unsupported: this version of torch lacks something that the run uses.
        """

    def compare(
        self,
        settings: Mapping[str, Scalar],
        payloads: Mapping[str, Any],
        strategy: Strategy,
        *,
        reference: tuple[Mapping[str, Scalar], Mapping[str, Any]] = ({}, {}),
        micro_batch: int = 2,
        seed: int = 0,
        update: bool = False,
    ) -> Comparison:
        """Return whether one training step with these settings agrees with the plain one.

        Both start from the same weights, state and random numbers. Loss, gradients, buffers,
        modules' attributes, random states and counters beside the model are compared, each no more
        strictly than two plain steps agree with each other: to the bit on a CPU.

        Args:
            settings: as for the strategy's `apply`; without any, plain training is compared with
                itself.
            payloads: as for the strategy's `apply`.
            strategy: the one that applies them to a training that is live already.
            reference: settings and payloads to compare with in place of plain training, where a
                plain step does not fit into memory.
            micro_batch: samples of the step.
            seed: of torch's, Python's and numpy's random numbers.
            update: run the optimizer too, and compare the parameters after it.

        Raises:
            InvalidArgument: on the meta device, which has no values to compare.
            torch.OutOfMemoryError: one of the steps does not fit into memory.
            Exception: whatever else the reference step raises. If the other step raises, that is a
                difference.
        """

    def note(self, text: str) -> None:
        """Tell the reader of the report something, such as what was left out and why."""


class TrainingView(Protocol):
    """The part of a training that a strategy may use to apply its settings."""

    @property
    def model(self) -> torch.nn.Module:
        """The model that is trained, on the device.

        A strategy of `Phase.PARALLEL` may set a wrapper around it, and must set it back. In a plan
        with such a strategy the model lies in host memory until that one places it.
        """

    @model.setter
    def model(self, model: torch.nn.Module) -> None: ...

    @property
    def world(self) -> World:
        """The ranks that train together; torch's default process group has all of them."""

    def place_model(self) -> None:
        """Move the model to the device, if it is not there.

        For strategies of `Phase.PARALLEL`: before what wraps a model on the device, and after what
        shards it, since a whole model need not fit. Once they are applied it is done in any case.
        """

    @property
    def optimizer(self) -> Any:
        """The optimizer, or a mapping of them where the user's `training_step` has several.

        A strategy may set another one over the same parameters, and must set it back. None in
        `Phase.MODEL` and `Phase.PARALLEL` of a plan with a parallel strategy: it is made after.
        """

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None: ...

    @property
    def device(self) -> torch.device:
        """Where model and batches are."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler in force; a strategy may set it, and must set it back."""

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None: ...

    def wrap_forward(
        self,
        context: Callable[[], AbstractContextManager[Any]],
        *,
        also_recomputation: bool = True,
    ) -> Callable[[], None]:
        """Enter `context()` around every forward and loss; return the function that undoes it.

        What was wrapped last is entered last. With `also_recomputation` it is entered around each
        part of the forward that a strategy runs again in the backward, too: one that changes what
        is computed must be. One that changes how tensors are saved must not.
        """

    def recomputation(self) -> AbstractContextManager[None]:
        """Enter, for a part of the forward that is run again, what `wrap_forward` says it needs.

        For strategies that recompute.
        """

    def wrap_optimizer_step(
        self, wrapper: Callable[[Callable[[], None]], None]
    ) -> Callable[[], None]:
        """Call `wrapper(step)` in place of the update; return the function that undoes it."""

    def update_in_backward(
        self, parameter: torch.Tensor, update: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `update()` in the backward pass, once the parameter's gradient is whole.

        Then the gradient is dropped. Where anything else uses it, nothing is called and it waits
        for the update of all: with several micro-batches, `clip_grad_norm`, `before_step`, a
        scaler, several ranks, hooks of an optimizer, and where the user's own code calls backward.
        Return the function that undoes it.
        """

    def wrap_optimizer_factory(
        self, wrapper: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
    ) -> Callable[[], None]:
        """Make each optimizer by `wrapper(factory)` in place of `factory`, of parameters.

        For strategies of `Phase.PARALLEL`; return the function that undoes it.
        """

    def before_micro_batch(self, notify: Callable[[bool], None]) -> Callable[[], None]:
        """Call `notify(is_last)` before each micro-batch that a batch is split into.

        `is_last` says that no other of that batch follows. Return the function that undoes it.
        """

    def add_notes(self, notes: Callable[[], Iterable[str]]) -> Callable[[], None]:
        """Have `notes()` called at the end of a probe; return the function that undoes it.

        What it returns stands in the measurement's notes.
        """

    def in_host_memory(self) -> AbstractContextManager[None]:
        """Have tensors that are made inside on the host not count against the VRAM budget.

        On a device that computes on the host itself they would.
        """

    @property
    def host_available_bytes(self) -> int:
        """The bytes of the host's memory that are available now."""

    def loss(self, batch: Any) -> torch.Tensor:
        """Run forward and loss of one micro-batch, under the forward contexts in force."""

    def step(self, batch: Any) -> torch.Tensor:
        """Run one optimizer step, the user's own where there is one; return the detached loss."""


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Take back at the end what a training added: call what its `wrap_...` returned."""
    try:
        yield
    finally:
        undo()


@contextmanager
def attributes_kept(owner: object, *names: str) -> Iterator[None]:
    """Give an object its own attributes of these names back at the end, or leave it without."""
    own = vars(owner)
    before = {name: own[name] for name in names if name in own}
    try:
        yield
    finally:
        for name in names:  # in place, or the order of its attributes would change
            if name in before:
                own[name] = before[name]
            else:
                own.pop(name, None)


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that `Module.__call__` prefers to its own call."""


@contextmanager
def calls_watched(
    model: torch.nn.Module,
    modules: Iterable[torch.nn.Module],
    enter: Callable[[torch.nn.Module, Any, Any], object],
    leave: Callable[[torch.nn.Module, Any], object],
) -> Iterator[None]:
    """Have each call of these modules of a model begin and end with these functions.

    A compiled module is watched from around its compiled call, and modules within compiled code are
    not: that would take hooks in, break up at them, and be compiled again for each new one. So each
    module's own call is covered, which `torch.compile` passes by.

    Args:
        model: holds the modules.
        modules: watched.
        enter: called with a module, and the arguments and keyword arguments of its forward.
        leave: called with a module and its output (None: it raised).
    """
    wrapped = (each for each in model.modules() if type(each).__name__ == "OptimizedModule")
    inside = {inner for each in wrapped for inner in each.modules() if inner is not each}
    with ExitStack() as stack:
        for module in modules:
            if module not in inside:
                stack.enter_context(attributes_kept(module, COMPILED_CALL))
                vars(module)[COMPILED_CALL] = _watched(module, enter, leave)
        yield


def _watched(module: Any, enter: Callable[..., object], leave: Callable[..., object]) -> Any:
    import torch

    compiled = vars(module).get(COMPILED_CALL)

    def after_hooks(*args: Any, **kwargs: Any) -> Any:
        """Call a module whose own hooks are no part of its forward."""
        hooks = (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(lambda own, _, made: leave(own, made), always_call=True),
        )
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def call(*args: Any, **kwargs: Any) -> Any:
        run, output = compiled or module._call_impl, None
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        if compiled is None and (module._forward_pre_hooks or module._forward_hooks):
            return after_hooks(*args, **kwargs)
        enter(module, args, kwargs)
        try:
            output = run(*args, **kwargs)
        finally:
            leave(module, output)
        return output

    return call


STANDARD_TERMS = ("autocast", "tf32", "optimizer_implementation", "compilation")
"""What trainers of other libraries know under names of their own: the type of autocast around the
forward ("bfloat16", "float16"), TF32 in matrix products and convolutions (True), which of torch's
implementations the optimizer steps with ("for_loop", "foreach", "fused"), and the mode in which
`torch.compile` compiles the whole model ("default", "reduce-overhead").

A strategy may offer the attribute `standard_terms`, those that its settings may set, and the method
`in_standard_terms(settings)`, which returns term -> value, all that these settings do, and {} where
they are plain PyTorch. A setting without it is applied to the model itself, by `Strategy.apply`.
The method `of_standard_terms(terms)` returns the settings that mean them, and {} where it has none;
whether a device has them is seen where they are used."""


@runtime_checkable
class Strategy(Protocol):
    """One technique, such as reduced precision, as dimensions of the search space.

    It may have a method `unavailable(device_type) -> str | None` that says, without a model, what
    this machine lacks for it; `autofit doctor` shows that. With a method `within(numerics) ->
    Strategy` it is asked for one that goes no further, where it would go too far. A mapping
    `numerics_of` has the settings that go less far than its `numerics`. With a method
    `in_anothers_loop() -> Strategy` it is asked for one without what needs `Report.apply`, in
    searches for the loop of another library. With an attribute
    `by_name_only` that is true it is used only by searches that name it. With an attribute
    `recomputes` that is true it has one setting, whose values recompute ever more of the model and
    need ever less memory; `autofit.checkpoint_to_budget` chooses among them, and a search whose
    plans all fit without asks for no dimensions unless the strategy was named.
    """

    name: str
    """Prefix of its settings."""
    phase: Phase
    """When it is applied, beside other strategies."""
    numerics: Numerics
    """How far its settings change the arithmetic."""

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Setting name (with the prefix) -> its values; {} = not for this model or device.

        One value alone adds nothing to a search, and lets a plan name it: where there is nothing
        to choose, that is kinder than {}. On the meta device, what is left out since it takes a
        run to find is noted.
        """

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Apply this strategy's settings; leaving the context undoes them exactly."""

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """The lines a user would write to get the same; [] where the settings are plain PyTorch.

        They use `model`, `optimizer` and what they import. A last line that ends in a colon opens a
        block, in which later strategies' lines and the training lie.
        """
