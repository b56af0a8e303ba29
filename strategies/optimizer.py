"""How the user's own optimizer steps: which of torch's implementations it takes, and when.

`optimizer.implementation` starts at "default". "for_loop" updates one parameter after another,
"foreach" many at once, with temporaries as large as the parameters, and "fused" all in one kernel
without temporaries. The optimizer, its hyperparameters and its state stay the same objects; only
the flags of its groups change, as `foreach=` and `fused=` would set them where it is made.

What an update costs depends on no other setting, so it is measured before the search: an
implementation that saves next to nothing, or raises, is not offered, and costs no probes.

`optimizer.state` starts at "default", the type of the parameters. "bfloat16" holds it in half the
bytes (`optimizer_state`), which no comparison of one step can judge: it is offered only to who
names this strategy.

`optimizer.when` starts at "step", after the backward pass. "backward" updates each parameter within
it (`update_in_backward`); that is tried on one step before it is offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from autofit.plan import CostHint, Dimension, Scalar
from autofit.strategy import Context, Numerics, Phase, TrainingView

SETTING, STATE, WHEN = "optimizer.implementation", "optimizer.state", "optimizer.when"
WORTH = 0.01
"""Least share of a step's time that an implementation must save to be offered."""
_SAMPLES = 8
_SAMPLES_OF_ONE_STEP = 2
_SAME_ACTIVATIONS = CostHint(bytes_per_sample=1.0, seconds_per_sample=1.0)
_LINES_IN_BACKWARD = [
    "def update(parameter):  # by its gradient, as soon as that is whole",
    "    groups = optimizer.param_groups",
    '    (group,) = (g for g in groups if any(p is parameter for p in g["params"]))',
    '    parameters, group["params"] = group["params"], [parameter]',
    "    optimizer.param_groups = [group]",
    "    optimizer.step()",
    '    optimizer.param_groups, group["params"] = groups, parameters',
    "    parameter.grad = None",
    "",
    "for parameter in model.parameters():  # in place of optimizer.step() after the backward pass",
    "    if parameter.requires_grad:",
    "        parameter.register_post_accumulate_grad_hook(update)",
]
"""What a user would write to get the same, in a training of one micro-batch."""


