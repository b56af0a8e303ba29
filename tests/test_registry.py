"""Strategies are found by entry point, filtered by numerics, refused in words that name them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit import registry
from autofit.errors import InvalidArgument
from autofit.plan import Dimension, Plan
from autofit.registry import (
    collect_dimensions,
    installed_names,
    load_strategies,
    resolve,
    strategies_of,
)
from autofit.space import Space
from autofit.strategy import Context, Numerics
from autofit.testing import PlainContext
from autofit.training.workload import Workload
from tests.plugin import Plugin


class Doubling(Plugin):
    name = "doubling"
    numerics = Numerics.ROUNDING

    def __init__(self, offered: Any = None) -> None:
        self.offered = offered

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        if isinstance(self.offered, Exception):
            raise self.offered
        return super().dimensions(context) if self.offered is None else self.offered


def _context() -> PlainContext:
    return PlainContext(lambda: Workload(torch.nn.Linear(1, 1), torch.zeros(2, 1)))


def test_all_strategies_come_in_phase_order_from_the_package_they_install_as() -> None:
    strategies = load_strategies()
    by_name_only = set(installed_names()) - {strategy.name for strategy in strategies}
    assert by_name_only == {"parallel"}
    assert [s.phase for s in strategies] == sorted(s.phase for s in strategies)
    (precision,) = load_strategies("precision")
    assert type(precision).__module__ == "autofit.strategies.precision"
    assert "strategies" not in sys.modules


def broken(attribute: str, value: Any) -> Doubling:
    strategy = Doubling()
    setattr(strategy, attribute, value)
    return strategy


@pytest.mark.parametrize("level", list(Numerics))
def test_numerics_filters(level: Numerics) -> None:
    found = {s.name: s for s in load_strategies(numerics=level.name.lower())}
    assert all(strategy.numerics <= level for strategy in found.values())
    assert set(found) >= {s.name for s in load_strategies() if s.numerics <= level}
    assert "checkpointing" in found


@pytest.mark.parametrize(
    ("strategies", "level", "words"),
    [
        (["precision"], "exact", r"'precision'.*'exact'"),
        ([Doubling(), Doubling()], "rounding", r"'doubling'.*twice"),
        ([object()], "rounding", r"Strategy.*describe"),
        ([Doubling], "rounding", "class"),
        ([broken("name", "two words")], "rounding", "name"),
        ([broken("phase", 1)], "rounding", "phase"),
        ([broken("numerics", "exact")], "rounding", "numerics"),
        *(
            (None, level, f"exact, rounding, reduced_precision.*{level!r}")
            for level in ("roughly", 1, None)
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(strategies: Any, level: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        load_strategies(strategies, numerics=level)


PLUGIN = """
from {module} import Doubling
class Other(Doubling):
    name = "other"
class Failing:
    def __init__(self):
        raise OSError("no such table")
class Leaving:
    def __init__(self):
        raise SystemExit(0)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a third party's that an entry point can name."""
    monkeypatch.setitem(sys.modules, "home_of_doubling", sys.modules[__name__])
    (tmp_path / "third_party.py").write_text(PLUGIN.format(module="home_of_doubling"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "third_party", raising=False)
    return "third_party"


def _install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    points = [EntryPoint(name, value, registry.GROUP) for name, value in entries]
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [each for each in points if each.group == group]
    )


