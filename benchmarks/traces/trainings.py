"""The 30 trainings as they were recorded: sizes, optimizer, precision, and the loop itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.traces.models import GPT, LSTM, LowRank, ResNet, UNet, ViT

Batch = tuple[Tensor, Tensor]
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Training:
    """One case.

    Attributes:
        make: builds the model on the current default device.
        batch: makes (input, target) on a device.
        autocast: the type of autocast, or None.
        pure: the type of all weights, or None for float32.
        channels_last: memory format of weights and images.
        scaled: with a gradient scaler.
        clipped: with gradients clipped to norm 1.
        accumulation_steps: micro-batches in one step.
        sgd: SGD with momentum in place of AdamW.
        adamw: further arguments of AdamW.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[str], Batch]
    autocast: torch.dtype | None = None
    pure: torch.dtype | None = None
    channels_last: bool = False
    scaled: bool = False
    clipped: bool = False
    accumulation_steps: int = 1
    sgd: bool = False
    adamw: Mapping[str, Any] = field(default_factory=dict)
    tf32: bool = False

    def steps(self, device: str) -> Iterator[None]:
        """Builds the model on the device and trains; yields at the end of each step."""
        with tf32(self.tf32):
            yield from self._steps(device)

    def _steps(self, device: str) -> Iterator[None]:
        with torch.device(device):
            model = self.make()
        model.to(self.pure)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks it
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = self._optimizer(parameters)
        scaler = torch.amp.GradScaler("cuda", enabled=self.scaled)
        while True:
            for _ in range(self.accumulation_steps):
                self._accumulate(model, scaler, device)
            if self.clipped:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            yield

    def _accumulate(self, model: nn.Module, scaler: torch.amp.GradScaler, device: str) -> None:
        batch = self.batch(device)
        if self.channels_last:
            batch = tuple(_channels_last(tensor) for tensor in batch)  # type: ignore[assignment]  # of two
        context = torch.autocast("cuda", dtype=self.autocast) if self.autocast else nullcontext()
        with context:
            loss = model(*batch)
        scaler.scale(loss / self.accumulation_steps).backward()

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.sgd:
            return torch.optim.SGD(parameters, 1e-3, momentum=0.9)
        return torch.optim.AdamW(parameters, 1e-4, **self.adamw)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 in products and convolutions, or forbid it."""
    parts: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [part.allow_tf32 for part in parts]
    try:
        for part in parts:
            part.allow_tf32 = allowed
        yield
    finally:
        for part, was in zip(parts, before, strict=True):
            part.allow_tf32 = was


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _ids(batch: int, length: int, vocabulary: int) -> Callable[[str], Batch]:
    def make(device: str) -> Batch:
        shape = (batch, length)
        ids = torch.randint(0, vocabulary, shape, device=device)
        return ids, torch.randint(0, vocabulary, shape, device=device)

    return make


def _images(batch: int, size: int, classes: int) -> Callable[[str], Batch]:
    def make(device: str) -> Batch:
        images = torch.randn(batch, 3, size, size, device=device)
        return images, torch.randint(0, classes, (batch,), device=device)

    return make


def _pairs(batch: int, size: int) -> Callable[[str], Batch]:
    def make(device: str) -> Batch:
        images = torch.randn(batch, 3, size, size, device=device)
        return images, torch.randn(batch, 1, size, size, device=device)

    return make


_TOKENS = _ids(8, 512, 32000)
TRAININGS: dict[str, Training] = {
    "gpt_fp32": Training(GPT, _TOKENS),
    "gpt_tf32": Training(GPT, _TOKENS, tf32=True),
    "gpt_bf16": Training(GPT, _TOKENS, BF16),
    "gpt_bf16_b24": Training(GPT, _ids(24, 512, 32000), BF16),
    "gpt_fp16_scaler_clip": Training(GPT, _TOKENS, FP16, scaled=True, clipped=True),
    "gpt_bf16_ckpt": Training(lambda: GPT(checkpointed=True), _TOKENS, BF16),
    "gpt_fp32_ckpt": Training(lambda: GPT(checkpointed=True), _TOKENS),
    "gpt_bf16_dropout": Training(lambda: GPT(dropout=0.1), _TOKENS, BF16),
    "gpt_bf16_fused": Training(GPT, _TOKENS, BF16, adamw={"fused": True}),
    "gpt_bf16_forloop": Training(GPT, _TOKENS, BF16, adamw={"foreach": False}),
    "gpt_bf16_accum3": Training(GPT, _TOKENS, BF16, accumulation_steps=3),
    "gpt_bf16_math": Training(lambda: GPT(fused=False), _TOKENS, BF16),
    "gpt_fp32_sgd": Training(GPT, _TOKENS, sgd=True),
    "gpt_pure_bf16": Training(GPT, _TOKENS, pure=BF16),
    "gpt_wide_bf16": Training(
        lambda: GPT(width=1536, heads=12, layers=6), _ids(4, 512, 32000), BF16
    ),
    "lora_bf16": Training(lambda: LowRank(GPT(width=768, heads=12)), _TOKENS, BF16),
    "resnet_fp32": Training(ResNet, _images(32, 160, 200), sgd=True),
    "resnet_tf32": Training(ResNet, _images(32, 160, 200), sgd=True, tf32=True),
    "resnet_bf16": Training(ResNet, _images(96, 160, 200), BF16, sgd=True),
    "resnet_bf16_cl": Training(ResNet, _images(96, 160, 200), BF16, sgd=True, channels_last=True),
    "resnet_fp16_cl": Training(
        ResNet, _images(96, 160, 200), FP16, sgd=True, channels_last=True, scaled=True
    ),
    "resnet_fp32_cl": Training(ResNet, _images(32, 160, 200), sgd=True, channels_last=True),
    "vit_fp32": Training(ViT, _images(24, 192, 100)),
    "vit_bf16": Training(ViT, _images(64, 192, 100), BF16),
    "vit_bf16_ckpt": Training(lambda: ViT(checkpointed=True), _images(64, 192, 100), BF16),
    "unet_fp32": Training(UNet, _pairs(4, 192)),
    "unet_bf16": Training(UNet, _pairs(8, 192), BF16),
    "unet_bf16_cl": Training(UNet, _pairs(8, 192), BF16, channels_last=True),
    "lstm_fp32": Training(LSTM, _ids(48, 96, 12000)),
    "lstm_bf16": Training(LSTM, _ids(48, 96, 12000), BF16),
}
