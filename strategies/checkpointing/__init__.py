"""The checkpointing strategy: which parts of a model recompute their activations in the backward.

`checkpointing.level` 0 is plain PyTorch; each level further up needs less memory and more time
than the one before. The units of a level are found by measuring the user's model (`levels`) and
stored in its payload by name, so that a level always means the same modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autofit.plan import Dimension
from autofit.strategy import Context, Numerics, Phase, TrainingView

from ..one_setting import OneSetting

SETTING = "checkpointing.level"


class Checkpointing(OneSetting):
    """Which parts of a model recompute their activations in the backward pass."""

    name = "checkpointing"
    setting, plain = SETTING, 0
    phase = Phase.MODEL
    numerics = Numerics.EXACT
    recomputes = True

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the levels of this model; 0 alone where nothing is worth checkpointing.

        Runs the user's step a few dozen times on small batches. On the meta device, where nothing
        can be measured or compared, a few times, for bytes and computed times; without these the
        levels are unknown.
        """
        from .levels import find_levels, predict_levels  # in the worker alone
        from .profile import clock_of

        if context.device.type == "meta":
            if clock_of(context) is not None:
                return {SETTING: predict_levels(context)}
            context.note(
                "checkpoint levels can only be found by running the model on a real device"
            )
            return {SETTING: Dimension([0])}

        return {SETTING: find_levels(context, self)}

    def applied(
        self, training: TrainingView, value: Any, payload: Any
    ) -> AbstractContextManager[None]:
        """Checkpoint the units of the level.

        Raises:
            InvalidArgument: the payload names a unit that this model does not have.
        """
        if payload is None:
            return nullcontext()
        from .checkpointed import checkpointed  # in the worker alone

        return checkpointed(
            training.model, payload["units"], payload["state"], training.recomputation
        )

    def lines(self, value: Any, payload: Any) -> list[str]:
        if payload is None:
            return []
        return [
            "from autofit.strategies.checkpointing.checkpointed import checkpointed",
            f"units = {payload['units']}",
            f"state = {payload['state']}",
            "with checkpointed(model, units, state):  # around the training loop",
        ]
