"""Compiled plans held against eager training, on ten models that nobody here tuned.

Transformers, networks of convolutions and recurrent ones, with random weights and without dropout,
whose random numbers differ where code is compiled. Each is trained for some steps as it is, then
with every compiled plan of `compile.region` and `compile.memory_budget` that is offered: in uneven
micro-batches, with the losses of both and the peak of the allocator in later steps.

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
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from autofit.devices.base import Device
from autofit.devices.cuda import open_device
from autofit.plan import Plan, Settings
from autofit.registry import collect_dimensions, load_strategies, resolve
from autofit.space import Space
from autofit.testing import PlainContext
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

WITHIN = 1e-3
"""Most that a loss may differ, as a share: the class of rounding. Where training is chaotic, as
with batch normalization over two or three samples, weights that begin one rounding larger move it
more than that."""
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
_STAGES = {"num_channels": 3, "hidden_sizes": [16, 32, 64, 64], "depths": [2, 2, 3, 2]}


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
            patch_size=2,
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
    is_rounded: bool = False,
) -> Trained:
    """Train in two micro-batches, uneven where the samples are odd, and return what it showed.

    With `is_rounded` the weights begin one rounding larger.
    """
    torch._dynamo.reset()
    gc.collect()
    workload, samples = workload_of(name, space.sample_batch_size), space.sample_batch_size
    plan = Plan.split(samples, -(-samples // 2), settings=space.complete(settings))
    resolved = resolve(plan, space, load_strategies(["compile"]))
    losses, peaks, start_s = list[Tensor](), list[int](), 0.0
    with device.accounting():
        model = device.place_model(workload.build_model())
        for parameter in model.parameters() if is_rounded else ():
            parameter.data.mul_(1 + torch.finfo(parameter.dtype).eps)
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
                losses.append(training.step(_on(device, batch)).detach())
                peaks.append(device.read().peak_allocated_bytes - before)
                start_s = start_s or time.perf_counter() - started
            notes = training.notes()
    return Trained(tuple(map(float, losses)), min(peaks[2:]), start_s, tuple(notes))


def _on(device: Device, batch: Any) -> Any:
    return {key: value.to(device.torch_device) for key, value in batch.items()}


def apart(one: Trained, other: Trained) -> float:
    """Return the largest difference of two trainings' losses, as a share."""
    pairs = zip(one.losses, other.losses, strict=True)
    return max(abs(a - b) / (abs(a) or 1.0) for a, b in pairs)


def main() -> None:
    """Print a row for each compiled plan of each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--regions", nargs="+", default=["whole", "blocks"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=7)
    given = parser.parse_args()
    device = open_device(given.device)
    has_values = device.torch_device.type == "cpu"
    print(
        "| model | region | memory budget | losses apart | peak | of eager's | first step | notes |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in given.models:
        space = space_of(name, given.samples, device)
        eager = trained(name, space, {}, device, given.steps)
        mib = eager.peak_bytes / 2**20
        rounded = trained(name, space, {}, device, given.steps, is_rounded=True)
        moved = f"{apart(eager, rounded):.1e} by a rounding" if has_values else "-"
        print(f"| {name} | eager | | {moved} | {mib:.2f} MiB | | {eager.start_s:.1f} s | |")
        for settings in compiled_settings(space):
            if settings[REGION] not in given.regions:
                continue
            plan = f"{name} | {settings[REGION]} | {settings[BUDGET]}"
            try:
                found = trained(name, space, settings, device, given.steps)
            except Exception as error:  # of the compiler: a row says so
                print(f"| {plan} | {type(error).__name__}: {str(error)[:200]!r} |", flush=True)
                continue
            cells = [
                plan,
                f"{apart(eager, found):.1e}" if has_values else "-",
                f"{found.peak_bytes / 2**20:.2f} MiB",
                f"{found.peak_bytes / eager.peak_bytes:.2f}",
                f"{found.start_s:.1f} s",
                "; ".join(note.removeprefix("compile: ") for note in found.notes)[:300],
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
