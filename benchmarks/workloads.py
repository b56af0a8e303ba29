"""Workloads to search: the README's examples, and what the benchmarks measure.

Each function returns a Workload; `autofit search benchmarks/workloads.py:NAME` takes any of them.
Those named `tiny_...`, `small_...` and `medium_...` are made for two CPU cores, the others for a
GPU of a data centre. Nothing is downloaded. `TINY`, `SMALL`, `MEDIUM` and `LARGE` list them, but
for the README's `small_cnn`; those of other packages are there where these are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autofit import Workload

sys.path.append(str(Path(__file__).parents[1]))  # as a file it is loaded without the repository
from benchmarks.grids.models import ResNet50
from benchmarks.traces.models import LSTM, UNet, ViT
from benchmarks.workload_models import (
    GPT,
    Reconstruction,
    groups_of_eight,
    mixture_of_experts,
    resnet,
)


def language(
    build: Callable[[], nn.Module], vocabulary: int, tokens: int, samples: int, **options: Any
) -> Workload:
    """A model that returns its loss of `ids`."""
    return Workload(build, {"ids": torch.randint(0, vocabulary, (samples, tokens))}, **options)


def images(
    build: Callable[[], nn.Module], size: int, classes: int, samples: int, **options: Any
) -> Workload:
    """A classifier of square images."""
    batch = (torch.randn(samples, 3, size, size), torch.randint(0, classes, (samples,)))
    return Workload(build, batch, **options)


def tiny_gpt() -> Workload:
    """A GPT of 0.9 million parameters on 64 tokens."""
    return language(lambda: GPT(512, 64, 128, 4, 4), 512, 64, 4, global_batch=32)


def small_gpt() -> Workload:
    """A GPT of 2.6 million parameters on 32 tokens, global batch 32."""
    return language(lambda: GPT(2048, 32, 192, 5, 6), 2048, 32, 4, global_batch=32)


def medium_gpt() -> Workload:
    """A GPT of 5.0 million parameters on 64 tokens."""
    return language(lambda: GPT(4096, 64, 256, 5, 8), 4096, 64, 8)


def gpt2_small() -> Workload:
    """GPT-2 small's sizes: 124 million parameters, 1024 tokens, global batch 64."""
    options = {"clip_grad_norm": 1.0, "global_batch": 64}
    return language(lambda: GPT(50257, 1024, 768, 12, 12), 50257, 1024, 4, **options)


def gpt2_medium() -> Workload:
    """GPT-2 medium's sizes: 355 million parameters, 1024 tokens, global batch 64."""
    options = {"clip_grad_norm": 1.0, "global_batch": 64}
    return language(lambda: GPT(50257, 1024, 1024, 24, 16), 50257, 1024, 4, **options)


def tiny_resnet() -> Workload:
    """A residual net on 32 x 32 images."""
    loss = nn.CrossEntropyLoss()
    return images(lambda: resnet((16, 32, 64), 1, 10), 32, 10, 8, criterion=loss)


def small_resnet() -> Workload:
    """A residual net of 2.1 million parameters, with its BatchNorm, on 16 x 16 images."""
    loss = nn.CrossEntropyLoss()
    return images(lambda: resnet((64, 128, 384), 1, 10), 16, 10, 8, criterion=loss)


def medium_cnn() -> Workload:
    """A residual net of 2.8 million parameters, with its BatchNorm, on 32 x 32 images."""
    loss = nn.CrossEntropyLoss()
    return images(lambda: resnet((48, 96, 192, 384), 1, 100), 32, 100, 16, criterion=loss)


def small_cnn() -> Workload:
    """A residual net with GroupNorm on 32 x 32 images, global batch 128."""
    build = partial(resnet, (32, 64, 128), 1, 10, groups_of_eight)
    return images(build, 32, 10, 8, criterion=nn.CrossEntropyLoss(), global_batch=128)


