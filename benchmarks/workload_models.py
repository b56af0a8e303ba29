"""The models of `benchmarks.workloads` that no other benchmark has."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Normalization = Callable[[int], nn.Module]
"""Makes the normalization of so many channels."""


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

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed: Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class GPT(nn.Module):
    """A decoder that predicts each next token; ids [batch, tokens] -> loss."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())}


def groups_of_eight(channels: int) -> nn.Module:
    """Group normalization: unlike BatchNorm it does not depend on the micro-batch."""
    return nn.GroupNorm(channels // 8, channels)


class Residual(nn.Module):
    """Two normalized convolutions around a shortcut; halves the image at stride 2."""

    def __init__(self, before: int, after: int, stride: int, norm: Normalization) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            norm(after),
        )
        self.shortcut = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(
    widths: tuple[int, ...], depth: int, classes: int, norm: Normalization = nn.BatchNorm2d
) -> nn.Sequential:
    """Stages of `depth` residual blocks, one for each width."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1)]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(depth):
            layers.append(Residual(before, width, 2 if stage and not block else 1, norm))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class ExpertChoice(nn.Module):
    """Experts that each take the tokens of a sequence they score highest; [batch, tokens, width].

    Each of them takes twice its even share, so no shape depends on a value, and no sample on
    another: expert choice routing (Zhou et al. 2022, arXiv 2202.09368), within a sequence.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, experts, bias=False)
        self.expand = nn.Parameter(torch.randn(experts, width, 4 * width) / math.sqrt(width))
        self.contract = nn.Parameter(torch.randn(experts, 4 * width, width) / math.sqrt(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        experts = self.expand.shape[0]
        taken = max(2 * tokens // experts, 1)
        weights, at = self.score(x).softmax(-1).transpose(1, 2).topk(taken, -1)
        places = at.reshape(batch, -1, 1).expand(-1, -1, width)
        given = x.gather(1, places).view(batch, experts, taken, width)
        hidden = functional.gelu(torch.einsum("betw,ewh->beth", given, self.expand))
        answers = torch.einsum("beth,ehw->betw", hidden, self.contract) * weights.unsqueeze(-1)
        answers = answers.reshape(batch, -1, width)
        # Autocast may have made the answers narrower than what they are added to.
        return torch.zeros_like(x).scatter_add(1, places, answers.to(x.dtype))


def mixture_of_experts(
    vocabulary: int, tokens: int, width: int, layers: int, heads: int, experts: int
) -> GPT:
    """A GPT whose every other block has experts instead of its feed-forward layers."""
    model = GPT(vocabulary, tokens, width, layers, heads)
    for block in list(model.blocks)[1::2]:
        block.mlp = ExpertChoice(width, experts)
    return model


def parallel_beam(size: int, angles: int) -> Tensor:
    """The projections of a square image along parallel rays: [angles * size, size * size].

    Each pixel's centre falls between two bins of the detector and is divided between them.
    """
    at = torch.arange(size) - (size - 1) / 2
    y, x = torch.meshgrid(at, at, indexing="ij")
    rows, pixels = torch.zeros(angles, size, size * size), torch.arange(size * size)
    for row, angle in zip(rows, torch.arange(angles) * math.pi / angles, strict=True):
        place = (x * angle.cos() + y * angle.sin()).flatten() / math.sqrt(2) + (size - 1) / 2
        low = place.floor().clamp(0, size - 2)
        row[low.long(), pixels] += 1 - (place - low)
        row[low.long() + 1, pixels] += place - low
    return rows.flatten(0, 1) / size


class Reconstruction(nn.Module):
    """Iterations of gradient descent on |Ax - y|^2, each with its own regulariser: learned
    tomography (Adler and Oktem 2018, doi 10.1109/TMI.2018.2799231). Sinograms
    [batch, angles * size] -> images [batch, 1, size, size].
    """

    operator: Tensor

    def __init__(self, size: int, angles: int, iterations: int = 12, channels: int = 32) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("operator", parallel_beam(size, angles))
        self.steps = nn.Parameter(torch.full((iterations,), 0.1))
        self.regularisers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(2, channels, 3, padding=1),
                nn.PReLU(),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.PReLU(),
                nn.Conv2d(channels, 1, 3, padding=1),
            )
            for _ in range(iterations)
        )

    def forward(self, sinogram: Tensor) -> Tensor:
        x = sinogram.new_zeros(len(sinogram), 1, self.size, self.size)
        for step, regulariser in zip(self.steps, self.regularisers, strict=True):
            residual = functional.linear(x.flatten(1), self.operator) - sinogram
            gradient = functional.linear(residual, self.operator.T).view_as(x)
            x = x - step * gradient + regulariser(torch.cat([x, gradient], 1))
        return x
