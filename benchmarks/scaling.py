"""How searches and predictions grow: with settings, trials, modules, and the size of the model.

    python -m benchmarks.scaling [settings] [trials] [modules] [parameters] [--json FILE]

Seconds are of this process's processor time, so a busy machine changes them little; waiting is not
in them. "a proposal" is one decision of the planner: the trials of the study as `Trial`s -> the
next plan. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, cast

import optuna
import torch
from optuna.trial import FrozenTrial
from torch import nn

from autofit import Plan, Workload, predict, search
from autofit.measurement import Trial, TrialKind
from autofit.plan import Dimension
from autofit.planning.planner import decide
from autofit.planning.posterior import Posterior
from autofit.planning.search_spec import SearchSpec
from autofit.probing.messages import ProbeRequest
from autofit.registry import resolve
from autofit.searching.engine import run_search
from autofit.searching.sampler import PlannerSampler
from autofit.searching.study import Store
from autofit.space import Space
from autofit.testing import SimulatedProber
from autofit.units import GIB, MIB
from benchmarks.workload_models import GPT

SETTINGS = (4, 12, 40, 120, 400)
TRIALS = (10, 50, 100, 500, 1000, 5000)
MODULES = (10, 100, 1000, 10_000)
PARAMETERS: dict[str, tuple[int, int, int]] = {
    "0.1e9": (768, 12, 12),
    "1.3e9": (2048, 24, 16),
    "6.7e9": (4096, 32, 32),
    "13e9": (5120, 40, 40),
    "70e9": (8192, 86, 64),
}
"""Width, layers and heads of decoders of such sizes; 2048 tokens."""

Row = dict[str, Any]


def processor_s(function: Callable[..., Any], *given: Any, **named: Any) -> tuple[Any, float]:
    """Return what a function returns, and the seconds of processor time that it took."""
    began = time.process_time()
    found = function(*given, **named)
    return found, time.process_time() - began


class World:
    """A simulated device with so many variants: lines of their own, a budget that binds."""

    def __init__(self, variants: int) -> None:
        dimensions = {"precision.dtype": Dimension(("default", "bfloat16"))}
        if variants > 2:
            dimensions["memory_format.layout"] = Dimension(("default", "channels_last"))
        if variants > 4:
            dimensions["checkpointing.level"] = Dimension(tuple(range(variants // 4)))
        self.space = Space(dimensions, sample_batch_size=1, max_micro_batch=1024)
        self.spec = SearchSpec(self.space, 8 * GIB, seed=0)

    @staticmethod
    def _factor(plan: Plan, what: str, low: float, high: float) -> float:
        return random.Random(f"{what}/{plan.variant}").uniform(low, high)

    def memory(self, plan: Plan) -> float:
        """Return the bytes of a plan."""
        return 0.5 * GIB + plan.micro_batch * 50 * MIB * self._factor(plan, "bytes", 0.2, 1.0)

    def step_time(self, plan: Plan) -> float:
        """Return the seconds of a plan's optimizer step."""
        return 5e-3 + plan.micro_batch * 1e-3 * self._factor(plan, "seconds", 0.3, 1.0)

    def prober(self) -> SimulatedProber:
        """Return a new prober."""
        return SimulatedProber(
            self.spec.vram_budget_bytes, self.memory, self.step_time, time_noise=0.01
        )

    def trials(self, count: int) -> list[Trial]:
        """Return trials of plans drawn at random among those that fit, the baseline first."""
        prober, draw, variants = self.prober(), random.Random(0), list(self.space.variants())
        found: list[Trial] = []
        plan = self.space.baseline
        while len(found) < count:
            if self.memory(plan) <= self.spec.vram_budget_bytes:
                kind = TrialKind.SEARCH if found else TrialKind.BASELINE
                request = ProbeRequest(resolve(plan, self.space, prober.strategies))
                found.append(Trial(len(found), kind, plan, prober.probe(request).measurement))
            size = round(2 ** draw.uniform(0, 8))
            plan = self.space.plan(size, draw.choice(variants))
        return found


def settings() -> Iterator[Row]:
    """Search simulated devices of more and more variants."""
    for variants in SETTINGS:
        world = World(variants)
        result, seconds = processor_s(run_search, world.prober(), world.spec)
        probes = len(result.trials)
        each = seconds / probes
        yield {"variants": variants, "probes": probes, "search_s": seconds, "a_probe_s": each}


def trials() -> Iterator[Row]:
    """Propose after more and more trials; the sampler reads them from a study in memory."""
    world = World(24)
    everything = world.trials(max(TRIALS))
    with Store.open(None, {}) as store:
        store.begin(world.spec)
        for count in TRIALS:
            for trial in everything[len(store.trials) : count]:
                store.record(store.ask(trial.plan), trial)
            its = everything[:count]
            taken = [
                processor_s(lambda of: decide(Posterior(world.spec, of)), its)[1]
                for _ in range(5 if count <= 1000 else 2)
            ]
            _, sampled = processor_s(proposed, store.study)
            row = {"trials": count, "a_proposal_s": statistics.median(taken)}
            yield row | {"with_the_study_s": sampled}


def proposed(study: optuna.Study) -> dict[str, Any]:
    """Return what the sampler proposes; it does not read the trial that it is for."""
    return PlannerSampler().sample_relative(study, cast(FrozenTrial, None), {})


def deep(layers: int) -> Workload:
    """A chain of so many small layers."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    return Workload(model, torch.randn(4, 8), optimizer=torch.optim.SGD)


def modules() -> Iterator[Row]:
    """Predict, and search with six probes, models of more and more modules."""
    for count in MODULES:
        workload = deep(count)
        _, predicted = processor_s(predict, workload, gpu="H200")
        report, searched = processor_s(
            search,
            workload,
            device="cpu",
            vram_budget="1GiB",
            max_probes=6,
            progress=False,
        )
        levels = report.record.dimensions.get("checkpointing.level")
        yield {
            "modules": count,
            "predict_s": predicted,
            "search_s": searched,
            "in_probes_s": sum(trial.measurement.seconds or 0.0 for trial in report.trials),
            "levels": len(levels.values) if levels else 1,
        }


def parameters() -> Iterator[Row]:
    """Predict decoders of up to 70e9 parameters."""
    for name, (width, layers, heads) in PARAMETERS.items():
        ids = torch.randint(0, 32000, (1, 2048))

        def build(width: int = width, layers: int = layers, heads: int = heads) -> nn.Module:
            return GPT(32000, 2048, width, layers, heads)

        with torch.device("meta"):
            count = sum(p.numel() for p in build().parameters())
        workload = Workload(build, {"ids": ids})
        told, seconds = processor_s(predict, workload, gpu="H200")
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        yield {
            "model": name,
            "parameters": count,
            "predict_s": seconds,
            "required_gib": told.required_bytes / GIB,
            "most_resident_gib": resident,
        }


MEASURED: dict[str, Callable[[], Iterator[Row]]] = {
    "settings": settings,
    "trials": trials,
    "modules": modules,
    "parameters": parameters,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="*", default=list(MEASURED), choices=list(MEASURED))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in given.what:
        found[name] = []
        for row in MEASURED[name]():
            if not found[name]:
                print(f"\n## {name}\n\n| {' | '.join(row)} |\n|{'---|' * len(row)}")
            found[name].append(row)
            cells = (f"{v:.4g}" if isinstance(v, float) else f"{v}" for v in row.values())
            print(f"| {' | '.join(cells)} |", flush=True)
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
