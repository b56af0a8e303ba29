"""Compiled plans held against eager training, on ten models that nobody here tuned.

Transformers, networks of convolutions and recurrent ones, with random weights and without dropout,
whose random numbers differ where code is compiled. Each is trained for some steps as it is, then
with every compiled plan of `compile.region` and `compile.memory_budget` that is offered: in uneven
micro-batches, with the losses of both and the peak of the allocator in later steps.

Training may be chaotic (batch normalization over two samples, say): then losses that begin one
rounding apart end far apart. So eager training is run again from weights that are one rounding
larger or smaller, each at random, and in float64. In each step the losses of a compiled plan may be
ROOM times as far from eager ones as the farthest of those in any step so far. Gradients of one step
are compared as a search does it.

    python -m benchmarks.compiled_models [MODEL ...] [--device cuda] [--steps 20]

On the emulated GPU (`emulated-gpu run --no-values -- python -m benchmarks.compiled_models --device
cuda --steps 5 --samples 64`) no value is computed: bytes count there, and losses do not.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor, nn

from autofit.devices.base import Device
from autofit.devices.cuda import open_device
from autofit.equivalence.comparison import MAX_ROUNDINGS, ROOM, compare_plans
from autofit.plan import Plan, Settings
from autofit.registry import collect_dimensions, load_strategies, resolve
from autofit.space import Space
from autofit.strategy import Comparison
from autofit.testing import PlainContext
from autofit.training.builder import TrainingBuilder
from autofit.training.training import Training
from autofit.training.workload import Workload
from benchmarks.library_models import (
    MakeBatch,
    MakeModel,
    Scale,
    images,
    labelled,
    of_images,
    tokens,
    transformers_model,
)

ROUNDINGS = 8
"""Times that eager training is run from weights that are a rounding apart."""
MIN_SPREAD = MAX_ROUNDINGS * torch.finfo(torch.float32).eps
"""Of losses that nothing in the training moves, as a share: that of their own roundings."""
REGION, BUDGET = "compile.region", "compile.memory_budget"
_SCALE = Scale(
    vocabulary=256,
    width=64,
    inner_width=256,
    layers=4,
    heads=4,
    positions=64,
    image_size=32,
    channels=16,
    latent_size=8,
)
_TOKENS, _LENGTH = _SCALE.vocabulary, 32
_STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_STAGES = {"num_channels": 3, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}


class Recurrent(nn.Module):
    """ids (n, length) -> logits (n, length, vocabulary), by a stack of a layer of torch's own.

    Args:
        layer: nn.LSTM or nn.GRU.
    """

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 64)
        self.body = layer(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, _TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(ids))[0])
        return logits


class Mixing(nn.Module):
    """x (n, length, width) -> x: a gated recurrence over the length, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gates = nn.LayerNorm(64), nn.Linear(64, 128)
        self.mlp = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, new = self.gates(self.norm(x)).chunk(2, -1)
        decay = nn.functional.logsigmoid(kept).cumsum(1)
        state = decay.exp() * ((new * torch.exp(-decay.clamp(min=-20))).cumsum(1))
        x = x + state.tanh()
        mixed: Tensor = x + self.mlp(x)
        return mixed


class Scanned(nn.Module):
    """ids (n, length) -> logits, by blocks that scan the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 64)
        self.blocks = nn.ModuleList(Mixing() for _ in range(4))
        self.head = nn.Linear(64, _TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Residual(nn.Module):
    """x (n, c, h, w) -> x: two convolutions with batch normalization."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.one = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )
        self.second, self.two = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = torch.relu(self.one(self.first(x)))
        return torch.relu(x + self.two(self.second(changed)))


