"""Plans: the settings of a training, and the split of its samples.

All batch arithmetic is here: a global batch of G samples is split into k micro-batches whose sizes
differ by at most one, the larger ones first. Devices that train together are ranks: they share the
G samples as evenly, and each splits its own share into k. Where k is more than a share has samples,
a micro-batch of that rank has none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

from autofit.codec import Count
from autofit.dimension import (
    CostHint as CostHint,
    Dimension as Dimension,
    Scalar as Scalar,
    Settings as Settings,
    VariantKey as VariantKey,
    as_called,
    variant_key as variant_key,
)
from autofit.errors import AutofitError, InvalidArgument
from autofit.strategy import Strategy

MAX_RANKS = 2**16
"""More than any cluster has: a zero too many would take hours to predict."""

MAX_ACCUMULATION_STEPS = 2**16
"""More than any training has; a zero too many would run for hours."""

MICRO_BATCHES_OF_A_SEARCH = 2
"""Run of a step to know its memory: gradients are resident from the second on, which with the first
is the largest, so these two show every peak."""

_Value = TypeVar("_Value")


def settings_of(strategy: str, by_setting: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the entries of one strategy: those named `strategy.something`."""
    prefix = f"{strategy}."
    return {name: value for name, value in by_setting.items() if name.startswith(prefix)}


