"""The strategy: one dimension along the best frontier of checkpoint placements.

`checkpointing.level` 0 is plain PyTorch; each level further up needs less memory and more time
than the one before. What a level checkpoints was found by measuring the user's own model, and
stands in its payload by name, so that level 2 means the same modules tomorrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autofit.errors import CannotTell
from autofit.plan import Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .candidates import find_candidates, layers
from .levels import Measured, make_dimension
from .parity import Parity, check_parity
from .patch import checkpointed
from .recorder import NeedsSavedTensors
from .survey import survey
from .units import Unit

SETTING = "checkpointing.level"
SMALL, LARGE = 2, (8, 32, 128)
"""Micro-batches to look at; a batch of one is refused by batch normalization."""

LONG_ENOUGH_S = 0.03
"""A step that takes this long is no longer made of launches alone; its times tell parts apart."""


class Checkpointing:
    """Which parts of a model recompute their activations in the backward pass."""

    name = "checkpointing"
    phase = Phase.MODEL
    numerics = Numerics.EXACT

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """The levels of this model; {} where nothing in it is worth checkpointing.

        Runs the user's step a few dozen times on small batches.

        Raises:
            CannotTell: on the meta device, where nothing can be measured or compared.
        """
        if context.device.type == "meta":
            raise CannotTell("checkpoint levels are found by running the model on a real device")
        try:
            small = Measured(SMALL, survey(context, SMALL))
        except (torch.OutOfMemoryError, NeedsSavedTensors):
            context.note("checkpointing left out: a step of 2 samples does not fit into memory")
            return {}
        found = find_candidates(
            context.model, small.survey.timeline, small.survey.checkpointed_itself
        )
        try:
            parity = self._parity(context, layers(found.timeline))
        except torch.OutOfMemoryError:
            context.note("checkpointing left out: there is no memory to compare a step with it")
            return {}
        for unit, why in (found.left_out | parity.left_out).items():
            context.note(f"{unit} is not checkpointed: {why}")
        units = [unit for unit in found.units if unit not in parity.left_out]
        if not units:
            return {}
        large = _larger(context, small, units)
        dimension = make_dimension(context.model, units, sorted(parity.buffers), small, large)
        return {SETTING: dimension} if len(dimension.values) > 1 else {}

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Checkpoint the units of the level; leaving the context takes it back.

        Raises:
            InvalidRequest: the payload names a unit that this model does not have.
        """
        payload = payloads.get(SETTING)
        if not settings.get(SETTING) or payload is None:
            return nullcontext()
        return checkpointed(training.model, payload["units"], payload["buffers"])

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """The lines that do the same in a training script."""
        payload = payloads.get(SETTING)
        if not settings.get(SETTING) or payload is None:
            return []
        return [
            "from autofit.strategies.checkpointing import checkpointed",
            f"units = {payload['units']}",
            f"buffers = {payload['buffers']}",
            "with checkpointed(model, units, buffers):  # around the training loop",
        ]

    def _parity(self, context: Context, layers: list[list[str]]) -> Parity:
        def run(training: TrainingView, batch: Any) -> Parity:
            return check_parity(training, batch, layers)

        parity: Parity = context.profile(run, SMALL)
        return parity


def _larger(context: Context, small: Measured, units: Sequence[str]) -> Measured:
    """A survey at a micro-batch large enough that times tell the parts apart, as far as it fits."""
    timed = {part for unit in units for part in Unit.parse(unit).parts(context.model)}
    micro_batch = _long_enough(context, small)
    for size in (micro_batch, small.micro_batch):
        try:
            return Measured(size, survey(context, size, timed, thorough=True))
        except (torch.OutOfMemoryError, NeedsSavedTensors):
            continue
    return small


def _long_enough(context: Context, small: Measured) -> int:
    """The first micro-batch whose step takes long enough, or the last one that fits."""
    if small.survey.step_s >= LONG_ENOUGH_S:
        return 2 * small.micro_batch  # another size is needed for the bytes, not for the times
    fits = small.micro_batch
    for micro_batch in LARGE:
        try:
            step_s = survey(context, micro_batch, ()).step_s
        except (torch.OutOfMemoryError, NeedsSavedTensors):
            break
        fits = micro_batch
        if step_s >= LONG_ENOUGH_S:
            break
    return fits
