"""What does not train as the baseline does cannot win, however fast it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.measurement import Measurement, Outcome, Trial, TrialKind
from autofit.plan import Dimension, Scalar
from autofit.planning.search_spec import SearchSpec
from autofit.probing.prober import Target, open_prober
from autofit.registry import load_strategies
from autofit.report.record import Record, SearchSummary
from autofit.report.summary import next_best
from autofit.searching.faithful import judged
from autofit.space import Space
from autofit.strategy import Context, TrainingView
from benchmarks.workload_models import resnet
from tests.plugin import Plugin

BUDGET = 2**28


class Wide(nn.Module):
    """Slow, unless a strategy leaves most of it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 2048), nn.Linear(2048, 4)
        self.repeats = 12

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return sum((self.last(hidden.relu() * at) for at in range(self.repeats)), torch.zeros(()))


class Alters(Plugin):
    """Trains another model: with another value of an attribute of a part."""

    part, attribute, altered = "", "", 0.0

    @contextmanager
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> Iterator[None]:
        part = training.model.get_submodule(self.part)
        before = getattr(part, self.attribute)
        if settings["plugin.on"]:
            setattr(part, self.attribute, self.altered)
        yield
        setattr(part, self.attribute, before)


class LeavesOut(Alters):
    """Runs a part of the model: the gradients are others."""

    attribute, altered = "repeats", 1


class DrawsNothing(Alters):
    """Leaves dropout out, and says that it is exact."""

    part, attribute = "dropout", "p"


class NeverUpdates(Plugin):
    """Leaves the optimizer's step out: every gradient is right."""

    @contextmanager
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> Iterator[None]:
        undo = training.wrap_optimizer_step(lambda step: None if settings["plugin.on"] else step())
        yield
        undo()


class Noisy(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.dropout(inputs))


class AtACost(LeavesOut):
    """As a compiler that computes something else."""

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {
            "plugin.on": Dimension([False, True], trial_cost_s=1.0),
            "plugin.free": Dimension([False, True]),
        }


def ran(seconds: float) -> Measurement:
    return Measurement(
        Outcome.OK, step_times_s=[seconds] * 3, peak_reserved_bytes=2**20, non_torch_bytes=0
    )


def recorded(space: Space, trials: tuple[Trial, ...], best: Trial) -> Record:
    """The record of a search that ended with these trials, the first of which is the baseline."""
    ended = SearchSummary(len(trials), 0, 1.0, "no plan is left", 0)
    return Record(BUDGET, ended, space.dimensions, trials, best.number, trials[0].number)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1)])
@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (LeavesOut(), "gradients differ"),
        (DrawsNothing(), "said to be exact"),
        (NeverUpdates(), "never updates"),
        (Plugin(), None),
    ],
)
def test_a_strategy_that_trains_something_else_does_not_win(
    strategy: Plugin, why: str | None, optimizer: Any
) -> None:
    """However fast it measured; one that trains the same does."""
    batch = torch.randn(8, 64), torch.randint(0, 4, (8,))
    workload = autofit.Workload(
        Noisy(), batch, criterion=nn.CrossEntropyLoss(), optimizer=optimizer, global_batch=16
    )
    with open_prober(workload, (strategy,), Target("cpu", BUDGET)) as prober:
        space = prober.survey().space(None)
        plain, fast = space.baseline, space.plan(8, {"plugin.on": True})
        first = Trial(0, TrialKind.BASELINE, plain, ran(0.4))
        best = Trial(1, TrialKind.SEARCH, fast, ran(0.1))
        found = judged(prober, SearchSpec(space, BUDGET), recorded(space, (first, best), best))
    assert found.recommended == found.best == (best if why is None else first)
    assert found.difference is None or found.difference["gradient"] < 1e-5
    assert [dict(each.settings) for each in found.skipped] == [{"plugin.on": True}] * bool(why)
    assert all(why is not None and why in note for note in found.notes)
    assert why is None or next_best(found) is None


def test_what_is_costly_to_try_does_not_win_either() -> None:
    """It is left out wherever it is, and what was free beside it stays."""
    batch = torch.randn(8, 64), torch.randint(0, 4, (8,))
    workload = autofit.Workload(Wide(), batch, criterion=nn.CrossEntropyLoss(), global_batch=16)
    with open_prober(workload, (AtACost(),), Target("cpu", BUDGET)) as prober:
        space = prober.survey().space(None)
        free, on = {"plugin.free": True}, {"plugin.on": True}
        chosen = [dict(space.default_settings) | more for more in (free, free | on, on)]
        plans = [space.baseline, *(space.plan(8, settings) for settings in chosen)]
        seconds = [0.4, 0.3, 0.1, 0.12]
        trials = tuple(
            Trial(number, TrialKind.SEARCH if number else TrialKind.BASELINE, plan, ran(each))
            for number, (plan, each) in enumerate(zip(plans, seconds, strict=True))
        )
        found = judged(prober, SearchSpec(space, BUDGET), recorded(space, trials, trials[2]))
    assert found.best == trials[1]
    assert [dict(each.settings) for each in found.skipped] == [on]
    assert found.difference is not None
    assert found.difference["gradient"] < 1e-5


class Negated(Plugin):
    """Turns every gradient around."""

    @contextmanager
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> Iterator[None]:
        on = settings["plugin.on"]
        parameters = list(training.model.parameters()) if on else []
        hooks = [each.register_hook(torch.neg) for each in parameters]  # type: ignore[no-untyped-call]  # torch
        yield
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("is_fault", [False, True])
@pytest.mark.parametrize("samples", [8, 32])
def test_gradients_that_roundings_move_by_half_are_no_fault(samples: int, is_fault: bool) -> None:
    """Of a residual network that normalizes over its batch, bfloat16 is as good as of others."""
    torch.manual_seed(0)  # by some weights and samples roundings move gradients by twice their size
    build = partial(resnet, (16, 16, 16, 16), 2, 4)
    batch = torch.randn(samples, 3, 8, 8), torch.randint(0, 4, (samples,))
    workload = autofit.Workload(build, batch, criterion=nn.CrossEntropyLoss())
    strategies = (*load_strategies(("precision",)), Negated() if is_fault else Plugin())
    with open_prober(workload, strategies, Target("cpu", BUDGET)) as prober:
        space = prober.survey().space(None)
        settings: dict[str, Scalar] = {"precision.dtype": "bfloat16", "plugin.on": True}
        plans = space.baseline, space.plan(samples, settings)
        first = Trial(0, TrialKind.BASELINE, plans[0], ran(0.4))
        best = Trial(1, TrialKind.SEARCH, plans[1], ran(0.1))
        found = judged(prober, SearchSpec(space, BUDGET), recorded(space, (first, best), best))
    assert found.recommended == (first if is_fault else best)
    assert is_fault == bool(found.skipped)
    assert is_fault or (
        found.difference is not None
        and 0.3 < found.difference["gradient"] < found.difference["tolerance"]
    )
