"""What is looked up about a workload before its first probe, in the worker that holds the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from autofit.devices.base import Environment
from autofit.equivalence.accumulation import decide_resplit
from autofit.equivalence.gradients import Comparison
from autofit.errors import InvalidRequest, NoFeasiblePlan, release_exception
from autofit.plan import Dimension, Plan, ResolvedPlan
from autofit.registry import collect_dimensions
from autofit.snapshot import process
from autofit.space import Space
from autofit.strategy import Strategy
from autofit.training.batch import describe
from autofit.training.builder import TrainingBuilder
from autofit.training.fingerprint import fingerprint
from autofit.training.loss import LossSource
from autofit.training.strategy_context import StrategyContext
from autofit.training.workload import Workload
from autofit.units import format_bytes


@dataclass(frozen=True)
class Survey:
    """The facts of a workload on a device, as plain data.

    Attributes:
        environment: device and versions.
        vram_budget_bytes: the budget, resolved on the device.
        fingerprint: see `autofit.training.fingerprint`.
        parameters: how many numbers the model learns or holds as parameters.
        parameter_bytes: their size.
        loss: where the loss comes from, in words; None where the trial forward failed.
        sample_batch_size: samples in the user's batch.
        sample_shapes: where each tensor of the sample batch stands -> its dtype and shape.
        global_batch: samples per optimizer step to keep.
        resplit: how split and whole gradients compare; None where that was not asked or failed.
        may_resplit: whether the accumulation count may change.
        dimensions: setting -> its values.
        notes: what a reader of the report should know.
    """

    environment: Environment
    vram_budget_bytes: int
    fingerprint: str
    parameters: int
    parameter_bytes: int
    loss: str | None
    sample_batch_size: int
    sample_shapes: Mapping[str, str]
    global_batch: int | None
    resplit: Comparison | None
    may_resplit: bool
    dimensions: Mapping[str, Dimension]
    notes: tuple[str, ...] = ()

    def space(self, max_micro_batch: int | None = None) -> Space:
        """The search space that these facts leave."""
        choices = {name: d for name, d in self.dimensions.items() if len(d.values) > 1}
        fixed = {name: d.values[0] for name, d in self.dimensions.items() if name not in choices}
        return Space(
            choices,
            self.sample_batch_size,
            global_batch=self.global_batch,
            may_resplit=self.may_resplit,
            max_micro_batch=max_micro_batch,
            fixed=fixed,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return vars(self) | {
            "environment": asdict(self.environment),
            "dimensions": {name: d.to_dict() for name, d in self.dimensions.items()},
            "resplit": self.resplit.to_dict() if self.resplit else None,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Survey:
        """The survey that `to_dict` wrote."""
        dimensions = {name: Dimension.from_dict(d) for name, d in data["dimensions"].items()}
        resplit = Comparison.from_dict(data["resplit"]) if data["resplit"] else None
        return cls(
            **{
                **data,
                "environment": Environment(**data["environment"]),
                "dimensions": dimensions,
                "resplit": resplit,
                "notes": tuple(data["notes"]),
            }
        )


def check_weights_fit(survey: Survey) -> None:
    """Refuse a budget that not even the weights fit into.

    Raises:
        NoFeasiblePlan: the model's parameters alone are larger than the budget.
    """
    if survey.parameter_bytes <= survey.vram_budget_bytes:
        return
    raise NoFeasiblePlan(
        f"the model's parameters alone take {format_bytes(survey.parameter_bytes)}, and the VRAM "
        f"budget is {format_bytes(survey.vram_budget_bytes)}",
        plan=None,
        required_bytes=survey.parameter_bytes,
        allowed_bytes=survey.vram_budget_bytes,
    )


def note_own_copy(survey: Survey, workload: Workload) -> Survey:
    """The survey, with a note where this process holds the model on a GPU beside the worker's."""
    if not isinstance(workload.model, torch.nn.Module):
        return survey
    held = sum(
        tensor.untyped_storage().nbytes()
        for tensor in (*workload.model.parameters(), *workload.model.buffers())
        if tensor.device.type == "cuda"
    )
    if not held:
        return survey
    note = (
        f"your own copy of the model holds {format_bytes(held)} on the GPU, which no plan can "
        "use: move it away with model.cpu(), or pass a function that builds the model"
    )
    return replace(survey, notes=(*survey.notes, note))


