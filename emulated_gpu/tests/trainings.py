"""Small trainings: `train` returns losses and gradient norms. Run as text by test_training.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody uses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 3
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "forloop": {"foreach": False}}


class Block(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norm_2(x))
        return result


class Decoder(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.head = nn.Embedding(100, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        result: Tensor = self.head(x).mean(1)
        return result


def perceptron() -> tuple[nn.Module, Tensor]:
    layers = (nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
    return nn.Sequential(*layers), torch.randn(32, 64)


def encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    layers = (nn.Linear(16, 64), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(*layers), torch.randn(4, 8, 16)


def convolutional() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, groups=2),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ), torch.randn(4, 3, 32, 32)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(16, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.second, self.head = nn.GRU(64, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(self.first(x)[0])[0][:, -1])
        return result


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron": perceptron,
    "decoder": lambda: (Decoder(), torch.randint(0, 100, (8, 32))),
    "checkpointed": lambda: (Decoder(checkpointed=True), torch.randint(0, 100, (8, 32))),
    "encoder": encoder,
    "convolutional": convolutional,
    "recurrent": lambda: (Recurrent(), torch.randn(4, 7, 16)),
}


def train(name: str, precision: str, optimizer: str, device: str) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step; both are NaN where kernels compute nothing."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    targets = torch.randint(0, 10, (len(inputs),))
    if name == "convolutional" and precision == "bfloat16":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks it
    model.to(device)
    options: dict[str, Any] = OPTIMIZERS[optimizer]
    optimizing = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    scaler = torch.amp.GradScaler(device, enabled=precision == "float16")
    dtype, steps = PRECISIONS[precision], []
    for _ in range(STEPS):
        with torch.autocast(device, dtype=dtype, enabled=precision != "float32"):
            loss = F.cross_entropy(model(inputs.to(device)).float(), targets.to(device))
        optimizing.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch left it so
        scaler.unscale_(optimizing)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizing)
        scaler.update()
        steps.append((loss.item(), norm.item()))
    return steps
