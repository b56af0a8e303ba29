"""Strategies by the entry-point group `autofit.strategies`, and plans completed with them.

A plug-in that breaks the contract is refused before anything is measured with it; the message names
it and its origin. No strategy is known by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from itertools import pairwise
from typing import Any

from autofit.codec import from_json, to_json
from autofit.dimension import DimensionForm, check_are_words, dimensions_of, forms_of, payloads_of
from autofit.errors import InvalidArgument
from autofit.plan import (
    Dimension,
    Plan,
    ResolvedPlan,
    settings_of,
)
from autofit.space import Space
from autofit.strategy import Context, Numerics, Phase, Strategy

GROUP = "autofit.strategies"
GROUP_OF_RANKS = "autofit.strategies.of_ranks"
"""Strategies for models that several ranks train: where one device trains alone, they are not even
imported."""


class Unnamed(tuple[Strategy, ...]):
    """Strategies for a search that its caller did not name: what is costly to try needs a name."""

    __slots__ = ()


def installed_names() -> tuple[str, ...]:
    """Return the sorted names of all installed strategies without importing them."""
    return tuple(sorted(_installed(GROUP, GROUP_OF_RANKS)))


def names_of_ranks() -> tuple[str, ...]:
    """Return the sorted names of the installed strategies for several ranks, importing none."""
    return tuple(sorted(_installed(GROUP_OF_RANKS)))


def check_installed(name: str) -> None:
    """Refuse a name that no installed strategy has, without importing one.

    Raises:
        InvalidArgument: there is no such strategy.
    """
    installed = installed_names()
    if name not in installed:
        known = ", ".join(installed) or "none (is torch-autofit installed?)"
        raise InvalidArgument(f"unknown strategy {name!r}; installed: {known}")


def unavailable(strategies: Iterable[Strategy], device_type: str) -> Iterator[str]:
    """Yield each of these strategies that this machine lacks something for, with the reason."""
    for strategy in strategies:
        why = getattr(strategy, "unavailable", lambda device_type: None)(device_type)
        if why is not None:
            yield f"{strategy.name}: {why}"


def load_strategies(
    strategies: Iterable[str | Strategy] | None = None,
    *,
    numerics: Numerics | str = Numerics.REDUCED_PRECISION,
    plan: Plan | None = None,
    ranks: int = 1,
) -> tuple[Strategy, ...]:
    """Return the strategies that a search may use.

    Args:
        strategies: names of installed strategies, or Strategy objects; None: all installed ones
            that `numerics` allows, but for those that are used by name only.
        numerics: how far a plan may change the arithmetic, as a level or its name.
        plan: to run, whose settings name strategies too.
        ranks: how many ranks train; from two on, strategies of `GROUP_OF_RANKS` join.

    Returns:
        Strategies ordered by phase, and by name within a phase.

    Raises:
        InvalidArgument: an unknown name or level, a given strategy that goes further than
            `numerics`, two strategies of one name, or a plug-in that breaks the contract.
    """
    allowed = numerics_level(numerics)
    if strategies is None:
        groups = (GROUP, GROUP_OF_RANKS) if ranks > 1 else (GROUP,)
        loaded = [_load(entry) for entry in _installed(*groups).values()]
        named = {setting.partition(".")[0] for setting in (plan.settings if plan else ())}
        return _in_order(
            strategy
            for each in loaded
            if (strategy := _within(each, allowed)) is not None
            and (strategy.name in named or not getattr(strategy, "by_name_only", False))
        )
    if isinstance(strategies, str):
        strategies = [strategies]
    if not isinstance(strategies, Iterable):
        raise InvalidArgument(f"strategies must be names or Strategy objects, got {strategies!r}")
    chosen = [_by_name(one) if isinstance(one, str) else _checked(one) for one in strategies]
    for place, strategy in enumerate(chosen):
        if (narrowed := _within(strategy, allowed)) is None:
            raise InvalidArgument(
                f"the strategy {strategy.name!r} needs "
                f"numerics={strategy.numerics.name.lower()!r}, "
                f"but only numerics={allowed.name.lower()!r} is allowed: drop the "
                f"strategy, or pass numerics={strategy.numerics.name.lower()!r}"
            )
        chosen[place] = narrowed
    return _in_order(chosen)


def strategies_of(
    plan: Plan,
    given: Iterable[str | Strategy] | None = None,
    remembered: Sequence[Strategy] = (),
) -> tuple[Strategy, ...]:
    """Return the strategies that a plan's settings belong to; of several ranks, those for them too.

    Args:
        plan: its settings name them.
        given: names or Strategy objects that come first, and are returned in any case.
        remembered: objects that come before the installed ones of their names.

    Raises:
        InvalidArgument: a strategy is not installed, or breaks the contract.
    """
    chosen = [given] if isinstance(given, str) else list(given or ())
    known = {strategy.name: strategy for strategy in remembered}
    named = {one if isinstance(one, str) else getattr(one, "name", "") for one in chosen}
    needed = {setting.partition(".")[0] for setting in plan.settings}
    if plan.ranks > 1:
        needed |= {*names_of_ranks()}
    return load_strategies([*chosen, *(known.get(name, name) for name in sorted(needed - named))])


def resolve(
    plan: Plan | None,
    space: Space,
    strategies: Sequence[Strategy] = (),
    payloads: Mapping[str, Any] | None = None,
) -> ResolvedPlan:
    """Complete a plan so that it can run.

    Args:
        plan: settings that it leaves out get their first value; None: the space's baseline.
        space: the values that the settings can have, and their payloads.
        strategies: those that may have settings in the plan.
        payloads: by setting, in place of the space's. A setting of these strategies that has one
            here may have any value.

    Raises:
        InvalidArgument: a setting or a value that the space does not have, or a given payload that
            its strategy cannot read.
    """
    chosen = plan or space.baseline
    names = {strategy.name for strategy in strategies}
    given = {
        setting: payload
        for setting, payload in (payloads or {}).items()
        if setting in chosen.settings and setting.partition(".")[0] in names
    }
    known = space.complete({n: v for n, v in chosen.settings.items() if n not in given})
    settings = {**known, **chosen.settings}
    _check_accumulation(chosen, space)
    used = {setting.partition(".")[0] for setting in settings}
    resolved = ResolvedPlan(
        replace(chosen, settings=settings),
        {**payloads_of(space.dimensions, known), **given},
        tuple(strategy for strategy in strategies if strategy.name in used),
    )
    _check_payloads(resolved, given)
    return resolved


def _check_accumulation(plan: Plan, space: Space) -> None:
    for name, dimension in space.dimensions.items() if plan.accumulation_steps > 1 else ():
        value = plan.settings.get(name, dimension.values[0])
        if dimension.accumulation.get(value) is False:
            raise InvalidArgument(
                f"{name}={value} needs a plan with one micro-batch a step, but this one has "
                f"{plan.accumulation_steps}: choose another value, or micro_batch="
                f"{plan.samples_per_step}"
            )


def _check_payloads(resolved: ResolvedPlan, given: Mapping[str, Any]) -> None:
    """Have the strategies read the payloads that came from outside, before a training does."""
    for strategy, settings, payloads in resolved.by_strategy():
        own = sorted(settings_of(strategy.name, given))
        try:
            if own:
                strategy.describe(settings, payloads)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidArgument(
                f"cannot read the payload of {', '.join(own)} ({type(error).__name__}: "
                f"{error}): pass it as it appears in a report or plan file"
            ) from error


def collect_dimensions(strategies: Sequence[Strategy], context: Context) -> dict[str, Dimension]:
    """Return every dimension that these strategies offer for the context's model and device.

    An exception raised by a strategy, or by the user's model while a strategy runs it, keeps its
    type and gets a note that names the strategy.

    Raises:
        InvalidArgument: the dimensions of a strategy break the contract.
    """
    found: dict[str, Dimension] = {}
    for strategy in strategies:
        try:
            offered = strategy.dimensions(context)
        except Exception as error:
            error.add_note(f"while the strategy {strategy.name!r} looked for its settings")
            raise
        _check_dimensions(strategy, offered)
        found.update(offered)
    return found


def numerics_level(numerics: Numerics | str) -> Numerics:
    """Return the level of that name; a level is returned as it is.

    Raises:
        InvalidArgument: there is no such level.
    """
    if isinstance(numerics, Numerics):
        return numerics
    try:
        return Numerics.parse(numerics)
    except (KeyError, AttributeError):
        known = ", ".join(level.name.lower() for level in Numerics)
        raise InvalidArgument(f"numerics must be one of {known}, got {numerics!r}") from None


def numerics_of(strategy: Strategy, setting: str) -> Numerics:
    """Return how far a setting may change the arithmetic."""
    own: Mapping[str, Numerics] = getattr(strategy, "numerics_of", {})
    return own.get(setting, strategy.numerics)


def _installed(*groups: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in (entry for group in groups for entry in entry_points(group=group)):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise InvalidArgument(
                f"two installed strategies are named {entry.name!r}: {_origin(other)} and "
                f"{_origin(entry)}. Uninstall one of them"
            )
    return found


def _by_name(name: str) -> Strategy:
    check_installed(name)
    return _load(_installed(GROUP, GROUP_OF_RANKS)[name])


def _load(entry: EntryPoint) -> Strategy:
    try:
        loaded = entry.load()
        strategy = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # else it would end a command as if all were well
        raise InvalidArgument(
            f"cannot load the strategy plug-in {_origin(entry)} ({type(error).__name__}: "
            f"{error}): fix or uninstall it, or name the strategies to use"
        ) from error
    checked = _checked(strategy, _origin(entry))
    if checked.name != entry.name:
        raise InvalidArgument(
            f"the strategy plug-in {_origin(entry)} is named {checked.name!r}: its "
            "entry point and its `name` must match"
        )
    return checked


def _checked(strategy: object, origin: str | None = None) -> Strategy:
    """Return the object after checking those parts of the contract that need no run."""
    who = f"the strategy plug-in {origin or repr(strategy)}"
    if isinstance(strategy, type):
        raise InvalidArgument(f"{who} is a class: pass an instance")
    if not isinstance(strategy, Strategy):
        wanted = ("name", "phase", "numerics", "dimensions", "apply", "describe")
        lacking = ", ".join(name for name in wanted if not hasattr(strategy, name))
        raise InvalidArgument(f"{who} is not a Strategy: it has no {lacking}")
    if not isinstance(strategy.name, str) or not strategy.name.isidentifier():
        raise InvalidArgument(
            f"{who} needs a name that is a valid identifier, got {strategy.name!r}"
        )
    if not isinstance(strategy.phase, Phase):
        raise InvalidArgument(f"{who} needs a phase from autofit.Phase, got {strategy.phase!r}")
    if not isinstance(strategy.numerics, Numerics):
        raise InvalidArgument(
            f"{who} needs numerics from autofit.Numerics, got {strategy.numerics!r}"
        )
    return strategy


def _within(strategy: Strategy, allowed: Numerics) -> Strategy | None:
    """Return the strategy, or what it narrows itself to, if it goes no further than allowed."""
    if strategy.numerics <= allowed:
        return strategy
    narrow = getattr(strategy, "within", None)
    return None if narrow is None else _checked(narrow(allowed))


def _in_order(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    ordered = sorted(strategies, key=lambda strategy: (strategy.phase, strategy.name))
    for one, other in pairwise(ordered):
        if one.name == other.name:
            raise InvalidArgument(f"the strategy {one.name!r} was passed twice")
    return tuple(ordered)


def _check_dimensions(strategy: Strategy, offered: object) -> None:
    who = f"the strategy {strategy.name!r}"
    if not isinstance(offered, Mapping):
        raise InvalidArgument(f"{who} must return a mapping of dimensions, got {offered!r}")
    for name, dimension in offered.items():
        if not isinstance(name, str) or not name.startswith(f"{strategy.name}."):
            raise InvalidArgument(
                f"{who} offers the setting {name!r}, which must begin with '{strategy.name}.'"
            )
        if not isinstance(dimension, Dimension):
            raise InvalidArgument(f"{who} offers {name} as {dimension!r}, which is not a Dimension")
        try:
            _check_readable(name, dimension)
        except (InvalidArgument, TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(
                f"{who} offers {name!r} with a value that a report or study could not read back: "
                f"{error}"
            ) from error


def _check_readable(name: str, dimension: Dimension) -> None:
    """Write a dimension as a study and a report do, and read it again.

    Raises:
        InvalidArgument, TypeError, ValueError, RecursionError: it cannot be read, or is another.
    """
    written = to_json(forms_of({name: dimension}))
    json.dumps(written, ensure_ascii=False, allow_nan=False).encode()
    read = from_json(written, dict[str, DimensionForm], "its dimension")
    check_are_words(read, ())
    if to_json(forms_of(dimensions_of(read))) != written:
        raise InvalidArgument(
            "its values or payloads change when they are written as JSON and read back"
        )


def _origin(entry: EntryPoint) -> str:
    home = f" of {entry.dist.name}" if entry.dist is not None else ""
    return f"{entry.name!r} ({entry.value}{home})"
