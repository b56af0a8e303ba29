"""Reduced precision: TF32, bfloat16 and float16, where the device supports them natively.

`precision.dtype` starts at "default". The reduced types run forward and loss under autocast, so
parameters, gradients and optimizer state stay as they are; float16 also scales the loss. A model
whose weights are mostly not float32 keeps the precision it has chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autofit.plan import Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .one_setting import OneSetting

SETTING = "precision.dtype"
_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision(OneSetting):
    """The data type of matrix products and convolutions."""

    name = "precision"
    setting = SETTING
    phase = Phase.STEP
    numerics = Numerics.REDUCED_PRECISION
    standard_terms = ("autocast", "tf32")

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the types the device supports natively; "default" alone without float32."""
        if not _mostly_float32(context.model):
            return {SETTING: Dimension(["default"])}
        native = context.capabilities
        offered = {
            "tf32": native.tf32 and not all(part.fp32_precision == "tf32" for part in _parts()),
            "bfloat16": native.bfloat16,
            "float16": native.float16,
        }
        values = ["default", *(dtype for dtype, is_native in offered.items() if is_native)]
        if any(p.dtype == torch.float16 and p.requires_grad for p in context.model.parameters()):
            values = [value for value in values if value != "float16"]  # GradScaler refuses these
        return {SETTING: Dimension(values)}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Run forward and loss in the chosen type."""
        return _tf32() if value == "tf32" else _autocast(training, _AUTOCAST[value])

    def in_standard_terms(self, settings: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        """Return the setting in standard terms: autocast in a type, or TF32."""
        dtype = settings.get(SETTING, "default")
        if dtype in _AUTOCAST:
            return {"autocast": dtype}
        return {"tf32": True} if dtype == "tf32" else {}

    def lines(self, value: Any, payload: Any) -> list[str]:
        if value == "tf32":
            return [
                "import torch",
                "torch.backends.cuda.matmul.allow_tf32 = True",
                "torch.backends.cudnn.allow_tf32 = True",
            ]
        scaler = [
            "scaler = torch.amp.GradScaler(device_type)",
            "# scaler.scale(loss).backward() in place of loss.backward()",
            "# scaler.step(optimizer); scaler.update() in place of optimizer.step()",
        ]
        return [
            "import torch",
            "device_type = next(model.parameters()).device.type",
            *(scaler if value == "float16" else ()),
            f"with torch.autocast(device_type, dtype=torch.{value}):  # around forward and loss",
        ]


def _mostly_float32(model: torch.nn.Module) -> bool:
    """Return whether at least half of the floating weights are float32, as autocast needs."""
    floating = [p for p in model.parameters() if p.is_floating_point()]
    float32 = sum(p.numel() for p in floating if p.dtype == torch.float32)
    return float32 > 0 and 2 * float32 >= sum(p.numel() for p in floating)


@contextmanager
def _autocast(training: TrainingView, dtype: torch.dtype) -> Iterator[None]:
    device_type = training.device.type
    scaler_before = training.scaler
    unwrap = training.wrap_forward(
        lambda: torch.autocast(device_type, dtype=dtype),
        also_recomputation=False,  # torch's checkpoint enters the autocast of its forward by itself
    )
    try:
        if dtype == torch.float16:
            training.scaler = torch.amp.GradScaler(device_type)
        yield
    finally:
        training.scaler = scaler_before
        unwrap()


def _parts() -> tuple[Any, ...]:
    """Return the modules that hold torch's precision of float32 products on a GPU."""
    cudnn: Any = torch.backends.cudnn  # torch does not annotate its parts
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


@contextmanager
def _tf32() -> Iterator[None]:
    """Enable TF32 through both of torch's interfaces, and restore each on leaving.

    torch keeps the older `allow_tf32` along with the newer `fp32_precision` and refuses to read the
    older one where the two disagree, so turning on only one would break the user's own reads.
    """
    olds: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    old_before = [(part, part.allow_tf32) for part in olds if _is_readable(part)]
    new_before = [(part, part.fp32_precision) for part in _parts()]
    try:
        for part, _ in old_before:
            part.allow_tf32 = True
        for part, _ in new_before:
            part.fp32_precision = "tf32"
        yield
    finally:
        for part, allowed in old_before:
            part.allow_tf32 = allowed
        for part, precision in new_before:  # last, because the older ones rewrite these
            part.fp32_precision = precision


def _is_readable(part: Any) -> bool:
    """Return whether the older flag can be read; torch refuses where only the newer was set."""
    try:
        part.allow_tf32  # noqa: B018  # reading it is the question
    except RuntimeError:
        return False
    return True
