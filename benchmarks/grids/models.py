"""The two models of the recorded grids, as they were recorded.

Peaks depend on which tensors a function still names when the next one is made, so these keep the
recorded functions: with the decoder of `benchmarks.traces`, micro-batch 32 of a plan that held
23.96 of 24 GiB runs out of memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY = 768, 12, 12, 1024, 50257


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (batch, length, 3, HEADS, width // HEADS)
        q, k, v = self.qkv(self.norm_1(x)).view(parts).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(F.gelu(self.expand(self.norm_2(x))))  # type: ignore[no-any-return]  # modules are untyped


class Decoder(nn.Module):
    """GPT-2 small's sizes. ids -> logits; a share of its blocks recomputes."""

    share = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        recomputed = round(self.share * len(self.blocks))
        for at, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if at < recomputed else block(x)
        result: Tensor = self.head(self.norm(x))
        return result


class Bottleneck(nn.Module):
    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        out = 4 * middle
        self.conv_1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(middle)
        self.conv_2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(middle)
        self.conv_3 = nn.Conv2d(middle, out, 1, bias=False)
        self.norm_3 = nn.BatchNorm2d(out)
        self.side: nn.Module | None = None
        if stride != 1 or channels != out:
            projection = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.side = nn.Sequential(projection, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        y = self.conv_1(x)
        y = F.relu(self.norm_1(y), inplace=True)
        y = self.conv_2(y)
        y = F.relu(self.norm_2(y), inplace=True)
        y = self.conv_3(y)
        y = self.norm_3(y)
        if self.side is not None:
            identity = self.side(x)
        y += identity
        return F.relu(y, inplace=True)


class ResNet50(nn.Module):
    """ResNet-50. images -> logits; a share of its blocks recomputes."""

    share = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], 64
        for middle, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for at in range(count):
                blocks.append(Bottleneck(channels, middle, stride if at == 0 else 1))
                channels = 4 * middle
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(x)), inplace=True))
        recomputed = round(self.share * len(self.blocks))
        for at, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if at < recomputed else block(x)
        result: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return result


MODELS: dict[str, type[Decoder | ResNet50]] = {"gpt2_small": Decoder, "resnet50": ResNet50}


def batch_of(workload: str, samples: int, device: str) -> Tensor:
    """Return ids or images."""
    if workload == "gpt2_small":
        return torch.randint(0, VOCABULARY, (samples, LENGTH), device=device)
    return torch.randn(samples, 3, 224, 224, device=device)


def loss_of(workload: str, output: Tensor, batch: Tensor) -> Tensor:
    """Return the loss: ids are their own targets, images are all of class 0."""
    if workload == "gpt2_small":
        return F.cross_entropy(output.view(-1, output.shape[-1]), batch.view(-1))
    targets = torch.zeros(output.shape[0], dtype=torch.long, device=output.device)
    return F.cross_entropy(output, targets)


def optimizer_of(workload: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, or SGD with momentum."""
    if workload == "gpt2_small":
        return torch.optim.AdamW(parameters, 3e-4)
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)
