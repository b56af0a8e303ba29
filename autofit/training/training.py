"""One live training loop on one device.

The same class runs in a probe, on the meta device for a prediction, and in the user's own process
after `Report.apply`, so a strategy is written once. A training changes the model and the optimizer
only through the strategies it applies, and `undo` reverts those changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from autofit.devices.base import host_memory
from autofit.devices.cpu import fix_malloc_thresholds
from autofit.errors import InvalidArgument, Unsupported, mark_users
from autofit.plan import ResolvedPlan, split_evenly, steps_for
from autofit.strategy import ALONE, Phase, World
from autofit.training.autocast import Autocast, Leave, left_beside_forwards
from autofit.training.batch import Batch, FlatBatch, placed
from autofit.training.loss import LossSource, Recipe, TrainingStep, scalar
from autofit.training.optimizers import (
    FactoryWrapper,
    LossScale,
    Optimizers,
    by_name,
    check_steps_alone,
    has_step_hooks,
    holds_any,
)
from autofit.training.samples import MicroBatches, Samples, samples_in
from autofit.training.watch import BatchWatch
from autofit.units import kind_of

if TYPE_CHECKING:
    from autofit.training.ranks import Ranks


StepWrapper = Callable[[Callable[[], None]], None]
ForwardContext: TypeAlias = Callable[[], AbstractContextManager[Any]]
_Item = TypeVar("_Item")


def _added(held: list[_Item], item: _Item) -> Callable[[], None]:
    """Add it; return the function that removes it."""
    held.append(item)
    return lambda: held.remove(item)


class ForwardContexts:
    """The contexts that a training's forward passes run under, in the order they were added."""

    def __init__(self) -> None:
        self._added: list[tuple[ForwardContext, bool]] = []
        self._is_forward = False

    def __bool__(self) -> bool:
        return bool(self._added)

    def add(self, context: ForwardContext, *, also_recomputation: bool) -> Callable[[], None]:
        """Add one; return the function that removes it. See `TrainingView.wrap_forward`."""
        return _added(self._added, (context, also_recomputation))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enter all of them."""
        before, self._is_forward = self._is_forward, True
        try:
            with ExitStack() as stack:
                for context, _ in self._added:
                    stack.enter_context(context())
                yield
        finally:
            self._is_forward = before

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Enter those that a recomputation needs, unless it runs inside `forward`."""
        with ExitStack() as stack:
            for context, also_recomputation in self._added:
                if also_recomputation and not self._is_forward:
                    stack.enter_context(context())
            yield