def test_a_plugin_is_loaded_by_its_entry_point(
    plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch, ("doubling", f"{plugin}:Doubling"), ("other", f"{plugin}:Other"))
    assert [strategy.name for strategy in load_strategies()] == ["doubling", "other"]


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("doubling", ["Missing"], "'doubling'.*AttributeError"),
        ("doubling", ["Failing"], "'doubling'.*no such table"),
        ("doubling", ["Leaving"], "'doubling'.*SystemExit"),
        ("doubled", ["Doubling"], "'doubled'.*'doubling'"),
        ("doubling", ["Doubling.describe"], "'doubling'.*Strategy"),
        ("doubling", ["Doubling", "Other"], r"two.*'doubling'"),
    ],
)
def test_a_broken_plugin_is_named(
    plugin: str, monkeypatch: pytest.MonkeyPatch, name: str, targets: list[str], message: str
) -> None:
    _install(monkeypatch, *((name, f"{plugin}:{target}") for target in targets))
    with pytest.raises(InvalidArgument, match=message):
        load_strategies()


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        ({"twice.on": Dimension([0, 1])}, "'twice.on'"),
        ({"doubling.on": [0, 1]}, "Dimension"),
        ([], "mapping"),
        ({"doubling.on": Dimension(["default", "max autotune"])}, "'max autotune'"),
        ({"doubling.on": Dimension(["default", "a/b"])}, "'a/b'"),
        ({"doubling.a\nprint(1)": Dimension([0, 1])}, "not a valid name"),
        ({"doubling.on": Dimension([(0, 1), (1, 0)])}, "doubling.on"),  # type: ignore[list-item]
        ({"doubling.on": Dimension([0.0, math.nan])}, "doubling.on"),
        ({"doubling.on": Dimension([0, 10**30])}, "doubling.on"),
        ({"doubling.on": Dimension([0, 1], payloads={1: object()})}, "doubling.on.*object"),
        ({"doubling.on": Dimension([0, 1], payloads={1: [math.inf]})}, "doubling.on"),
        ({"doubling.on": Dimension([0, 1], payloads={1: {"a;b": 1}})}, "'a;b'"),
        ({"doubling.on": Dimension([0, 1], payloads={1: "\ud800"})}, "doubling.on"),
    ],
)
def test_broken_dimensions_are_refused(offered: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'doubling' .*{message}"):
        collect_dimensions([Doubling(offered)], _context())


def test_a_users_exception_keeps_its_type_and_names_the_strategy() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        collect_dimensions([Doubling(ZeroDivisionError())], _context())
    assert "'doubling'" in caught.value.__notes__[0]


LEVELS = Space({"doubling.on": Dimension([0, 1, 2], payloads={1: ["a"], 2: ["a", "b"]})}, 8)


def test_a_plan_is_resolved_with_the_space_s_values_and_payloads() -> None:
    doubling = Doubling()
    plain = resolve(None, LEVELS, [doubling])
    assert (plain.plan, plain.payloads) == (LEVELS.baseline, {})
    chosen = resolve(Plan(4, settings={"doubling.on": 2}), LEVELS, [doubling])
    assert [*chosen.by_strategy()] == [(doubling, {"doubling.on": 2}, {"doubling.on": ["a", "b"]})]
    with pytest.raises(InvalidArgument, match=r"doubling\.on.*\b7\b"):
        resolve(Plan(4, settings={"doubling.on": 7}), LEVELS, [doubling])


@pytest.mark.parametrize("payload", [7, "0", ["0"], {"unit": ["0"]}, {"units": ["0"]}])
def test_a_payload_that_its_strategy_cannot_read_is_refused(payload: Any) -> None:
    given = load_strategies(["checkpointing"]), {"checkpointing.level": payload}
    with pytest.raises(InvalidArgument, match=r"payload of checkpointing\.level"):
        resolve(Plan(4, settings={"checkpointing.level": 1}), Space({}, 8), *given)


def test_strategies_of_a_plan_are_those_given_remembered_or_installed() -> None:
    doubling, plan = Doubling(), Plan(4, settings={"doubling.on": 1, "precision.dtype": "default"})
    assert doubling in strategies_of(plan, remembered=[doubling])
    given = strategies_of(plan, [doubling], remembered=[Doubling()])
    assert doubling in given
    assert sorted(strategy.name for strategy in given) == ["doubling", "precision"]
    with pytest.raises(InvalidArgument, match="'doubling'"):
        strategies_of(plan)
