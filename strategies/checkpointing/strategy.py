"""The strategy: none, half or all of a model's repeated blocks checkpointed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from autofit.plan import Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView

from .patch import checkpointed

SETTING = "checkpointing.level"


class Checkpointing:
    """Which units recompute their activations: level 0 none, the last one all."""

    name = "checkpointing"
    phase = Phase.MODEL
    numerics = Numerics.EXACT

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Levels 0 to 2 where the model has repeated blocks; {} where it has none."""
        blocks = _repeated_blocks(context.model)
        if not blocks:
            return {}
        buffers = [name for name, _ in context.model.named_buffers()]
        chosen = {1: blocks[::2], 2: blocks}
        payloads: dict[Scalar, Any] = {
            level: {"units": names, "buffers": buffers} for level, names in chosen.items()
        }
        return {SETTING: Dimension([0, *chosen], payloads=payloads)}

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Checkpoint the units of the level; leaving the context takes it back."""
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
            f"with checkpointed(model, {payload['units']}, {payload['buffers']}):  # and train",
        ]


def _repeated_blocks(model: nn.Module) -> list[str]:
    """Children of the outermost lists that hold at least two modules of one class with weights."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not _is_within(name, found):
            found += [f"{name}.{child}".lstrip(".") for child in _repeated(module)]
    return found


def _repeated(module: nn.Module) -> list[str]:
    kinds: dict[type, list[str]] = {}
    for name, child in module.named_children():
        if any(True for _ in child.children()):  # a lone layer saves what it is given: no gain
            kinds.setdefault(type(child), []).append(name)
    return [name for names in kinds.values() if len(names) > 1 for name in names]


def _is_within(name: str, found: list[str]) -> bool:
    return any(name == outer or name.startswith(f"{outer}.") for outer in found)