class Training(AbstractContextManager["Training"]):
    """A model, its optimizer and a plan, ready to step.

    Args:
        model: already on `device`, unless `place_model` is given.
        optimizer: over the model's parameters; with `Recipe.training_step`, a mapping of several. A
            function of the model is called for it, after strategies of `Phase.PARALLEL`; where
            these wrap how optimizers are made, the wrappers are given to it as `wrappers`.
        recipe: the user's loss, clipping and functions around the update.
        resolved: the plan, with the strategies that apply its settings.
        device: each micro-batch is moved to it when its turn comes.
        place: moves a tensor to the device; None: `tensor.to(device)`.
        samples: how what a step is given becomes micro-batches; None: its batches are rows, decided
            on each by the sizes of its tensors, see `autofit.training.batch`.
        watch: is shown every batch of the user's own training; None: nothing is expected of them.
        in_host_memory: see `TrainingView.in_host_memory`.
        place_model: moves a module to the device; see `TrainingView.place_model`.
        world: the ranks that train together.

    Attributes:
        model, optimizer, device, recipe: as given; a training_step uses them. A parallel strategy
            may have wrapped the model.
        plain_model: the model without such a wrapper.
        ranks: those that share every optimizer step; None: this device trains alone.
        plan: micro-batch and settings.

    Raises:
        InvalidArgument: the optimizer needs a closure to step, and no training_step passes one.
        Unsupported: a live optimizer holds none of the parameters that a strategy left.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers | Callable[..., Optimizers],
        recipe: Recipe,
        resolved: ResolvedPlan,
        *,
        device: torch.device,
        place: Callable[[torch.Tensor], torch.Tensor] | None = None,
        samples: Samples | None = None,
        watch: BatchWatch | None = None,
        in_host_memory: Callable[[], AbstractContextManager[None]] = nullcontext,
        place_model: Callable[[torch.nn.Module], object] | None = None,
        world: World = ALONE,
    ) -> None:
        self.model = model
        self.world = world
        self.plain_model, self._place_model = model, place_model
        self.plan = resolved.plan
        self.device = device
        self.recipe = recipe
        # A copy to the host that nobody waits for would be read too early.
        self._place = place or partial(_to_device, device)
        self._samples = samples
        self._watch = watch
        self.in_host_memory = in_host_memory
        self._forward_contexts = ForwardContexts()
        self._step_wrappers: list[StepWrapper] = []
        self._factory_wrappers: list[FactoryWrapper] = []
        self._micro_batch_observers: list[Callable[[bool], None]] = []
        self._notes: list[Callable[[], Iterable[str]]] = []
        self._loss_scale = LossScale()
        self._leave_autocast: Leave = nullcontext
        self._is_last = self._is_whole = False
        self.loss_source: LossSource | None = None
        # Whether any step so far split its batch; a training_step may not.
        self.has_split = False
        self._ended = False
        self._is_in_training_step = self._is_looked_at = False
        self._applied = ExitStack()
        self.optimizer: Optimizers = None  # type: ignore[assignment]  # until it is made
        self.ranks: Ranks | None = None
        fix_malloc_thresholds(device)  # before the model is placed
        with ExitStack() as stack:
            self._apply(resolved, optimizer, stack)
            self._applied = stack.pop_all()

    def _apply(
        self,
        resolved: ResolvedPlan,
        optimizer: Optimizers | Callable[..., Optimizers],
        stack: ExitStack,
    ) -> None:
        """Apply the strategies in the order of their phases, and make the optimizer in between."""
        applied = list(resolved.by_strategy())
        is_parallel = any(strategy.phase is Phase.PARALLEL for strategy, _, _ in applied)
        if is_parallel and self.world.size > 1:
            from autofit.training.ranks import Ranks  # most trainings are of one device

            self.ranks = Ranks(self.world, self.device)
        if not is_parallel:
            self.place_model()
            self.optimizer = self._made(optimizer)
        for strategy, settings, payloads in applied:
            if strategy.phase > Phase.PARALLEL:
                self._make_ready(optimizer)
            on_host = strategy.phase is Phase.MODEL and self._place_model is not None
            with self.in_host_memory() if on_host else nullcontext():
                applying = strategy.apply(self, settings, payloads)
                if not isinstance(applying, AbstractContextManager):
                    raise InvalidArgument(
                        f"the strategy {strategy.name!r} must return a context manager from "
                        f"apply, got {kind_of(applying)}"
                    )
                stack.enter_context(applying)
        self._make_ready(optimizer)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a training_step uses model and optimizer, and replaces neither.

        Raises:
            AttributeError: a training_step replaces one, as an error of the user's.
        """
        if name in ("model", "optimizer") and vars(self).get("_is_in_training_step"):
            refusal = AttributeError(
                f"training_step replaces training.{name} by {kind_of(value)}, but the plan holds "
                f"for the {name} that was given: pass the other {name} to autofit instead"
            )
            mark_users(refusal)
            raise refusal
        super().__setattr__(name, value)

    def _make_ready(self, optimizer: Optimizers | Callable[..., Optimizers]) -> None:
        """Place the model and make the optimizer, if that waited for a parallel strategy."""
        self.place_model()
        if self.optimizer is None:
            self.optimizer = self._made(optimizer)
            if not any(holds_any(each, self.plain_model) for each in self._optimizers(None)):
                raise Unsupported(
                    "the plan replaces the model's parameters, so the optimizer must be "
                    "created afterwards: pass optimizer= as a function of the parameters"
                )

    def _made(self, optimizer: Optimizers | Callable[..., Optimizers]) -> Optimizers:
        given = {"wrappers": self._factory_wrappers} if self._factory_wrappers else {}
        made = optimizer(self.plain_model, **given) if callable(optimizer) else optimizer
        if self.recipe.training_step is None:
            check_steps_alone(made)
        return made

    def place_model(self) -> None:
        """Move the model to the device, if it is not there."""
        place, self._place_model = self._place_model, None
        if place is not None:
            place(self.plain_model)

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Revert the strategies' changes to model and optimizer; safe to call twice."""
        self._applied.close()
        self._ended = True

    def holds(self, model: torch.nn.Module, optimizer: Any) -> bool:
        """Return whether it has not ended and uses that model or one of those optimizers."""
        own, asked = by_name(self.optimizer).values(), by_name(optimizer).values()
        is_shared = any(one is other for one in own for other in asked)
        return not self._ended and (self.plain_model is model or is_shared)

    @property
    def host_available_bytes(self) -> int:
        """The bytes of the host's memory that are available now."""
        return host_memory()[1]

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The active gradient scaler, or None if gradients are not scaled."""
        return self._loss_scale.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._loss_scale.scaler = scaler

    def wrap_forward(
        self, context: ForwardContext, *, also_recomputation: bool = True
    ) -> Callable[[], None]:
        """Enter `context()` around every forward and loss; return a function that undoes this.

        Where `also_recomputation`, around what a checkpoint runs again in the backward too.
        """
        return self._forward_contexts.add(context, also_recomputation=also_recomputation)

    def recomputation(self) -> AbstractContextManager[None]:
        """Enter the contexts that a recomputed part of the forward needs."""
        return self._forward_contexts.recomputation()

    def wrap_optimizer_step(self, wrapper: StepWrapper) -> Callable[[], None]:
        """Call `wrapper(step)` in place of the update; return a function that undoes this."""
        return _added(self._step_wrappers, wrapper)

    def update_in_backward(
        self, parameter: torch.Tensor, update: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `update()` once its gradient is whole; see `TrainingView.update_in_backward`."""

        def on_gradient(of: torch.Tensor) -> None:
            if self._is_whole and of.grad is not None:
                self._call_wrapped(update)
                of.grad = None

        hook = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]  # torch's
        return lambda: hook.remove()

    def wrap_optimizer_factory(self, wrapper: FactoryWrapper) -> Callable[[], None]:
        """Make optimizers by `wrapper(factory)`; return a function that undoes this."""
        return _added(self._factory_wrappers, wrapper)

    def before_micro_batch(self, notify: Callable[[bool], None]) -> Callable[[], None]:
        """Call `notify(is_last)` before each micro-batch; return a function that undoes this."""
        return _added(self._micro_batch_observers, notify)

    def add_notes(self, notes: Callable[[], Iterable[str]]) -> Callable[[], None]:
        """Add what `notes()` returns to `notes`; return a function that undoes this."""
        return _added(self._notes, notes)

    def notes(self) -> tuple[str, ...]:
        """Return the notes of the active strategies on the steps so far."""
        return tuple(note for notes in self._notes for note in notes())

    def step(self, batch: Batch) -> torch.Tensor:
        """Run one optimizer step.

        Args:
            batch: n >= 1 samples on any device; split evenly into ceil(n / micro_batch)
                micro-batches. Of several ranks each gives its own, and all run as many. Where the
                workload has a collate_fn, a list of samples, of which it makes each micro-batch.
                Where it has a function n -> batch, a batch, or such a function, which is called
                for each micro-batch of the plan.

        Returns:
            The detached mean loss, a scalar tensor on the device; of all ranks' samples.

        Raises:
            InvalidArgument: the training was undone, so it would run without its plan.

        Warns:
            UserWarning: once each, of another number of samples than the plan's, of samples longer
                than those of the search, and of micro-batches that ignore unequal shares of their
                targets and are weighted by their samples.
        """
        if self._ended:
            raise InvalidArgument("this training has ended: call report.apply(...) again")
        training_step = self.recipe.training_step
        if training_step is None:
            given, is_made = self._in_micro_batches(batch), True
            self._look(given)
        else:
            samples, given = samples_in(batch, self._samples)
            is_made = isinstance(given, FlatBatch)  # else `micro_batches` makes batches of it
            if self._watch is not None:  # how a training_step divides it is not known yet
                known = (given,) if is_made else ()
                self._look(MicroBatches(known, (sum(self._sizes(samples.size(given))),)))
        # By no other part, since ranks gather for each look. Of what a training_step makes batches,
        # they are looked at as it makes them.
        self._is_looked_at = is_made
        try:
            self.zero_grad()
            if training_step is not None:
                return self._users_step(training_step, self.placed(given) if is_made else given)
            loss = self.accumulate(given, then_updates=True)
            self.optimizer_step()
            return loss
        finally:
            self._is_looked_at = False

    def accumulate(self, batch: Batch, *, then_updates: bool = False) -> torch.Tensor:
        """Run forward and backward of every micro-batch; return their detached mean loss.

        It is the mean over all ranks. With `then_updates` the caller does nothing but
        `optimizer_step` next, so that parameters may be updated before (`update_in_backward`).
        """
        total: torch.Tensor | None = None
        for micro_batch, weight in self.micro_batches(batch):
            loss = self.loss(micro_batch)
            is_only = total is None and self._is_last
            share = loss.detach() * weight if weight else torch.zeros_like(loss.detach())
            total = share if total is None else total + share
            # Whether nothing but the update uses the gradients of a whole step
            recipe, hooked = self.recipe, map(has_step_hooks, self._optimizers(None))
            is_read = recipe.clip_grad_norm is not None or recipe.before_step is not None
            is_free = self.ranks is None and self.scaler is None and not is_read
            self._is_whole = then_updates and is_only and is_free and not any(hooked)
            try:
                self.backward(loss, weight)
            finally:
                self._is_whole = False
            del loss, micro_batch  # else this graph stays alive during the next forward
        assert total is not None  # a batch has at least one sample
        return self._over_ranks(total)

    def _look(self, step: MicroBatches) -> None:
        if self._watch is not None and not self._is_looked_at:
            gathered = None if self.ranks is None else partial(self._gathered, self.ranks)
            self._watch.look(step, stacklevel=3, gathered=gathered)

    def _in_micro_batches(self, given: Any) -> MicroBatches:
        """Return what a step is given in micro-batches of the plan."""
        if isinstance(given, MicroBatches):
            return given
        samples, given = samples_in(given, self._samples)
        return samples.step_of(given, self._sizes(samples.size(given)))

    def _sizes(self, samples: int | None) -> tuple[int, ...]:
        if samples is None:
            return self.plan.micro_batch_sizes_of(self.world.rank)
        return split_evenly(samples, steps_for(samples, self.plan.micro_batch))

    def _over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        if self.ranks is None:
            return loss
        with self.in_host_memory():
            return self.ranks.mean(loss)

    def share_of(self, batch: Batch) -> Batch:
        """Return this rank's samples of those of all ranks; all of them where it trains alone."""
        if self.ranks is None:
            return batch
        samples, given = samples_in(batch, self._samples)
        sizes = split_evenly(samples.size(given) or 0, self.world.size)
        return list(samples.divided(given, sizes))[self.world.rank]

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Batch, float]]:
        """Yield each micro-batch on the device, with its weight in the mean loss.

        The weights add up to one. A micro-batch of weight zero (every token of it is masked) is
        left out: its loss is often 0 / 0. Takes what `step` takes, and warns as it does.

        Of several ranks all yield as many, with weights whose mean over the ranks adds up to one,
        as gradients are averaged over them. There nothing can be left out: where a micro-batch has
        no weight, the rank's heaviest one is run again without any.
        """
        self.has_split = True
        step = self._in_micro_batches(batch)
        self._look(step)
        weights, of_ranks = self._weighed(step)
        steps = round(max(count for count, _ in of_ranks))
        if any(count != steps for count, _ in of_ranks):  # seen by every rank alike
            assert step.divide is not None  # only those of a user's step are divided anew
            step = step.divide(split_evenly(sum(step.sizes), steps))
            weights, of_ranks = self._weighed(step)
        whole = sum(weight for _, weight in of_ranks)
        if not whole:  # the unsplit batch would have the same 0 / 0
            weights, whole = [1.0] * steps, float(steps * len(of_ranks))
        heaviest = max(range(steps), key=weights.__getitem__)
        runs = [
            (index if weight else heaviest, weight)
            for index, weight in enumerate(weights)
            if weight or self.ranks is not None
        ]
        for number, (index, weight) in enumerate(runs, start=1):
            self._announce(is_last=number == len(runs))
            yield self.placed(step.batches[index]), weight * len(of_ranks) / whole

    def _weighed(self, step: MicroBatches) -> tuple[list[float], list[list[float]]]:
        """Return the weights of micro-batches, and of each rank how many it has and their sum."""
        if self.ranks is None and len(step.sizes) == 1:
            return [1.0], [[1.0, 1.0]]
        each = zip(step.batches, step.sizes, strict=True)
        weights = [self.recipe.weight(piece, size) if size else 0.0 for piece, size in each]
        own = [float(len(weights)), sum(weights)]
        return weights, [own] if self.ranks is None else self._gathered(self.ranks, *own)

    def _gathered(self, ranks: Ranks, *numbers: float) -> list[list[float]]:
        with self.in_host_memory():
            return ranks.gathered(numbers)

    def _announce(self, *, is_last: bool) -> None:
        self._is_last = is_last
        for notify in self._micro_batch_observers:
            notify(is_last)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Enter the forward contexts.

        Backward passes and updates inside leave autocast; forwards after an update see the new
        weights.
        """
        before, leave = Autocast.now(self.device.type), self._leave_autocast
        with self._forward_contexts.forward(), left_beside_forwards(before) as left:
            self._leave_autocast = leave if left is nullcontext else left
            try:
                yield
            finally:
                self._leave_autocast = leave

    def placed(self, batch: Batch) -> Batch:
        """Return the batch on the device."""
        return placed(batch, self._place, self.device)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of one micro-batch on the device, under the forward contexts."""
        with self._forward_contexts.forward():
            loss, self.loss_source = self.recipe.loss_and_source(self.model, batch)
        return loss

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """Add the gradients of `weight * loss`.

        Raises:
            InvalidArgument: the loss does not depend on a parameter that requires gradients.
        """
        if not loss.requires_grad:
            raise InvalidArgument(
                "the loss does not depend on any parameter that requires gradients: is "
                "the whole model frozen, or was the loss detached or computed under "
                "torch.no_grad()?"
            )
        if not weight:  # 0 * nan would be nan
            loss, weight = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0), 1.0
        weighted = self._loss_scale.scaled(loss if weight == 1.0 else loss * weight)
        weighted.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def optimizer_step(self, name: str | None = None) -> None:
        """Unscale and clip the gradients as configured, update, and drop the gradients.

        A gradient scaler changes its scale only when no other optimizer still holds gradients
        scaled with it.

        Args:
            name: of one optimizer in a mapping; None: all of them in turn.

        Raises:
            InvalidArgument: there is no optimizer of that name.
        """
        optimizers, all_of_them = self._optimizers(name), self._optimizers(None)
        self._loss_scale.begin(optimizers, of=all_of_them)
        with self._leave_autocast():
            for optimizer in optimizers:
                self._prepare_gradients(optimizer)
                self._call_wrapped(partial(self._loss_scale.step, optimizer))
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._loss_scale.end(of=all_of_them)

    def zero_grad(self) -> None:
        """Drop all gradients of the model and of every optimizer's parameters."""
        self.model.zero_grad(set_to_none=True)
        for optimizer in self._optimizers(None):
            optimizer.zero_grad(set_to_none=True)

    def _optimizers(self, name: str | None) -> list[torch.optim.Optimizer]:
        optimizers = by_name(self.optimizer)
        if name is None:
            return list(optimizers.values())
        if name not in optimizers:
            raise InvalidArgument(
                f"there is no optimizer {name!r}; "
                f"there are: {', '.join(optimizers) or 'a single one without a name'}; "
                f'pass several as optimizer={{"{name}": ..., ...}}'
            )
        return [optimizers[name]]

    def _prepare_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        recipe = self.recipe
        if recipe.clip_grad_norm is None and recipe.before_step is None:
            return
        self._loss_scale.unscale(optimizer)
        if recipe.clip_grad_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_grad_norm)
        if recipe.before_step is not None:
            recipe.before_step(self.model, optimizer)

    def _call_wrapped(self, update: Callable[[], None]) -> None:
        for wrapper in self._step_wrappers:
            update = partial(wrapper, update)
        update()

    def _users_step(self, training_step: TrainingStep, given: Any) -> torch.Tensor:
        self._loss_scale.was_used = False
        self._is_in_training_step = True
        try:
            with self.context():
                loss = scalar(training_step(self, given), "training_step")
        finally:
            self._is_in_training_step = False
        if self.scaler is not None and not self._loss_scale.was_used:
            raise InvalidArgument(
                "training_step did not use the gradient scaler that float16 needs: call "
                "training.backward(loss) and training.optimizer_step() in it"
            )
        self._loss_scale.adapt(self._optimizers(None))
        return self._over_ranks(loss.detach().clone())  # a compiled model may write over this one


def _to_device(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device, non_blocking=device.type != "cpu")