class OptimizerImplementation:
    """How the optimizer's update is computed, and when.

    Args:
        numerics: how far its settings may change the arithmetic.
        has_step: whether `Training.step` trains: no other loop leaves the gradients alone.
    """

    name = "optimizer"
    phase = Phase.OPTIMIZER
    numerics_of: Mapping[str, Numerics] = MappingProxyType(
        {SETTING: Numerics.ROUNDING, WHEN: Numerics.EXACT}
    )
    standard_terms = ("optimizer_implementation",)

    def __init__(
        self, numerics: Numerics = Numerics.REDUCED_PRECISION, *, has_step: bool = True
    ) -> None:
        self.numerics, self._has_step = numerics, has_step

    def within(self, numerics: Numerics) -> OptimizerImplementation:
        """Return the strategy without settings that go further."""
        return OptimizerImplementation(numerics, has_step=self._has_step)

    def in_anothers_loop(self) -> OptimizerImplementation:
        """Return the strategy without updates in the backward pass."""
        return OptimizerImplementation(self.numerics, has_step=False)

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        """Return the implementations, when the update may run, and from what state.

        As steps show it, and as far as the arithmetic may change.
        """
        from .optimizer_implementations import look  # in the worker alone

        samples = min(_SAMPLES_OF_ONE_STEP, context.samples_per_step)
        looks = partial(look, samples, context.world.size)
        implementations, share, shares = context.with_training(looks, samples)
        dimensions = {}
        if self.numerics >= Numerics.ROUNDING:
            dimensions[SETTING] = _implementations(context, implementations)
        dimensions.update(_of_one_step(share, shares))
        return {
            setting: dimension
            for setting, dimension in dimensions.items()
            if self.numerics_of.get(setting, Numerics.REDUCED_PRECISION) <= self.numerics
            and (setting != WHEN or self._has_step)
        }

    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Choose how the optimizer steps, and when; leaving the context undoes it."""
        from .optimizer_implementations import applied  # in the worker alone

        value = str(settings.get(SETTING, "default"))
        is_halved = settings.get(STATE, "default") == "bfloat16"
        return applied(
            training,
            None if value == "default" else (value, payloads[SETTING]["optimizers"]),
            payloads[STATE]["optimizers"] if is_halved else None,
            in_backward=settings.get(WHEN, "step") == "backward",
        )

    def in_standard_terms(self, settings: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        """Return the setting in standard terms: an optimizer implementation."""
        value = settings.get(SETTING, "default")
        return {} if value == "default" else {"optimizer_implementation": value}

    def describe(self, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]) -> list[str]:
        """Return the equivalent lines of a training script."""
        value = str(settings.get(SETTING, "default"))
        others = _LINES_IN_BACKWARD if settings.get(WHEN) == "backward" else []
        if settings.get(STATE) == "bfloat16":
            others = [*others, *_lines_of_state(payloads)]
        if value == "default":
            return [*others]
        names = payloads[SETTING]["optimizers"]
        chosen = "[optimizer]" if names == [""] else f"[optimizer[name] for name in {names}]"
        flags = ", ".join(f"{name}={name == value}" for name in ("foreach", "fused"))
        return [
            f"for each in {chosen}:  # before its first step, or give these where it is made",
            "    for group in each.param_groups:",
            f"        group.update({flags})",
            *others,
        ]


def _lines_of_state(payloads: Mapping[str, Any]) -> list[str]:
    names = payloads[STATE]["optimizers"]
    chosen = "optimizer" if names == [""] else f"*(optimizer[name] for name in {names})"
    return [
        "from autofit.strategies.optimizer_state import state_in_bfloat16",
        f"with state_in_bfloat16({chosen}):  # around the training",
    ]


def _implementations(context: Context, implementations: Mapping[str, Sequence[str]]) -> Dimension:
    """Return those of the implementations that are worth it.

    Without "foreach" where torch would not choose it itself: there (on a CPU) its functions
    loop over the tensors. Without what raises, or saves neither time nor temporaries, except
    on the meta device, where that cannot be measured.
    """
    if implementations and context.device.type != "meta":
        from .optimizer_implementations import worth_it  # in the worker alone

        samples = min(_SAMPLES, context.samples_per_step)
        micro_batches = context.samples_per_step / samples
        tried = list(implementations)
        raised: Mapping[str, str] = {}
        with suppress(torch.OutOfMemoryError):
            look = partial(worth_it, implementations, WORTH, micro_batches)
            implementations, raised = context.with_training(look, samples)
        for value, why in raised.items():
            context.note(f"{SETTING}={value} skipped: a step with it raised {why}")
        if left_out := [
            value for value in tried if value not in implementations and value not in raised
        ]:
            context.note(
                f"{SETTING}: {', '.join(left_out)} skipped: saves less than {WORTH:.0%} of a step"
            )
    return Dimension(
        ["default", *implementations],
        payloads={value: {"optimizers": names} for value, names in implementations.items()},
        hints=dict.fromkeys(implementations, _SAME_ACTIVATIONS),
        lever=next((value for value in ("fused", "foreach") if value in implementations), None),
    )


def _of_one_step(share: float | None, shares: Mapping[str, float]) -> dict[str, Dimension]:
    """Return when the update may run, and the types of its state, on one device.

    In the backward pass where that is as exact and saves bytes.
    """
    dimensions = {}
    own_state: Mapping[str, Sequence[Scalar | None]] = {"adam_state.format": ("default", None)}
    if share is not None:
        dimensions[WHEN] = Dimension(
            ["step", "backward"],
            hints={"backward": replace(_SAME_ACTIVATIONS, fixed_bytes=share)},
            when={
                **own_state,
                "checkpointing.level": (0, None),  # a recomputation may read what is updated
                "compile.mode": ("off", None),
                "precision.dtype": ("default", "tf32", "bfloat16", None),  # float16 has a scaler
            },
            accumulation={"backward": False},
        )
    if shares:
        dimensions[STATE] = Dimension(
            ["default", "bfloat16"],
            payloads={"bfloat16": {"optimizers": [*shares]}},
            hints={"bfloat16": replace(_SAME_ACTIVATIONS, fixed_bytes=max(shares.values()))},
            when=own_state,
            opt_in=True,
        )
    return dimensions