class Convolutional(nn.Module):
    """Images (n, 3, h, w) -> logits (n, 10): residual blocks at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.large = nn.Sequential(*(Residual(16) for _ in range(3)))
        self.between = nn.Conv2d(16, 32, 2, stride=2)
        self.small = nn.Sequential(*(Residual(32) for _ in range(3)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.small(self.between(self.large(self.stem(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def of_tokens(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True)
class Model:
    """A model, what a batch of so many samples is, and the loss."""

    make: MakeModel
    batch: Callable[[int], MakeBatch]
    loss: Callable[[nn.Module, Any], Tensor] = own_loss


def _tokens(samples: int) -> MakeBatch:
    return tokens(samples, _LENGTH, _TOKENS)


def _labelled(samples: int) -> MakeBatch:
    return labelled(samples, _SCALE.image_size)


def _images(samples: int) -> MakeBatch:
    return images(samples, _SCALE.image_size)


MODELS = {
    "gpt2": Model(
        transformers_model(
            "GPT2LMHeadModel", **_SCALE.gpt(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        ),
        _tokens,
    ),
    "llama": Model(transformers_model("LlamaForCausalLM", **_SCALE.decoder()), _tokens),
    "bert": Model(transformers_model("BertForMaskedLM", **_SCALE.encoder(**_STILL)), _tokens),
    "t5": Model(
        transformers_model("T5ForConditionalGeneration", **_SCALE.t5(dropout_rate=0.0)), _tokens
    ),
    "vit": Model(
        transformers_model("ViTForImageClassification", num_labels=10, **_SCALE.patches(**_STILL)),
        _labelled,
    ),
    "convnext": Model(
        transformers_model("ConvNextForImageClassification", num_labels=10, **_STAGES), _labelled
    ),
    "swin": Model(
        transformers_model(
            "SwinForImageClassification",
            num_labels=10,
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.0,
            **_STILL,
        ),
        _labelled,
    ),
    "resnet": Model(Convolutional, _images, of_images),
    "lstm": Model(lambda: Recurrent(nn.LSTM), _tokens, of_tokens),
    "scan": Model(Scanned, _tokens, of_tokens),
}
"""Ten models: of transformers, as timm has them, and recurrent."""


@dataclass(frozen=True)
class Trained:
    """What a training showed.

    Attributes:
        losses: of each step.
        peak_bytes: allocated in a step, beyond what lay there before it; the least of all but the
            first two, since a step that compiles holds more.
        start_s: seconds of the first step, with what it compiles.
        notes: of the training.
    """

    losses: tuple[float, ...]
    peak_bytes: int
    start_s: float
    notes: tuple[str, ...]


def workload_of(name: str, samples: int) -> Workload:
    """Return the training of a model, alike on each call."""
    model = MODELS[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return model.make().train()

    torch.manual_seed(1)
    return Workload(
        build,
        model.batch(samples)(),
        loss_fn=model.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9),
    )


def space_of(name: str, samples: int, device: Device) -> Space:
    """Return the compiled plans that are offered for a model."""
    context = PlainContext(lambda: workload_of(name, samples), device.torch_device)
    dimensions = collect_dimensions(load_strategies(["compile"]), context)
    context.close()
    return Space(dimensions, samples, global_batch=samples)


def compiled_settings(space: Space) -> Iterator[Settings]:
    """Yield each compiled plan of the default mode."""
    values = (space.dimensions[name].values for name in (REGION, BUDGET))
    for region, budget in product(*values):
        settings = {"compile.mode": "default", REGION: region, BUDGET: budget}
        if space.allows({**space.default_settings, **settings}):
            yield settings


def trained(
    name: str,
    space: Space,
    settings: Settings,
    device: Device,
    steps: int,
    *,
    rounding: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Train in two micro-batches, uneven where the samples are odd, and return what it showed.

    Args:
        name: of the model.
        space: of its plans.
        settings: beside those of eager training.
        device: to train on.
        steps: how many.
        rounding: a number of a start whose weights are one rounding away; None: as they are.
        dtype: of weights and computation.
    """
    torch._dynamo.reset()
    gc.collect()
    workload, samples = workload_of(name, space.sample_batch_size), space.sample_batch_size
    resolved = resolve(_plan(space, settings), space, load_strategies(["compile"]))
    losses, peaks, start_s = list[Tensor](), list[int](), 0.0
    with device.accounting():
        model = device.place_model(workload.build_model()).to(dtype)
        if rounding is not None:
            _round(model, rounding)
        with Training(
            model,
            workload.build_optimizer,
            workload.recipe,
            resolved,
            device=device.torch_device,
        ) as training:
            for step in range(steps):
                started = time.perf_counter()
                before = device.read().allocated_bytes
                device.reset_peaks()
                torch.manual_seed(2 + step)
                batch = MODELS[name].batch(samples)()
                losses.append(training.step(_on(device, batch, dtype)).detach())
                peaks.append(device.read().peak_allocated_bytes - before)
                start_s = start_s or time.perf_counter() - started
            notes = training.notes()
    return Trained(tuple(map(float, losses)), min(peaks[2:]), start_s, tuple(notes))


def _on(device: Device, batch: Any, dtype: torch.dtype) -> Any:
    placed = {key: value.to(device.torch_device) for key, value in batch.items()}
    return {key: v.to(dtype) if v.is_floating_point() else v for key, v in placed.items()}


