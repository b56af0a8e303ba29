"""Models that no recorded training has, for predictions against this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch import Tensor, nn

from autofit import Workload


class LlamaBlock(nn.Module):
    """A block with grouped queries, rotary positions, RMS norms and a gated feed-forward."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        hidden = 8 * width // 3
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, kv = (self._split(part) for part in (self.q(y), self.kv(y)))
        k, v = kv.chunk(2, 1)
        q, k = (self._rotated(part, cosine, sine) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.size).transpose(1, 2)

    @staticmethod
    def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cosine + torch.cat((-second, first), -1) * sine


class Llama(nn.Module):
    def __init__(self, width: int = 1024, layers: int = 12, heads: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32000, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, 4) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 32000, bias=False)
        self.size = width // heads

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        at = torch.arange(ids.shape[1], device=ids.device)
        rates = 1e4 ** -(torch.arange(0, self.size, 2, device=ids.device) / self.size)
        angles = torch.outer(at, rates).repeat(1, 2)
        x, cosine, sine = self.tokens(ids), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.head(self.norm(x))[:, :-1].float()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())}


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm(self.spread(x).permute(0, 2, 3, 1)))
        result: Tensor = x + mixed.permute(0, 3, 1, 2)
        return result


def _convnext() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4)]
    for width, depth in ((96, 3), (192, 3), (384, 9)):
        layers += [ConvNeXtBlock(width) for _ in range(depth)]
        layers += [nn.Conv2d(width, 2 * width, 2, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 1000))


def _generator() -> nn.Module:
    layers: list[nn.Module] = []
    for wide, narrow in ((256, 256), (256, 128), (128, 64), (64, 32)):
        layers += [nn.ConvTranspose2d(wide, narrow, 4, 2, 1), nn.BatchNorm2d(narrow), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 3, 3, padding=1), nn.Tanh())


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20000, 384)
        self.rnn = nn.GRU(384, 512, 3, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(1024, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(ids))[0])  # type: ignore[no-any-return]  # modules are untyped


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)


def _images(size: int, classes: int = 1000) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, size, size), torch.randint(0, classes, (4,))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "llama": lambda: Workload(Llama, torch.randint(0, 32000, (2, 1024))),
    "convnext": lambda: Workload(_convnext, _images(224), criterion=F.cross_entropy),
    "generator": lambda: Workload(_generator, torch.randn(4, 256, 8, 8)),
    "tagger": lambda: Workload(Tagger, torch.randint(0, 20000, (4, 200))),
    "encoder": lambda: Workload(_encoder, torch.randn(4, 256, 768)),
}
