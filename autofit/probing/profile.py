"""Where the time of an optimizer step goes, by torch's own profiler.

Each operator counts by itself, without those it calls, and on a GPU by its kernels: as arithmetic
(products, convolutions, attention), as memory traffic (every other operator that touches data), or
for the optimizer. What is left is launches: Python, dispatch and autograd on a CPU; on a GPU, where
they may run beside the kernels, the time in which it idles.

One step is profiled, since torch takes about half a second to read its events.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from autofit.measurement import BOUNDS
from autofit.plan import Plan, ResolvedPlan
from autofit.probing.measure import micro_batches_to_run, staged, warm_up
from autofit.probing.requests import Workplace
from autofit.training.batch import Batch
from autofit.training.flops import ModelFlops
from autofit.training.training import Training
from autofit.training.workload import Workload, compiled_part

ARITHMETIC, TRAFFIC, LAUNCHES, OPTIMIZER = BOUNDS
_STEP, _UPDATE = "autofit: step", "autofit: update"
_UPDATES = (_UPDATE, "Optimizer.step#")  # the second is torch's own mark
_PRODUCT = re.compile(
    r"conv|gem[mv]|(add|\bb?|baddb|scaled_|grouped_|group_|triton_)mm\b|matmul|einsum|attention|"
    r"attn|flash|fmha|rnn|lstm|gru_cell|xmma|cutlass|triton_tem|slow_conv",
    re.IGNORECASE,
)
_NO_DATA = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::resize_"})
_FUSED = re.compile(r"compiled|inductor|triton|fused", re.IGNORECASE)


@dataclass(frozen=True)
class StepProfile:
    """Seconds of an optimizer step of a plan, at full accumulation.

    Attributes:
        seconds: by the names of `BOUNDS`; "launches" only where `on_gpu` is false.
        operators: how many operators ran that touch data.
        on_gpu: whether the seconds are those of kernels; they do not add up to the step then.
    """

    seconds: dict[str, float]
    operators: int
    on_gpu: bool

    def shares(self, step_time_s: float) -> dict[str, float]:
        """Return the share of each in the step; they add up to one.

        Args:
            step_time_s: of the step when nothing watched it. On a GPU, what its kernels do not fill
                is launches.
        """
        busy = sum(self.seconds.values())
        whole = max(busy, step_time_s) if self.on_gpu else busy
        shares = {name: self.seconds.get(name, 0.0) / whole for name in BOUNDS}
        return shares | {LAUNCHES: shares[LAUNCHES] + (whole - busy) / whole}


def look_at_step(
    session: Workplace,
    *,
    plan: ResolvedPlan,
    trace: str | None = None,
    counted: ResolvedPlan | None = None,
) -> tuple[StepProfile | None, float | None]:
    """Run a plan for a few steps and profile the last; return that, and model FLOPs of a sample.

    Args:
        session: of the worker.
        plan: that is profiled; the profile is None where there was nothing to see.
        trace: file to write a trace of this step to, in torch's own format (.json or .json.gz).
        counted: the plan whose FLOPs are counted, see `autofit.training.flops`; None: no plan's.
            The FLOPs are None where they are unknown.

    Raises:
        OSError: the trace cannot be written.
        Exception: what the user's code or the device raised.
    """
    is_same = counted == plan
    profiled, flops = _profiled(session, plan, trace, counts_flops=is_same)
    if counted is not None and not is_same:
        with _running(session, counted) as (training, workload, sizes):
            flops = _flops_of_a_sample(training, workload, sizes)
    return profiled, flops


def _profiled(
    session: Workplace, resolved: ResolvedPlan, trace: str | None, *, counts_flops: bool
) -> tuple[StepProfile | None, float | None]:
    with _running(session, resolved) as (training, workload, sizes):
        device = session.builder.device
        on_gpu = device.torch_device.type == "cuda"
        batch = staged(device, workload.step_of(*sizes))
        for _ in warm_up(training):
            _step(training, batch)
            device.synchronize()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
        with profile(activities=activities) as profiler:
            with record_function(_STEP):  # what it takes itself is launches
                _step(training, batch)
            device.synchronize()
        if trace is not None:
            profiler.export_chrome_trace(trace)
        flops = _flops_of_a_sample(training, workload, sizes) if counts_flops else None
    return _profile_of(profiler.events() or (), resolved.plan, len(sizes), on_gpu=on_gpu), flops


@contextmanager
def _running(
    session: Workplace, resolved: ResolvedPlan
) -> Iterator[tuple[Training, Workload, list[int]]]:
    """Yield a training of a plan, its workload, and the sizes of the micro-batches to run."""
    builder, plan = session.builder, resolved.plan
    workload = builder.fresh_workload()
    builder.reclaim()
    places = micro_batches_to_run(workload, plan, full_accumulation=False)
    with builder.training(workload, resolved) as training:
        yield training, workload, [plan.micro_batch_sizes[place] for place in places]
    builder.reclaim_or_not()


def _profile_of(events: Any, plan: Plan, micro_batches: int, *, on_gpu: bool) -> StepProfile | None:
    """Return the profile of a step in which this many of the plan's micro-batches ran."""
    seconds, operators = dict.fromkeys(BOUNDS, 0.0), 0
    for event in events:
        if event.device_type.name != "CPU":
            continue
        for kind, took_s in _times(event, on_gpu=on_gpu):
            seconds[kind] += took_s
            operators += kind != LAUNCHES
    if not operators:
        return None
    scale = plan.accumulation_steps / micro_batches
    scaled = {name: s if name == OPTIMIZER else s * scale for name, s in seconds.items()}
    return StepProfile(scaled, operators, on_gpu)


