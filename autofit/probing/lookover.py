"""What is found out about a workload before its first probe, and when two plans are compared.

The facts (size, shapes, fingerprint) come from the model where it lies. Loss, dimensions and
gradients take trainings on the device, one at a time; where one of those fails, the survey says so
and goes on: the baseline's probe will meet the same fault and report it in full. A strategy that
breaks the contract of plug-ins is refused instead.

The budget holds here too. On the CPU device, whose budget binds under accounting alone, it holds
for the loss: strategies time what they profile, and gradients are compared on the host, which there
is the device itself, so accounting would tell the one wrong times and count the other twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autofit.batching import Batch, describe
from autofit.errors import InvalidRequest
from autofit.fingerprint import fingerprint
from autofit.plan import Dimension, Plan
from autofit.probing.comparison import (
    SAMPLES_OF_A_COMPARISON,
    Comparison,
    Gradients,
    compare,
    gradients,
)
from autofit.probing.scrub import scrub
from autofit.probing.survey import Survey
from autofit.probing.workbench import Workbench
from autofit.recipe import LossSource
from autofit.registry import collect_dimensions
from autofit.restoring import process_state
from autofit.strategy import Capabilities
from autofit.training import Training
from autofit.workload import Workload

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
    facts, mode_notes = _facts(bench)
    loss = _loss_source(bench)
    dimensions, notes = _dimensions(bench)
    # Without the model, which may lie on the device that the following trainings need.
    workload = replace(bench.fresh_workload(), model=torch.nn.Identity(), optimizer=torch.optim.SGD)
    resplit, may_resplit, resplit_notes = _resplit(bench, workload)
    return Survey(
        environment=bench.device.environment,
        vram_budget_bytes=vram_budget_bytes,
        loss=loss,
        sample_batch_size=workload.sample_batch_size,
        sample_shapes=describe(workload.batch(workload.sample_batch_size)),
        global_batch=workload.global_batch,
        resplit=resplit,
        may_resplit=may_resplit,
        dimensions=dimensions,
        notes=(*mode_notes, *notes, *resplit_notes),
        **facts,
    )


def compare_plans(
    bench: Workbench,
    first: Plan,
    second: Plan,
    payloads: Sequence[Mapping[str, Any]],
    samples: int,
) -> Comparison:
    """Loss and gradients of two plans on the same samples.

    Raises:
        InvalidRequest: the workload has a train_step, whose gradients cannot be looked at.
        Exception: whatever the model or the device raises.
    """
    if bench.fresh_workload().train_step is not None:
        raise InvalidRequest("train_step hides its gradients: plans cannot be compared")
    seeds = (bench.seed, bench.seed)
    return _compare(bench, list(zip((first, second), payloads, seeds, strict=True)), samples)


def _compare(
    bench: Workbench, passes: Sequence[tuple[Plan, Mapping[str, Any], int]], samples: int
) -> Comparison:
    """Two passes, each a plan, what its settings mean and a seed, over the same samples."""
    batch = bench.fresh_workload().batch(samples)  # once: a function may make another each time
    try:
        return compare(*(_pass(bench, *each, batch, calm=True) for each in passes))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # some models have a loss in training mode only
        scrub(error)
    return compare(*(_pass(bench, *each, batch, calm=False) for each in passes))


def _pass(
    bench: Workbench,
    plan: Plan,
    payloads: Mapping[str, Any],
    seed: int,
    batch: Batch,
    *,
    calm: bool,
) -> Gradients:
    bench.reclaim()
    with bench.training(bench.fresh_workload(), plan, payloads) as training:
        return gradients(training, batch, seed=seed, calm=calm)


def _facts(bench: Workbench) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the model says where it lies, and a note about the mode that it is in."""
    torch.manual_seed(bench.seed)
    workload = bench.fresh_workload()
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    parameters = list(model.parameters())
    evaluates = not model.training and workload.train_step is None  # which may call model.train()
    facts = {
        "fingerprint": fingerprint(
            workload, model, optimizer, bench.device.environment, process_state.computing()
        ),
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
    }
    return facts, (_IN_EVAL_MODE,) * evaluates


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
        context = _Context(bench, notes)
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


