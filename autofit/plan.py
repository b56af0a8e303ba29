"""Plans and dimensions: the settings of a training, and the split of its samples.

All batch arithmetic is here: a global batch of G samples is split into k micro-batches whose sizes
differ by at most one, the larger ones first. Devices that train together are ranks: they share the
G samples as evenly, and each splits its own share into k. Where k is more than a share has samples,
a micro-batch of that rank has none.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from autofit.codec import Count, Number, SettingValue
from autofit.errors import InvalidArgument

if TYPE_CHECKING:
    from autofit.strategy import Strategy

Scalar: TypeAlias = SettingValue
"""Type of a setting's value: it must fit into JSON and be an Optuna category."""

Settings: TypeAlias = Mapping[str, Scalar]
"""Values by setting name (`strategy.name`), such as {"precision.dtype": "bfloat16"}."""

MOST_RANKS = 2**16
"""More than any cluster has: a zero too many would take hours to predict."""

MOST_ACCUMULATION_STEPS = 2**16
"""More than any training has; a zero too many would run for hours."""

VariantKey: TypeAlias = tuple[tuple[str, Scalar], ...]
"""Settings as a hashable key that does not depend on their order."""


def variant_key(settings: Settings) -> VariantKey:
    """Return the settings as (name, value) pairs sorted by name."""
    return tuple(sorted(settings.items()))


_Value = TypeVar("_Value")


