"""Where the memory of plans goes over an optimizer step: by kind and by module.

On a GPU a dry run tells, which costs no device memory; on the CPU device real steps do. Two
micro-batches stand for any number, and the second step for all later ones, as in a prediction.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from autofit.devices.cpu import CpuDevice
from autofit.errors import PredictionUnavailable
from autofit.memory.blocks import ROUNDING_BYTES, round_up
from autofit.plan import ResolvedPlan
from autofit.prediction.breakdown import KINDS, Labels
from autofit.prediction.dry_run import STEPS, dry_run, traced_sizes
from autofit.prediction.variant_lines import gpu_of
from autofit.strategy import attributes_kept
from autofit.training.builder import TrainingBuilder
from autofit.training.training import Training

if TYPE_CHECKING:
    from autofit.probing.session import Session

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
# Moments of a step that are kept; each is the largest of its part of the step.
MOMENTS = 240
# Parts into which a model is divided.
MOST_PARTS = 12
# What would take longer is left out: a picture is not worth more.
MOST_SECONDS = 20.0


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
    began, found = time.monotonic(), {}
    on_cpu = session.builder.device.environment.gpu is None
    for key, resolved in plans.items():
        session.on_stage(f"looking where the memory of the {key} plan goes")
        run = len(traced_sizes(resolved.plan, session.builder.fresh_workload()))
        step_s = step_seconds.get(key, 0.0) * run / resolved.plan.accumulation_steps
        if time.monotonic() - began + STEPS * step_s * on_cpu > MOST_SECONDS:
            found[key] = {"why_not": f"it would have taken more than {MOST_SECONDS:.0f} s"}
            continue
        try:
            found[key] = _memory_use(session, resolved)
        except PredictionUnavailable as error:
            found[key] = {"why_not": str(error)}
        except Exception as error:
            found[key] = {"why_not": f"{type(error).__name__}: {error}"}
        finally:
            session.builder.reclaim_or_not()
    return found


def _memory_use(session: Session, resolved: ResolvedPlan) -> dict[str, Any]:
    gpu = gpu_of(session.builder.device.environment)
    if gpu is None:
        return _in_real_steps(session.builder, resolved).to_dict("real steps")
    owners: list[Owners] = []

    def watching(labels: Labels, training: Training) -> AbstractContextManager[None]:
        owners.append(Owners(labels))
        return owners[0].watching(training)

    dry_run(session.builder.fresh_workload(), resolved, gpu, watching=watching)
    return owners[0].to_dict("dry run")


def _in_real_steps(builder: TrainingBuilder, resolved: ResolvedPlan) -> Owners:
    """Run the steps on a CPU device of their own, within all that the host has free.

    Raises:
        OutOfMemoryError: the plan needs more.
    """
    device = CpuDevice(record=True)
    device.limit(device.free_bytes)
    own = TrainingBuilder(builder.fresh_workload, device, builder.seed)
    workload, labels = own.fresh_workload(), Labels(device.tracer)
    owners = Owners(labels)
    batch = workload.step_of(*traced_sizes(resolved.plan, workload))
    with (
        device.accounting(),
        own.training(workload, resolved) as training,
        labels.watching(training),
        owners.watching(training),
    ):
        for _ in range(STEPS):
            training.step(batch)
            labels.note_state(training)
            device.tracer.end_step()
    return owners


class Owners:
    """Finds out, while a training runs, where and when each labelled allocation was made."""

    def __init__(self, labels: Labels) -> None:
        self._labels, self._tracer = labels, labels.tracer
        self._classes: dict[str, str] = {}
        self._running: list[str] = []
        self._phases: list[tuple[int, str]] = [(0, FORWARD)]
        # Which module was running from a certain allocation on.
        self._first_numbers, self._modules = [0], [""]

    @contextmanager
    def watching(self, training: Training) -> Iterator[None]:
        """Note which module runs when, and in which phase."""
        model = training.model
        self._classes = {name: type(module).__name__ for name, module in model.named_modules()}
        with ExitStack() as stack:
            for name, module in model.named_modules():
                enter = module.register_forward_pre_hook(partial(self._enter, name))
                leave = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            # A training_step calls these itself, so they are wrapped rather than called from here.
            stack.enter_context(self._phase_around(training, "backward", BACKWARD))
            stack.enter_context(self._phase_around(training, "optimizer_step", UPDATE))
            yield

    @contextmanager
    def _phase_around(self, training: Training, name: str, phase: str) -> Iterator[None]:
        method = getattr(training, name)

        def run(*given: Any, **named: Any) -> None:
            self._begin(phase)
            try:
                method(*given, **named)
            finally:
                self._begin(FORWARD)

        with attributes_kept(training, name):
            setattr(training, name, run)
            yield

    def _begin(self, phase: str) -> None:
        self._phases.append((len(self._tracer.events), phase))

    def _enter(self, name: str, *_: Any) -> None:
        self._running.append(name)
        self._mark()

    def _leave(self, *_: Any) -> None:
        self._running.pop()
        self._mark()

    def _mark(self) -> None:
        self._first_numbers.append(self._tracer.last_number + 1)
        self._modules.append(self._running[-1] if self._running else "")

    def to_dict(self, how: str) -> dict[str, Any]:
        """Return the memory over the last step, as a report holds it.

        Args:
            how: "dry run" or "real steps".
        """
        events, ends = self._tracer.events, self._tracer.step_ends
        begin, end = ends[-2], ends[-1]
        owner = {}
        for event, _ in events[:end]:
            if event > 0:
                running = self._modules[bisect_right(self._first_numbers, event) - 1]
                owner[event] = self._labels.noted(event, running)  # its kind and module
        parts = min(MOMENTS, end - begin)
        held = dict.fromkeys(KINDS, 0)
        live: dict[int, int] = {}
        moments: list[tuple[int, dict[str, int]]] = []
        most, at_peak, peak = -1, dict(live), 0
        for index, (event, size) in enumerate(events[:end]):
            number = abs(event)
            if event > 0:
                live[number] = round_up(size, ROUNDING_BYTES)
                held[owner[number][0]] += live[number]
            else:
                held[owner[number][0]] -= live.pop(number)
            if index < begin:
                continue
            total, part = sum(held.values()), (index - begin) * parts // (end - begin)
            if part == len(moments):
                moments.append((total, dict(held)))
            elif total > moments[-1][0]:
                moments[-1] = total, dict(held)
            if total > most:
                most, at_peak, peak = total, dict(live), len(moments) - 1
        by_module: dict[tuple[str, str], int] = {}
        for number, size in at_peak.items():
            kind, module = owner[number]
            by_module[module, kind] = by_module.get((module, kind), 0) + size
        return {
            "how": how,
            "phases": self._phases_of(begin, end, len(moments)),
            "bytes": {kind: [each[kind] for _, each in moments] for kind in KINDS},
            "peak": peak,
            "modules": divided(by_module, self._classes),
        }

    def _phases_of(self, begin: int, end: int, moments: int) -> list[dict[str, Any]]:
        """Return the phases of the step that have any moment, with the first of each."""
        inside = [(max(at, begin), phase) for at, phase in self._phases if at < end]
        if inside[-1][1] == FORWARD:  # what follows the last update
            inside.pop()
        starts: dict[int, str] = {}
        for at, phase in inside:
            starts[(at - begin) * moments // (end - begin)] = (
                phase  # the last one that begins there
            )
        return [{"name": phase, "first": at} for at, phase in sorted(starts.items())]


# The model in parts: modules in a list that are of one class are one part.

# The name of a module in parts; "*Block" stands for all numbers whose modules are Blocks.
Path: TypeAlias = tuple[str, ...]


def divided(
    by_module: Mapping[tuple[str, str], int], classes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the model in parts with their bytes by kind, the largest first.

    All names are cut at one depth, the largest that leaves no more than `MOST_PARTS`.

    Args:
        by_module: (name of a module, kind) -> bytes that it holds itself.
        classes: name of a module -> its class.
    """
    paths = {name: _path(name, classes) for name in classes}
    holding = {paths[module] for module, _ in by_module}
    depth = max(
        depth
        for depth in range(1 + max(map(len, holding), default=0))
        if depth == 0 or len({path[:depth] for path in holding}) <= MOST_PARTS
    )
    parts: dict[Path, dict[str, int]] = {}
    for (module, kind), size in by_module.items():
        held = parts.setdefault(paths[module][:depth], dict.fromkeys(KINDS, 0))
        held[kind] += size
    counts = Counter(paths.values())
    class_of = {path: classes[name] for name, path in paths.items()}
    rows = [
        {
            "name": ".".join("*" if each.startswith("*") else each for each in part),
            "class": class_of[part],
            "count": counts[part],
            "bytes": {kind: size for kind, size in held.items() if size},
        }
        for part, held in parts.items()
    ]
    return sorted(rows, key=lambda row: -sum(row["bytes"].values()))


def _path(name: str, classes: Mapping[str, str]) -> Path:
    parts = name.split(".") if name else []
    ends = enumerate(parts, start=1)
    return tuple(
        f"*{classes['.'.join(parts[:end])]}" if part.isdecimal() else part for end, part in ends
    )
