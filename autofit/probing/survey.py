"""The survey: facts about a workload on a device, and nothing of what looks them up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from autofit.measurement import ACT, NOT_TRIED
from autofit.plan import Dimension, NoFeasiblePlan, Plan
from autofit.space import Space
from autofit.training.samples import SamplesKind
from autofit.training.workload import Workload, compiled_in_place, first_size
from autofit.units import format_bytes

if TYPE_CHECKING:
    from autofit.devices.base import Environment
    from autofit.strategy import Comparison
    from autofit.training.lengths import Tokens


@dataclass(frozen=True)
class Survey:
    """The facts of a workload on a device, as plain data.

    Attributes:
        environment: device and versions.
        vram_budget_bytes: the budget, resolved on the device.
        fingerprint: see `autofit.training.fingerprint`.
        parameters: number of elements of the model's parameters, trained or not.
        parameter_bytes: their size.
        loss: where the loss comes from, in words; None where the trial forward failed.
        sample_batch_size: samples in the user's batch.
        sample_shapes: place of each tensor in the sample batch -> its dtype and shape.
        samples: what the samples are: rows, what collate_fn takes, or what a function makes.
        batched: the places of those that hold samples; None: they are not told apart.
        described_size: samples of the batch with those shapes.
        chose_size: whether the sample batch has a size, which its user chose.
        global_batch: samples per optimizer step to keep.
        split_gradients: how split and whole gradients compare; None: not asked, or failed.
        may_change_accumulation: whether the accumulation steps may change.
        dimensions: setting -> its values.
        notes: what a reader of the report should know.
        busy: what others did on the device before this search computed there; None: not much.
        ranks: how many train together.
        accumulation_kept: why the accumulation steps are kept, with which a note begins; None: they
            may change.
        allow_accumulation_change: whether they may change all the same, since the user said so.
        tokens: of the sample batch; None: it has none.
    """

    environment: Environment
    vram_budget_bytes: int
    fingerprint: str
    parameters: int
    parameter_bytes: int
    loss: str | None
    sample_batch_size: int
    sample_shapes: Mapping[str, str]
    samples: SamplesKind
    batched: Sequence[str] | None
    described_size: int
    global_batch: int | None
    split_gradients: Comparison | None
    may_change_accumulation: bool
    dimensions: Mapping[str, Dimension]
    notes: tuple[str, ...] = ()
    busy: str | None = None
    ranks: int = 1
    accumulation_kept: str | None = None
    allow_accumulation_change: bool = False
    tokens: Tokens | None = None
    chose_size: bool = True

    def space(self, max_micro_batch: int | None = None, *, even: bool = False) -> Space:
        """Return the search space that these facts leave."""
        # A plan of several ranks names how these share the work, also where there is one way
        fewest = 2 if self.ranks == 1 else 1
        choices = {name: d for name, d in self.dimensions.items() if len(d.values) >= fewest}
        fixed = {name: d.values[0] for name, d in self.dimensions.items() if name not in choices}
        return Space(
            choices,
            first_size(self.sample_batch_size, max_micro_batch, is_chosen=self.chose_size),
            global_batch=self.global_batch,
            may_change_accumulation=self.may_change_accumulation,
            max_micro_batch=max_micro_batch,
            even_split=even,
            fixed=fixed,
            ranks=self.ranks,
        )

    def space_for(self, plan: Plan | None) -> Space:
        """Return the space of a single plan, with opt-in values only if the plan names them."""
        return self.without_opt_in(plan.settings if plan else {}).space()

    def with_accumulation_free(self) -> Survey:
        """Return the survey of a search that may change the accumulation steps in any case."""
        why, notes = self.accumulation_kept, self.notes
        if why is not None:
            freed = f"{why}: the accumulation steps are free by allow_accumulation_change"
            notes = tuple(freed if note.startswith(why) else note for note in notes)
        return replace(
            self, notes=notes, may_change_accumulation=True, allow_accumulation_change=True
        )

    @property
    def is_split_by_function(self) -> bool:
        """Whether nobody chose a split, and a function that makes batches can tell any of them."""
        return self.samples is SamplesKind.MADE and not self.chose_size

    def split_by_function(self) -> Survey:
        """Return the survey where the global batch does not fit at once, which only splits do."""
        why, notes = self.accumulation_kept, self.notes
        if why is not None:
            freed = (
                f"{ACT}The global batch does not fit at once, so that splits of it were tried, "
                f"though {why}: layers that normalize over a batch would train otherwise"
            )
            notes = tuple(freed if note.startswith(why) else note for note in notes)
        return replace(self, notes=notes, may_change_accumulation=True)

    def without_costly(self) -> Survey:
        """Return the survey without the strategies that have a setting that is costly to try."""
        left_out = {n.partition(".")[0] for n, d in self.dimensions.items() if d.is_costly}
        if not left_out:
            return self
        dimensions, notes = dict(self.dimensions), list(self.notes)
        for name, dimension in self.dimensions.items():
            if name.partition(".")[0] in left_out:
                dimensions[name] = Dimension(dimension.values[:1])
        notes.append(f"{NOT_TRIED}{', '.join(sorted(left_out))} (planned_steps is 0)")
        return replace(self, dimensions=dimensions, notes=tuple(notes))

    def without_opt_in(self, asked_for: Collection[str]) -> Survey:
        """Return the survey without the opt-in values that nobody asked for."""
        left_out = {
            name: Dimension(dimension.values[:1])
            for name, dimension in self.dimensions.items()
            if dimension.opt_in and not {name, name.partition(".")[0]} & set(asked_for)
        }
        return replace(self, dimensions={**self.dimensions, **left_out})


def check_weights_fit(survey: Survey) -> None:
    """Refuse a budget that not even the weights fit into.

    Raises:
        NoFeasiblePlan: the model's parameters alone are larger than the budget.
    """
    if survey.parameter_bytes <= survey.vram_budget_bytes:
        return
    raise NoFeasiblePlan(
        f"the model's parameters alone take {format_bytes(survey.parameter_bytes)}, and the VRAM "
        f"budget is {format_bytes(survey.vram_budget_bytes)}: raise it, or make the model smaller",
        plan=None,
        required_bytes=survey.parameter_bytes,
        allowed_bytes=survey.vram_budget_bytes,
    )


def note_own_copy(survey: Survey, workload: Workload) -> Survey:
    """Return the survey with notes on how this process's live model differs from the worker's."""
    model, notes = workload.model, list(survey.notes)
    if not isinstance(model, torch.nn.Module):
        return survey
    held = sum(
        tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cuda"
    )
    if held:
        notes.append(
            f"{ACT}Your copy of the model holds {format_bytes(held)} of the GPU, which no plan "
            "could use: call model.cpu(), or pass a function that builds the model"
        )
    if compiled_in_place(model):
        notes.append(
            f"{ACT}model.compile() had no effect on the search: pass a function that builds and "
            "compiles the model"
        )
    return replace(survey, notes=tuple(notes))


LOOKING = "looking the workload over"
FIRST_SAMPLES = f"{LOOKING}: its first samples"
# Why a look is left out that never began.
NO_TIME = "the timeout left no time to look at it"
# The name of the look that compares split and whole gradients.
SPLIT_GRADIENTS = "split gradients"


def stage_of(look: str) -> str:
    """Return the stage of a look, by a strategy's name or `SPLIT_GRADIENTS`."""
    return f"{LOOKING}: {look}"


@dataclass(frozen=True)
class Recomputation:
    """What decides whether a search needs any, before its strategies are looked at.

    Attributes:
        strategies: names of those that do nothing else, and that nobody asked for by name.
        fits_without: the largest micro-batch that is expected to fit without.
        largest: the largest micro-batch of any plan.
        largest_if_kept: likewise where the accumulation steps may not change.
    """

    strategies: Sequence[str]
    fits_without: int
    largest: int
    largest_if_kept: int

    def why_left_out(self, *, keeps_accumulation: bool) -> dict[str, str]:
        """Return, by name, why strategies are left out: no plan needs the memory they free."""
        largest = self.largest_if_kept if keeps_accumulation else self.largest
        if largest > self.fits_without:
            return {}
        why = f"the largest micro-batch, {largest}, is expected to fit without"
        return dict.fromkeys(self.strategies, why)


class StrategyLost(Exception):
    """The worker or the device was lost during a look at the workload.

    Attributes:
        strategy: whose look it was; `SPLIT_GRADIENTS` for the one that is no strategy's.
        detail: how it was lost.
    """

    def __init__(self, strategy: str, detail: str) -> None:
        super().__init__(strategy, detail)
        self.strategy, self.detail = strategy, detail