def resnet50() -> Workload:
    """ResNet-50, with its BatchNorm, on 224 x 224 images."""
    return images(ResNet50, 224, 1000, 32, criterion=nn.CrossEntropyLoss(), optimizer=momentum)


def tiny_vit() -> Workload:
    """A ViT of two blocks on 192 x 192 images."""
    return images(lambda: ViT(64, 2, 4, 10), 192, 10, 4)


def medium_vit() -> Workload:
    """A ViT of 2.9 million parameters on 192 x 192 images."""
    return images(lambda: ViT(192, 6, 3, 100), 192, 100, 8)


def vit() -> Workload:
    """ViT-Base on 192 x 192 images, global batch 256."""
    return images(lambda: ViT(768, 12, 12, 1000), 192, 1000, 16, global_batch=256)


def tiny_unet() -> Workload:
    """A U-Net of two levels on 32 x 32 images."""
    return Workload(lambda: UNet((8, 16)), (torch.randn(4, 3, 32, 32), torch.randn(4, 1, 32, 32)))


def small_unet() -> Workload:
    """A U-Net of three levels and 2.7 million parameters on 32 x 32 images."""
    batch = (torch.randn(4, 3, 32, 32), torch.randn(4, 1, 32, 32))
    return Workload(lambda: UNet((32, 96, 192)), batch)


def unet() -> Workload:
    """A U-Net of four levels on 256 x 256 images."""
    batch = (torch.randn(4, 3, 256, 256), torch.randn(4, 1, 256, 256))
    return Workload(lambda: UNet((64, 128, 256, 512)), batch)


def tiny_lstm() -> Workload:
    """An LSTM language model on 32 tokens."""
    return tokens_and_targets(lambda: LSTM(256, 64), 256, 32, 4)


def small_lstm() -> Workload:
    """An LSTM language model of 3.2 million parameters on 32 tokens."""
    return tokens_and_targets(lambda: LSTM(4096, 256), 4096, 32, 4)


def lstm() -> Workload:
    """An LSTM language model of two layers, 1024 wide, on 256 tokens."""
    return tokens_and_targets(lambda: LSTM(33000, 1024), 33000, 256, 16)


def tokens_and_targets(
    build: Callable[[], nn.Module], vocabulary: int, tokens: int, samples: int
) -> Workload:
    """A model that returns its loss of ids and targets."""
    ids = torch.randint(0, vocabulary, (samples, tokens + 1))
    return Workload(build, (ids[:, :-1].clone(), ids[:, 1:].clone()))


def tiny_experts() -> Workload:
    """A mixture of four experts on 32 tokens."""
    return language(lambda: mixture_of_experts(256, 32, 64, 2, 4, 4), 256, 32, 4)


def experts() -> Workload:
    """A mixture of eight experts in six of twelve blocks: 323 million parameters, 1024 tokens."""

    def build() -> nn.Module:
        return mixture_of_experts(50257, 1024, 768, 12, 12, 8)

    return language(build, 50257, 1024, 4, global_batch=64)


def tiny_reconstruction() -> Workload:
    """Twelve iterations of reconstruction of 24 x 24 images from 18 angles."""
    return reconstructed(24, 18, 2, channels=8)


def reconstruction() -> Workload:
    """Twelve iterations of reconstruction of 96 x 96 images from 60 angles."""
    return reconstructed(96, 60, 8, channels=64)


def reconstructed(size: int, angles: int, samples: int, channels: int) -> Workload:
    """A `Reconstruction` of that size, and its batch."""
    batch = (torch.randn(samples, angles * size), torch.randn(samples, 1, size, size))
    build = lambda: Reconstruction(size, angles, channels=channels)  # noqa: E731 - as short
    return Workload(build, batch, criterion=functional.mse_loss)


def tiny_mlp() -> Workload:
    """An MLP of 24 layers, 32 wide: most of a step is the launching of its operators."""
    return narrow(24, 32)


