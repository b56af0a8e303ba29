"""The parity gate: find the units that train differently when they are checkpointed.

Steps on a tiny batch are compared, plainly and with units checkpointed. Units are tried many at a
time, and halved where something differs, so a model with nothing wrong costs a few steps. Units of
one kind stay together and are judged by a few of them, so that a kind that differs costs little.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations as class_of

from autofit.strategy import Comparison

from .units import KEEPING, Unit, make_of

SEEDS = (0, 1, 2)
# A model in which this many units differ is not worth more steps; the rest is left out untried.
MAX_COMPARISONS = 60

# Units of one kind that differ, and none that does not, for the rest to be left out untried.
ENOUGH_OF_A_KIND = 3

_NEVER_RUN = "not tried: no step on a few samples ran it, nor a module like it"
_TOO_MANY = "not tried: too many parts of this model differ when recomputed"
_TOO_LARGE = "not tried: without it a step does not fit into memory"
_PLAIN_TOO_LARGE = "not tried: a step without checkpointing does not fit into memory"


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
    model: nn.Module,
    compare: Compare,
    layers: Sequence[Sequence[str]],
    seeds: Sequence[int] = SEEDS,
) -> Parity:
    """Compare each unit of these lists with and without checkpointing.

    Args:
        model: has the units.
        compare: compares steps of it.
        layers: units; no list has nested ones, and outer ones come first.
        seeds: of the random numbers; one is enough for steps that draw none.

    Raises:
        torch.OutOfMemoryError: no step fits into memory.
    """
    gate = _Gate(model, compare, layers)
    try:
        if not gate.fits_plainly(layers, seeds):  # tried again out here, where its tensors are gone
            gate.always = frozenset(layers[0])
            gate.search_all(layers[:1], seeds)
            gate.leave_out(chain(*layers[1:]), _PLAIN_TOO_LARGE)
    except _UnrepeatableStep as why:
        gate.parity.left_out = dict.fromkeys(chain(*layers), str(why))
    return gate.parity


class _Gate:
    """Searches units for those that differ.

    Attributes:
        parity: what is known so far.
        always: units that are checkpointed in the reference step, where none else fits.
    """

    def __init__(self, model: nn.Module, compare: Compare, layers: Sequence[Sequence[str]]) -> None:
        self.parity = Parity()
        self.always: frozenset[str] = frozenset()
        self._model = model
        self._compare_steps = compare
        self._seed = SEEDS[0]
        self._comparisons = 0
        self._ran: set[str] = set()
        self._kinds = {unit: _kind(unit, model) for unit in chain(*layers)}
        self._harmless_kinds: set[Hashable] = set()

    def fits_plainly(self, layers: Sequence[Sequence[str]], seeds: Sequence[int]) -> bool:
        """Search against steps without checkpointing; return whether these fit into memory."""
        try:
            self.search_all(layers, seeds)
        except torch.OutOfMemoryError:
            if not layers:
                raise
            return False
        return True

    def search_all(self, layers: Sequence[Sequence[str]], seeds: Sequence[int]) -> None:
        """Search these lists from each seed, and leave out units that no step has run.

        From further seeds, units within others make no difference as long as none of those does,
        but for units that keep their products: they run again what others do not.
        """
        self._compare(())  # whether a step repeats is no matter of the seed
        for self._seed in seeds:
            differs = self._seed == seeds[0]
            for layer in layers:
                units = {u for u in layer if differs or layer is layers[0] or u.endswith(KEEPING)}
                units -= self.parity.left_out.keys()
                self._search(sorted(units, key=lambda unit: (str(self._kinds[unit]), unit)))
                differs = differs or not self.parity.left_out.keys().isdisjoint(layer)
        self.leave_out(self._never_run([*chain(*layers)]), _NEVER_RUN)

    def leave_out(self, units: Iterable[str], why: str) -> None:
        self.parity.left_out |= dict.fromkeys(units, why)

    def _search(self, units: Sequence[str]) -> None:
        """Note those of the units, sorted by kind, that train differently when checkpointed."""
        if not units:
            return
        why = self._of_its_kind(units) or self._difference(units)
        if why is None:
            self._harmless_kinds.update(self._kinds[unit] for unit in units)
        elif len(units) == 1 or self._of_its_kind(units):
            self.leave_out(units, why)
        else:
            known = len(self.parity.left_out)
            middle = self._middle(units)
            self._search(units[:middle])
            self._search(units[middle:])
            none_alone = len(self.parity.left_out) == known
            if none_alone and why != _TOO_LARGE:  # harmless apart, harmful together
                self.leave_out(units[middle:], f"{why}, together with others")

    def _of_its_kind(self, units: Sequence[str]) -> str | None:
        """Return how units of the same kind differ; None: several kinds, or too little is known."""
        kind, *others = {self._kinds[unit] for unit in units}
        if others or kind in self._harmless_kinds:
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
        """Return how a step with these units checkpointed differs, or None if it does not."""
        if self._comparisons >= MAX_COMPARISONS:
            return _TOO_MANY
        try:
            found = self._compare(units)
        except torch.OutOfMemoryError:
            if not self.always:
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
            self.always ^ set(units),
            reference=self.always,
            state=self.parity.state,
            seed=self._seed,
        )
        if not found.is_repeatable:
            raise _UnrepeatableStep(*found.differences)
        self._ran |= found.ran
        is_new = not found.changes <= self.parity.state
        self.parity.state |= found.changes
        return found if found.equal or not is_new else self._compare(units)

    def _never_run(self, units: Sequence[str]) -> list[str]:
        """Return units that every step skipped, unless one of their make was found harmless."""
        makes = {unit: make_of(unit, self._model) for unit in units}
        ran = set(map(self._model.get_submodule, self._ran))
        skipped = {unit for unit in units if ran.isdisjoint(_modules(unit, self._model))}
        harmful = {makes[unit] for unit in units if unit in self.parity.left_out}
        harmless = {makes[unit] for unit in units if unit not in skipped} - harmful
        return [unit for unit in units if unit in skipped and makes[unit] not in harmless]


def _kind(unit: str, model: nn.Module) -> Hashable:
    """Return the classes of a unit's outermost modules, and whether it keeps its products."""
    names = (class_of(module).__qualname__ for module in _modules(unit, model))
    return Unit.parse(unit).keeps_products, *names


def _modules(unit: str, model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in Unit.parse(unit).modules(model)]
