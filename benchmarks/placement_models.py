"""Do the checkpoint levels of real architectures train exactly, and save what blocks would?

    python -m benchmarks.placement_models [--only NAME ...] [--out benchmarks/results/FILE.md]

Small configurations of architectures from torchvision, timm, transformers and diffusers, with
dropout on and no pretrained weights. For each one:

- looking: seconds to find the levels, and how many plain steps of the same batch take as long;
- bits: parameters, buffers, gradients and losses that differ from plain training in any bit, over
  three optimizer steps at every level;
- least: the least peak of any level, and that of full checkpointing of the model's own blocks (by
  the library's own switch, or `torch.utils.checkpoint` around each of the blocks named here), as
  shares of the plain peak. A peak is the most live bytes in a real forward and backward pass
  beside weights, buffers, samples and the gradients of weights, which do not grow with the batch;
  of a few random seeds, the largest.

The packages are no requirement of anything else here; architectures of a package that is not
installed are named and skipped.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from autofit.equivalence.steps import seed_everything
from autofit.memory.tracer import MemoryTracer
from autofit.plan import Plan, ResolvedPlan
from autofit.registry import load_strategies
from autofit.testing import PlainContext
from autofit.training.training import Training
from autofit.training.workload import Workload
from benchmarks.library_models import switch_checkpointing_on
from benchmarks.placement_architectures import ARCHITECTURES, Architecture

SETTING = "checkpointing.level"
STEPS = 3


@dataclass(frozen=True)
class Result:
    """Measurements of one architecture.

    Attributes:
        step_s: seconds of a plain optimizer step on the sample batch.
        looking_s: seconds to find the levels.
        levels: their number, plain training included.
        differing: values that differ in any bit from plain training, and all compared.
        plain_bytes, least_bytes, own_bytes: peaks of plain training, of the level with the least,
            and of full checkpointing of the model's own blocks.
        notes: of the strategy.
    """

    name: str
    package: str
    step_s: float
    looking_s: float
    levels: int
    differing: tuple[int, int]
    plain_bytes: int
    least_bytes: int
    own_bytes: int
    notes: tuple[str, ...]

    def row(self) -> str:
        """Return a row of the table."""
        share = self.least_bytes / self.own_bytes
        cells = (
            self.name,
            self.package,
            f"{1000 * self.step_s:.0f}",
            f"{self.looking_s:.1f}",
            f"{self.looking_s / self.step_s:.0f}",
            str(self.levels),
            f"{self.differing[0]} of {self.differing[1]}",
            f"{self.plain_bytes / 2**20:.2f}",
            f"{self.own_bytes / self.plain_bytes:.2f}",
            f"{self.least_bytes / self.plain_bytes:.2f}",
            f"{share:.2f}",
        )
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| model | package | plain step, ms | looking, s | in plain steps | levels | differing "
    "| plain peak, MiB | own blocks | least level | least / own blocks |"
)


def measure(name: str, architecture: Architecture) -> Result:
    """Find the levels of a model and train at each of them."""
    strategy = load_strategies(["checkpointing"])[0]
    workload = architecture.workload()

    def build() -> Workload:
        return copy.deepcopy(workload)

    plain, step_s = train(build())
    context = PlainContext(build)
    gc.collect()
    gc.freeze()  # as a worker does, whose collections would go through all that libraries import
    began = time.process_time()
    dimension = strategy.dimensions(context)[SETTING]
    looking_s = time.process_time() - began
    gc.unfreeze()
    context.close()
    levels = {level: dimension.payloads.get(level) for level in dimension.values}
    differing = compared = 0
    peaks = []
    for payload in levels.values():
        found, _ = train(build(), payload)
        differing += sum(not _same(plain[key], found.get(key)) for key in plain)
        compared += len(plain)
        peaks.append(peak_bytes(build(), payload, architecture.seeds))
    own = build()
    with checkpointing_its_own_blocks(own.build_model(), architecture.blocks):
        own_bytes = peak_bytes(own, seeds=architecture.seeds)
    return Result(
        name,
        architecture.package,
        step_s,
        looking_s,
        len(levels),
        (differing, compared),
        peaks[0],
        min(peaks),
        own_bytes,
        tuple(context.notes),
    )


def training_of(workload: Workload, payload: Any = None) -> Training:
    """Return a training on the whole sample batch with a level's payload; None: plain."""
    model = workload.build_model()
    plan = Plan(workload.sample_batch_size, settings={SETTING: 0 if payload is None else 1})
    return Training(
        model,
        workload.build_optimizer(model),
        workload.recipe,
        ResolvedPlan(
            plan,
            {} if payload is None else {SETTING: payload},
            load_strategies(["checkpointing"]),
        ),
        device=torch.device("cpu"),
        samples=workload.samples,
    )


