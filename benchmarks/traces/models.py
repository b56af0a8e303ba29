"""The models of the recorded trainings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout: float = 0.0,
        fused: bool = True,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused, self.causal = heads, dropout, fused, causal
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # All in one function, as it was recorded: names keep tensors until the block returns.
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = self.fused_attention(q, k, v) if self.fused else self.plain_attention(q, k, v)
        x = x + F.dropout(
            self.project(mixed.transpose(1, 2).reshape(batch, length, width)),
            self.dropout,
            self.training,
        )
        return x + F.dropout(self.mlp(x), self.dropout, self.training)

    def mlp(self, x: Tensor) -> Tensor:
        result: Tensor = self.contract(F.gelu(self.expand(self.norm_2(x))))
        return result

    def fused_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)

    def plain_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        weights = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        seen = torch.ones(length, length, device=q.device, dtype=torch.bool).tril()
        mixed: Tensor = weights.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return mixed


class GPT(nn.Module):
    """A decoder with tied embeddings; returns the loss of ids against targets."""

    def __init__(
        self,
        vocabulary: int = 32000,
        width: int = 512,
        heads: int = 8,
        layers: int = 8,
        length: int = 512,
        *,
        dropout: float = 0.0,
        checkpointed: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout=dropout, fused=fused) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.loss(x, targets)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))  # type: ignore[no-any-return]  # modules are untyped

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class LowRank(nn.Module):
    """A frozen GPT whose block outputs pass a trainable low-rank side path."""

    def __init__(self, base: GPT, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        width = base.tokens.weight.shape[1]
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in base.blocks)
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in base.blocks)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.base.embed(ids)
        for block, down, up in zip(self.base.blocks, self.down, self.up, strict=True):
            x = block(x) + up(down(x))
        return self.base.loss(x, targets)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        out = 4 * middle
        self.conv_1, self.norm_1 = (
            nn.Conv2d(channels, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
        )
        self.conv_2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(middle)
        self.conv_3, self.norm_3 = nn.Conv2d(middle, out, 1, bias=False), nn.BatchNorm2d(out)
        self.side: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.side = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        y = F.relu(self.norm_2(self.conv_2(y)), inplace=True)
        return F.relu(self.norm_3(self.conv_3(y)) + self.side(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, classes: int = 200) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], 64
        for middle, count, stride in ((64, 2, 1), (128, 3, 2), (256, 4, 2), (512, 2, 2)):
            for at in range(count):
                blocks.append(Bottleneck(channels, middle, stride if at == 0 else 1))
                channels = 4 * middle
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(2048, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        features = self.blocks(self.pool(F.relu(self.norm(self.stem(x)), inplace=True)))
        return F.cross_entropy(self.head(features.mean((2, 3))), targets)


class ViT(nn.Module):
    def __init__(
        self,
        width: int = 384,
        layers: int = 8,
        heads: int = 6,
        classes: int = 100,
        *,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 145, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), targets)


def _twice_convolved(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1),
        nn.GroupNorm(8, out),
        nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1),
        nn.GroupNorm(8, out),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice_convolved(*pair) for pair in pairwise((3, *widths)))
        self.middle = _twice_convolved(widths[-1], widths[-1])
        rising = list(reversed(widths))
        below = [widths[-1], *rising[:-1]]
        self.up = nn.ModuleList(
            _twice_convolved(under + out, out) for under, out in zip(below, rising, strict=True)
        )
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            x = down(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, side in zip(self.up, reversed(skipped), strict=True):
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), side], 1))
        return F.mse_loss(self.head(x), target)


class LSTM(nn.Module):
    def __init__(self, vocabulary: int = 12000, width: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.rnn(self.tokens(ids))[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