def _resplit(
    bench: Workbench, workload: Workload
) -> tuple[Comparison | None, bool, tuple[str, ...]]:
    """Whether a split batch trains like a whole one, tried on a few samples; notes about it."""
    allowed = workload.allow_resplit
    if workload.global_batch is None or workload.global_batch == 1:
        return None, True, ()
    if workload.train_step is not None:
        why = "train_step decides how a batch is split"
        return None, allowed, () if allowed else (_kept(why, "allow_resplit"),)
    if not workload.makes_batches and workload.sample_batch_size == 1:
        why = "copies of one sample do not show whether split gradients equal whole ones"
        return None, allowed, () if allowed else (_kept(why, "two or more samples"),)
    try:
        comparison = _split_against_whole(bench)
        noise = None if comparison.equal else _whole_against_whole(bench)
    except Exception as error:
        scrub(error)
        why = f"split and whole gradients could not be compared ({type(error).__name__}: {error})"
        return None, allowed, (_kept(why, "allow_resplit") if not allowed else why,)
    finally:
        bench.reclaim_or_not()
    if noise is None:
        return comparison, True, ()
    if not noise.equal and not allowed:
        why = (
            "the model draws random numbers that move the gradients of the same samples by "
            f"{noise.gradient:.1%}, so split and whole gradients cannot be compared"
        )
        return comparison, False, (_kept(why, "allow_resplit"),)
    return comparison, allowed, (_resplit_note(comparison, workload),)


def _split_against_whole(bench: Workbench) -> Comparison:
    samples = SAMPLES_OF_A_COMPARISON
    whole, split = Plan(samples), Plan.split(samples, -(-samples // 2))
    return compare_plans(bench, whole, split, ({}, {}), samples)


def _whole_against_whole(bench: Workbench) -> Comparison:
    """The same samples with other random numbers: what differs is the model's own noise."""
    whole = Plan(SAMPLES_OF_A_COMPARISON)
    seeds = (bench.seed, bench.seed + 1)
    return _compare(bench, [(whole, {}, seed) for seed in seeds], SAMPLES_OF_A_COMPARISON)


def _resplit_note(comparison: Comparison, workload: Workload) -> str:
    where = f" ({', '.join(comparison.modules)})" if comparison.modules else ""
    why = f"split gradients differ from whole ones by {comparison.gradient:.1%}{where}"
    if workload.allow_resplit:
        return f"{why}: allow_resplit was given, so the accumulation count is free"
    return _kept(why, "allow_resplit" if workload.loss_weight else "loss_weight or allow_resplit")


def _kept(why: str, way_out: str) -> str:
    return f"{why}: the accumulation count stays at the baseline's; give {way_out} to free it"


class _Context:
    """What a strategy sees while it makes its dimensions; implements `autofit.strategy.Context`."""

    def __init__(self, bench: Workbench, notes: list[str]) -> None:
        self._bench = bench
        self._notes = notes
        self._training: Training | None = None

    @property
    def device(self) -> torch.device:
        return self._bench.device.torch_device

    @property
    def capabilities(self) -> Capabilities:
        return self._bench.device.capabilities

    @property
    def model(self) -> torch.nn.Module:
        if self._training is None:
            self._training = self._bench.training(self._bench.fresh_workload(), Plan(1))
        return self._training.model

    def profile(self, run: Callable[[Any, Any], Any], micro_batch: int) -> Any:
        self.close()
        self._bench.reclaim()
        workload = self._bench.fresh_workload()
        with self._bench.training(workload, Plan(micro_batch)) as training:
            ((batch, _),) = training.micro_batches(workload.batch(micro_batch))
            return run(training, batch)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def close(self) -> None:
        if self._training is not None:
            self._training.undo()
            self._training = None
