"""Ways in which people use autograd, each as the training of a tiny model.

Every one of them trains in plain PyTorch. A strategy that is applied to it has to train alike, as
far as its numerics say, or to refuse it in words: see `autofit.testing.check_usages`.

The models have what strategies look for: a convolution with batch normalization, attention, blocks
that repeat, a head of thousands of classes, whose gradient takes more than what a sample saves.
What user code sees on the way (in hooks, in copies) it notes in `model.seen`, which is compared
too.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as global_hooks
from torch.utils.checkpoint import checkpoint

from autofit.training.batch import Batch
from autofit.training.workload import COMPILED_CALL, Workload

CLASSES, WIDTH, SAMPLES, HEIGHT = 4100, 8, 4, 2
Loss: TypeAlias = Callable[["Tiny", Any], Tensor]


@dataclass(frozen=True)
class Usage:
    """A way of using autograd.

    Attributes:
        name: what is used.
        make_workload: builds its training, alike on each call.
        steps: how many optimizer steps are compared.
        batch: number of the step -> its batch; None: another one of random images each time.
    """

    name: str
    make_workload: Callable[[], Workload]
    steps: int = 3
    batch: Callable[[int], Batch] | None = None

    def batch_of(self, step: int) -> Batch:
        """Return the batch of a step, alike on each call."""
        return images_of(step) if self.batch is None else self.batch(step)


def images_of(step: int, length: int = 2) -> tuple[Tensor, Tensor]:
    """Return images (samples, 3, HEIGHT, length), and a class for each of their places."""
    random = torch.Generator().manual_seed(step)
    images = torch.randn(SAMPLES, 3, HEIGHT, length, generator=random)
    targets = torch.randint(CLASSES, (SAMPLES, HEIGHT * length), generator=random)
    return images, targets


class Block(nn.Module):
    """x (n, t, width) -> x: attention, then a perceptron.

    Args:
        attends: whether it has attention, whose kernels have no second derivatives.
        centers: whether it subtracts a running mean, a buffer that is written in place.
    """

    center: Tensor

    def __init__(self, *, attends: bool = True, centers: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH) if attends else None
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.centers = centers
        self.register_buffer("center", torch.zeros(WIDTH))
        self.between: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.centers:
            self.center.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
            x = x - self.center
        if self.mix is not None:
            heads = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*heads.unbind(0))
            x = x + mixed.transpose(1, 2).flatten(2)
        if self.between is not None:
            x = self.between(x)
        changed: Tensor = x + self.mlp(x)
        return changed


class Tiny(nn.Module):
    """Images (n, 3, HEIGHT, l) -> logits (n, HEIGHT * l, CLASSES).

    Args:
        given: of its blocks.

    Attributes:
        seen: what user code noted in a step; it is compared, and cleared after each.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.blocks = nn.ModuleList(Block(**given) for _ in range(2))
        self.norm, self.aux = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.seen: dict[str, Any] = {}

    def embedded(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.stem(images).flatten(2).transpose(1, 2)
        return embedded

    def features(self, images: Tensor) -> Tensor:
        x = self.embedded(images)
        for block in self.blocks:
            x = block(x)
        normalized: Tensor = self.norm(x)
        return normalized

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    return loss_of(model(images), targets)


def _workload(
    loss: Loss | None = plain_loss,
    prepare: Callable[[Tiny], object] = lambda model: None,
    make_model: Callable[[], Tiny] = Tiny,
    **given: Any,
) -> Workload:
    """Return a training of a model that is prepared where it is built."""

    def build() -> Tiny:
        torch.manual_seed(0)
        model = make_model()
        prepare(model)
        return model

    given = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)} | given
    loss_fn: Any = loss
    return Workload(build, images_of(0), loss_fn=loss_fn, **given)


def _direction(gradient: Tensor) -> Tensor:
    """Return it without its size, which a scale for gradients changes."""
    return functional.normalize(gradient.detach().float().flatten(), dim=0)


def _smooth() -> Tiny:
    return Tiny(attends=False)


HOOKED = ("stem.0", "blocks.0", "head")


def forward_hooks() -> Workload:
    def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 0.5

    def prepare(model: Tiny) -> None:
        for name in HOOKED:
            model.get_submodule(name).register_forward_hook(halve)

    return _workload(prepare=prepare)


