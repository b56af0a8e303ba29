"""Small workloads that exercise a strategy: convolutions with running statistics, and attention.

They are quick on a CPU and hold what strategies trip over: batch normalization, dropout, repeated
blocks, shared weights, a frozen parameter, keyword arguments.
"""

from __future__ import annotations

import torch
from torch import nn

from autofit.training.workload import Workload


def convolutions() -> Workload:
    """Six residual blocks with BatchNorm over 12x12 images, 4 channels to 16."""
    torch.manual_seed(0)
    images, labels = torch.randn(4, 4, 12, 12), torch.randint(0, 5, (4,))
    return Workload(_ConvNet(), (images, labels), criterion=nn.functional.cross_entropy)


def attention() -> Workload:
    """Four attention blocks with dropout over 16 tokens; input and output embeddings are tied."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (4, 16))
    return Workload(_Transformer(), {"tokens": tokens, "targets": tokens.roll(-1, 1)})


class _ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + x)


class _ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(_ConvBlock(16) for _ in range(6)))
        self.head = nn.Linear(16, 5)
        self.stem.bias.requires_grad_(False)  # type: ignore[union-attr]  # it was made with a bias

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(images))
        logits: torch.Tensor = self.head(features.mean((2, 3)))
        return logits


class _AttentionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        inner = self.norm1(x)
        x = x + self.attention(inner, inner, inner, attn_mask=mask, need_weights=False)[0]
        mixed: torch.Tensor = x + self.mlp(self.norm2(x))
        return mixed


class _Transformer(nn.Module):
    mask: torch.Tensor

    def __init__(self, width: int = 32, tokens: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_AttentionBlock(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((tokens, tokens), float("-inf")).triu(1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask=self.mask)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return {"loss": loss}