def _round(model: nn.Module, number: int) -> None:
    """Make each weight one rounding larger or smaller, at random."""
    draws = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=draws).to(parameter.device) < 0.5
        parameter.data.mul_(1 + torch.finfo(parameter.dtype).eps * torch.where(up, 1, -1))


def apart(one: Trained, other: Trained) -> list[float]:
    """Return how far two trainings' losses differ at most until each step, as a share."""
    pairs = zip(one.losses, other.losses, strict=True)
    return list(accumulate((abs(a - b) / (abs(a) or 1.0) for a, b in pairs), max))


@dataclass(frozen=True)
class Eager:
    """Eager training, and what roundings do to it.

    Attributes:
        plain: as it is.
        spread: for each step, the most that losses from weights a rounding away differ until then.
        from_float64: the most that its losses differ from those in float64.
    """

    plain: Trained
    spread: list[float]
    from_float64: float

    @classmethod
    def of(cls, name: str, space: Space, device: Device, steps: int) -> Eager:
        """Train eagerly from each of the starts, and in float64."""
        run = partial(trained, name, space, {}, device, steps)
        plain, exact = run(), run(dtype=torch.float64)
        rounded = [apart(plain, run(rounding=number)) for number in range(ROUNDINGS)]
        spread = [max(each) for each in zip(*rounded, strict=True)]
        return cls(plain, spread, apart(exact, plain)[-1])

    def times_spread(self, other: Trained) -> float:
        """Return how many times the spread another training's losses are away, at most."""
        pairs = zip(apart(self.plain, other), self.spread, strict=True)
        return max(far / max(spread, MIN_SPREAD) for far, spread in pairs)


def gradients_apart(name: str, space: Space, settings: Settings, device: Device) -> Comparison:
    """Compare one step with eager training, as a search judges the plan that it answers."""
    strategies = load_strategies(["compile"])
    builder = TrainingBuilder(lambda: workload_of(name, space.sample_batch_size), device, seed=0)
    first, second = (resolve(_plan(space, chosen), space, strategies) for chosen in ({}, settings))
    return compare_plans(builder, first, second, space.sample_batch_size)


def _plan(space: Space, settings: Settings) -> Plan:
    samples = space.sample_batch_size
    return Plan.split(samples, -(-samples // 2), settings=space.complete(settings))


def main() -> None:
    """Print a row for each compiled plan of each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--regions", nargs="+", default=["whole", "blocks"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[1.0, 0.5, 0.05])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=7)
    given = parser.parse_args()
    device = open_device(given.device)
    has_values = device.torch_device.type == "cpu"
    print(
        "| model | region | memory budget | losses apart | of the spread | gradients apart | peak ",
        end="",
    )
    print("| of eager's | first step | notes |")
    print(f"|{'---|' * 10}")
    for name in given.models:
        space = space_of(name, given.samples, device)
        eager = Eager.of(name, space, device, given.steps)
        cells = [
            f"{name} | eager | ",
            f"{eager.spread[-1]:.1e} by roundings" if has_values else "-",
            f"{eager.from_float64:.1e} from float64" if has_values else "-",
            "",
            f"{eager.plain.peak_bytes / 2**20:.2f} MiB",
            "",
            f"{eager.plain.start_s:.1f} s",
            "",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        for settings in compiled_settings(space):
            if settings[REGION] not in given.regions or settings[BUDGET] not in given.budgets:
                continue
            try:
                row = _row(name, space, settings, device, eager, has_values=has_values)
            except Exception as error:  # of the compiler: a row says so
                row = f"{type(error).__name__}: {str(error)[:200]!r}"
            print(f"| {name} | {settings[REGION]} | {settings[BUDGET]} | {row} |", flush=True)


def _row(
    name: str,
    space: Space,
    settings: Settings,
    device: Device,
    eager: Eager,
    *,
    has_values: bool,
) -> str:
    found = trained(name, space, settings, device, len(eager.plain.losses))
    compared = ["-"] * 3
    if has_values:
        times, one_step = eager.times_spread(found), gradients_apart(name, space, settings, device)
        compared = [
            f"{apart(eager.plain, found)[-1]:.1e}",
            f"{times:.2g} x{'' if times <= ROOM else ': not within'}",
            f"{one_step.gradient:.1e} of {one_step.tolerance:.1e}",
        ]
    cells = [
        *compared,
        f"{found.peak_bytes / 2**20:.2f} MiB",
        f"{found.peak_bytes / eager.plain.peak_bytes:.2f}",
        f"{found.start_s:.1f} s",
        "; ".join(note.removeprefix("compile: ") for note in found.notes)[:300],
    ]
    return " | ".join(cells)


if __name__ == "__main__":
    main()
