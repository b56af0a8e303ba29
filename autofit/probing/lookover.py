"""What is found out about a workload before its first probe.

The facts (size, shapes, fingerprint) come from the model where it lies. Loss, dimensions and
gradients take trainings on the device, one at a time; where one of those fails, the survey says so
and goes on: the baseline's probe will meet the same fault and report it in full. A strategy that
breaks the contract of plug-ins is refused instead.

The budget holds here too. On the CPU device, whose budget binds under accounting alone, it holds
for the loss: strategies time what they profile, and gradients are compared on the host, which there
is the device itself, so accounting would tell the one wrong times and count the other twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from autofit.batching import describe
from autofit.errors import InvalidRequest
from autofit.fingerprint import fingerprint
from autofit.plan import Dimension, Plan
from autofit.probing.context import BenchContext
from autofit.probing.resplit import decide_resplit
from autofit.probing.scrub import scrub
from autofit.probing.survey import Survey
from autofit.probing.workbench import Workbench
from autofit.recipe import LossSource
from autofit.registry import collect_dimensions
from autofit.restoring import process_state

_IN_EVAL_MODE = (
    "the model was handed over in eval mode, and trained so: dropout and BatchNorm did as they do "
    "in evaluation. Unless that is meant, call model.train() and search again"
)


def look_over(bench: Workbench, vram_budget_bytes: int) -> Survey:
    """The facts of the bench's workload on its device.

    Raises:
        InvalidRequest: the workload's functions make no model, optimizer or batch, or a strategy
            answers with what the contract has no place for.
        Exception: what the user's code raised in making them.
    """
    model = _model_facts(bench)
    loss = _loss_source(bench)
    dimensions, notes = _dimensions(bench)
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


def _model_facts(bench: Workbench) -> _ModelFacts:
    torch.manual_seed(bench.seed)
    workload = bench.fresh_workload()
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    parameters = list(model.parameters())
    return _ModelFacts(
        fingerprint(
            workload, model, optimizer, bench.device.environment, process_state.computing()
        ),
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        # A train_step may call model.train() itself
        evaluates=not model.training and workload.train_step is None,
    )


def _loss_source(bench: Workbench) -> str | None:
    if bench.fresh_workload().train_step is not None:
        return LossSource.TRAIN_STEP
    try:
        return _source_in_a_trial_forward(bench)
    except Exception as error:
        scrub(error)
        return None
    finally:
        bench.reclaim_or_not()


def _source_in_a_trial_forward(bench: Workbench) -> str:
    workload = bench.fresh_workload()
    samples = min(workload.sample_batch_size, 2)
    whole = workload.batch(samples)
    with (
        bench.device.accounting(),
        bench.training(workload, Plan(samples)) as training,
        training.context(),
    ):
        batch, _ = next(training.micro_batches(whole))
        return training.recipe.loss_and_source(training.model, batch)[1]


def _dimensions(bench: Workbench) -> tuple[dict[str, Dimension], list[str]]:
    dimensions: dict[str, Dimension] = {}
    notes: list[str] = []
    for strategy in bench.strategies:
        context = BenchContext(bench, notes)
        try:
            dimensions |= collect_dimensions([strategy], context)
        except InvalidRequest:  # a plug-in that breaks the contract, or arguments no probe can mend
            raise
        except Exception as error:
            scrub(error)
            notes.append(f"{strategy.name} left out: {type(error).__name__}: {error}")
        finally:
            context.close()
            bench.reclaim_or_not()
    return dimensions, notes
