"""`autofit.checkpoint_to_budget`: the fewest recomputations that fit, in the user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autofit.errors import InvalidArgument, hides_own_frames
from autofit.integrations.applied import on_model
from autofit.measurement import Trial, TrialKind
from autofit.plan import NoFeasiblePlan, ResolvedPlan
from autofit.probing.prober import Prober, Target, open_prober
from autofit.probing.requests import ProbeRequest
from autofit.probing.survey import Survey, check_weights_fit
from autofit.registry import load_strategies, resolve
from autofit.strategy import Strategy
from autofit.training.workload import Workload, workload_of
from autofit.units import counted, format_bytes


@hides_own_frames
def checkpoint_to_budget(
    model: torch.nn.Module | Workload,
    sample_batch: Any = None,
    vram_budget: str | float | None = None,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = torch.optim.AdamW,
    device: str | None = None,
) -> AbstractContextManager[Trial]:
    """Checkpoint as few activations of a live model as a VRAM budget requires.

        with autofit.checkpoint_to_budget(model, batch, "8GiB", criterion=criterion):
            ...  # your training loop, as it is

    The parts of the model and their placements are measured in a worker, on a copy: those that
    recompute least for each amount of memory (docs/strategies.md). They are halved by probes of
    the whole batch until the first that fits is known. Inside the context the model recomputes
    these parts in the backward pass, with the same gradients; outside it is as before. Where no
    recomputation is needed, nothing is changed. Arguments not explained here are as for
    `autofit.search`.

    Args:
        model: a live module, or a `Workload` of one.
        sample_batch: as large as a micro-batch of the loop.
        vram_budget: for the whole training: weights, gradients, optimizer state and activations.

    Returns:
        A context; it gives the probe that fits, with its peak in `.measurement.held_bytes`, and
        under `.plan.settings` how far along the placements it lies. 0: nothing is recomputed.

    Raises:
        InvalidArgument: an argument is not valid, or the model is a function.
        NoFeasiblePlan: not even the placement of least memory fits, with what it needs.
        Exception: as of `autofit.probe`.
    """
    given = {"criterion": criterion, "loss_fn": loss_fn, "optimizer": optimizer}
    workload = workload_of(model, sample_batch, **given)
    live = workload.model
    if not isinstance(live, torch.nn.Module):
        raise InvalidArgument("checkpoint_to_budget changes a live model: pass the model it builds")
    strategies = [one for one in load_strategies() if getattr(one, "recomputes", False)]
    with open_prober(workload, strategies, Target(device, vram_budget)) as prober:
        survey = prober.survey()
        check_weights_fit(survey)
        placements = _Placements(workload, prober, survey, strategies)
        resolved, trial = placements.fewest()
    if not trial.measurement.ok:
        required = _required_bytes(workload, strategies, device, resolved)
        raise placements.nothing_fits(trial, required)
    return _applied(live, resolved, trial)


def _required_bytes(
    workload: Workload, strategies: list[Strategy], device: str | None, resolved: ResolvedPlan
) -> int | None:
    """Return what a plan holds with all free memory of the device as its budget.

    None if it has no room there.
    """
    with open_prober(workload, strategies, Target(device)) as prober:
        prober.survey()
        measured = prober.probe(ProbeRequest(resolved, full_accumulation=True)).measurement
    return measured.needed_bytes if measured.ok else None


@contextmanager
def _applied(model: torch.nn.Module, resolved: ResolvedPlan, trial: Trial) -> Iterator[Trial]:
    with on_model(resolved, model, None):
        yield trial


@dataclass
class _Placements:
    """The values of one setting, each of which needs less memory and more time than those before.

    Attributes:
        workload, prober, survey, strategies: of the model; one strategy, which has the setting.
    """

    workload: Workload
    prober: Prober
    survey: Survey
    strategies: list[Strategy]

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Those of each placement, that of most memory first."""
        return [
            {name: value}
            for name, dimension in self.survey.dimensions.items()
            for value in dimension.values
        ] or [{}]

    def fewest(self) -> tuple[ResolvedPlan, Trial]:
        """Return the first that fits, or else the last, which does not."""
        settings = self.settings
        probed: dict[int, tuple[ResolvedPlan, Trial]] = {}

        def fits(place: int) -> bool:
            probed[place] = self._probe(settings[place])
            return probed[place][1].measurement.ok

        good, bad = len(settings) - 1, 0
        if fits(0):
            return probed[0]
        if good == 0 or not fits(good):
            return probed[good]
        while good - bad > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        return probed[good]

    def _probe(self, settings: dict[str, Any]) -> tuple[ResolvedPlan, Trial]:
        plan = self.workload.plan(settings=settings)
        resolved = resolve(plan, self.survey.space_for(plan), self.strategies)
        result = self.prober.probe(ProbeRequest(resolved, full_accumulation=True))
        if result.user_exception is not None:
            raise result.user_exception
        return resolved, Trial(0, TrialKind.SEARCH, plan, result.measurement)

    def nothing_fits(self, trial: Trial, required_bytes: int | None) -> NoFeasiblePlan:
        """Return the error for the placement of least memory, which does not fit."""
        budget, placements = self.survey.vram_budget_bytes, len(self.settings)
        how = f"it ended as {trial.measurement.outcome.value}"
        if required_bytes is not None:
            how = f"it needs {format_bytes(required_bytes)}"
        tried = (
            f"the placement of least memory, of {counted(placements, 'placement')}, does not fit"
            if placements > 1
            else "no part of the model can be recomputed, and the model as it is does not fit"
        )
        why = "".join(f"; {note}" for note in self.survey.notes if "checkpoint" in note)
        return NoFeasiblePlan(
            f"{tried} {format_bytes(budget)}: {how}{why}. Use a smaller batch, or raise the budget",
            plan=trial.plan,
            required_bytes=required_bytes,
            allowed_bytes=budget,
        )
