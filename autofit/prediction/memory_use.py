"""Where the memory of plans goes over an optimizer step: by kind and by module.

On a GPU a dry run tells, which costs no device memory; on the CPU device real steps do. Two
micro-batches stand for any number, and the second step for all later ones, as in a prediction.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autofit.devices.cpu import CpuDevice
from autofit.devices.gpu_catalogue import gpu_of
from autofit.errors import PredictionUnavailable
from autofit.plan import ResolvedPlan
from autofit.prediction.breakdown import Labels
from autofit.prediction.dry_run import STEPS, dry_run, traced_sizes
from autofit.training.builder import TrainingBuilder

if TYPE_CHECKING:
    from autofit.probing.session import Session

# What would take longer is left out: a picture is not worth more.
MAX_SECONDS = 20.0


def memory_uses(
    session: Session,
    plans: Mapping[str, ResolvedPlan],
    step_seconds: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the memory use of each plan by its key, and {"why_not": ...} of one that has none.

    Nothing is raised for a plan that cannot be looked at: the picture of one is no answer.

    Args:
        session: of the search.
        plans: by key.
        step_seconds: how long a step of the plan takes on the device, where that is known.
    """
    began, uses = time.monotonic(), {}
    on_cpu = session.builder.device.environment.gpu is None
    for key, resolved in plans.items():
        session.on_stage(f"looking where the memory of the {key} plan goes")
        run = len(traced_sizes(resolved.plan, session.builder.fresh_workload()))
        step_s = step_seconds.get(key, 0.0) * run / resolved.plan.accumulation_steps
        if time.monotonic() - began + STEPS * step_s * on_cpu > MAX_SECONDS:
            uses[key] = {"why_not": f"it would have taken more than {MAX_SECONDS:.0f} s"}
            continue
        try:
            uses[key] = _memory_use(session, resolved)
        except PredictionUnavailable as error:
            uses[key] = {"why_not": str(error)}
        except Exception as error:
            uses[key] = {"why_not": f"{type(error).__name__}: {error}"}
        finally:
            session.builder.reclaim_or_not()
    return uses


def _memory_use(session: Session, resolved: ResolvedPlan) -> dict[str, Any]:
    gpu = gpu_of(session.builder.device.environment)
    if gpu is None:
        return _in_real_steps(session.builder, resolved).last_step("real steps")
    run = dry_run(session.builder.fresh_workload(), resolved, gpu, by_module=True)
    return run.labels.last_step("dry run")


def _in_real_steps(builder: TrainingBuilder, resolved: ResolvedPlan) -> Labels:
    """Run the steps on a CPU device of their own, within all that the host has free.

    Raises:
        OutOfMemoryError: the plan needs more.
    """
    device = CpuDevice(record=True)
    device.limit(device.free_bytes)
    traced = TrainingBuilder(builder.fresh_workload, device, builder.seed)
    workload, labels = traced.fresh_workload(), Labels(device.tracer)
    batch = workload.step_of(*traced_sizes(resolved.plan, workload))
    with (
        device.accounting(),
        traced.training(workload, resolved) as training,
        labels.watching(training, by_module=True),
    ):
        for _ in range(STEPS):
            training.step(batch)
            labels.note_state(training)
            device.tracer.end_step()
    return labels
