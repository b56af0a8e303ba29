"""The parity gate: find the units that train differently when they are checkpointed.

Steps on a tiny batch are compared, plainly and with units checkpointed. Units are tried many at a
time, and halved where something differs, so a model with nothing wrong costs a few steps. Units of
one kind stay together and are judged by a few of them, so that a kind that differs costs little.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from autofit.strategy import Comparison, Context

from .units import Unit, make_of

SEEDS = (0, 1, 2)
# A model in which so many units differ is not worth more steps; the rest is left out untried.
MOST_COMPARISONS = 60

# Units of one kind that differ, and none that does not, for the rest to be left out untried.
ENOUGH_OF_A_KIND = 3

_NEVER_RUN = "not tried: no step on a few samples ran it, nor a module like it"
_TOO_LARGE = "not tried: without it a step does not fit into memory"


class Compare(Protocol):
    """Compares a step with these units checkpointed with one that has those of `reference`."""

    def __call__(
        self, units: Collection[str], reference: Collection[str], state: Collection[str], seed: int
    ) -> Comparison: ...


@dataclass
class Parity:
    """Result of the gate.

    Attributes:
        left_out: unit -> how its recomputation changes the training.
        state: names of the buffers and random states that a forward pass changes and that its
            recomputation must find unchanged, for `checkpointed`.
    """

    left_out: dict[str, str] = field(default_factory=dict)
    state: set[str] = field(default_factory=set)


class _UnrepeatableStep(Exception):
    """Two steps without checkpointing from the same state differ."""


def find_parity(
    context: Context,
    compare: Compare,
    layers: Sequence[Sequence[str]],
    seeds: Sequence[int] = SEEDS,
) -> Parity:
    """Compare each unit of these lists with and without checkpointing.

    Args:
        context: holds the model.
        compare: compares steps of it.
        layers: units; no list has nested ones.
        seeds: of the random numbers; one is enough for steps that draw none.

    Raises:
        torch.OutOfMemoryError: no step fits into memory.
    """
    gate = _Gate(context, compare, seeds)
    try:
        if not gate.fits_plainly(layers):
            gate.compare_within(layers)
    except _UnrepeatableStep as why:
        gate.parity.left_out = dict.fromkeys((unit for layer in layers for unit in layer), str(why))
    return gate.parity


class _Gate:
    def __init__(self, context: Context, compare: Compare, seeds: Sequence[int]) -> None:
        self.parity = Parity()
        self._seeds = seeds
        self._context = context
        self._compare_steps = compare
        self._seed = seeds[0]
        self._comparisons = 0
        self._always: frozenset[str] = frozenset()
        self._ran: set[str] = set()
        self._kinds: dict[str, Hashable] = {}
        self._harmless: set[Hashable] = set()

    def fits_plainly(self, layers: Sequence[Sequence[str]]) -> bool:
        """Compare with steps without checkpointing, and return whether these fit into memory."""
        try:
            self.compare(layers)
        except torch.OutOfMemoryError:
            if not layers:
                raise
            return False
        return True

    def compare_within(self, layers: Sequence[Sequence[str]]) -> None:
        """Where a step without checkpointing does not fit: all outermost units against fewer."""
        outermost, *inner = layers
        self._always = frozenset(outermost)
        self.compare([outermost])
        too_large = "not tried: a step without checkpointing does not fit into memory"
        self.parity.left_out |= {unit: too_large for layer in inner for unit in layer}

    def compare(self, layers: Sequence[Sequence[str]]) -> None:
        """Search all layers; from further seeds, those within outer units that differ then.

        An outer unit runs again all that the whole units within it do.
        """
        model = self._context.model
        self._kinds = {unit: _kind(unit, model) for layer in layers for unit in layer}
        self._compare(())  # whether a step repeats is no matter of the seed
        for seed in self._seeds:
            self._seed = seed
            covered: set[str] = set()
            for layer in layers:
                units = [unit for unit in layer if unit not in self.parity.left_out]
                if seed != self._seeds[0]:
                    units = [unit for unit in units if not self._is_within(unit, covered)]
                self.search(sorted(units, key=lambda unit: str(self._kinds[unit])))
                alike = [unit for unit in units if unit not in self.parity.left_out]
                covered.update(part for unit in alike for part in self._names_of(unit))
        self.parity.left_out |= dict.fromkeys(self._never_run(layers), _NEVER_RUN)

    def _names_of(self, unit: str) -> list[str]:
        return Unit.parse(unit).parts(self._context.model)

    def _is_within(self, unit: str, covered: Collection[str]) -> bool:
        """Return whether all modules of a unit are, or lie within, those with these names.

        One that keeps its products is within no other: it runs again what others do not.
        """
        return not Unit.parse(unit).keeps_products and all(
            any(part == name or name == "" or part.startswith(f"{name}.") for name in covered)
            for part in self._names_of(unit)
        )

    def search(self, units: Sequence[str]) -> None:
        """Note those of the units, sorted by kind, that train differently when checkpointed."""
        if not units:
            return
        reason = self._of_its_kind(units) or self._difference(units)
        if reason is None:
            self._harmless.update(self._kinds[unit] for unit in units)
            return
        if len(units) == 1 or self._of_its_kind(units):
            self.parity.left_out |= dict.fromkeys(units, reason)
            return
        known = len(self.parity.left_out)
        middle = self._middle(units)
        self.search(units[:middle])
        self.search(units[middle:])
        none_alone = len(self.parity.left_out) == known
        if none_alone and reason != _TOO_LARGE:  # harmless apart, harmful together
            together = f"{reason}, together with others"
            self.parity.left_out |= dict.fromkeys(units[middle:], together)

    def _of_its_kind(self, units: Sequence[str]) -> str | None:
        """Return how units of the same kind differ; None: several kinds, or too little is known."""
        (kind, *others) = {self._kinds[unit] for unit in units}
        if others or kind in self._harmless:
            return None
        known = [why for unit, why in self.parity.left_out.items() if self._kinds[unit] == kind]
        return known[0] if len(known) >= ENOUGH_OF_A_KIND else None

    def _middle(self, units: Sequence[str]) -> int:
        """Return where to cut: between two kinds if there are several."""
        half = len(units) // 2
        kinds = [self._kinds[unit] for unit in units]
        cuts = [index for index in range(1, len(units)) if kinds[index] != kinds[index - 1]]
        return min(cuts, key=lambda cut: abs(cut - half), default=half)

    def _difference(self, units: Sequence[str]) -> str | None:
        """Return how a step with these units checkpointed differs; None: it does not."""
        if self._comparisons >= MOST_COMPARISONS:
            return "not tried: too many parts of this model differ when recomputed"
        try:
            found = self._compare(units)
        except torch.OutOfMemoryError:
            if not self._always:
                raise
            return _TOO_LARGE
        if found.equal:
            return None
        first = next(iter(found.differences), "loss or gradients")
        raises = first.startswith("it raises")
        return f"it cannot be recomputed ({first})" if raises else f"it changes {first}"

    def _compare(self, units: Collection[str]) -> Comparison:
        """Compare a step with these units checkpointed, or left out of those that always are.

        Raises:
            _UnrepeatableStep: a step without them differs from itself.
        """
        self._comparisons += 1
        found = self._compare_steps(
            self._always ^ set(units),
            reference=self._always,
            state=self.parity.state,
            seed=self._seed,
        )
        if not found.is_repeatable:
            raise _UnrepeatableStep(*found.differences)
        self._ran |= found.ran
        is_new = not found.changes <= self.parity.state
        self.parity.state |= found.changes
        return found if found.equal or not is_new else self._compare(units)

    def _never_run(self, layers: Sequence[Sequence[str]]) -> set[str]:
        """Return units that every step skipped, unless one of their make was found harmless."""
        model = self._context.model
        units = [unit for layer in layers for unit in layer]
        makes = {unit: make_of(unit, model) for unit in units}
        called = set(map(model.get_submodule, self._ran))
        ran = {unit for unit in units if called.intersection(_parts(unit, model))}
        harmful = {makes[unit] for unit in self.parity.left_out}
        harmless = {makes[unit] for unit in ran} - harmful
        return {unit for unit in makes.keys() - ran if makes[unit] not in harmless}


def _kind(unit: str, model: nn.Module) -> Hashable:
    """Return the classes of a unit's outermost modules, and whether it keeps its products."""
    names = (type_before_parametrizations(part).__qualname__ for part in _parts(unit, model))
    return Unit.parse(unit).keeps_products, *names


def _parts(unit: str, model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(part) for part in Unit.parse(unit).parts(model)]