def settings_of(strategy: str, by_setting: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the entries of one strategy: those named `strategy.something`."""
    prefix = f"{strategy}."
    return {name: value for name, value in by_setting.items() if name.startswith(prefix)}


def payloads_of(dimensions: Mapping[str, Dimension], settings: Settings) -> dict[str, Any]:
    """Return the payloads of these values, by setting; plain values have none."""
    return {
        name: dimensions[name].payloads[value]
        for name, value in settings.items()
        if name in dimensions and value in dimensions[name].payloads
    }


def steps_for(global_batch: int, micro_batch: int, world_size: int = 1) -> int:
    """Return the smallest k with ceil(global_batch / (world_size * k)) <= micro_batch."""
    return -(-global_batch // (micro_batch * world_size))


def _check_shared(global_batch: int, world_size: int) -> None:
    if global_batch < world_size:
        raise InvalidArgument(
            f"a global batch of {global_batch} samples is too small for {world_size} "
            "ranks: use a larger global_batch or fewer ranks"
        )


def _even_share(global_batch: int, world_size: int) -> int:
    if global_batch % world_size:
        raise InvalidArgument(
            f"a global batch of {global_batch} samples cannot be split evenly over "
            f"{world_size} ranks: use a multiple of {world_size}"
        )
    return global_batch // world_size


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
    """Return at most so many of the values, evenly spread, both ends included."""
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
            accumulation_steps * world_size.
        settings: values by setting; a missing setting has its first value.
        world_size: devices that train together, N; each is a rank.

    Raises:
        InvalidArgument: a count is below one, there are more than `MOST_RANKS` ranks or
            `MOST_ACCUMULATION_STEPS` micro-batches in a step, or the micro-batches do not
            add up to the global batch.
    """

    micro_batch: Count
    accumulation_steps: Count = field(default=1, kw_only=True)
    global_batch: Count | None = field(default=None, kw_only=True)
    settings: Settings = field(default_factory=dict, kw_only=True)
    world_size: Count = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation_steps", "world_size"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if self.world_size > MOST_RANKS:
            raise InvalidArgument(f"world_size can be at most {MOST_RANKS}, got {self.world_size}")
        if self.accumulation_steps > MOST_ACCUMULATION_STEPS:
            raise InvalidArgument(
                f"accumulation_steps can be at most {MOST_ACCUMULATION_STEPS}, got "
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
        _check_shared(global_batch, self.world_size)
        steps, share = self.accumulation_steps, -(-global_batch // self.world_size)
        largest = -(-share // steps)
        if share < steps or largest != self.micro_batch:
            ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
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
        world_size: int = 1,
    ) -> Plan:
        """Return the plan for `global_batch` samples in micro-batches of at most `micro_batch`.

        Args:
            global_batch: samples in one optimizer step, over all devices.
            micro_batch: samples in one forward and backward on one device.
            settings: those that are not at their first value.
            even: all micro-batches have one size, a divisor of the global batch.
            world_size: devices that train together.

        Raises:
            InvalidArgument: one of the counts is below one, or the samples do not suffice for the
                ranks.
        """
        steps = steps_for(
            check_count("global_batch", global_batch),
            check_count("micro_batch", micro_batch),
            check_count("world_size", world_size),
        )
        _check_shared(global_batch, world_size)
        if even:
            share = _even_share(global_batch, world_size)
            steps = next(k for k in range(steps, share + 1) if share % k == 0)
        return cls(
            -(-global_batch // (steps * world_size)),
            accumulation_steps=steps,
            global_batch=global_batch,
            settings=settings or {},
            world_size=world_size,
        )

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step."""
        return self.global_batch or self.micro_batch * self.accumulation_steps * self.world_size

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch of one optimizer step, in order; of the first rank's."""
        return self.micro_batch_sizes_of(0)

    @property
    def mean_micro_batch(self) -> float:
        """Samples of a micro-batch, on average, on the rank with most, for which others wait."""
        return -(-self.samples_per_step // self.world_size) / self.accumulation_steps

    def micro_batch_sizes_of(self, rank: int) -> tuple[int, ...]:
        """Samples of each of a rank's micro-batches of one optimizer step, in order."""
        share = split_evenly(self.samples_per_step, self.world_size)[rank]
        return split_evenly(share, self.accumulation_steps)

    @cached_property
    def variant(self) -> VariantKey:
        """The settings as a hashable key."""
        return variant_key(self.settings)

    def on(self, world_size: int) -> Plan:
        """Return the plan of so many ranks: of the same global batch, where one was given.

        Raises:
            InvalidArgument: that cannot be shared by so many.
        """
        if self.world_size == world_size:
            return self
        if self.global_batch is None:
            return replace(self, world_size=world_size)
        return Plan.split(self.global_batch, self.micro_batch, self.settings, world_size=world_size)

    def of_rank(self, rank: int) -> Plan:
        """Return the plan of one rank's share of the samples."""
        if self.world_size == 1:
            return self
        share = sum(self.micro_batch_sizes_of(rank))
        return Plan.split(share, self.micro_batch, self.settings)

    def without(self, settings: Settings) -> Plan:
        """Return the plan without the settings that have exactly these values."""
        return replace(self, settings=unlike(self.settings, settings))

    def __hash__(self) -> int:
        counts = (self.micro_batch, self.accumulation_steps, self.global_batch, self.world_size)
        return hash((counts, self.variant))

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[()]]:
        return _as_called(self, settings=dict(self.settings))

    def __str__(self) -> str:
        split = f"{self.micro_batch} x {self.accumulation_steps}"
        if self.world_size > 1:
            split += f" on each of {self.world_size} ranks"
            if self.samples_per_step % (self.accumulation_steps * self.world_size):
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


@dataclass(frozen=True)
class CostHint:
    """The expected effect of a value, before anything is measured.

    Every number is a ratio to the dimension's first value; None: unknown.

    Attributes:
        bytes_per_sample: slope of peak memory over micro-batch.
        seconds_per_sample: slope of step time over micro-batch.
        fixed_bytes: peak memory that does not depend on the micro-batch (parameters, gradients,
            optimizer state). Unknown effects are assumed to be within a few percent.
    """

    bytes_per_sample: Number | None = None
    seconds_per_sample: Number | None = None
    fixed_bytes: Number | None = None


_BY_VALUE = ("payloads", "hints", "trial_costs_s", "accumulation")


MOST_VALUES = 1000
"""Of a dimension: a search of 200,000 chose for minutes, past its timeout."""


@dataclass(frozen=True)
class Dimension:
    """The values one setting may take, and what is known about them.

    Attributes:
        values: the first is plain PyTorch.
        payloads: a value's meaning as JSON data (say, the module names of a checkpoint level),
            stored in study and report and handed to the strategy's `apply`; as JSON gives it back,
            so that a tuple becomes a list, and None is no payload.
        hints: expected effect of a value, relative to the first value.
        when: limits the dimension to settings of others, {"other.setting": [allowed values]};
            where it does not hold, the setting has its first value. None among them allows what
            has no such setting, or nothing to choose of it.
        trial_cost_s: extra seconds that a probe of a value other than the first costs; values of
            a dimension with a cost are tried last, on the leading plans only, where they are
            expected to save more over the planned training than they cost.
        trial_costs_s: the same of single values, in place of `trial_cost_s`. Below zero where a
            value makes what another setting costs cheaper.
        fresh_worker: a probe of a value other than the first wants a worker of its own.
        accumulation: whether a value goes with accumulation. True: with one accumulation step it is
            the same as the first, so that it is tried with more alone. False: it is tried with one
            alone. Values that are not in it go with any number.
        opt_in: its values other than the first are only tried where the strategy is named.
        lever: the value that an expert would turn on at once, since it is expected to help wherever
            it is offered; None: there is none. A search tries levers first, together and alone.
    """

    values: Sequence[Scalar]
    payloads: Mapping[Scalar, Any] = field(default_factory=dict, kw_only=True)
    hints: Mapping[Scalar, CostHint] = field(default_factory=dict, kw_only=True)
    when: Mapping[str, Sequence[Scalar | None]] | None = field(default=None, kw_only=True)
    trial_cost_s: float = field(default=0.0, kw_only=True)
    trial_costs_s: Mapping[Scalar, float] = field(default_factory=dict, kw_only=True)
    fresh_worker: bool = field(default=False, kw_only=True)
    accumulation: Mapping[Scalar, bool] = field(default_factory=dict, kw_only=True)
    opt_in: bool = field(default=False, kw_only=True)
    lever: Scalar | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if self.when is not None:  # any iterable, which is asked again and again
            allowed = {n: v if isinstance(v, str) else tuple(v) for n, v in self.when.items()}
            object.__setattr__(self, "when", allowed)
        if not self.values:
            raise InvalidArgument("a dimension needs at least one value, the default")
        if len(self.values) > MOST_VALUES:
            raise InvalidArgument(
                f"a dimension has at most {MOST_VALUES} values, got {len(self.values)}: each is a "
                "plan to choose among, so offer some of them"
            )
        if len(set(self.values)) != len(self.values):
            raise InvalidArgument(f"a dimension's values must be distinct, got {list(self.values)}")
        if self.lever is not None and self.lever not in self.values[1:]:
            raise InvalidArgument(
                f"a dimension's lever is one of its values other than the first, "
                f"{list(self.values[1:])}, got {self.lever!r}"
            )
        means = {value: _as_json(payload) for value, payload in self.payloads.items()}
        means = {value: payload for value, payload in means.items() if payload is not None}
        object.__setattr__(self, "payloads", means)
        for name in _BY_VALUE:
            given = getattr(self, name)
            object.__setattr__(self, name, MappingProxyType(dict(given)))
            unknown = set(given) - set(self.values)
            if unknown:
                raise InvalidArgument(
                    f"{name} has values that the dimension does not: {sorted(map(str, unknown))}"
                )

    def __reduce__(self) -> tuple[Callable[..., Dimension], tuple[()]]:
        return _as_called(self, **{name: dict(getattr(self, name)) for name in _BY_VALUE})

    def trial_cost_of(self, value: Scalar) -> float:
        """Return the extra seconds that a probe of the value costs; 0 for the first."""
        if value == self.values[0]:
            return 0.0
        return self.trial_costs_s.get(value, self.trial_cost_s)

    def recomputes(self, value: Scalar) -> bool:
        """Return whether the value is expected to save memory for time, as recomputation does."""
        hint = self.hints.get(value)
        if hint is None or hint.bytes_per_sample is None or hint.bytes_per_sample >= 1:
            return False
        return hint.seconds_per_sample is None or hint.seconds_per_sample >= 1

    @property
    def is_costly(self) -> bool:
        """Whether a probe of some value costs extra seconds."""
        return any(self.trial_cost_of(value) > 0 for value in self.values)

    @property
    def is_ordered(self) -> bool:
        """Whether these are three or more growing numbers, so that neighbours should act alike."""
        if len(self.values) < 3 or any(isinstance(v, bool | str) for v in self.values):
            return False
        return list(self.values) == sorted(self.values, key=float)

    def allowed_with(self, settings: Settings) -> bool:
        """Return whether `when` allows values other than the first next to these settings."""
        return all(settings.get(name) in allowed for name, allowed in (self.when or {}).items())


def _as_json(payload: Any) -> Any:
    """Return a payload as it is read again; what is no JSON stays, for `check_strategy` to name."""
    try:
        return json.loads(json.dumps(payload))
    except (TypeError, ValueError):
        return payload


_Made = TypeVar("_Made", "Plan", "Dimension")


def _as_called(made: _Made, **changed: Any) -> tuple[Callable[..., _Made], tuple[()]]:
    """Return how to make a value again, for pickle, which has no way with a `MappingProxyType`."""
    given = {f.name: getattr(made, f.name) for f in fields(made)}
    return partial(type(made), **(given | changed)), ()


@dataclass(frozen=True)
class DimensionForm:
    """A dimension as JSON: what is known of the values stands in the order of the values."""

    values: Sequence[Scalar]
    payloads: Sequence[Any] = ()
    hints: Sequence[CostHint | None] = ()
    when: Mapping[str, Sequence[Scalar | None]] | None = None
    trial_cost_s: Number = 0.0
    trial_costs_s: Sequence[Number | None] = ()
    fresh_worker: bool = False
    accumulation: Sequence[bool | None] = ()
    opt_in: bool = False
    lever: Scalar | None = None

    @classmethod
    def of(cls, dimension: Dimension) -> DimensionForm:
        """Return the form of a dimension."""
        known = {f.name: getattr(dimension, f.name) for f in fields(cls)}
        in_order = {name: list(map(known[name].get, dimension.values)) for name in _BY_VALUE}
        return cls(**(known | in_order))

    def dimension(self) -> Dimension:
        """Return the dimension of a form.

        Raises:
            InvalidArgument: there is none of these values.
        """
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in _BY_VALUE:
            pairs = zip(self.values, known[name], strict=False)
            known[name] = {value: of for value, of in pairs if of is not None}
        return Dimension(**known)


def forms_of(dimensions: Mapping[str, Dimension]) -> dict[str, DimensionForm]:
    """Return dimensions as JSON has them."""
    return {name: DimensionForm.of(dimension) for name, dimension in dimensions.items()}


def dimensions_of(forms: Mapping[str, DimensionForm]) -> dict[str, Dimension]:
    """Return the dimensions that `forms_of` wrote.

    Raises:
        InvalidArgument: a form has values of which there is no dimension.
    """
    return {name: form.dimension() for name, form in forms.items()}
