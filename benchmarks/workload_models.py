"""The models of `benchmarks.workloads` that no other benchmark has."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.traces.models import Block

Normalization = Callable[[int], nn.Module]
"""Makes the normalization of so many channels."""


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


def separable(widths: tuple[int, ...], depth: int, classes: int) -> nn.Sequential:
    """Stages of `depth` depthwise and pointwise convolutions, one for each width."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1)]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            layers += [
                nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False),
                nn.BatchNorm2d(before),
                nn.ReLU(),
                nn.Conv2d(before, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
