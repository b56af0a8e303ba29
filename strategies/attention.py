"""Which kernel runs the model's calls of `scaled_dot_product_attention`.

`attention.backend` starts at "default": torch chooses among flash attention, memory-efficient
attention, cuDNN's and its own mathematics by an order of its own. Another value puts one of the
fused kernels first; calls that it cannot take go to the others, as before. Which is fastest depends
on the card, the shape and the type.

What the model's own calls run on is found by running its forward: by default, and with each kernel
first, as it is and in bfloat16. A kernel is offered where that changes what runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView, undone

from .calls import Calls, run_step
from .one_setting import OneSetting

SETTING = "attention.backend"
_FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_SAMPLES = 2
_SAME_BYTES = CostHint(bytes_per_sample=1.0, seconds_per_sample=1.0)
"""No fused kernel holds the weights of attention. Which is faster nobody knows beforehand."""
_BACKWARD = "ScaledDotProduct{}AttentionBackward0"
_NAMES = {_BACKWARD.format(name.title()): name for name in _FUSED}


class AttentionBackend(OneSetting):
    """The fused kernel that attention prefers."""

    name = "attention"
    setting = SETTING
    phase = Phase.STEP
    numerics = Numerics.ROUNDING

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the kernels that change what the model's calls run on, on an NVIDIA GPU.

        Where only half precision leaves a choice, the setting goes with half precision.
        """
        capabilities = context.capabilities
        if capabilities.compute_capability is None:
            return {}
        types = [None, torch.bfloat16] if capabilities.bfloat16 else [None]
        kernels_by_type = context.with_training(partial(_look, types), _SAMPLES)
        values = [
            name for name in _FUSED if any(name in changing for changing, _ in kernels_by_type)
        ]
        if not values:
            return {}
        for dtype, (_, default) in zip(types, kernels_by_type, strict=True):
            if default:
                where = "in bfloat16" if dtype else "as the model is"
                context.note(f"{SETTING}=default runs {' and '.join(default)} {where}")
        when: dict[str, tuple[Scalar | None, ...]] = {"compile.mode": ("off", None)}
        if not kernels_by_type[0][0]:
            when["precision.dtype"] = ("bfloat16", "float16")
        dimension = Dimension(
            ["default", *values],
            hints=dict.fromkeys(values, _SAME_BYTES),
            when=when,
        )
        return {SETTING: dimension}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Put the kernel first in the forward."""
        order = _order(value)
        return undone(training.wrap_forward(lambda: sdpa_kernel(order, set_priority=True)))

    def lines(self, value: Any, payload: Any) -> list[str]:
        order = [f"SDPBackend.{backend.name}" for backend in _order(value)]
        return [
            "from torch.nn.attention import SDPBackend, sdpa_kernel",
            f"order = [{', '.join(order)}]",
            "with sdpa_kernel(order, set_priority=True):  # around the forward",
        ]


def _order(value: str) -> list[SDPBackend]:
    """Return all kernels, that one first, and the mathematics last."""
    others = [backend for name, backend in _FUSED.items() if name != value]
    return [_FUSED[value], *others, SDPBackend.MATH]


def _look(
    types: Sequence[torch.dtype | None], training: TrainingView, batch: Any
) -> list[tuple[list[str], list[str]]]:
    """Return the kernels that change what runs where they come first, and what runs by default.

    Args:
        types: of autocast; None: without it.
        training: runs the model.
        batch: samples for it.
    """
    kernels_by_type = list[tuple[list[str], list[str]]]()
    for dtype in types:
        ran = partial(_kernels, training, batch, dtype)
        default = ran(None)
        if default and training.device.type == "meta":  # no kernel runs there
            kernels_by_type.append(([*_FUSED], []))
        else:
            others = [name for name in _FUSED if default and ran(name) != default]
            kernels_by_type.append((others, sorted(default)))
    return kernels_by_type


def _kernels(
    training: TrainingView, batch: Any, dtype: torch.dtype | None, first: str | None
) -> set[str]:
    """Return the kernels that a forward runs if one is preferred, as its backward tells."""
    kernels: set[str] = set()

    def note(function: Any, result: Any) -> None:
        if function is scaled_dot_product_attention:
            kernels.add(_NAMES.get(type(result.grad_fn).__name__, "mathematics"))

    autocast = torch.autocast(training.device.type, dtype) if dtype else nullcontext()
    order = sdpa_kernel(_order(first), set_priority=True) if first else nullcontext()
    with autocast, order, Calls(note):
        run_step(training, batch)
    return kernels
