"""Workloads to search: the README's examples, and what the benchmarks measure.

Each function returns a Workload; `autofit search benchmarks/workloads.py:NAME` takes any of them.
The small ones are made for a CPU, the others for a GPU.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from autofit import Workload


class Block(nn.Module):
    """A pre-norm transformer block with causal attention; [batch, tokens, width] in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed: torch.Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class GPT(nn.Module):
    """A decoder that predicts each next token; ids [batch, tokens] -> loss."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())}


class Residual(nn.Module):
    """Two convolutions with batch normalization around a shortcut; halves the image at stride 2."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(widths: tuple[int, ...], depth: int, classes: int) -> nn.Sequential:
    """Stages of `depth` residual blocks, one for each width."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1)]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(depth):
            layers.append(Residual(before, width, 2 if stage and not block else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def tiny_gpt() -> Workload:
    """A GPT of 0.9 million parameters on 64 tokens, for a CPU."""
    ids = torch.randint(0, 512, (4, 64))
    return Workload(lambda: GPT(512, 64, 128, 4, 4), {"ids": ids}, global_batch=32)


def tiny_resnet() -> Workload:
    """A residual net on 32 x 32 images, for a CPU."""
    batch = (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))
    return Workload(lambda: resnet((16, 32, 64), 1, 10), batch, criterion=nn.CrossEntropyLoss())


def gpt2_small() -> Workload:
    """GPT-2 small's sizes: 124 million parameters, 1024 tokens, global batch 64."""
    ids = torch.randint(0, 50257, (4, 1024))
    return Workload(
        lambda: GPT(50257, 1024, 768, 12, 12), {"ids": ids}, clip_grad_norm=1.0, global_batch=64
    )


def resnet50_sized() -> Workload:
    """A residual net of 224 x 224 images with 64 to 512 channels."""
    batch = (torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,)))
    return Workload(
        lambda: resnet((64, 128, 256, 512), 3, 1000), batch, criterion=nn.CrossEntropyLoss()
    )
