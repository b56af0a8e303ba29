"""One live training loop on one device.

The same object runs in a probe, on the meta device for a prediction, and in the user's own
process after `Report.apply`; so a strategy is written once. A training changes the model and the
optimizer only through the strategies it applies, and `undo` takes those changes back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from autofit.errors import InvalidRequest
from autofit.plan import ResolvedPlan, split_evenly, steps_for
from autofit.training.amp import LossScale, fresh_casts
from autofit.training.batch import Batch, batch_size, map_tensors, pieces
from autofit.training.loss import Recipe, scalar
from autofit.training.optimizers import Optimizers, by_name, check_steps_alone

ForwardContext = Callable[[], AbstractContextManager[Any]]
StepWrapper = Callable[[Callable[[], None]], None]


class Training(AbstractContextManager["Training"]):
    """A model, its optimizer and a plan, ready to step.

    Args:
        model: on `device` already.
        optimizer: over the model's parameters; a mapping of several, with `Recipe.train_step`.
        recipe: the user's loss and what happens around the update.
        resolved: the plan, with the strategies that apply its settings.
        device: where batches are moved, micro-batch by micro-batch.
        place: how a tensor is moved to the device; None: `tensor.to(device)`.
        batched: which tensors of a batch hold samples, where that is known better than
            `autofit.training.batch` can tell from their sizes.

    Attributes:
        model, optimizer, device, recipe: as given; a train_step trains with them.
        plan: micro-batch and settings.

    Raises:
        InvalidRequest: the optimizer steps by a closure, and there is no train_step to call it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        recipe: Recipe,
        resolved: ResolvedPlan,
        *,
        device: torch.device,
        place: Callable[[torch.Tensor], torch.Tensor] | None = None,
        batched: Collection[int] | None = None,
    ) -> None:
        if recipe.train_step is None:
            check_steps_alone(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.plan = resolved.plan
        self.device = device
        self.recipe = recipe
        self._place = place or (lambda tensor: tensor.to(device, non_blocking=True))
        self._batched = batched
        self._forward_contexts: list[ForwardContext] = []
        self._step_wrappers: list[StepWrapper] = []
        self._loss_scale = LossScale()
        self.has_split = False
        """Whether any step so far asked for its micro-batches, as a train_step need not."""
        self._ended = False
        self._applied = ExitStack()
        with ExitStack() as stack:
            for strategy, settings, payloads in resolved.by_strategy():
                stack.enter_context(strategy.apply(self, settings, payloads))
            self._applied = stack.pop_all()

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Give model and optimizer back as the strategies found them; once is enough."""
        self._applied.close()
        self._ended = True

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler in force."""
        return self._loss_scale.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._loss_scale.scaler = scaler

    def wrap_forward(self, context: ForwardContext) -> Callable[[], None]:
        """Enter `context()` around every forward and loss; returns the function that undoes it."""
        self._forward_contexts.append(context)
        return lambda: self._forward_contexts.remove(context)

    def wrap_optimizer_step(self, wrapper: StepWrapper) -> Callable[[], None]:
        """Call `wrapper(step)` in place of the update; returns the function that undoes it."""
        self._step_wrappers.append(wrapper)
        return lambda: self._step_wrappers.remove(wrapper)

    def step(self, batch: Batch) -> torch.Tensor:
        """Train on the samples of one optimizer step.

        Args:
            batch: any number n >= 1 of samples, on any device; split evenly into
                ceil(n / micro_batch) micro-batches.

        Returns:
            The detached mean loss, a scalar tensor on the device.

        Raises:
            InvalidRequest: the training was undone, and would go on without its plan.
        """
        if self._ended:
            raise InvalidRequest("this training has ended: make another with report.apply(...)")
        self.zero_grad()
        if self.recipe.train_step is not None:
            return self._users_step(self.recipe.train_step, batch)
        loss = self.accumulate(batch)
        self.optimizer_step()
        return loss

    def accumulate(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of every micro-batch; returns their detached mean loss."""
        total: torch.Tensor | None = None
        for micro_batch, weight in self.micro_batches(batch):
            loss = self.loss(micro_batch)
            share = loss.detach() * weight
            total = share if total is None else total + share
            self.backward(loss, weight)
            del loss, micro_batch  # or the next forward would run beside this graph
        assert total is not None  # a batch has at least one sample
        return total

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Batch, float]]:
        """Each micro-batch on the device, with the share of the whole loss that it stands for.

        One that stands for nothing (every token of it is masked) is left out: its loss is often
        0 / 0, and would spoil the whole.
        """
        self.has_split = True
        samples = batch_size(batch)
        sizes = split_evenly(samples, steps_for(samples, self.plan.micro_batch))
        if len(sizes) == 1:
            yield map_tensors(self._place, batch), 1.0
            return
        weights = [self.recipe.weight(piece) for piece in pieces(batch, sizes, self._batched)]
        if not any(weights):  # as a whole batch would, it trains on nothing
            weights = [1.0] * len(weights)
        whole = sum(weights)
        for piece, weight in zip(pieces(batch, sizes, self._batched), weights, strict=True):
            if weight:
                yield map_tensors(self._place, piece), weight / whole

    @contextmanager
    def context(self) -> Iterator[None]:
        """What forward and loss run under; updates inside it are seen by the next forward."""
        with ExitStack() as stack:
            stack.enter_context(fresh_casts())
            for context in self._forward_contexts:
                stack.enter_context(context())
            yield

    def loss(self, batch: Batch) -> torch.Tensor:
        """Forward and loss of one micro-batch on the device, under the forward contexts."""
        with self.context():
            return self.recipe.loss(self.model, batch)

    def backward(self, loss: torch.Tensor, weight: float = 1.0) -> None:
        """Add the gradients of this loss, weighted by its share of the whole.

        Raises:
            InvalidRequest: no parameter's gradient could come of it.
        """
        if not loss.requires_grad:
            raise InvalidRequest(
                "the loss hangs on no parameter that requires gradients: is the whole model "
                "frozen, or was the loss detached or computed under torch.no_grad()?"
            )
        weighted = self._loss_scale.scaled(loss if weight == 1.0 else loss * weight)
        weighted.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def optimizer_step(self, name: str | None = None) -> None:
        """Unscale and clip where asked, update, and drop the gradients.

        A gradient scaler keeps its scale while gradients of other optimizers wait that have it.

        Args:
            name: which optimizer, where there is a mapping of them; None: each in turn.

        Raises:
            InvalidRequest: there is no optimizer of that name.
        """
        optimizers, all_of_them = self._optimizers(name), self._optimizers(None)
        self._loss_scale.begin(optimizers, of=all_of_them)
        for optimizer in optimizers:
            self._prepare_gradients(optimizer)
            self._update(optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._loss_scale.end(optimizers, of=all_of_them)

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
            raise InvalidRequest(
                f"there is no optimizer {name!r}; "
                f"there are: {', '.join(optimizers) or 'one, and it has no name'}; "
                f'several are given as optimizer={{"{name}": ..., ...}}'
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

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        def update() -> None:
            self._loss_scale.step(optimizer)

        for wrapper in self._step_wrappers:
            update = _wrapped(wrapper, update)
        update()

    def _users_step(
        self, train_step: Callable[[Training, Batch], torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        self._loss_scale.was_used = False
        with self.context():
            loss = scalar(train_step(self, map_tensors(self._place, batch)), "train_step")
        if self.scaler is not None and not self._loss_scale.was_used:
            raise InvalidRequest(
                "train_step never used the gradient scaler that float16 needs: call "
                "training.backward(loss) and training.optimizer_step() in it"
            )
        self._loss_scale.adapt(self._optimizers(None))
        return loss.detach()


def _wrapped(wrapper: StepWrapper, update: Callable[[], None]) -> Callable[[], None]:
    return lambda: wrapper(update)