# What is found out about a workload before its first probe.
#
# The facts (size, shapes, fingerprint) come from the model where it lies. Loss, dimensions and
# gradients take trainings on the device, one at a time; where one of those fails, the survey says
# so and goes on: the baseline's probe will meet the same fault and report it in full. A strategy
# that breaks the contract of plug-ins is refused instead.
#
# The budget holds here too. On the CPU device, whose budget binds under accounting alone, it holds
# for the loss: strategies time what they profile, and gradients are compared on the host, which
# there is the device itself, so accounting would tell the one wrong times and count the other
# twice.

_IN_EVAL_MODE = (
    "the model was handed over in eval mode, and trained so: dropout and BatchNorm did as they do "
    "in evaluation. Unless that is meant, call model.train() and search again"
)


def look_over(
    bench: TrainingBuilder, strategies: Sequence[Strategy], vram_budget_bytes: int
) -> Survey:
    """The facts of the bench's workload on its device.

    Raises:
        InvalidRequest: the workload's functions make no model, optimizer or batch, or a strategy
            answers with what the contract has no place for.
        Exception: what the user's code raised in making them.
    """
    model = _model_facts(bench)
    loss = _loss_source(bench)
    dimensions, notes = _dimensions(bench, strategies)
    # Without the model, which may lie on the device that the following trainings need.
    workload = replace(bench.fresh_workload(), model=torch.nn.Identity(), optimizer=torch.optim.SGD)
    resplit = decide_resplit(bench, workload)
    return Survey(
        environment=bench.device.environment,
        vram_budget_bytes=vram_budget_bytes,
        fingerprint=model.fingerprint,
        parameters=model.parameters,
        parameter_bytes=model.parameter_bytes,
        loss=loss,
        sample_batch_size=workload.sample_batch_size,
        sample_shapes=describe(workload.batch(workload.sample_batch_size)),
        global_batch=workload.global_batch,
        resplit=resplit.comparison,
        may_resplit=resplit.allowed,
        dimensions=dimensions,
        notes=(*(_IN_EVAL_MODE,) * model.evaluates, *notes, *resplit.notes),
    )


@dataclass(frozen=True)
class _ModelFacts:
    """What a model says where it lies.

    Attributes:
        evaluates: whether it was handed over in eval mode, and trains so.
    """

    fingerprint: str
    parameters: int
    parameter_bytes: int
    evaluates: bool


def _model_facts(bench: TrainingBuilder) -> _ModelFacts:
    torch.manual_seed(bench.seed)
    workload = bench.fresh_workload()
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    parameters = list(model.parameters())
    return _ModelFacts(
        fingerprint(workload, model, optimizer, bench.device.environment, process.computing()),
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        # A train_step may call model.train() itself
        evaluates=not model.training and workload.train_step is None,
    )


def _loss_source(bench: TrainingBuilder) -> str | None:
    if bench.fresh_workload().train_step is not None:
        return LossSource.TRAIN_STEP
    try:
        return _source_in_a_trial_forward(bench)
    except Exception as error:
        release_exception(error)
        return None
    finally:
        bench.reclaim_or_not()


def _source_in_a_trial_forward(bench: TrainingBuilder) -> str:
    workload = bench.fresh_workload()
    samples = min(workload.sample_batch_size, 2)
    whole = workload.batch(samples)
    with (
        bench.device.accounting(),
        bench.training(workload, ResolvedPlan(Plan(samples))) as training,
        training.context(),
    ):
        batch, _ = next(training.micro_batches(whole))
        return training.recipe.loss_and_source(training.model, batch)[1]


def _dimensions(
    bench: TrainingBuilder, strategies: Sequence[Strategy]
) -> tuple[dict[str, Dimension], list[str]]:
    dimensions: dict[str, Dimension] = {}
    notes: list[str] = []
    for strategy in strategies:
        context = StrategyContext(bench, notes)
        try:
            dimensions |= collect_dimensions([strategy], context)
        except InvalidRequest:  # a plug-in that breaks the contract, or arguments no probe can mend
            raise
        except Exception as error:
            release_exception(error)
            notes.append(f"{strategy.name} left out: {type(error).__name__}: {error}")
        finally:
            context.close()
            bench.reclaim_or_not()
    return dimensions, notes
