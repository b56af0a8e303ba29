"""Every value of a strategy against plain training, in the ways that people use autograd.

    from autofit.testing import check_usages

    def test_it_trains_alike_however_autograd_is_used():
        check_usages(MyStrategy())

Each cell of the matrix, a value in a usage, trains for several steps from the same state as plain
PyTorch: losses, weights, buffers and what user code sees have to be equal, as far as the numerics
of the strategy say, or the strategy refuses in words (`InvalidArgument`, `Unsupported`), or does
not offer the value.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import torch

from autofit.equivalence.steps import PlainContext, one_thread
from autofit.errors import InvalidArgument, Unsupported, in_one_line, release_exception, with_type
from autofit.plan import Plan, ResolvedPlan, Scalar, Settings, thinned
from autofit.registry import collect_dimensions, load_strategies, numerics_of, resolve
from autofit.space import Space
from autofit.strategy import Capabilities, Numerics, Strategy
from autofit.testing.conformance import NotConformant, set_scale
from autofit.testing.usages import Usage, usages as all_usages
from autofit.training.training import Training

EQUAL, REFUSED, NOT_OFFERED, DIFFERENT = "equal", "refused", "not offered", "DIFFERENT"
_MAX_VALUES = 3
"""Most values tried of a setting besides the first; of more, evenly spaced ones are tried."""

Step: TypeAlias = Mapping[str, Any]
"""What a step left, by name."""


@dataclass(frozen=True)
class _Bounds:
    """Largest difference of a value: a share of its own norm, and of the norm of all changes."""

    of_own: float
    of_all: float


_BOUNDS = {
    Numerics.EXACT: _Bounds(0.0, 0.0),
    # Roundings of float32 add up over steps; a gradient that is zero but for roundings is as far
    # from itself as it is large.
    Numerics.ROUNDING: _Bounds(1e-3, 1e-4),
    # Eight bits of bfloat16 in a dozen layers, of which one normalizes over few values.
    Numerics.REDUCED_PRECISION: _Bounds(0.25, 0.1),
}
_CHANGE = "the change of "
_NOTHING = 1e-4  # of all changes: what is less may be roundings alone, and cancel
_BY_TORCH = "torch.compile with aot_autograd does not currently support"  # a refusal of torch's own


@dataclass(frozen=True)
class Cell:
    """How one variant trains in one usage.

    Attributes:
        usage: its name.
        settings: those of the variant that are not at their first values.
        outcome: EQUAL, REFUSED, NOT_OFFERED or DIFFERENT.
        why: words for a refusal or a difference.
    """

    usage: str
    settings: Settings
    outcome: str
    why: str = ""

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.usage}, {named}: {self.outcome}{': ' * bool(self.why)}{self.why}"


def check_usages(
    strategy: Strategy | str | Sequence[Strategy | str],
    *,
    usages: Iterable[Usage] = all_usages,
    pairs: bool = False,
    looked_at: Usage | None = None,
    device: str | torch.device = "cpu",
    capabilities: Capabilities | None = None,
) -> list[Cell]:
    """Train with every value that is offered, in every usage; see the module.

    Args:
        strategy: one strategy, or several; objects, or names of installed ones.
        usages: the ways of using autograd.
        pairs: try the pairs of values of two settings, in place of each value alone.
        looked_at: the usage in which the strategies look for their values, as where a plan is
            applied to a training that has changed since its search; None: each usage itself.
        device: where to train.
        capabilities: of the device; None: all of them, as `check_strategy` has it.

    Returns:
        The cells, for `usage_table`.

    Raises:
        NotConformant: some cells are different; it lists them.
        InvalidArgument: an object is not a strategy.
    """
    given = [strategy] if isinstance(strategy, str | Strategy) else list(strategy)
    cells = list(
        cells_of(
            given,
            usages,
            pairs=pairs,
            looked_at=looked_at,
            device=device,
            capabilities=capabilities,
        )
    )
    if wrong := [str(cell) for cell in cells if cell.outcome == DIFFERENT]:
        raise NotConformant("\n".join(["against plain training:", *wrong]))
    return cells


def cells_of(
    strategies: Iterable[Strategy | str],
    usages: Iterable[Usage] = all_usages,
    *,
    pairs: bool = False,
    looked_at: Usage | None = None,
    device: str | torch.device = "cpu",
    capabilities: Capabilities | None = None,
) -> Iterator[Cell]:
    """Yield the cells of `check_usages`, the different ones too."""
    loaded = load_strategies(strategies)
    for usage in usages:
        with one_thread(), _short_collections():
            context = PlainContext((looked_at or usage).make_workload, device, capabilities)
            row = _Row(usage, loaded, context)
            cells = list(row.cells(pairs=pairs))
        yield from cells


@contextmanager
def _short_collections() -> Iterator[None]:
    """Leave alone what is there already: a look at a training collects garbage before it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def usage_table(cells: Iterable[Cell]) -> str:
    """Return the cells as lines of a Markdown table, a row for each usage."""
    by_place = {(cell.usage, _named(cell.settings)): cell.outcome for cell in cells}
    columns = list(dict.fromkeys(column for _, column in by_place if column))
    rows = list(dict.fromkeys(row for row, _ in by_place))
    lines = [["usage", *columns], ["---"] * (len(columns) + 1)]
    lines += [
        [row, *(by_place.get((row, column), NOT_OFFERED) for column in columns)] for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _named(settings: Settings) -> str:
    return " + ".join(f"{name}={value}" for name, value in settings.items())


class _Row:
    """One usage."""

    def __init__(self, usage: Usage, strategies: Sequence[Strategy], context: PlainContext) -> None:
        self._usage, self._strategies, self._context = usage, strategies, context
        self._device = context.device
        self._samples = usage.make_workload().sample_batch_size
        self._plain: list[Step] = []

    def cells(self, *, pairs: bool) -> Iterator[Cell]:
        dimensions, by_name = {}, {each.name: each for each in self._strategies}
        for strategy in self._strategies:
            try:
                dimensions.update(collect_dimensions([strategy], self._context))
            except Exception as error:
                yield self._failed({f"{strategy.name}.*": "any"}, error)
        self._context.close()
        samples = self._samples
        space = Space(dimensions, samples, global_batch=samples)
        alone = [
            {name: value}
            for name, dimension in dimensions.items()
            for value in thinned(dimension.values[1:], _MAX_VALUES)
        ]
        both = [{**one, **two} for one, two in combinations(alone, 2) if one.keys() != two.keys()]
        for changed in both if pairs else alone:
            settings = {**space.default_settings, **changed}
            if not pairs:  # a value may be there for others only
                settings |= self._needed(space, settings, changed)
            if not space.allows(settings):
                yield Cell(self._usage.name, changed, NOT_OFFERED)
                continue
            resolved = resolve(Plan(samples, settings=settings), space, self._strategies)
            differing = [n for n, v in settings.items() if v != space.default_settings[n]]
            levels = [numerics_of(by_name[n.partition(".")[0]], n) for n in differing]
            yield self._cell(resolved, changed, max(levels))

    def _needed(self, space: Space, settings: Settings, changed: Settings) -> Mapping[str, Scalar]:
        needed = {
            other: values[0]
            for name in changed
            for other, values in (space.dimensions[name].when or {}).items()
            if other in settings and settings[other] not in values
        }
        return {name: value for name, value in needed.items() if value is not None}

    def _cell(self, resolved: ResolvedPlan, changed: Settings, numerics: Numerics) -> Cell:
        if not self._plain:
            self._plain = trained(self._usage, ResolvedPlan(Plan(self._samples)), self._device)
        try:
            steps = trained(self._usage, resolved, self._device)
        except Exception as error:
            return self._failed(changed, error)
        why = difference(self._plain, steps, numerics)
        return Cell(self._usage.name, changed, DIFFERENT if why else EQUAL, why or "")

    def _failed(self, changed: Settings, error: Exception) -> Cell:
        release_exception(error)
        is_refusal = isinstance(error, InvalidArgument | Unsupported) or _BY_TORCH in str(error)
        why = in_one_line(error) if is_refusal else with_type(error)
        return Cell(self._usage.name, changed, REFUSED if is_refusal else DIFFERENT, why)


def trained(usage: Usage, resolved: ResolvedPlan, device: torch.device) -> list[Step]:
    """Return what each step of a training leaves, from the usage's first state."""
    workload = usage.make_workload()
    model = workload.build_model().to(device)
    make, found = workload.build_optimizer, list[Step]()
    with Training(model, make, workload.recipe, resolved, device=device) as training:
        set_scale(training)
        torch.manual_seed(1)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(usage.steps):
            loss = training.step(usage.batch_of(step)).detach().clone()
            found.append({"the loss": loss, **_left(model, start)})
    return found


def _left(model: torch.nn.Module, start: Mapping[str, torch.Tensor]) -> Step:
    left: dict[str, Any] = {
        f"{_CHANGE}{name}": parameter.detach() - start[name]
        for name, parameter in model.named_parameters()
    }
    left |= {f"the buffer {name}": b.detach().clone() for name, b in model.named_buffers()}
    seen: dict[str, Any] = getattr(model, "seen", {})
    left |= {f"what is seen of {name}": value for name, value in seen.items()}
    seen.clear()
    return left


def difference(plain: Sequence[Step], other: Sequence[Step], numerics: Numerics) -> str | None:
    """Return the first value in which the other training differs; None: within the numerics."""
    bounds = _BOUNDS[numerics]
    for number, (one, two) in enumerate(zip(plain, other, strict=True), start=1):
        sizes = [_norm(value) for name, value in one.items() if name.startswith(_CHANGE)]
        whole = math.hypot(*sizes)
        for name in {**one, **two}:
            if name not in one or name not in two:
                return f"{name} is missing in step {number}"
            is_change = name.startswith(_CHANGE)
            if is_change and not two[name].any() and _norm(one[name]) > _NOTHING * whole:
                return f"{name} is nothing in step {number}"
            room = bounds.of_all * whole if is_change else 0.0
            if why := _apart(one[name], two[name], bounds, room):
                return f"{name} differs in step {number}{why}"
    return None


def _apart(one: Any, other: Any, bounds: _Bounds, room: float) -> str:
    """Return by how much two values differ beyond the bounds; "" where they do not."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return "" if one == other else f": {other!r}, not {one!r}"
    if one.shape != other.shape:
        return f": it has the shape {list(other.shape)}, not {list(one.shape)}"
    if torch.equal(one, other.to(one.dtype)):
        return ""
    distance, size = _norm(other.double() - one.double()), _norm(one)
    rounding = torch.finfo(torch.float32).eps * math.sqrt(one.numel())
    allowed = bounds.of_own * size + room + (rounding if bounds.of_own else 0.0)
    return "" if distance <= allowed else f" by {distance / size if size else math.inf:.1e}"


def _norm(value: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))
