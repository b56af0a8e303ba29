"""What does not train as the baseline does cannot win, however fast it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from autofit.strategy import Context, TrainingView
from benchmarks.workload_models import resnet
from tests.plugin import Plugin

BUDGET = 2**28


class Wide(nn.Module):
    """Slow, unless a strategy leaves most of it out."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 2048), nn.Linear(2048, 4)
        self.dropout, self.repeats = nn.Dropout(dropout), 12

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.dropout(inputs))
        return sum((self.last(hidden.relu() * at) for at in range(self.repeats)), torch.zeros(()))


class Does(Plugin):
    """Where it is on, does something to a training, which returns how to undo it."""

    def __init__(self, do: Callable[[TrainingView], Callable[[], object]]) -> None:
        self.do = do

    @contextmanager
    def apply(
        self, training: TrainingView, settings: Mapping[str, Scalar], payloads: Mapping[str, Any]
    ) -> Iterator[None]:
        undo = self.do(training) if settings["plugin.on"] else None
        yield
        if undo is not None:
            undo()


class AtACost(Does):
    """As a compiler that computes something else."""

    def dimensions(self, context: Context) -> Mapping[str, Dimension]:
        return {
            "plugin.on": Dimension([False, True], trial_cost_s=1.0),
            "plugin.free": Dimension([False, True]),
        }


def leaves_out(training: TrainingView) -> Callable[[], object]:
    """Run a part of the model: the gradients are others."""
    vars(training.model)["repeats"] = 1
    return partial(vars(training.model).update, repeats=12)


def draws_nothing(training: TrainingView) -> Callable[[], object]:
    """Leave dropout out, and say that this is exact."""
    dropout: Any = training.model.get_submodule("dropout")
    vars(dropout)["p"] = 0.0
    return partial(vars(dropout).update, p=0.3)


def never_updates(training: TrainingView) -> Callable[[], object]:
    """Leave the optimizer's step out: every gradient is right."""
    return training.wrap_optimizer_step(lambda step: None)


def negates(training: TrainingView) -> Callable[[], object]:
    """Turn every gradient around."""
    hooks = [each.register_hook(torch.neg) for each in training.model.parameters()]  # type: ignore[no-untyped-call]  # torch
    return lambda: [hook.remove() for hook in hooks]


def judged_of(
    workload: autofit.Workload, strategies: tuple[Any, ...], *measured: tuple[Any, float], best: int
) -> tuple[Record, list[Trial]]:
    """Judge a search of these settings that took so many seconds; the first are the baseline's."""
    with open_prober(workload, strategies, Target("cpu", BUDGET)) as prober:
        space = prober.survey().space(None)
        batch: Any = workload.sample_batch
        trials = []
        for number, (settings, seconds) in enumerate(measured):
            whole = space.plan(len(batch[0]), space.default_settings | settings)
            ran = Measurement(
                Outcome.OK,
                step_times_s=[seconds] * 3,
                peak_reserved_bytes=2**20,
                non_torch_bytes=0,
            )
            kind = TrialKind.SEARCH if number else TrialKind.BASELINE
            trials.append(Trial(number, kind, whole if number else space.baseline, ran))
        ended = SearchSummary(len(trials), 0, 1.0, "no plan is left", 0)
        record = Record(BUDGET, ended, space.dimensions, tuple(trials), best, 0)
        return judged(prober, SearchSpec(space, BUDGET), record), trials


def batch_of(samples: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, *shape), torch.randint(0, 4, (samples,))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1)])
@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (Does(leaves_out), "gradients differ"),
        (Does(draws_nothing), "said to be exact"),
        (Does(never_updates), "never updates"),
        (Plugin(), None),
    ],
)
def test_a_strategy_that_trains_something_else_does_not_win(
    strategy: Plugin, why: str | None, optimizer: Any
) -> None:
    """However fast it measured; one that trains the same does."""
    workload = autofit.Workload(
        Wide(), batch_of(8, 64), criterion=nn.CrossEntropyLoss(), optimizer=optimizer,
        global_batch=16,
    )  # fmt: skip
    on = {"plugin.on": True}
    found, (first, best) = judged_of(workload, (strategy,), ({}, 0.4), (on, 0.1), best=1)
    assert found.recommended == found.best == (best if why is None else first)
    assert found.difference is None or found.difference["gradient"] < 1e-5
    assert [dict(each.settings) for each in found.skipped] == [on] * bool(why)
    assert all(why is not None and why in note for note in found.notes)
    assert why is None or next_best(found) is None


def test_what_is_costly_to_try_does_not_win_either() -> None:
    """It is left out wherever it is, and what was free beside it stays."""
    workload = autofit.Workload(
        Wide(0.0), batch_of(8, 64), criterion=nn.CrossEntropyLoss(), global_batch=16
    )
    free, on = {"plugin.free": True}, {"plugin.on": True}
    measured: Any = (({}, 0.4), (free, 0.3), (free | on, 0.1), (on, 0.12))
    found, trials = judged_of(workload, (AtACost(leaves_out),), *measured, best=2)
    assert found.best == trials[1]
    assert [dict(each.settings) for each in found.skipped] == [on]
    assert found.difference is not None
    assert found.difference["gradient"] < 1e-5


@pytest.mark.parametrize("is_fault", [False, True])
@pytest.mark.parametrize("samples", [8, 32])
def test_gradients_that_roundings_move_by_half_are_no_fault(samples: int, is_fault: bool) -> None:
    """Of a residual network that normalizes over its batch, bfloat16 is as good as of others."""
    torch.manual_seed(0)  # by some weights and samples roundings move gradients by twice their size
    build = partial(resnet, (16, 16, 16, 16), 2, 4)
    batch = batch_of(samples, 3, 8, 8)
    workload = autofit.Workload(build, batch, criterion=nn.CrossEntropyLoss())
    strategies = (*load_strategies(("precision",)), Does(negates) if is_fault else Plugin())
    settings = {"precision.dtype": "bfloat16", "plugin.on": True}
    found, (first, best) = judged_of(workload, strategies, ({}, 0.4), (settings, 0.1), best=1)
    assert found.recommended == (first if is_fault else best)
    assert is_fault == bool(found.skipped)
    assert is_fault or (
        found.difference is not None
        and 0.3 < found.difference["gradient"] < found.difference["tolerance"]
    )
