"""The parity gate: units that train otherwise when checkpointed are found and left out.

The user's own step runs on a tiny batch, plainly and with units checkpointed, from the same state
and seeds; then loss, gradients, parameters, buffers, what Python sees in the modules, and random
states are compared, to the bit wherever two plain runs agree to the bit. Units are tried many at
a time, and halved where something differs, so a model with nothing wrong costs a few steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autofit.strategy import TrainingView

from .checkpointed import checkpointed
from .state import ATTRIBUTE, State, altered, has_tensors, moved_since, seed_everything, traces
from .step_diff import LOSS, Noise, NotRepeatable, Remains, first_difference, gradients_into
from .units import Unit, make_of

SEEDS = (0, 1, 2)
MOST_STEPS = 300
"""A model in which so many units differ is not worth more steps; the untried ones are left out."""

NO_OTHERS: Mapping[str, Any] = MappingProxyType({})

_NEVER_RUN = "not tried: no step on a few samples ran it, or anything like it that may run twice"
_TOO_LARGE = "not tried: without it a step does not fit into memory"


@dataclass
class Parity:
    """What the gate found.

    Attributes:
        left_out: unit -> what its recomputation changes.
        state: what a forward pass changes and a second run must find as it was, as `checkpointed`
            takes it.
    """

    left_out: dict[str, str] = field(default_factory=dict)
    state: set[str] = field(default_factory=set)


def check_parity(training: TrainingView, batch: Any, layers: Sequence[Sequence[str]]) -> Parity:
    """Compare each unit of these lists with and without checkpointing.

    Args:
        training: a plain one, whose model may be run; it is put back after.
        batch: a few samples, on the device.
        layers: units; no list has nested ones.
    """
    gate = _Gate(training, batch)
    threads = torch.get_num_threads()
    try:
        if training.device.type == "cpu":
            torch.set_num_threads(1)  # several add in any order; one repeats to the bit
        try:
            gate.compare(layers)
        except torch.OutOfMemoryError:
            if not layers:
                raise
            gate.compare_within(layers)
    except NotRepeatable as why:
        gate.parity.left_out = dict.fromkeys((unit for layer in layers for unit in layer), str(why))
    finally:
        torch.set_num_threads(threads)
        gate.finish()
    return gate.parity


class _Gate:
    def __init__(self, training: TrainingView, batch: Any) -> None:
        self.parity = Parity()
        self._training = training
        self._batch = batch
        self._state = State(training.model)
        self._seed = 0
        self._steps = 0
        self._always: frozenset[str] = frozenset()
        self._called: set[nn.Module] = set()
        self._plain: Remains = {}
        self._noise = Noise(is_device_exact=training.device.type == "cpu")

    def compare(self, layers: Sequence[Sequence[str]]) -> None:
        """Search all layers, from several seeds."""
        self.find_state()
        for seed in SEEDS:
            self.start(seed)
            for layer in layers:
                self.search([unit for unit in layer if unit not in self.parity.left_out])
        self.parity.left_out |= dict.fromkeys(self._never_run(layers), _NEVER_RUN)

    def compare_within(self, layers: Sequence[Sequence[str]]) -> None:
        """Where a plain step does not fit: all outermost units against all but some of them."""
        outermost, *inner = layers
        self._always = frozenset(outermost)
        self.compare([outermost])
        too_large = "not tried: a step without checkpointing does not fit into memory"
        self.parity.left_out |= {unit: too_large for layer in inner for unit in layer}

    def find_state(self) -> None:
        """Note what the second of two steps changes: what the first one makes once is no state.

        Tensors that a step leaves in attributes are state where it reads them, too: where it does
        otherwise if they are others. A copy of what is only written would be memory for nothing.
        """
        model = self._training.model
        self._run(())
        between = State(model, with_parameters=False)
        plain = self._step((), between)
        self.parity.state |= between.changed_buffers() | moved_since(self._seed)
        changed = between.changed_attributes()
        large = {name: value for name, value in changed.items() if has_tensors(value)}
        self.parity.state |= changed.keys() - large.keys()
        if large and self._reads(large, between, plain):
            self.parity.state |= large.keys()

    def start(self, seed: int) -> None:
        """Run the steps of this seed against which units are compared."""
        self._seed = seed
        self._plain = self._run(())
        self.parity.state |= self._state.changed_buffers()

    def search(self, units: Sequence[str]) -> None:
        """Note those of the units that train otherwise when checkpointed."""
        reason = self._difference(units) if units else None
        if reason is None:
            return
        if len(units) == 1:
            self.parity.left_out[units[0]] = reason
            return
        known = len(self.parity.left_out)
        middle = len(units) // 2
        self.search(units[:middle])
        self.search(units[middle:])
        is_new = len(self.parity.left_out) == known
        if is_new and reason != _TOO_LARGE:  # harmless apart, harmful together
            together = f"{reason}, together with others"
            self.parity.left_out |= dict.fromkeys(units[middle:], together)

    def finish(self) -> None:
        """Put the model and the random states back."""
        self._state.restore()

    def _never_run(self, layers: Sequence[Sequence[str]]) -> set[str]:
        """Units that every step skipped at random, unless one of their make was found harmless."""
        model, units = self._training.model, [unit for layer in layers for unit in layer]
        makes = {unit: make_of(unit, model) for unit in units}
        ran = {unit for unit in units if self._called.intersection(_parts(unit, model))}
        harmful = {makes[unit] for unit in self.parity.left_out}
        harmless = {makes[unit] for unit in ran} - harmful
        return {unit for unit in makes.keys() - ran if makes[unit] not in harmless}

    def _difference(self, units: Sequence[str]) -> str | None:
        """What a step with these units checkpointed does otherwise; None: nothing."""
        if self._steps >= MOST_STEPS:
            return "not tried: too many parts of this model differ when they run twice"
        try:
            remains = self._run(units)
        except torch.OutOfMemoryError:
            if not self._always:
                raise
            return _TOO_LARGE
        except Exception as error:  # whatever a recomputation raises speaks against the unit
            return f"it cannot run twice ({type(error).__name__}: {_first_line(error)})"
        reason = first_difference(self._plain, remains, self._noise)
        if reason is not None and self._noise.learn(self._plain, self._run(())):
            reason = first_difference(self._plain, remains, self._noise)
        return reason

    def _reads(self, attributes: Mapping[str, Any], before: State, plain: Remains) -> bool:
        """Whether a step does otherwise where these attributes are others before it."""
        try:
            others = {name: altered(value) for name, value in attributes.items()}
            remains = self._step((), before, others)
        except Exception:  # such as an index that is too large now
            return True
        beside = [name for name in plain if not name.startswith(ATTRIBUTE)]
        found = {name: remains.get(name) for name in beside}
        return (
            first_difference({name: plain[name] for name in beside}, found, self._noise) is not None
        )

    def _run(self, units: Collection[str]) -> Remains:
        return self._step(units, self._state)

    def _step(
        self, units: Collection[str], before: State, attributes: Mapping[str, Any] = NO_OTHERS
    ) -> Remains:
        self._steps += 1
        before.restore()
        for name, value in attributes.items():
            path, _, attribute = name.rpartition(".")
            vars(self._training.model.get_submodule(path))[attribute] = value
        seed_everything(self._seed)
        training, remains = self._training, Remains()
        placed = self._always ^ set(units)
        with (
            checkpointed(training.model, placed, self.parity.state),
            gradients_into(training, remains),
            _calls_into(self._called, training.model),
        ):
            remains[LOSS] = training.step(self._batch).detach().clone()
        remains.update(traces(training.model))
        return remains


def _parts(unit: str, model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(part) for part in Unit.parse(unit).parts(model)]


@contextmanager
def _calls_into(called: set[nn.Module], model: nn.Module) -> Iterator[None]:
    """Note the modules that run."""

    def note(module: nn.Module, inputs: Any) -> None:
        called.add(module)

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:160]