def forward_hooks_that_read() -> Workload:
    def prepare(model: Tiny) -> None:
        def note(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
            model.seen[name] = output.detach().float().mean()

        for name in HOOKED:
            model.get_submodule(name).register_forward_hook(partial(note, name))

    return _workload(prepare=prepare)


def forward_pre_hooks() -> Workload:
    def double(module: nn.Module, args: Any) -> Any:
        return (args[0] * 2,)

    def prepare(model: Tiny) -> None:
        for name in HOOKED:
            model.get_submodule(name).register_forward_pre_hook(double)

    return _workload(prepare=prepare)


def backward_hooks() -> Workload:
    def prepare(model: Tiny) -> None:
        def halve(name: str, module: nn.Module, given: Any, of_output: Any) -> Any:
            model.seen[name] = _direction(of_output[0])
            return (given[0] * 0.5,)

        for name in ("blocks.1", "head"):
            model.get_submodule(name).register_full_backward_hook(partial(halve, name))

    return _workload(prepare=prepare)


def backward_pre_hooks() -> Workload:
    def prepare(model: Tiny) -> None:
        def halve(name: str, module: nn.Module, of_output: Any) -> Any:
            model.seen[name] = _direction(of_output[0])
            return (of_output[0] * 0.5,)

        for name in ("blocks.1", "head"):
            model.get_submodule(name).register_full_backward_pre_hook(partial(halve, name))

    return _workload(prepare=prepare)


def hooks_of_all_modules() -> Workload:
    """From the forward to the end of the backward: what is recomputed in it needs them, too."""

    def of_forward(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.1 if isinstance(module, nn.Linear) else None

    def before_forward(module: nn.Module, args: Any) -> Any:
        return (args[0] * 0.9,) if isinstance(module, nn.Linear) else None

    def of_backward(module: nn.Module, given: Any, of_output: Any) -> Any:
        return (given[0] * 0.5,) if isinstance(module, nn.Linear) else None

    def step(training: Any, batch: Any) -> Tensor:
        with ExitStack() as stack:
            for handle in (
                global_hooks.register_module_forward_hook(of_forward),
                global_hooks.register_module_forward_pre_hook(before_forward),
                global_hooks.register_module_full_backward_hook(of_backward),
            ):
                stack.callback(handle.remove)
            loss: Tensor = training.loss(batch)
            training.backward(loss)
        training.optimizer_step()
        return loss

    return _workload(training_step=step)


def tensor_hooks() -> Workload:
    def prepare(model: Tiny) -> None:
        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        model.head.weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]  # torch
        model.norm.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]  # torch

    def loss(model: Tiny, batch: Any) -> Tensor:
        features: Any = model.features(batch[0])
        logits = model.head(features)
        features.register_hook(lambda gradient: gradient * 0.5)
        logits.register_hook(lambda gradient: gradient * 2)
        features.register_hook(lambda gradient: model.seen.update(features=_direction(gradient)))
        return loss_of(logits, batch[1])

    return _workload(loss, prepare)


class _SoftCap(torch.autograd.Function):
    """x -> cap * tanh(x / cap)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        capped = torch.tanh(x / 5)
        ctx.save_for_backward(capped)
        return capped * 5

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        capped: Tensor
        (capped,) = ctx.saved_tensors
        return gradients[0] * (1 - capped * capped)


class _Reversal(torch.autograd.Function):
    """x -> x, with half of the gradient turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * -0.5


def functions_of_ones_own() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        features: Any = _Reversal.apply(model.features(batch[0]))  # type: ignore[no-untyped-call]  # torch
        capped: Any = _SoftCap.apply(model.head(features))  # type: ignore[no-untyped-call]  # torch
        return loss_of(capped, batch[1])

    return _workload(loss)


def vmap() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        losses: Tensor = torch.vmap(functional.cross_entropy)(model(batch[0]), batch[1])
        return losses.mean()

    return _workload(loss)


def jvp() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        features = model.features(batch[0])
        block: Any = model.blocks[0]
        tangent: Tensor
        _, tangent, *_ = torch.func.jvp(block.mlp, (features,), (torch.ones_like(features),))
        return loss_of(model.head(features), batch[1]) + tangent.square().mean()

    return _workload(loss)


def functional_gradient() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        features = model.features(batch[0])

        def energy(x: Tensor) -> Tensor:
            return functional.softplus(model.aux(x)).sum()

        force: Tensor = torch.func.grad(energy)(features)
        return loss_of(model.head(features), batch[1]) + force.square().mean()

    return _workload(loss)