def steps_for(global_batch: int, micro_batch: int, ranks: int = 1) -> int:
    """Return the smallest k with ceil(global_batch / (ranks * k)) <= micro_batch."""
    return -(-global_batch // (micro_batch * ranks))


def _check_shared(global_batch: int, ranks: int) -> None:
    if global_batch < ranks:
        raise InvalidArgument(
            f"a global batch of {global_batch} samples is too small for {ranks} "
            "ranks: use a larger global_batch or fewer ranks"
        )


def _even_share(global_batch: int, ranks: int) -> int:
    if global_batch % ranks:
        raise InvalidArgument(
            f"a global batch of {global_batch} samples cannot be split evenly over "
            f"{ranks} ranks: use a multiple of {ranks}"
        )
    return global_batch // ranks


def split_evenly(samples: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of `parts` pieces of `samples`; they differ by at most one, larger first."""
    small, larger = divmod(samples, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


PLANNED_STEPS = 10_000
"""Optimizer steps that a training takes, where nobody says."""


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Return the count as an int; NumPy's and other integers are accepted.

    Raises:
        InvalidArgument: it is no whole number, or less than `least`; the message contains `name`.
    """
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise InvalidArgument(f"{name} must be a whole number of at least {least}, got {value!r}")
    return count


def thinned(values: Sequence[_Value], most: int) -> list[_Value]:
    """Return at most this many of the values, evenly spread, both ends included."""
    if len(values) <= most:
        return list(values)
    last = len(values) - 1
    return [values[round(number * last / (most - 1))] for number in range(most)]


def unlike(settings: Settings, others: Settings) -> dict[str, Scalar]:
    """Return the settings that `others` lacks or has with another value."""
    return {name: value for name, value in settings.items() if value != others.get(name)}


@dataclass(frozen=True)
class Plan:
    """A variant plus batch geometry.

    Attributes:
        micro_batch: samples in one forward and backward pass; the largest, if sizes differ.
        accumulation_steps: micro-batches in one optimizer step, on one device.
        global_batch: samples in one optimizer step, over all devices; None: micro_batch *
            accumulation_steps * ranks.
        settings: values by setting; a missing setting has its first value.
        ranks: devices that train together, N; each is a rank.

    Raises:
        InvalidArgument: a count is below one, there are more than `MAX_RANKS` ranks or
            `MAX_ACCUMULATION_STEPS` micro-batches in a step, or the micro-batches do not
            add up to the global batch.
    """

    micro_batch: Count
    accumulation_steps: Count = field(default=1, kw_only=True)
    global_batch: Count | None = field(default=None, kw_only=True)
    settings: Settings = field(default_factory=dict, kw_only=True)
    ranks: Count = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation_steps", "ranks"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if self.ranks > MAX_RANKS:
            raise InvalidArgument(f"ranks can be at most {MAX_RANKS}, got {self.ranks}")
        if self.accumulation_steps > MAX_ACCUMULATION_STEPS:
            raise InvalidArgument(
                f"accumulation_steps can be at most {MAX_ACCUMULATION_STEPS}, got "
                f"{self.accumulation_steps}: use a larger micro_batch or a smaller "
                "global_batch"
            )
        if not isinstance(self.settings, Mapping):
            raise InvalidArgument(
                'settings must be a mapping such as {"strategy.setting": value}, '
                f"got {self.settings!r}"
            )
        object.__setattr__(self, "settings", MappingProxyType(dict(sorted(self.settings.items()))))
        if self.global_batch is not None:
            object.__setattr__(self, "global_batch", check_count("global_batch", self.global_batch))
            self._check_global_batch(self.global_batch)

    def _check_global_batch(self, global_batch: int) -> None:
        _check_shared(global_batch, self.ranks)
        steps, share = self.accumulation_steps, -(-global_batch // self.ranks)
        largest = -(-share // steps)
        if share < steps or largest != self.micro_batch:
            ranks = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
            raise InvalidArgument(
                f"a global batch of {global_batch} in {steps} micro-batches{ranks} means "
                f"micro-batches of {largest}, not {self.micro_batch}: use micro_batch={largest}, "
                "or leave global_batch out"
            )

    @classmethod
    def split(
        cls,
        global_batch: int,
        micro_batch: int,
        settings: Settings | None = None,
        *,
        even: bool = False,
        ranks: int = 1,
    ) -> Plan:
        """Return the plan for `global_batch` samples in micro-batches of at most `micro_batch`.

        Args:
            global_batch: samples in one optimizer step, over all devices.
            micro_batch: samples in one forward and backward on one device.
            settings: those that are not at their first value.
            even: all micro-batches have one size, a divisor of the global batch.
            ranks: devices that train together.

        Raises:
            InvalidArgument: one of the counts is below one, or the samples do not suffice for the
                ranks.
        """
        steps = steps_for(
            check_count("global_batch", global_batch),
            check_count("micro_batch", micro_batch),
            check_count("ranks", ranks),
        )
        _check_shared(global_batch, ranks)
        if even:
            share = _even_share(global_batch, ranks)
            steps = next(k for k in range(steps, share + 1) if share % k == 0)
        return cls(
            -(-global_batch // (steps * ranks)),
            accumulation_steps=steps,
            global_batch=global_batch,
            settings=settings or {},
            ranks=ranks,
        )

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step."""
        return self.global_batch or self.micro_batch * self.accumulation_steps * self.ranks

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch of one optimizer step, in order; of the first rank's."""
        return self.micro_batch_sizes_of(0)

    @property
    def mean_micro_batch(self) -> float:
        """Mean samples of a micro-batch on the rank with most, for which the others wait."""
        return -(-self.samples_per_step // self.ranks) / self.accumulation_steps

    def micro_batch_sizes_of(self, rank: int) -> tuple[int, ...]:
        """Samples of each of a rank's micro-batches of one optimizer step, in order."""
        share = split_evenly(self.samples_per_step, self.ranks)[rank]
        return split_evenly(share, self.accumulation_steps)

    @cached_property
    def variant(self) -> VariantKey:
        """The settings as a hashable key."""
        return variant_key(self.settings)

    def on(self, ranks: int) -> Plan:
        """Return the plan of this many ranks: of the same global batch, where one was given.

        Raises:
            InvalidArgument: that cannot be shared by this many.
        """
        if self.ranks == ranks:
            return self
        if self.global_batch is None:
            return replace(self, ranks=ranks)
        return Plan.split(self.global_batch, self.micro_batch, self.settings, ranks=ranks)

    def of_rank(self, rank: int) -> Plan:
        """Return the plan of one rank's share of the samples."""
        if self.ranks == 1:
            return self
        share = sum(self.micro_batch_sizes_of(rank))
        return Plan.split(share, self.micro_batch, self.settings)

    def without(self, settings: Settings) -> Plan:
        """Return the plan without the settings that have exactly these values."""
        return replace(self, settings=unlike(self.settings, settings))

    def __hash__(self) -> int:
        counts = (self.micro_batch, self.accumulation_steps, self.global_batch, self.ranks)
        return hash((counts, self.variant))

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[()]]:
        return as_called(self, settings=dict(self.settings))

    def __str__(self) -> str:
        split = f"{self.micro_batch} x {self.accumulation_steps}"
        if self.ranks > 1:
            split += f" on each of {self.ranks} ranks"
            if self.samples_per_step % (self.accumulation_steps * self.ranks):
                split += f" ({self.samples_per_step} samples in all)"
        return ", ".join([split, *(f"{name}={value}" for name, value in self.settings.items())])


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan that can run; `autofit.registry.resolve` makes it.

    Attributes:
        plan: with a value for every setting.
        payloads: meaning of the settings' values as JSON data, by setting; values that are plain
            PyTorch have none.
        strategies: the strategies that apply the plan's settings.
    """

    plan: Plan
    payloads: Mapping[str, Any] = field(default_factory=dict)
    strategies: Sequence[Strategy] = ()

    def by_strategy(self) -> Iterator[tuple[Strategy, dict[str, Scalar], dict[str, Any]]]:
        """Yield each strategy with its own settings and payloads, in the order of application.

        A strategy without a setting in the plan is left out.
        """
        for strategy in sorted(self.strategies, key=lambda strategy: strategy.phase):
            if settings := settings_of(strategy.name, self.plan.settings):
                yield strategy, settings, settings_of(strategy.name, self.payloads)


class NoFeasiblePlan(AutofitError):
    """Not one plan fits the VRAM budget.

    Attributes:
        plan: the plan that came nearest of those that were tried; None where the weights alone are
            too large, and none was.
        required_bytes: what it (or the weights) needs, as measured or expected; None: unknown.
        allowed_bytes: the VRAM budget.
        sufficient_bytes: the smallest VRAM budget that is expected to work; None: unknown.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        plan: Plan | None,
        required_bytes: int | None,
        allowed_bytes: int,
        sufficient_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.plan = plan
        self.required_bytes = required_bytes
        self.allowed_bytes = allowed_bytes
        self.sufficient_bytes = sufficient_bytes
