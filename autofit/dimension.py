"""Dimensions: the values that a setting may have, what is known of each, and their JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias

from autofit.codec import Number, SettingValue, without_controls
from autofit.errors import InvalidArgument

Scalar: TypeAlias = SettingValue
"""Type of a setting's value: it must fit into JSON and be an Optuna category."""

Settings: TypeAlias = Mapping[str, Scalar]
"""Values by setting name (`strategy.name`), such as {"precision.dtype": "bfloat16"}."""

VariantKey: TypeAlias = tuple[tuple[str, Scalar], ...]
"""Settings as a hashable key that does not depend on their order."""


def variant_key(settings: Settings) -> VariantKey:
    """Return the settings as (name, value) pairs sorted by name."""
    return tuple(sorted(settings.items()))


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


_BY_VALUE = ("payloads", "hints", "trial_costs_s", "accumulation", "labels")


MAX_VALUES = 1000
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
            a dimension with a cost are tried last, on the fastest plans only, where they are
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
        labels: what a value means in a few words, which reports show beside it ("recompute 6 of 12
            blocks").
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
    labels: Mapping[Scalar, str] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if self.when is not None:  # any iterable, which is asked again and again
            allowed = {n: v if isinstance(v, str) else tuple(v) for n, v in self.when.items()}
            object.__setattr__(self, "when", allowed)
        if not self.values:
            raise InvalidArgument("a dimension needs at least one value, the default")
        if len(self.values) > MAX_VALUES:
            raise InvalidArgument(
                f"a dimension has at most {MAX_VALUES} values, got {len(self.values)}: offer fewer"
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
        if not all(isinstance(words, str) for words in dict(self.labels).values()):
            raise InvalidArgument(f"labels are text by value, got {self.labels!r}")
        for name in _BY_VALUE:
            given = getattr(self, name)
            object.__setattr__(self, name, MappingProxyType(dict(given)))
            unknown = set(given) - set(self.values)
            if unknown:
                raise InvalidArgument(
                    f"{name} has values that the dimension does not: {sorted(map(str, unknown))}"
                )

    def __reduce__(self) -> tuple[Callable[..., Dimension], tuple[()]]:
        return as_called(self, **{name: dict(getattr(self, name)) for name in _BY_VALUE})

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
        """Whether three or more numbers grow, or fall, so that neighbours should act alike."""
        if len(self.values) < 3 or any(isinstance(v, bool | str) for v in self.values):
            return False
        growing = sorted(self.values, key=float)
        return list(self.values) in (growing, growing[::-1])

    def allowed_with(self, settings: Settings) -> bool:
        """Return whether `when` allows values other than the first next to these settings."""
        return all(settings.get(name) in allowed for name, allowed in (self.when or {}).items())


def _as_json(payload: Any) -> Any:
    """Return a payload as it would be read back; what is not JSON stays, for `check_strategy`."""
    try:
        return json.loads(json.dumps(payload))
    except (TypeError, ValueError):
        return payload


def as_called(made: Any, **changed: Any) -> tuple[Callable[..., Any], tuple[()]]:
    """Return how to rebuild a value, since pickle cannot handle a `MappingProxyType`.

    Args:
        made: an instance of a dataclass.
        changed: fields that are given in another form.
    """
    factory: Callable[..., Any] = type(made)
    given = {f.name: getattr(made, f.name) for f in fields(made)}
    return partial(factory, **(given | changed)), ()


@dataclass(frozen=True)
class DimensionForm:
    """A dimension as JSON, where facts about values are lists in the order of the values."""

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
    labels: Sequence[str | None] = ()

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


def payloads_of(dimensions: Mapping[str, Dimension], settings: Settings) -> dict[str, Any]:
    """Return the payloads of these values, by setting; plain values have none."""
    return {
        name: dimensions[name].payloads[value]
        for name, value in settings.items()
        if name in dimensions and value in dimensions[name].payloads
    }


_WORD = re.compile(r"[\w.+-]*")


def check_are_words(
    dimensions: Mapping[str, DimensionForm], settings: Iterable[Mapping[str, Any]]
) -> None:
    """Refuse a name or value that would be written into code and is not a plain word.

    Args:
        dimensions: setting -> a dimension as JSON has it.
        settings: of plans.

    Raises:
        InvalidArgument: one is not made of letters, digits, "_", ".", "+" and "-" alone.
    """
    values = [(*each.values, *each.payloads) for each in dimensions.values()]
    for text in _bare([*dimensions, *chain(*values), *settings]):
        if not _WORD.fullmatch(text):
            raise InvalidArgument(
                f"{without_controls(text)[:80]!r} is not a valid name or value of a setting: "
                'use only letters, digits, "_", ".", "+" and "-"'
            )


def _bare(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts among values and in mappings, but not in lists, such as names of modules.

    A list is written as Python writes it, with its texts in quotes.
    """
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _bare(chain(*value.items()))