def double_backward() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        first: Tensor = plain_loss(model, batch)
        parameters = [p for p in model.parameters() if p is not model.aux.weight]
        parameters = [p for p in parameters if p is not model.aux.bias]
        gradients = torch.autograd.grad(first, parameters, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        return first + 0.1 * penalty

    return _workload(loss, make_model=_smooth)


def gradient_penalty() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        images = batch[0].detach().requires_grad_()
        logits = model(images)
        total = logits.float().logsumexp(-1).mean()
        gradient: Tensor
        (gradient,) = torch.autograd.grad(total, images, create_graph=True)
        return loss_of(logits, batch[1]) + gradient.square().sum()

    return _workload(loss, make_model=_smooth)


def retain_graph() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        features = model.features(batch[0])
        first = loss_of(model.head(features), batch[1])
        second: Tensor = model.aux(features).float().square().mean()
        sizes: list[Tensor] = [  # of gradients that float16 can hold
            torch.autograd.grad(each * 2**8, features, retain_graph=True)[0].norm()
            for each in (first, second)
        ]
        return first + second * (sizes[0] / sizes[1]).detach()

    return _workload(loss)


def backward_in_parts() -> Workload:
    def step(training: Any, batch: Any) -> Tensor:
        features = training.model.features(batch[0])
        cut = features.detach().requires_grad_()
        loss = loss_of(training.model.head(cut), batch[1])
        training.backward(loss)
        features.backward(cut.grad)
        training.optimizer_step()
        return loss

    return _workload(None, training_step=step)


def weights_written_in_place() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        with torch.no_grad():
            model.head.weight.clamp_(-0.3, 0.3)
            for block in model.blocks:
                block.mlp[0].weight.div_(block.mlp[0].weight.norm())  # type: ignore[index, union-attr]
        return plain_loss(model, batch)

    return _workload(loss)


def weights_swapped_for_a_reference() -> Workload:
    """The model computes with other weights in between, as policies that keep a reference do."""
    reference: dict[str, Tensor] = {}

    def keep(model: Tiny) -> None:
        reference.update({n: p.detach().flip(0).clone() for n, p in model.named_parameters()})

    def loss(model: Tiny, batch: Any) -> Tensor:
        now = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            _write(model, reference)
            target = model(batch[0]).float().softmax(-1)
            _write(model, now)
        logits = model(batch[0]).float()
        apart = functional.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
        model.seen["divergence"] = apart.detach()
        return loss_of(logits, batch[1]) + apart / 16

    return _workload(loss, keep)


def _write(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def two_passes_with_weights_moved_between() -> Workload:
    """Sharpness-aware minimization."""

    def step(training: Any, batch: Any) -> Tensor:
        model = training.model
        training.backward(training.loss(batch))
        trained = [p for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in trained]).norm()
            moves = [p.grad * (0.05 / norm) for p in trained]
            torch._foreach_add_(trained, moves)
        for parameter in trained:
            parameter.grad = None
        loss: Tensor = training.loss(batch)
        training.backward(loss)
        with torch.no_grad():
            torch._foreach_sub_(trained, moves)
        training.optimizer_step()
        return loss

    return _workload(training_step=step)


def activations_written_in_place() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        embedded = model.embedded(batch[0]).clone().add_(1)
        for block in model.blocks:
            embedded = block(embedded).mul_(0.9)
        features = model.norm(embedded).mul_(0.5)
        logits = model.head(features).div_(2)
        logits[..., :10] = -30
        return loss_of(logits, batch[1].clamp(min=10))

    return _workload(loss)


def views_of_images_written() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        places = model.stem(batch[0]).clone()
        places.reshape(len(places), -1)[:, ::2] = 0  # a view, where all lies in the default order
        return loss_of(model.head(places.flatten(2).transpose(1, 2)), batch[1])

    return _workload(loss)


def copies_of_images_written() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        places = model.stem(batch[0]).clone()
        last = places.permute(0, 2, 3, 1).contiguous().mul_(2)  # a copy, likewise
        both = last.flatten(1, 2) + places.flatten(2).transpose(1, 2)
        return loss_of(model.head(both), batch[1])

    return _workload(loss)


def inputs_written_after_a_frozen_head() -> Workload:
    def freeze(model: Tiny) -> None:
        model.head.requires_grad_(False)

    def loss(model: Tiny, batch: Any) -> Tensor:
        features = model.features(batch[0])
        logits = model.head(features)  # its gradient needs the weight alone
        features.mul_(2)
        return loss_of(logits, batch[1]) + features.float().square().mean()

    return _workload(loss, freeze)


def unused_branch() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        features = model.features(batch[0])
        model.aux(features).sigmoid().exp()
        return loss_of(model.head(features), batch[1])

    return _workload(loss)


def gradients_missing_in_a_step() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        features = model.features(batch[0])
        total = loss_of(model.head(features), batch[1])
        is_used = bool(batch[0].sum() > 0)
        model.seen["branch"] = is_used
        return total + model.aux(features).float().square().mean() if is_used else total

    return _workload(loss)


def gradients_that_come_later() -> Workload:
    """As those of layers that are unfrozen, and of experts that are chosen late."""
    steps = iter(range(100))

    def loss(model: Tiny, batch: Any) -> Tensor:
        model.stem.requires_grad_(next(steps) > 1)
        return plain_loss(model, batch)

    return _workload(loss)


def several_optimizers() -> Workload:
    def step(training: Any, batch: Any) -> Tensor:
        model = training.model
        features = model.features(batch[0])
        loss = loss_of(model.head(features), batch[1])
        if batch[0].sum() > 0:
            loss = loss + model.aux(features).float().square().mean()
        training.backward(loss)
        training.optimizer_step("blocks")
        training.optimizer_step()  # of blocks and perhaps aux none has a gradient
        return loss

    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    names = "stem", "blocks", "norm", "head", "aux"
    return _workload(None, training_step=step, optimizer=dict.fromkeys(names, make))


def lengths() -> Workload:
    return _workload()


def compiled_function() -> Workload:
    """In the blocks and in the loss; it must run compiled in each step."""
    runs: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    # each training has a function of its own: torch.compile keeps what it knows by its code
    capped = FunctionType(_capped.__code__.replace(), globals())
    compiled: Any = torch.compile(capped, backend=count)

    def prepare(model: Tiny) -> None:
        for block in model.blocks:
            block.between = compiled

    def loss(model: Tiny, batch: Any) -> Tensor:
        runs.clear()
        logits = model(batch[0])
        around = (model, *model.blocks)  # the function may be part of their code
        is_inlined = any(vars(each).get(COMPILED_CALL) is not None for each in around)
        ran = is_inlined or len(runs) == len(model.blocks)
        model.seen["runs of compiled code in the forward"] = ran
        return loss_of(logits, batch[1])

    return _workload(loss, prepare)


def _capped(x: Tensor) -> Tensor:
    return torch.tanh(x / 5) * 5


def compiled_by_autograd() -> Workload:
    compiled: Any = torch.compile(
        FunctionType(_capped.__code__.replace(), globals()), backend="aot_eager"
    )

    def loss(model: Tiny, batch: Any) -> Tensor:
        return loss_of(compiled(model(batch[0])), batch[1])

    return _workload(loss)


def _with_checkpoints(model: Tiny, batch: Any, *, use_reentrant: bool) -> Tensor:
    x = model.embedded(batch[0])
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    return loss_of(model.head(model.norm(x)), batch[1])


def reentrant_checkpoint_twice() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        x = model.embedded(batch[0])
        for _ in range(2):
            x = checkpoint(model.blocks[0], x, use_reentrant=True)
        return loss_of(model.head(model.norm(x)), batch[1])

    return _workload(loss)


def loss_in_a_reentrant_checkpoint() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        def of(features: Tensor) -> Tensor:
            return loss_of(model.head(features), batch[1])

        total: Tensor = checkpoint(of, model.features(batch[0]), use_reentrant=True)
        return total

    return _workload(loss)


def second_model() -> Workload:
    torch.manual_seed(1)
    teacher = Tiny().eval()

    def loss(model: Tiny, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0]).float().softmax(-1)
        logits = model(batch[0])
        apart = functional.kl_div(logits.float().log_softmax(-1), target, reduction="batchmean")
        return loss_of(logits, batch[1]) + apart / 16

    return _workload(loss)


