"""Workloads to search: the README's examples, and what the benchmarks measure.

Each function returns a Workload; `autofit search benchmarks/workloads.py:NAME` takes any of them.
Those named `tiny_...`, `small_...` and `medium_...` are made for two CPU cores, the others for a
GPU of a data centre. Nothing is downloaded. `WORKLOADS` lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit import Workload

sys.path.append(str(Path(__file__).parents[1]))  # as a file it is loaded without the repository
from benchmarks.grids.models import ResNet50
from benchmarks.traces.models import LSTM, UNet, ViT
from benchmarks.workload_models import GPT, groups_of_eight, resnet, separable


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


def tiny_resnet() -> Workload:
    """A residual net on 32 x 32 images."""
    loss = nn.CrossEntropyLoss()
    return images(lambda: resnet((16, 32, 64), 1, 10), 32, 10, 8, criterion=loss)


def small_resnet() -> Workload:
    """A residual net of 2.1 million parameters, with its BatchNorm, on 16 x 16 images."""
    loss = nn.CrossEntropyLoss()
    return images(lambda: resnet((64, 128, 384), 1, 10), 16, 10, 8, criterion=loss)


def small_separable() -> Workload:
    """A net of depthwise separable convolutions, 1.5 million parameters, on 32 x 32 images."""
    loss = nn.CrossEntropyLoss()
    return images(lambda: separable((96, 192, 384, 576), 3, 100), 32, 100, 16, criterion=loss)


def small_encoder() -> Workload:
    """A classifier of 64 tokens by torch's own encoder: 2.7 million parameters, dropout 0.1."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(192, 6, 768, norm_first=True, batch_first=True)
        body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(4096, 192), body, nn.Flatten(), nn.Linear(64 * 192, 20))

    batch = (torch.randint(0, 4096, (8, 64)), torch.randint(0, 20, (8,)))
    return Workload(build, batch, criterion=nn.CrossEntropyLoss())


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


def medium_vit() -> Workload:
    """A ViT of 2.9 million parameters on 192 x 192 images."""
    return images(lambda: ViT(192, 6, 3, 100), 192, 100, 8)


def small_unet() -> Workload:
    """A U-Net of three levels and 2.7 million parameters on 32 x 32 images."""
    batch = (torch.randn(4, 3, 32, 32), torch.randn(4, 1, 32, 32))
    return Workload(lambda: UNet((32, 96, 192)), batch)


def small_lstm() -> Workload:
    """An LSTM language model of 3.2 million parameters on 32 tokens."""
    return tokens_and_targets(lambda: LSTM(4096, 256), 4096, 32, 4)


def tokens_and_targets(
    build: Callable[[], nn.Module], vocabulary: int, tokens: int, samples: int
) -> Workload:
    """A model that returns its loss of ids and targets."""
    ids = torch.randint(0, vocabulary, (samples, tokens + 1))
    return Workload(build, (ids[:, :-1].clone(), ids[:, 1:].clone()))


def tiny_mlp() -> Workload:
    """An MLP of 24 layers, 32 wide: most of a step is the launching of its operators."""
    parts = [part for _ in range(24) for part in (nn.Linear(32, 32), nn.ReLU())]
    batch = torch.randn(16, 32), torch.randn(16, 1)
    return Workload(nn.Sequential(*parts, nn.Linear(32, 1)), batch, criterion=nn.MSELoss())


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    make.__name__: make
    for make in (
        tiny_gpt,
        tiny_resnet,
        tiny_mlp,
        small_cnn,
        small_gpt,
        small_lstm,
        small_resnet,
        small_unet,
        small_encoder,
        small_separable,
        medium_vit,
        medium_cnn,
        medium_gpt,
        gpt2_small,
        resnet50,
    )
}
"""All, by name."""
