"""A plan in parts: per strategy what it does, in code and in the terms that trainers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autofit.plan import ResolvedPlan, Scalar, Settings, unlike
from autofit.strategy import Strategy


@dataclass(frozen=True)
class Part:
    """What one strategy does in a plan.

    Attributes:
        settings: those that are not at their default.
        lines: of code that does the same, as `Strategy.describe` gives them.
        terms: the same in standard terms (`autofit.strategy.STANDARD_TERMS`); {}: it has none.
    """

    settings: Settings
    lines: Sequence[str]
    terms: Mapping[str, Scalar] = field(default_factory=dict)


def parts_of(resolved: ResolvedPlan, defaults: Settings) -> tuple[Part, ...]:
    """Return the parts of a plan, in the order in which they are applied.

    Args:
        resolved: the plan.
        defaults: every setting at its first value.
    """
    return tuple(
        Part(changed, lines_of(strategy.describe(settings, payloads)), terms_of(strategy, settings))
        for strategy, settings, payloads in resolved.by_strategy()
        if (changed := unlike(settings, defaults))
    )


def lines_of(described: object) -> list[str]:
    """Return what `describe` of a plug-in returned as lines, a whole text too."""
    if isinstance(described, str):
        return described.splitlines()
    return [str(line) for line in described] if isinstance(described, Iterable) else []


def terms_of(strategy: Strategy, settings: Settings) -> Mapping[str, Scalar]:
    """Return the settings in standard terms; {} if the strategy offers none."""
    in_terms: Callable[[Settings], Mapping[str, Scalar]] | None = getattr(
        strategy, "in_standard_terms", None
    )
    return in_terms(settings) if in_terms else {}