def average_of_weights() -> Workload:
    averages: list[Tiny] = []

    def prepare(model: Tiny) -> None:
        averages[:] = [copy.deepcopy(model).requires_grad_(False)]

    def loss(model: Tiny, batch: Any) -> Tensor:
        (average,) = averages
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
            target = average(batch[0]).float()
        model.seen["the average"] = average.head.weight.detach().clone()
        logits = model(batch[0])
        return loss_of(logits, batch[1]) + functional.mse_loss(logits.float(), target)

    return _workload(loss, prepare)


def state_taken_before() -> Workload:
    """It lies in the memory of the weights, as detached tensors and weights tied by `.data` do."""
    taken: dict[str, Tensor] = {}

    def prepare(model: Tiny) -> None:
        twin = nn.Conv2d(3, WIDTH, 3)
        convolution: Any = model.stem[0]
        twin.weight.data = convolution.weight.data
        taken.update({**model.state_dict(), "twin": twin.weight})

    def loss(model: Tiny, batch: Any) -> Tensor:
        now = {**model.state_dict(), "twin": model.stem[0].weight}
        model.seen["earlier states that are as now"] = [
            name for name, value in now.items() if torch.equal(value, taken[name])
        ]
        return plain_loss(model, batch)

    return _workload(loss, prepare)


