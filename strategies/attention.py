"""Which kernel runs the model's calls of `scaled_dot_product_attention`.

`attention.backend` starts at "default": torch chooses among flash attention, memory-efficient
attention, cuDNN's and its own mathematics by an order of its own. Another value puts one of the
fused kernels first; calls that it cannot take go to the others, as before. Which is fastest depends
on the card, the shape and the type.

What the model's own calls run on is found by running its forward: by default, and with each kernel
first, as it is and in bfloat16. A kernel is offered where that changes what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        found = context.with_training(partial(_look, types), _SAMPLES)
        values = [name for name in _FUSED if any(name in changing for changing, _ in found)]
        if not values:
            return {}
        for dtype, (_, default) in zip(types, found, strict=True):
            if default:
                where = "in bfloat16" if dtype else "as the model is"
                context.note(f"{SETTING}=default runs {' and '.join(default)} {where}")
        when: dict[str, tuple[Scalar | None, ...]] = {"compile.mode": ("off", None)}
        if not found[0][0]:
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
        return _preferred(training, value)

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


@contextmanager
def _preferred(training: TrainingView, value: str) -> Iterator[None]:
    order = _order(value)
    with undone(training.wrap_forward(lambda: sdpa_kernel(order, set_priority=True))):
        yield


def _look(
    types: Sequence[torch.dtype | None], training: TrainingView, batch: Any
) -> list[tuple[list[str], list[str]]]:
    return [_kernels(dtype, training, batch) for dtype in types]


def _kernels(
    dtype: torch.dtype | None, training: TrainingView, batch: Any
) -> tuple[list[str], list[str]]:
    """Return the kernels that change what runs where they come first, and what runs by default.

    Args:
        dtype: of autocast; None: without it.
        training: runs the model.
        batch: samples for it.
    """
    default = _run(nullcontext(), dtype, training, batch)
    if not default:
        return [], []
    if training.device.type == "meta":  # no kernel runs there
        return list(_FUSED), []
    first = {
        name: _run(sdpa_kernel(_order(name), set_priority=True), dtype, training, batch)
        for name in _FUSED
    }
    return [name for name, ran in first.items() if ran != default], sorted(default)


def _run(
    within: AbstractContextManager[Any],
    dtype: torch.dtype | None,
    training: TrainingView,
    batch: Any,
) -> set[str]:
    """Return the kernels of a forward in that context."""
    autocast = torch.autocast(training.device.type, dtype) if dtype else nullcontext()
    kernels: set[str] = set()
    with autocast, within, Calls(partial(_note_kernel, kernels)):
        run_step(training, batch)
    return kernels


def _note_kernel(kernels: set[str], function: Callable[..., Any], result: Any) -> None:
    """Note the kernel that a call of attention ran on, by the backward that it will take."""
    if function is scaled_dot_product_attention:
        kernels.add(_NAMES.get(type(result.grad_fn).__name__, "mathematics"))