def train(workload: Workload, payload: Any = None) -> tuple[dict[str, torch.Tensor], float]:
    """Return what three optimizer steps left, and the seconds of the fastest of them."""
    seed_everything(1)
    left: dict[str, torch.Tensor] = {}
    seconds = []
    with training_of(workload, payload) as training:

        def update(step: Callable[[], None]) -> None:
            for name, parameter in training.model.named_parameters():
                if parameter.grad is not None:
                    left[f"gradient {number} of {name}"] = parameter.grad.detach().clone()
            step()

        training.wrap_optimizer_step(update)
        for number in range(STEPS):
            began = time.process_time()
            left[f"loss {number}"] = training.step(workload.sample_batch).clone()
            seconds.append(time.process_time() - began)
        left |= {f"parameter {n}": p.detach() for n, p in training.model.named_parameters()}
        left |= {f"buffer {n}": b for n, b in training.model.named_buffers()}
    return left, min(seconds)


def peak_bytes(workload: Workload, payload: Any = None, seeds: int = 1) -> int:
    """Return the most bytes at once of what one forward and backward pass makes."""
    with training_of(workload, payload) as training:
        return max(_peak_bytes(training, workload.sample_batch, seed) for seed in range(seeds))


def _peak_bytes(training: Training, batch: Any, seed: int) -> int:
    seed_everything(seed)
    parameters = [p for p in training.model.parameters() if p.requires_grad]
    tracer = MemoryTracer(record=True)
    tracer.register_foreign([parameters, list(training.model.buffers()), tree_leaves(batch)])
    of_weights: set[int | None] = set()
    hooks = [
        parameter.register_hook(  # type: ignore[no-untyped-call]  # torch does not annotate it
            lambda gradient: of_weights.add(tracer.number_of(gradient))
        )
        for parameter in parameters
    ]
    with tracer:
        training.accumulate(batch)
    for hook in hooks:
        hook.remove()
    training.zero_grad()
    live: dict[int, int] = {}
    now = most = 0
    for number, nbytes in tracer.events:
        if abs(number) not in of_weights:
            now += nbytes if number > 0 else -live.pop(-number)
            most = max(most, now)
            if number > 0:
                live[number] = nbytes
    return most


@contextmanager
def checkpointing_its_own_blocks(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Checkpoint all blocks of these classes; (): by the switch that the library offers."""
    found = [module for module in model.modules() if type(module).__name__ in blocks]
    for block in found:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if blocks and not found:
        raise LookupError(f"the model has no {' or '.join(blocks)}")
    if not blocks:
        switch_checkpointing_on(model)
    yield


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether all bits agree; NaN is itself."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def missing_packages(packages: Iterable[str]) -> dict[str, str]:
    """Return why each of the packages that cannot be imported is left out."""
    missing = {}
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as error:  # some raise RuntimeError where they do not match torch
            missing[package] = f"{type(error).__name__}: {error}"
    return missing


def report(chosen: Mapping[str, Architecture]) -> Iterator[str]:
    """Yield the lines of the results, each as soon as it is known."""
    packages = dict.fromkeys(architecture.package for architecture in chosen.values())
    missing = missing_packages(packages)
    there = ", ".join(f"{p} {version(p)}" for p in packages if p not in missing)
    yield f"# Checkpoint levels of real architectures, {date.today()}"
    yield ""
    yield (
        f"torch {torch.__version__}, {there}, Python {platform.python_version()}, "
        f"{_processor()}, 1 thread; {STEPS} optimizer steps at every level"
    )
    yield from (f"Skipped, as {p} cannot be imported: {why}" for p, why in missing.items())
    yield ""
    yield HEADER
    yield "|" + "---|" * (HEADER.count("|") - 1)
    results, failed = [], {}
    for name, architecture in chosen.items():
        if architecture.package in missing:
            continue
        try:
            results.append(measure(name, architecture))
        except Exception as error:  # the others are measured all the same
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        else:
            yield results[-1].row()
    yield ""
    yield from summary(results)
    yield from (f"- {name} failed: {why}" for name, why in failed.items())
    yield ""
    yield from (f"- {r.name}: {note}" for r in results for note in r.notes)


def summary(results: Sequence[Result]) -> Iterator[str]:
    """Yield what all the results say together."""
    if not results:
        return
    shares = [r.least_bytes / r.own_bytes for r in results]
    looking = [r.looking_s / r.step_s for r in results]
    yield f"- {len(results)} architectures, {sum(r.levels for r in results)} levels"
    yield (
        f"- values that differ from plain training: {sum(r.differing[0] for r in results)} of "
        f"{sum(r.differing[1] for r in results)}"
    )
    yield (
        f"- least level over own blocks: median {statistics.median(shares):.2f}, "
        f"worst {max(shares):.2f}, above 1.00 in {sum(round(s, 3) > 1 for s in shares)}"
    )
    yield (
        f"- looking: median {statistics.median(looking):.0f} plain steps, worst "
        f"{max(looking):.0f}; {sum(r.looking_s for r in results):.0f} s in all"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (lines.read_text().splitlines() if lines.exists() else ())
        if line.startswith("model name")
    ]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ARCHITECTURES)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for line in report({name: ARCHITECTURES[name] for name in arguments.only or ARCHITECTURES}):
        print(line, flush=True)
        lines.append(line)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