def _step(training: Training, batch: Batch) -> None:
    if training.recipe.training_step is not None:
        training.step(batch)
        return
    training.zero_grad()
    training.accumulate(batch, then_updates=True)
    with record_function(_UPDATE):
        training.optimizer_step()


def _flops_of_a_sample(
    training: Training, workload: Workload, sizes: Sequence[int]
) -> float | None:
    """Count the model FLOPs of a step with micro-batches of these sizes, or None if unknown."""
    mix = workload.mix_of_steps(sizes)
    return sum(share * _flops_of_a_step(training, each) for share, each in mix) / sum(sizes) or None


def _flops_of_a_step(training: Training, batch: Batch) -> float:
    """Count model FLOPs; 0.0 where nothing is known of them.

    Compiled code has no operators to see, so what the user compiled runs as written.
    """
    flops = ModelFlops()
    is_known = "torch._dynamo" in sys.modules
    as_written = torch.compiler.set_stance("force_eager") if is_known else nullcontext()
    if compiled_part(training.plain_model) is None:
        with suppress(Exception), as_written, flops:  # a profile goes on without a rate
            _step(training, batch)
            return flops.total
    return 0.0


def _times(event: Any, *, on_gpu: bool) -> Iterator[tuple[str, float]]:
    """Yield what an operator, or each of its kernels on a GPU, counts as, and its seconds."""
    lineage = list(_lineage(event))
    if not on_gpu:
        yield _kind(lineage, event.name), event.self_cpu_time_total * 1e-6
        return
    for kernel in event.kernels:
        # Marks of ranges are shown on the device too, as long as all that lies in them
        if kernel.name != event.name:
            kind = _kind(lineage, kernel.name)
            yield TRAFFIC if kind == LAUNCHES else kind, kernel.duration * 1e-6


def _lineage(event: Any) -> Iterator[str]:
    """Yield the names of an event and of those that it is part of, itself first."""
    while event is not None:
        yield event.name
        event = event.cpu_parent


def _kind(lineage: list[str], kernel: str) -> str:
    if any(name.startswith(_UPDATES) for name in lineage):
        return OPTIMIZER
    name = lineage[0]
    if _moves_data(name):
        is_product = any(_moves_data(each) and _PRODUCT.search(each) for each in lineage)
        return ARITHMETIC if is_product else TRAFFIC
    if _FUSED.search(name) or _FUSED.search(kernel):
        return ARITHMETIC if _PRODUCT.search(kernel) else TRAFFIC
    return LAUNCHES


@cache
def _moves_data(name: str) -> bool:
    """Return whether an operator works on data by itself: no view, and no sum of others."""
    namespace, separator, operator = name.partition("::")
    if not separator or namespace in ("autograd", "torch") or name in _NO_DATA:
        return False
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:  # such as mkldnn's own marks
        return True
    overload = getattr(packet, packet.overloads()[0])
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        overload.name(), "CompositeImplicitAutograd"
    )
    return not (overload.is_view or composite)