def deepcopy_inside() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        with torch.no_grad():
            target = copy.deepcopy(model)(batch[0]).float()
        logits = model(batch[0])
        model.seen["logits of the copy"] = target[..., :8]
        return loss_of(logits, batch[1]) + functional.mse_loss(logits.float(), target * 0.5)

    return _workload(loss)


def pickle_inside() -> Workload:
    def loss(model: Tiny, batch: Any) -> Tensor:
        with torch.no_grad():
            loaded = pickle.loads(pickle.dumps(model))
            model.seen["logits of the copy"] = loaded(batch[0]).float()[..., :8]
        return plain_loss(model, batch)

    return _workload(loss)


def _of_another_length(step: int) -> Batch:
    return images_of(step, 2 + (7 * step) % 20)


usages: tuple[Usage, ...] = (
    Usage("forward hooks", forward_hooks),
    Usage("forward hooks that read", forward_hooks_that_read),
    Usage("forward pre-hooks", forward_pre_hooks),
    Usage("full backward hooks", backward_hooks),
    Usage("full backward pre-hooks", backward_pre_hooks),
    Usage("hooks of all modules", hooks_of_all_modules),
    Usage("tensor hooks", tensor_hooks),
    Usage("custom autograd functions", functions_of_ones_own),
    Usage("vmap", vmap),
    Usage("jvp", jvp),
    Usage("functional gradient", functional_gradient),
    Usage("double backward", double_backward),
    Usage("gradient penalty", gradient_penalty),
    Usage("retained graph", retain_graph),
    Usage("backward in parts", backward_in_parts),
    Usage("weights written in place", weights_written_in_place),
    Usage("weights swapped for a reference", weights_swapped_for_a_reference),
    Usage("weights moved between passes", two_passes_with_weights_moved_between),
    Usage("buffers written in place", partial(_workload, make_model=partial(Tiny, centers=True))),
    Usage("activations written in place", activations_written_in_place),
    Usage("views of images written in place", views_of_images_written),
    Usage("copies of images written in place", copies_of_images_written),
    Usage("inputs written after a frozen head", inputs_written_after_a_frozen_head),
    Usage("unused branch", unused_branch),
    Usage("gradients missing in a step", gradients_missing_in_a_step, steps=6),
    Usage("gradients that come later", gradients_that_come_later, steps=4),
    Usage("several optimizers", several_optimizers, steps=6),
    Usage("lengths that change", lengths, steps=20, batch=_of_another_length),
    Usage("compiled function", compiled_function),
    Usage("function compiled with autograd", compiled_by_autograd),
    Usage(
        "reentrant checkpoint", partial(_workload, partial(_with_checkpoints, use_reentrant=True))
    ),
    Usage("reentrant checkpoint twice", reentrant_checkpoint_twice),
    Usage("loss in a reentrant checkpoint", loss_in_a_reentrant_checkpoint),
    Usage(
        "checkpoint of one's own",
        partial(_workload, partial(_with_checkpoints, use_reentrant=False)),
    ),
    Usage("second model", second_model),
    Usage("average of weights", average_of_weights),
    Usage("state taken before", state_taken_before),
    Usage("deepcopy inside", deepcopy_inside),
    Usage("pickle inside", pickle_inside),
)
"""The ways of using autograd that `check_usages` tries."""