def mlp() -> Workload:
    """An MLP of 200 layers, 256 wide, that a GPU waits for."""
    return narrow(200, 256)


def narrow(layers: int, width: int) -> Workload:
    """An MLP and 16 samples of a regression."""

    def build() -> nn.Module:
        each = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU()))
        return nn.Sequential(*each, nn.Linear(width, 1))

    return Workload(build, (torch.randn(16, width), torch.randn(16, 1)), criterion=nn.MSELoss())


def tiny_keras() -> Workload:
    """A Keras model of three dense layers, on its torch backend."""
    return keras_dense(32, 3)


def keras_dense(width: int = 2048, layers: int = 8) -> Workload:
    """A Keras model of dense layers with batch normalization, on its torch backend."""

    def build() -> nn.Module:
        os.environ.setdefault("KERAS_BACKEND", "torch")
        keras = import_module("keras")
        parts = [keras.layers.Input((width,))]
        for _ in range(layers):
            parts += [keras.layers.Dense(width, activation="relu")]
            parts += [keras.layers.BatchNormalization()]
        return keras.Sequential([*parts, keras.layers.Dense(10)])  # type: ignore[no-any-return]

    batch = (torch.randn(16, width), torch.randint(0, 10, (16,)))
    return Workload(build, batch, criterion=nn.CrossEntropyLoss())


def transformers_gpt2() -> Workload:
    """GPT-2 small as `transformers` has it."""
    found = import_module("transformers")
    ids = torch.randint(0, 50257, (4, 1024))
    batch = {"input_ids": ids, "labels": ids.clone()}
    return Workload(lambda: found.GPT2LMHeadModel(found.GPT2Config()), batch, global_batch=64)


def torchvision_resnet50() -> Workload:
    """ResNet-50 as `torchvision` has it."""
    build = import_module("torchvision.models").resnet50
    return images(build, 224, 1000, 32, criterion=nn.CrossEntropyLoss(), optimizer=momentum)


def timm_vit() -> Workload:
    """ViT-Base as `timm` has it, on 224 x 224 images."""
    create = import_module("timm").create_model
    loss = nn.CrossEntropyLoss()
    return images(lambda: create("vit_base_patch16_224"), 224, 1000, 16, criterion=loss)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def _where(**packages: Callable[[], Workload]) -> dict[str, Callable[[], Workload]]:
    """Return by their names the workloads whose packages are installed."""
    return {make.__name__: make for package, make in packages.items() if find_spec(package)}


TINY: Mapping[str, Callable[[], Workload]] = {
    **{
        make.__name__: make
        for make in (
            tiny_gpt,
            tiny_resnet,
            tiny_vit,
            tiny_unet,
            tiny_lstm,
            tiny_experts,
            tiny_reconstruction,
            tiny_mlp,
        )
    },
    **_where(keras=tiny_keras),
}
"""For two CPU cores, by name."""

SMALL: Mapping[str, Callable[[], Workload]] = {
    make.__name__: make for make in (small_gpt, small_resnet, small_unet, small_lstm)
}
"""Of two or three million parameters, for the comparison on a processor, by name."""

MEDIUM: Mapping[str, Callable[[], Workload]] = {
    make.__name__: make for make in (medium_vit, medium_cnn, medium_gpt)
}
"""Of three to five million parameters, to hold against plans by hand on a processor, by name."""

LARGE: Mapping[str, Callable[[], Workload]] = {
    **{
        make.__name__: make
        for make in (
            gpt2_small,
            gpt2_medium,
            resnet50,
            vit,
            unet,
            lstm,
            experts,
            reconstruction,
            mlp,
        )
    },
    **_where(
        keras=keras_dense,
        transformers=transformers_gpt2,
        torchvision=torchvision_resnet50,
        timm=timm_vit,
    ),
}
"""For a GPU of a data centre, by name."""
