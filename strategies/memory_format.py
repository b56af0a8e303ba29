"""Channels-last convolutions.

`memory_format.layout` starts at "default". With "channels_last" each convolution is given its input
in that order, and returns its output so; what lies between convolutions keeps the order, so the
activations are rearranged once, where they enter. The weights stay as they are: whatever shares
their memory (an earlier `state_dict()`, detached aliases, weights tied by `.data`, optimizer state,
one flat storage for all) holds the same values as without it, during the training too. A kernel
that wants its weight channels-last copies it for the call, which is little beside the activations.

A model whose writes in place depend on the order is refused in the first forward: see
`default_layout`. One that is compiled is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from autofit.plan import Dimension
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .one_setting import OneSetting

SETTING = "memory_format.layout"


class MemoryFormat(OneSetting):
    """The order in which convolutions have their activations in memory."""

    name = "memory_format"
    setting = SETTING
    phase = Phase.MODEL
    numerics = Numerics.ROUNDING

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return two layouts where the model has 2-d or 3-d convolutions in the default one."""
        from .channels_last import has_default  # in the worker alone

        others = ["channels_last"] if has_default(context.model) else []
        return {SETTING: Dimension(["default", *others], lever=next(iter(others), None))}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Give the convolutions channels-last inputs."""
        from .channels_last import channels_last  # in the worker alone

        return channels_last(training)

    def lines(self, value: Any, payload: Any) -> list[str]:
        return [
            "import torch",
            "model = model.to(memory_format=torch.channels_last)  # _3d for 3-d convolutions",
        ]
